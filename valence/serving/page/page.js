"use strict";
// The page of `valence collect`. All text is inserted as text, never as HTML.

// The link carries the token in its fragment, which browsers do not send to servers.
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem("token", fragment.get("token"));
  history.replaceState(null, "", location.pathname);
}
const token = sessionStorage.getItem("token") || "";

const $ = (id) => document.getElementById(id);
const conversation = $("conversation");

let messages = []; // the conversation so far, as the model sees it
let mode = "chat";
let busy = false;
let current = null; // the last answer or comparison: what the keyboard acts on

function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

async function request(path, body) {
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) {
    const data = await response.json().catch(() => ({}));
    throw new Error((data.error && data.error.message) || data.detail || `HTTP ${response.status}`);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error);
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
  conversation.append(element("p", { className: `message ${message.role}`, textContent: message.content }));
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
  const card = element("section", { className: "answer" });
  if (title) card.append(element("h2", { textContent: title }));
  card.append(text);
  return { card, text };
}

function cutNote(stop) {
  return stop === "length"
    ? [element("p", { className: "note", textContent: "The answer was cut off at its maximum length." })]
    : [];
}

async function rate(item, changes) {
  const before = { ...item.verdict };
  Object.assign(item.verdict, changes);
  showVerdict(item);
  try {
    const response = await request("api/rate", { answer: item.id, ...item.verdict });
    setVotes((await response.json()).votes);
    showError("");
  } catch (error) {
    item.verdict = before;
    showVerdict(item);
    showError(`The vote was not saved: ${error.message}`);
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

async function askOnce() {
  const { card, text } = answerCard("");
  conversation.append(card);
  const response = await request("api/answer", { messages });
  for await (const event of events(response)) {
    if (event.text !== undefined) { text.textContent += event.text; scrollDown(); }
    if (event.done) {
      card.append(...cutNote(event.stop));
      messages.push({ role: "assistant", content: text.textContent });
      setCurrent(rateable(card, event.done, text.textContent));
    }
  }
  scrollDown();
}

// Two answers

async function askTwice() {
  const sides = { a: answerCard("Answer 1"), b: answerCard("Answer 2") };
  const pair = element("div", { className: "pair" }, sides.a.card, sides.b.card);
  conversation.append(pair);
  const response = await request("api/answer", { messages, compare: true });
  for await (const event of events(response)) {
    if (event.text !== undefined) { sides[event.side].text.textContent += event.text; scrollDown(); }
    if (event.stop) sides[event.side].card.append(...cutNote(event.stop));
    if (event.done) setCurrent(comparison(pair, sides, event.done));
  }
  scrollDown();
}

function comparison(pair, sides, id) {
  const item = { kind: "comparison", nodes: [sides.a.card, sides.b.card], winner: null };
  const place = messages.length; // the conversation goes on with the winner
  const choose = async (winner) => {
    try {
      const response = await request("api/compare", { comparison: id, winner });
      setVotes((await response.json()).votes);
      showError("");
    } catch (error) {
      showError(`The vote was not saved: ${error.message}`);
      return;
    }
    item.winner = winner;
    for (const [name, node] of Object.entries(buttons)) node.setAttribute("aria-pressed", name === winner);
    sides.a.card.classList.toggle("chosen", winner === "a");
    sides.b.card.classList.toggle("chosen", winner === "b");
    if (messages.length <= place + 1) {
      messages[place] = { role: "assistant", content: sides[winner === "b" ? "b" : "a"].text.textContent };
    }
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

// The conversation

async function ask() {
  setBusy(true);
  setCurrent(null);
  showError("");
  try {
    if (mode === "compare") await askTwice();
    else await askOnce();
  } catch (error) {
    showError(error.message);
    conversation.lastElementChild && conversation.lastElementChild.remove();
  } finally {
    setBusy(false);
  }
}

async function send(text) {
  if (current && current.kind === "comparison" && current.winner === null) {
    showError("First say which of the two answers is better.");
    return;
  }
  const message = { role: "user", content: text };
  messages.push(message);
  addMessage(message);
  scrollDown();
  $("input").value = "";
  const before = messages.length;
  await ask();
  if (mode === "chat" && messages.length === before) messages.pop(); // it was not answered
}

function clear() {
  messages = [];
  setCurrent(null);
  conversation.replaceChildren();
  showError("");
}

async function nextPrompt() {
  if (busy) return;
  try {
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
    messages = prompt.messages;
    messages.forEach(addMessage);
    await ask();
    document.activeElement && document.activeElement.blur();
  } catch (error) {
    showError(error.message);
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
    n: $("next").hidden ? null : nextPrompt,
    i: () => $("input").focus(),
  };
  const action = actions[event.key];
  if (action) { event.preventDefault(); action(); }
});

(async () => {
  try {
    session = await (await request("api/session")).json();
    $("model").textContent = session.model;
    document.title = `${session.model} · Valence`;
    $("next").hidden = session.prompts === 0;
    showStatus();
    if (session.prompts) await nextPrompt();
    else $("input").focus();
  } catch (error) {
    showError(error.message);
  }
})();
