"use strict";
// The page of `valence audit --review`. All text is inserted as text, never as HTML.

let session = { file: "", rater: "" };
let cards = []; // of the case that is shown
let number = null; // of that case; null: all is decided
let numCases = 0;
let current = 0; // the card that decisions are about
let busy = false;

const DONE = { keep: "kept", flip: "flipped", drop: "dropped", score: "scored" };

// Characters that could hide or reorder the text around them are shown as their codes.
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff])/;

function paragraph(text, className = "") {
  const node = element("p", { className });
  for (const part of text.replaceAll("\r\n", "\n").split(HIDDEN)) {
    if (!HIDDEN.test(part)) { node.append(part); continue; }
    const code = part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    node.append(element("span", { className: "invisible-character", textContent: `U+${code}` }));
  }
  return node;
}

function turns(messages) {
  return messages.map(({ role, text }) => element("div", { className: "turn" },
    ...(role && role !== "assistant" ? [element("h3", { textContent: role })] : []),
    paragraph(text)));
}

// The label of a row as it would be written now.
function labelOf(card) {
  const choice = card.decision && card.decision.choice;
  if (choice === "flip") return card.opposite;
  if (choice === "score") return String(card.decision.score);
  return card.kind === "scores" ? String(card.score) : card.label;
}

function verdictOf(card) {
  if (!card.decision) return "";
  const { choice, rater } = card.decision;
  const what = choice === "flip" || choice === "score" ? `${DONE[choice]} to ${labelOf(card)}` : DONE[choice];
  return `${what} by ${rater}`;
}

function cardNode(card, index) {
  const head = element("div", { className: "card-head" });
  const level = card.kind === "scores" ? card.label : labelOf(card);
  const words = { thumbs: "rated", scores: "score", pairs: "prefers" }[card.kind];
  head.append(element("span", { className: `badge ${level}`, textContent: `${words} ${labelOf(card)}` }));
  head.append(element("h2", { textContent: card.origin }));
  head.append(element("span", { className: "verdict", textContent: verdictOf(card) }));
  const node = element("section", { className: "card" }, head);
  node.classList.toggle("current", index === current);
  node.classList.toggle("done", Boolean(card.decision));
  node.append(element("ul", { className: "reasons", "aria-label": "Why this row is listed" },
    ...card.reasons.map(({ text }) => element("li", { textContent: text }))));
  const prompt = JSON.stringify(card.prompt);
  if (index === 0 || index === current || prompt !== JSON.stringify(cards[index - 1].prompt)) {
    node.append(element("div", { className: "prompt" }, ...turns(card.prompt)));
  }
  const sides = card.sides.map((side) => {
    const isBetter = side.name === "completion" ? level === "up" || level === "high" : side.name === labelOf(card);
    const title = side.name === "completion" ? "completion" : `${side.name}${isBetter ? " (preferred)" : ""}`;
    return element("div", { className: `side ${isBetter ? "better" : "worse"}` },
      element("h3", { textContent: title }), ...turns(side.messages));
  });
  node.append(element("div", { className: "sides" }, ...sides));
  const about = [];
  if (card.raters.length) {
    const names = card.raters.map(({ name, verdict }) => (verdict ? `${name}: ${verdict}` : name));
    about.push(`${names.length === 1 ? "Rater" : "Raters"}: ${names.join(", ")}`);
  }
  if (card.comment) about.push(`Comment: ${card.comment}`);
  if (card.tags.length) about.push(`Tags: ${card.tags.join(", ")}`);
  if (about.length) node.append(paragraph(about.join("\n"), "about"));
  node.onclick = () => setCurrent(index);
  return node;
}

function showChoices() {
  const card = cards[current];
  for (const id of ["keep", "flip", "drop"]) {
    $(id).disabled = !card || busy;
    $(id).setAttribute("aria-pressed", Boolean(card && card.decision &&
      (card.decision.choice === id || (id === "flip" && card.decision.choice === "score"))));
  }
  $("previous").disabled = $("next").disabled = busy || numCases === 0;
  $("undo").disabled = busy;
  const isScored = card && card.kind === "scores";
  const given = card ? (isScored ? card.score : card.label) : "";
  const set = (id, text, key) => $(id).replaceChildren(`${text} `, element("kbd", { textContent: key }));
  set("keep", card ? `Keep “${given}”` : "Keep", "k");
  set("flip", isScored ? "New score" : card ? `Flip to “${card.opposite}”` : "Flip", "f");
  set("drop", "Drop", "d");
}

function setCurrent(index) {
  if (index === current || index < 0 || index >= cards.length) return;
  current = index;
  hideScore();
  show();
  $("cards").children[index].scrollIntoView({ block: "nearest" });
}

function show() {
  if (number === null) {
    $("cards").replaceChildren(element("section", { className: "finished" },
      element("h2", { textContent: "All suspicious rows are decided" }),
      element("p", { textContent: `The reviewed rows are in ${session.file}. You can stop the command with Ctrl-C, or go back with ←.` })));
  } else {
    $("cards").replaceChildren(...cards.map(cardNode));
  }
  $("place").textContent = number === null ? "" : `case ${number + 1} of ${numCases}`;
  showChoices();
}

