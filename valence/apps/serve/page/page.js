"use strict";
// The page of `valence collect`. All text is inserted as text, never as HTML.

const conversation = $("conversation");

let messages = []; // those after the last answer
let after = ""; // id of the last answer, after which the conversation continues
let tools = []; // that the prompt offers to the model
let startPrompt = null; // number of the prompt that the conversation starts with
let mode = "chat";
let busy = false;
let current = null; // the last answer or comparison: what the keyboard acts on

async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let isComplete = false;
  for (;;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done && isComplete) return;
    if (done) throw new Error("the connection was lost before the answer was complete");
    buffer += decoder.decode(value, { stream: true });
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      isComplete = isComplete || Boolean(event.done);
      yield event;
    }
  }
}

function setBusy(value) {
  busy = value;
  for (const id of ["send", "new", "next", "mode-chat", "mode-compare"]) $(id).disabled = value;
}

function setVotes(count) {
  session.votes = count;
  showStatus();
}

let session = { votes: 0 };
let promptNumber = "";
let openPrompt = null; // number of the prompt that is shown

function showStatus() {
  const votes = `${session.votes} ${session.votes === 1 ? "vote" : "votes"}`;
  $("status").textContent = [session.rater, promptNumber, votes].filter(Boolean).join(" · ");
}

function addMessage(message) {
  if (message.role === "tool") {
    conversation.append(toolBlock("Result", message.content));
    return;
  }
  if (message.content || !message.tool_calls) {
    conversation.append(element("p", { className: `message ${message.role}`, textContent: message.content }));
  }
  for (const call of message.tool_calls || []) {
    const { name, arguments: values } = call.function || {};
    conversation.append(toolBlock(name, typeof values === "string" ? values : JSON.stringify(values)));
  }
}

// A call of a tool, or its result, of which one line is shown until it is opened.
function toolBlock(title, ...texts) {
  const summary = element("summary", { textContent: `${title}: ${texts.join(" → ")}` });
  return element("details", { className: "tool" }, summary,
    ...texts.map((textContent) => element("pre", { textContent })));
}

function scrollDown() {
  conversation.scrollTop = conversation.scrollHeight;
}

function setCurrent(item) {
  for (const node of conversation.querySelectorAll(".current")) node.classList.remove("current");
  current = item;
  for (const node of item ? item.nodes : []) node.classList.add("current");
}

// One answer

function answerCard(title) {
  const text = element("p", { className: "message" });
  const card = element("section", { className: "answer writing" });
  if (title) card.append(element("h2", { textContent: title }));
  card.append(text);
  return { card, text, isTurnFinished: false };
}

// The text of the next turn comes after the calls of the one before.
function addText(side, text) {
  if (side.isTurnFinished) {
    side.text = element("p", { className: "message" });
    side.card.append(side.text);
    side.isTurnFinished = false;
  }
  side.text.textContent += text;
}

function finishTurn(side, { content, calls, results }) {
  if (side.isTurnFinished) addText(side, "");
  side.text.textContent = content;
  calls.forEach((call, index) => {
    const result = index < results.length ? [results[index]] : [];
    side.card.append(toolBlock(call.name, call.arguments, ...result));
  });
  if (!calls.length) side.card.append(...results.map((result) => toolBlock("Not a valid call", result)));
  side.isTurnFinished = true;
}

function showEnd({ card, text }, stop) {
  card.classList.remove("writing");
  const notes = [];
  if (text.textContent === "" && !card.querySelector(".tool")) notes.push("The answer is empty.");
  if (stop === "length") notes.push("The answer was truncated at its maximum length.");
  for (const note of notes) card.append(element("p", { className: "note", textContent: note }));
}

// Votes are sent one after the other, so that the last one counts.
let sending = Promise.resolve();

function save(path, body) {
  const result = sending.then(async () => {
    const reply = await (await request(path, body)).json();
    setVotes(reply.votes);
    return reply;
  });
  sending = result.catch(() => {});
  return result;
}

async function rate(item, changes) {
  item.verdict = { ...item.verdict, ...changes };
  showVerdict(item);
  const verdict = item.verdict;
  try {
    await save("api/rate", { answer: item.id, ...verdict });
    item.saved = verdict;
    showError("");
  } catch (error) {
    if (item.verdict === verdict) item.verdict = item.saved;
    showVerdict(item);
    showError(`The vote was not saved: ${error.message}`, () => rate(item, changes));
  }
}

function showVerdict(item) {
  item.up.setAttribute("aria-pressed", item.verdict.label === true);
  item.down.setAttribute("aria-pressed", item.verdict.label === false);
  item.edit.setAttribute("aria-pressed", Boolean(item.verdict.correction));
  item.comment.setAttribute("aria-pressed", Boolean(item.verdict.comment));
}

