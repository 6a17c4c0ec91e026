"use strict";
// Shared by the pages of the web services. All text is inserted as text, never as HTML.

// The link carries the token in its fragment, which browsers do not send to servers.
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem("token", fragment.get("token"));
  history.replaceState(null, "", location.pathname);
}
const token = sessionStorage.getItem("token") || "";

const $ = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

let retry = null; // what "Try again" does

function showError(text, action = null) {
  retry = action;
  $("error-text").textContent = text;
  $("error").hidden = !text;
  $("retry").hidden = !action;
}

async function request(path, body) {
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Error("the server does not respond; check that it is still running");
  }
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    const message = (error && error.message) || `the server answered with status ${response.status}`;
    throw Object.assign(new Error(message), { status: response.status });
  }
  return response;
}

$("retry").onclick = () => { const action = retry; showError(""); action(); };
