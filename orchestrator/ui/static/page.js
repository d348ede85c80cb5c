// Sections arrive as server-sent events; a section with an open detail or a scrolled table keeps both.
"use strict";
const link = document.getElementById("link"), problem = document.getElementById("problem"), live = document.body.dataset.live;
const GONE = "holdfast ui has ended or was started again: open the URL that it printed.";
const FOCUS = "a, button, input, summary, [tabindex]";
function swap(id, html) {
  const section = document.getElementById(id), chosen = getSelection();
  if (!section || section.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
  if (!chosen.isCollapsed && section.contains(chosen.anchorNode)) return;  // somebody copies a text
  const open = new Set([...section.querySelectorAll("details[open]")].map((one) => one.id));
  const closed = new Set([...section.querySelectorAll("details:not([open])")].map((one) => one.id));
  const focus = [...section.querySelectorAll(FOCUS)].indexOf(document.activeElement);
  const boxes = [...section.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
  section.hidden = !html;
  section.innerHTML = html;
  for (const one of section.querySelectorAll("details")) one.open = open.has(one.id) || one.open && !closed.has(one.id);
  section.querySelectorAll(".scroll").forEach((one, number) => one.scrollTo(...boxes[number] ?? [0, 0]));
  if (focus >= 0) section.querySelectorAll(FOCUS)[focus]?.focus({ preventScroll: true });
  if (section.dataset.filtered) filter();
}
function filter() {
  const words = document.getElementById("filter").value.toLowerCase();
  for (const row of document.querySelectorAll("[data-filter]")) row.hidden = !row.textContent.toLowerCase().includes(words);
}
// A page that nobody sees needs no connection; a browser has six for one address.
let stream = null;
function follow() {
  stream?.close();
  stream = document.hidden || !live ? null : new EventSource(live);
  if (!stream) return;
  stream.addEventListener("section", (event) => { const one = JSON.parse(event.data); swap(one.id, one.html); });
  stream.addEventListener("problem", (event) => { say("not live", "This is the last known state. " + JSON.parse(event.data)); });
  stream.addEventListener("well", () => { say("live", ""); });
  stream.addEventListener("state", () => { document.getElementById("answer").textContent = ""; });
  stream.onerror = () => { say("not live", GONE); };
}
function say(word, why) {
  link.textContent = word;
  problem.textContent = why;
  problem.hidden = !why;
}
document.addEventListener("visibilitychange", follow);
follow();
document.getElementById("filter")?.addEventListener("input", filter);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.dialog) {
    document.querySelector("#" + button.dataset.dialog + " form").reset();
    document.getElementById(button.dataset.dialog).showModal();
  }
  if (button && "close" in button.dataset) button.closest("dialog").close();
});
async function post(form) {
  try {
    const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
    const name = answer.headers.get("content-disposition")?.match(/filename="(.*)"/)?.[1];
    if (!name) return answer.text();
    const file = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: name });
    file.click();
    return "recorded: " + name;
  } catch (error) { return GONE; }
}
for (const form of document.querySelectorAll("[data-ask]"))
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    form.closest("dialog").close();
    document.getElementById("answer").textContent = await post(form);
  });
document.addEventListener("submit", async (event) => {
  if (!("text" in event.target.dataset)) return;
  event.preventDefault();
  const pre = event.target.closest("section").querySelector("pre");
  pre.hidden = false;
  pre.textContent = "asking the ranks";
  pre.textContent = await post(event.target);
});
for (const form of document.querySelectorAll("[data-lines]")) {
  const pre = form.closest("section").querySelector("pre"), grep = form.querySelector("[data-grep]");
  let source = null, lines = [];
  const show = () => {
    const words = grep ? grep.value.toLowerCase() : "", low = pre.scrollTop + pre.clientHeight > pre.scrollHeight - 30;
    pre.textContent = lines.filter((line) => line.toLowerCase().includes(words)).join("\n") || "no lines";
    if (low) pre.scrollTop = pre.scrollHeight;
  };
  grep?.addEventListener("input", show);
  document.addEventListener("visibilitychange", () => { if (document.hidden) source?.close(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    source?.close();
    lines = [];
    pre.hidden = false;
    pre.textContent = "reading";
    source = new EventSource(form.dataset.lines + "?" + new URLSearchParams(new FormData(form)));
    source.addEventListener("lines", (one) => { lines = lines.concat(JSON.parse(one.data)).slice(-5000); show(); });
    source.addEventListener("end", () => { source.close(); show(); });
    source.onerror = () => { source.close(); };
  });
}