function editor(item, label, value, save) {
  item.box.replaceChildren();
  const input = element("textarea", { rows: 4, value, "aria-label": label });
  const done = element("button", { type: "button", textContent: "Save" });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  const close = () => { item.box.replaceChildren(); item.edit.focus(); };
  done.onclick = () => { save(input.value.trim()); close(); };
  cancel.onclick = close;
  input.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done.click();
  };
  item.box.append(input, element("div", { className: "actions" }, done, cancel));
  input.focus();
  scrollDown();
}

function rateable(card, id, content) {
  const button = (text, title, className = "") =>
    element("button", { type: "button", textContent: text, title, className, "aria-pressed": "false" });
  const item = {
    kind: "answer", id, nodes: [card],
    verdict: { label: null, correction: null, comment: "" },
    saved: { label: null, correction: null, comment: "" },
    up: button("👍 Good", "Good answer (↑)", "good"),
    down: button("👎 Bad", "Bad answer (↓)", "bad"),
    edit: button("Correct", "Write a better answer (e)"),
    comment: button("Comment", "Comment on the answer (c)"),
    box: element("div", { className: "edit" }),
  };
  const toggle = (label) => rate(item, { label: item.verdict.label === label ? null : label });
  item.good = () => toggle(true);
  item.bad = () => toggle(false);
  item.correct = () => editor(item, "Better answer", item.verdict.correction || content, (text) =>
    rate(item, { correction: text && text !== content.trim() ? text : null }));
  item.remark = () => editor(item, "Comment", item.verdict.comment, (text) => rate(item, { comment: text }));
  item.up.onclick = item.good;
  item.down.onclick = item.bad;
  item.edit.onclick = item.correct;
  item.comment.onclick = item.remark;
  card.append(element("div", { className: "actions" }, item.up, item.down, item.edit, item.comment), item.box);
  return item;
}

// An answer is shown in sides.a, two of them in sides.a and sides.b. Returns what they are rated by.
async function receive(sides) {
  const response = await request("api/answer",
    { messages, tools, after, prompt: startPrompt, compare: "b" in sides });
  let id;
  for await (const event of events(response)) {
    if (event.done) id = event.done;
    if (event.text !== undefined) addText(sides[event.side], event.text);
    if (event.turn) finishTurn(sides[event.side], event.turn);
    if (event.prompt !== undefined) showPrompt(sides[event.side], event.prompt);
    if (event.stop) showEnd(sides[event.side], event.stop);
    scrollDown();
  }
  return id;
}

// An environment has added to the last message of the user.
function showPrompt({ card }, text) {
  const title = card.querySelector("h2");
  const message = element("p", { className: "note", textContent: `The model read: ${text}` });
  if (title) title.after(message);
  else card.prepend(message);
}

async function askOnce() {
  const side = answerCard("");
  conversation.append(side.card);
  const id = await receive({ a: side });
  continueAfter(id);
  setCurrent(rateable(side.card, id, side.text.textContent));
  scrollDown();
}

function continueAfter(id) {
  after = id;
  messages = [];
}

// Two answers

async function askTwice() {
  const sides = { a: answerCard("Answer 1"), b: answerCard("Answer 2") };
  const pair = element("div", { className: "pair" }, sides.a.card, sides.b.card);
  conversation.append(pair);
  setCurrent(comparison(pair, sides, await receive(sides)));
  scrollDown();
}

function comparison(pair, sides, id) {
  const item = { kind: "comparison", nodes: [sides.a.card, sides.b.card], winner: null };
  const choose = async (winner) => {
    if (item.isFinal) return;
    let models;
    try {
      ({ models } = await save("api/compare", { comparison: id, winner }));
      showError("");
    } catch (error) {
      showError(`The vote was not saved: ${error.message}`, () => choose(winner));
      return;
    }
    item.winner = winner;
    for (const [name, node] of Object.entries(buttons)) node.setAttribute("aria-pressed", name === winner);
    sides.a.card.classList.toggle("chosen", winner === "a");
    sides.b.card.classList.toggle("chosen", winner === "b");
    if (models.length) reveal(item, sides, models, Object.values(buttons));
    if (current === item) continueAfter(id.split("-")[winner === "b" ? 1 : 0]);
  };
  const button = (text, title, winner) => element("button", {
    type: "button", textContent: text, title, "aria-pressed": "false", onclick: () => choose(winner),
  });
  const buttons = {
    a: button("1 is better", "The first answer is better (1)", "a"),
    tie: button("Equally good", "Both are equally good (0)", "tie"),
    both_bad: button("Both bad", "Both are bad (x)", "both_bad"),
    b: button("2 is better", "The second answer is better (2)", "b"),
  };
  item.choose = choose;
  pair.append(element("div", { className: "actions compare" }, ...Object.values(buttons)));
  return item;
}

