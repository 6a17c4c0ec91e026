'use strict';
const figures = JSON.parse(document.getElementById('charts').textContent);
const touch = matchMedia('(pointer: coarse)').matches;
const drawn = new Set();

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
  for (const name of new Set(['xaxis', 'yaxis', ...Object.keys(own).filter(key => /^[xy]axis\d*$/.test(key))]))
    layout[name] = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: 'e', nticks: 7, ...own[name]};
  Plotly.react(id, figures[id].data, layout, {displayModeBar: false, responsive: true});
}

// A page may have a hundred charts: each is drawn when it comes near.
const near = new IntersectionObserver(seen => {
  for (const place of seen)
    if (place.isIntersecting) { near.unobserve(place.target); draw(place.target.id); }
}, {rootMargin: '400px'});
if (window.Plotly) {
  document.querySelectorAll('.chart').forEach(place => near.observe(place));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => drawn.forEach(draw));
  addEventListener('beforeprint', () => Object.keys(figures).forEach(draw));
}

// What is open and where one reads stays when the page is loaded anew. A browser may refuse to keep anything for a file.
function kept(store, name, value) {
  try { return value === undefined ? store().getItem(name) : store().setItem(name, value); } catch { return null; }
}
const session = () => sessionStorage, local = () => localStorage, here = 'valence ' + location.pathname;
const folds = [...document.querySelectorAll('details[data-key]')];

function remember() {
  const open = folds.filter(each => each.open).map(each => each.dataset.key);
  kept(session, here, JSON.stringify({y: scrollY, open}));
}
function restore() {
  const found = kept(session, here);
  if (!found) return;
  kept(session, here, '');
  const {y, open} = JSON.parse(found);
  folds.forEach(each => { each.open = open.includes(each.dataset.key); });
  scrollTo(0, y);
}
restore();

const reload = document.getElementById('reload');
if (reload) {
  reload.checked = kept(local, 'valence reload') !== 'off';
  reload.addEventListener('change', () => kept(local, 'valence reload', reload.checked ? 'on' : 'off'));
  const again = () => {
    const busy = document.hidden || !getSelection().isCollapsed;
    if (reload.checked && !busy) { remember(); location.reload(); }
  };
  setInterval(again, 1000 * Number(reload.dataset.seconds));
}