function showProgress(progress) {
  const counts = Object.entries(DONE).filter(([name]) => progress[name]).map(([name, word]) => `${progress[name]} ${word}`);
  const done = progress.rows - progress.left;
  $("status").textContent = [session.rater, `${done} of ${progress.rows} decided`, ...counts].filter(Boolean).join(" · ");
  $("progress").max = Math.max(progress.rows, 1);
  $("progress").value = done;
}

// row: the card to make the current one; otherwise the first that is not decided.
function receive(answer, row = null) {
  ({ cards, number, cases: numCases } = answer);
  showProgress(answer.progress);
  const place = cards.findIndex((card) => (row === null ? !card.decision : card.row === row));
  current = Math.max(place, 0);
  hideScore();
  show();
  $("cards").scrollTop = 0;
  if (current > 0) $("cards").children[current].scrollIntoView({ block: "nearest" });
}

async function exchange(path, body) {
  return (await request(path, body)).json();
}

// One request at a time: a key pressed during a request would act on a row that is not shown yet.
async function busily(action, problem) {
  if (busy) return;
  busy = true;
  showChoices();
  try {
    await action();
    showError("");
  } catch (error) {
    showError(`${problem}${error.message}`, () => busily(action, problem));
  } finally {
    busy = false;
    showChoices();
  }
}

function decide(choice, score = null) {
  const card = cards[current];
  if (!card) return;
  busily(async () => {
    let answer;
    try {
      answer = await exchange("api/decide", { row: card.row, version: card.version, choice, score });
    } catch (error) {
      if (error.status !== 409) throw error;
      receive(await exchange("api/case", { number }), card.row);
      $("last").textContent = `${card.origin}: ${error.message}. The current state is shown.`;
      return;
    }
    const now = answer.cards.find((each) => each.row === card.row);
    $("last").textContent = `${card.origin}: ${verdictOf(now)}`;
    const isDone = answer.cards.every((each) => each.decision);
    receive(isDone ? await exchange("api/case", { after: number }) : answer);
  }, "The decision was not saved: ");
}

function undo() {
  busily(async () => {
    let answer;
    try {
      answer = await exchange("api/undo", {});
    } catch (error) {
      if (error.status !== 404) throw error;
      $("last").textContent = "There is nothing to undo.";
      return;
    }
    receive(answer, answer.row);
    const card = cards[current];
    $("last").textContent = card ? `${card.origin}: decision undone` : "Decision undone";
  }, "The decision was not undone: ");
}

function step(by) {
  if (!numCases) return;
  const from = number === null ? (by > 0 ? -1 : numCases) : number;
  busily(async () => receive(await exchange("api/case", { number: (from + by + numCases) % numCases })), "");
}

function flip() {
  const card = cards[current];
  if (!card) return;
  if (card.kind !== "scores") { decide("flip"); return; }
  $("score-form").hidden = false;
  $("score").value = card.decision && card.decision.score !== null ? card.decision.score : card.score;
  $("score").focus();
  $("score").select();
}

function hideScore() {
  $("score").blur();  // otherwise the next key goes to the hidden field until the page is drawn again
  $("score-form").hidden = true;
}

$("keep").onclick = () => decide("keep");
$("flip").onclick = flip;
$("drop").onclick = () => decide("drop");
$("undo").onclick = undo;
$("previous").onclick = () => step(-1);
$("next").onclick = () => step(1);
$("score-cancel").onclick = hideScore;
$("score-form").onsubmit = (event) => {
  event.preventDefault();
  const score = $("score").valueAsNumber;
  if (Number.isFinite(score)) decide("score", score);
};
$("help-button").onclick = () => {
  $("help").hidden = !$("help").hidden;
  $("help-button").setAttribute("aria-expanded", !$("help").hidden);
};

document.addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLInputElement) {
    if (event.key === "Escape") hideScore();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const scroll = (pages) => $("cards").scrollBy({ top: pages * $("cards").clientHeight });
  if (event.key === "PageDown" || event.key === "PageUp") {
    event.preventDefault();
    scroll(event.key === "PageDown" ? 0.9 : -0.9);
    return;
  }
  // a key that is held down must not decide one row after the other
  if (event.repeat) return;
  const actions = {
    k: () => decide("keep"), 1: () => decide("keep"),
    f: flip, 2: flip,
    d: () => decide("drop"), 3: () => decide("drop"),
    u: undo,
    ArrowUp: () => setCurrent(current - 1), ArrowDown: () => setCurrent(current + 1),
    ArrowLeft: () => step(-1), ArrowRight: () => step(1),
    "?": () => $("help-button").click(),
  };
  if (cards.length < 2) { // with one row, these keys scroll
    actions.ArrowUp = () => scroll(-0.1);
    actions.ArrowDown = () => scroll(0.1);
  }
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

async function start() {
  try {
    session = await exchange("api/session");
    $("file").textContent = session.file;
    document.title = `${session.file} · Review`;
    receive(await exchange("api/case", {}));
  } catch (error) {
    showError(error.message, start);
  }
}

start();
