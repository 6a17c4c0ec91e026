'use strict';
const figures = JSON.parse(document.getElementById('charts').textContent);
const touch = matchMedia('(pointer: coarse)').matches;
const drawn = new Set();

function valuesOn(traces, axis) {
  const letter = axis[0], reference = axis.replace('axis', '');
  return traces.filter(trace => (trace[letter + 'axis'] || letter) === reference).flatMap(trace => trace[letter]);
}

function draw(id) {
  drawn.add(id);
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const line = colour('--line'), own = figures[id].layout;
  const layout = {
    hovermode: 'x unified', ...own, paper_bgcolor: 'transparent', plot_bgcolor: 'transparent',
    font: {color: colour('--text'), size: 12, family: 'system-ui, sans-serif'}, margin: {l: 8, r: 10, t: 8, b: 8},
    hoverlabel: {bgcolor: colour('--soft'), bordercolor: line, font: {color: colour('--text')}}, dragmode: touch ? false : 'zoom',
    legend: {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, xanchor: 'left', font: {size: 11.5}, itemwidth: 30},
  };
  for (const name of new Set(['xaxis', 'yaxis', ...Object.keys(own).filter(key => /^[xy]axis\d*$/.test(key))])) {
    // 50k and 2M, but 5e-6 on an axis of small numbers such as learning rates
    const exponentformat = valuesOn(figures[id].data, name).some(value => Math.abs(value) >= 1) ? 'B' : 'e';
    layout[name] = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat, nticks: 7, ...own[name]};
  }
  Plotly.react(id, figures[id].data, layout, {displayModeBar: false, responsive: true});
}

// A page may have a hundred charts: each is drawn when it comes near.
const near = new IntersectionObserver(entries => {
  for (const entry of entries)
    if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target.id); }
}, {rootMargin: '400px'});
if (window.Plotly) {
  document.querySelectorAll('.chart').forEach(chart => near.observe(chart));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => drawn.forEach(draw));
  addEventListener('beforeprint', () => Object.keys(figures).forEach(draw));
}

// Keep the open sections and the scroll position when the page is reloaded. A browser may refuse to store data for a file.
function stored(store, name, value) {
  try { return value === undefined ? store().getItem(name) : store().setItem(name, value); } catch { return null; }
}
const session = () => sessionStorage, local = () => localStorage, pageKey = 'valence ' + location.pathname;
const folds = [...document.querySelectorAll('details[data-key]')];

function remember() {
  const open = folds.filter(fold => fold.open).map(fold => fold.dataset.key);
  stored(session, pageKey, JSON.stringify({y: scrollY, open}));
}
function restore() {
  const state = stored(session, pageKey);
  if (!state) return;
  stored(session, pageKey, '');
  const {y, open} = JSON.parse(state);
  folds.forEach(fold => { fold.open = open.includes(fold.dataset.key); });
  scrollTo(0, y);
}
restore();

const reload = document.getElementById('reload');
if (reload) {
  reload.checked = stored(local, 'valence reload') !== 'off';
  reload.addEventListener('change', () => stored(local, 'valence reload', reload.checked ? 'on' : 'off'));
  const again = () => {
    const busy = document.hidden || !getSelection().isCollapsed;
    if (reload.checked && !busy) { remember(); location.reload(); }
  };
  setInterval(again, 1000 * Number(reload.dataset.seconds));
}