// The verdict is final once the names of the models are shown.
function reveal(item, sides, models, buttons) {
  item.isFinal = true;
  Object.values(sides).forEach((side, index) => {
    side.card.querySelector("h2").textContent = `Answer ${index + 1}: ${models[index]}`;
  });
  for (const button of buttons) button.disabled = true;
  if (!$("results").hidden) showResults();
}

async function showResults() {
  try {
    const { wins, ties, both_bad } = await (await request("api/results")).json();
    const counts = { ...Object.fromEntries(Object.entries(wins).map(([name, count]) => [`${name} won`, count])),
      "Equally good": ties, "Both bad": both_bad };
    $("results").replaceChildren(...Object.entries(counts).map(([name, count]) => element("div", {},
      element("dt", { textContent: name }), element("dd", { textContent: String(count) }))));
  } catch (error) {
    showError(error.message, showResults);
  }
}

// The conversation

async function ask() {
  setBusy(true);
  setCurrent(null);
  showError("");
  const shown = conversation.childElementCount;
  try {
    if (mode === "compare") await askTwice();
    else await askOnce();
  } catch (error) {
    while (conversation.childElementCount > shown) conversation.lastElementChild.remove();
    showError(`The model did not answer: ${error.message}`, ask);
  } finally {
    setBusy(false);
  }
}

async function send(text) {
  if (current && current.kind === "comparison" && current.winner === null) {
    showError("First choose the better answer.");
    return;
  }
  if (messages.length) { // the last one was not answered
    messages.pop();
    conversation.lastElementChild.remove();
  }
  const message = { role: "user", content: text };
  messages.push(message);
  addMessage(message);
  scrollDown();
  $("input").value = "";
  await ask();
}

function clear() {
  continueAfter("");
  tools = [];
  startPrompt = null;
  setCurrent(null);
  conversation.replaceChildren();
  showError("");
}

async function nextPrompt() {
  if (busy) return;
  setBusy(true);
  try {
    await sending; // so that the server knows what has been voted on
    const prompt = await (await request("api/next-prompt", { skip: openPrompt })).json();
    openPrompt = prompt.messages === null ? null : prompt.number;
    if (prompt.messages === null) {
      promptNumber = `all ${prompt.total} prompts done`;
      $("next").hidden = true;
      showStatus();
      return;
    }
    promptNumber = `prompt ${prompt.number} of ${prompt.total}`;
    showStatus();
    clear();
    ({ messages, tools, number: startPrompt } = prompt);
    messages.forEach(addMessage);
    document.activeElement && document.activeElement.blur();
    await ask();
  } catch (error) {
    showError(error.message, nextPrompt);
  } finally {
    setBusy(false);
  }
}

function setMode(value) {
  mode = value;
  $("mode-chat").setAttribute("aria-pressed", mode === "chat");
  $("mode-compare").setAttribute("aria-pressed", mode === "compare");
}

$("mode-chat").onclick = () => setMode("chat");
$("mode-compare").onclick = () => setMode("compare");
$("new").onclick = () => { clear(); $("input").focus(); };
$("next").onclick = nextPrompt;
$("results-button").onclick = () => {
  $("results").hidden = !$("results").hidden;
  $("results-button").setAttribute("aria-expanded", !$("results").hidden);
  if (!$("results").hidden) showResults();
};
$("help-button").onclick = () => {
  $("help").hidden = !$("help").hidden;
  $("help-button").setAttribute("aria-expanded", !$("help").hidden);
};
$("form").onsubmit = (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (text && !busy) send(text);
};
$("input").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
};

document.addEventListener("keydown", (event) => {
  const writing = event.target instanceof HTMLTextAreaElement;
  if (event.key === "Escape" && writing) { event.target.blur(); return; }
  if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
  const answer = current && current.kind === "answer" ? current : null;
  const two = current && current.kind === "comparison" ? current : null;
  const actions = {
    ArrowUp: answer && answer.good, ArrowDown: answer && answer.bad,
    e: answer && answer.correct, c: answer && answer.remark,
    1: two && (() => two.choose("a")), 2: two && (() => two.choose("b")),
    0: two && (() => two.choose("tie")), x: two && (() => two.choose("both_bad")),
    n: $("next").hidden || busy ? null : nextPrompt,
    i: () => $("input").focus(),
  };
  const action = actions[event.key];
  if (action) { event.preventDefault(); action(); }
});

async function start() {
  try {
    session = await (await request("api/session")).json();
    const title = session.is_blind ? "Which answer is better?" : session.model;
    $("model").textContent = title;
    document.title = `${title} · Valence`;
    $("modes").hidden = session.is_blind;
    $("results-button").hidden = !session.has_results;
    if (session.is_blind) setMode("compare");
    $("next").hidden = session.prompts === 0;
    showStatus();
    if (session.prompts) await nextPrompt();
    else $("input").focus();
  } catch (error) {
    showError(error.message, start);
  }
}

start();
