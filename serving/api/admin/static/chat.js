// The conversation: questions, answers as they come, tools' results, errors.

import { ApiError, asCurl, stream } from "./api.js";
import { Answer } from "./answer.js";
import { announce, find, make } from "./dom.js";
import * as settings from "./settings.js";

const PATH = "v1/chat/completions";
const STORE = "weft-conversation"; // in this tab's storage

let model; // until it is known, requests name none, and the server takes its own
let turns = []; // { message, for the API; answers also have reasoning, facts, model }
let running = null; // AbortController for the running answer
let partial = () => []; // the running answer's turns

export function setModel(name) {
  model = name;
  find("examples").hidden = !name.startsWith("weft-demo"); // only bundled models can answer them
}

/** Store the conversation in the tab, so that it survives a reload. */
function keep() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify([...turns, ...partial()]));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    sessionStorage.removeItem(STORE);
  }
}

/** Show this tab's stored conversation. */
export function restore() {
  turns = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
  turns.forEach((turn, i) => {
    const { role, content } = turn.message;
    if (role === "user") append(question(content));
    if (role === "assistant") showOld(turn, turns.slice(0, i));
  });
  addEventListener("pagehide", keep);
}

function showOld(turn, before) {
  showModel(turn.model, before);
  const request = () => body(before.map(({ message }) => message), turn.model);
  const answer = Answer.of(turn, { markdown: true }, () => showRequest(request()));
  append(answer.element);
  if (!answer.calls.length) return;
  const said = turns.slice(before.length + 1).filter(({ message }) => message.role === "tool");
  append(results(answer, said.slice(0, answer.calls.length)));
}

/** Show the model's name if another model gave the answer before; both must be known. */
function showModel(name, before) {
  const last = before.findLast(({ message }) => message.role === "assistant");
  if (name && last?.model && last.model !== name) append(make("p", { class: "divider", text: name }));
}

const question = (text) =>
  make("article", { class: "question", "aria-label": "You" }, make("p", { text }));

function body(messages, of = model) {
  return {
    model: of,
    messages: [...settings.systemMessages(), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...settings.fields(),
  };
}

/** Show an element at the end, and go there. */
function append(element) {
  const log = find("conversation");
  find("welcome").hidden = true;
  log.append(element);
  log.scrollTop = log.scrollHeight;
}

let atEnd = true; // whether the reader sees the conversation's end

/** Change what is shown, and stay at the end if the reader is there. */
function update(change) {
  const log = find("conversation");
  atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** Stay at the end, too, when a panel opens or the window changes. */
export function followSize() {
  const log = find("conversation");
  const room = () => `${log.clientWidth} ${log.clientHeight}`;
  let known;
  log.addEventListener("scroll", () => {
    if (room() !== known) return; // nobody scrolled: a panel took room, and the observer is next
    atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  });
  new ResizeObserver(() => {
    known = room();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }).observe(log);
}

let frame = 0;

/** Draw an answer with the next frame, however many tokens come until then. */
function drawSoon(answer) {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    update(() => answer.draw());
  });
}

/** Ask what is in the composer. */
export async function send(openSettings) {
  const text = find("message").value.trim();
  if (!text || running) return;
  const turn = { message: { role: "user", content: text } };
  const request = body([...turns, turn].map(({ message }) => message));
  const wrong = settings.wrong();
  if (wrong) {
    openSettings();
    wrong.focus();
    announce("A setting is wrong.");
    return;
  }
  find("message").value = "";
  append(question(text));
  const good = await ask(request, [turn]);
  if (!good && !find("message").value) find("message").value = text;
}

/** Send a request whose last messages are new; they stay if there is an answer, or a part. */
async function ask(request, news) {
  const look = {
    tokens: Boolean(request.logprobs),
    json: Boolean(request.response_format),
    markdown: find("markdown").checked,
  };
  showModel(request.model, turns);
  const answer = new Answer(look, () => showRequest(request));
  append(answer.element);
  const entry = () => ({ ...answer.entry, model: request.model });
  partial = () => (answer.content ? [...news, entry()] : news);
  running = new AbortController();
  busy(true);
  let how;
  let failure;
  try {
    for await (const event of stream(PATH, request, running.signal)) {
      answer.take(event);
      drawSoon(answer);
    }
  } catch (error) {
    if (error.name === "AbortError") how = "stopped";
    else if (error instanceof ApiError) failure = error;
    else throw error;
  } finally {
    running = null;
    busy(false);
    cancelAnimationFrame(frame);
    frame = 0;
    update(() => answer.finish(failure ? "failed" : how));
  }
  const kept = Boolean(answer.content || answer.calls.length);
  if (kept && !(answer.calls.length && (failure || how))) {
    turns.push(...news, entry());
    if (answer.calls.length) append(results(answer, []));
  }
  partial = () => [];
  keep();
  if (failure) {
    if (!kept) answer.element.remove();
    append(complaint(failure, request));
  } else {
    announce(how === "stopped" ? "Stopped." : "The answer is complete.");
  }
  return kept || !failure;
}

export function stop() {
  running?.abort();
}

function busy(is) {
  const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
  find("send").hidden = is;
  find("stop").hidden = !is;
  if (hadFocus) find(is ? "stop" : "message").focus();
  if (is) announce("Answering.");
}

function complaint(error, request) {
  const title = error.status ? `Error ${error.status}` : "No answer";
  const element = make(
    "div",
    { class: "error", role: "alert" },
    make("strong", { text: title }),
    make("p", { text: error.message }),
  );
  const details = [error.param && `field: ${error.param}`, error.code && `code: ${error.code}`];
  const facts = make("span", { text: details.filter(Boolean).join(" · ") });
  const show = () => showRequest(request);
  const curl = make("button", { type: "button", class: "small", text: "curl", onclick: show });
  element.append(make("p", { class: "note" }, facts, curl));
  if (error.status === 401) document.dispatchEvent(new Event("key-wanted"));
  return element;
}

/** A form for the tools' results, the next turns; `said` are these turns if they exist. */
function results(answer, said) {
  const form = make("form", { class: "results", "aria-label": "Results of the tools" });
  const fields = answer.calls.map((call, i) => {
    const field = make("textarea", { class: "code", rows: "2", spellcheck: "false" });
    field.value = said[i]?.message.content ?? "";
    form.append(make("label", {}, `What ${call.name} returns`, field));
    return field;
  });
  form.append(make("button", { type: "submit", text: "Send results" }));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    const news = answer.calls.map((call, i) => ({
      message: { role: "tool", tool_call_id: call.id, content: fields[i].value },
    }));
    const request = body([...turns, ...news].map(({ message }) => message));
    if (await ask(request, news)) close();
  });
  const close = () => [...form.elements].forEach((part) => (part.disabled = true));
  if (said.length) close();
  return form;
}

/** The request that the composer would send now. */
export function showNext() {
  const content = find("message").value.trim() || "Hello!";
  const messages = turns.map(({ message }) => message);
  showRequest(body([...messages, { role: "user", content }]));
}

function showRequest(request) {
  find("request").querySelector("code").textContent = asCurl(PATH, request);
  find("request").showModal();
}

/** Forget the conversation. */
export function clear() {
  stop();
  turns = [];
  keep();
  for (const child of [...find("conversation").children]) {
    if (child.id !== "welcome") child.remove();
  }
  find("welcome").hidden = false;
  find("message").focus();
}
