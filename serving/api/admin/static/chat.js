// The conversation: questions, answers as they come, tools' results, errors.

import { ApiError, asCurl, stream } from "./api.js";
import { Answer } from "./answer.js";
import { announce, find, make } from "./dom.js";
import * as settings from "./settings.js";

const PATH = "v1/chat/completions";

let model = "";
let turns = []; // messages as the API takes them
let running = null; // AbortController of the answer under way

export function setModel(name) {
  model = name;
}

function body(messages) {
  return {
    model,
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

/** Change what is shown, and stay at the end if the reader is there. */
function update(change) {
  const log = find("conversation");
  const rest = log.scrollHeight - log.scrollTop - log.clientHeight;
  change();
  if (rest < 120) log.scrollTop = log.scrollHeight;
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
  const turn = { role: "user", content: text };
  const request = body([...turns, turn]);
  const wrong = settings.wrong();
  if (wrong) {
    openSettings();
    wrong.focus();
    announce("A setting is wrong.");
    return;
  }
  find("message").value = "";
  const shown = make("article", { class: "question", "aria-label": "You" }, make("p", { text }));
  append(shown);
  const good = await ask(request, [turn]);
  if (!good && !find("message").value) find("message").value = text;
}

/** Send a request whose last messages are new; they stay if there is an answer, or a part. */
async function ask(request, news) {
  const answer = new Answer(request, () => showRequest(request));
  append(answer.element);
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
    turns.push(...news, answer.message);
    if (answer.calls.length) append(results(answer));
  }
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

/** A form for what the tools say, which is the next turn. */
function results(answer) {
  const form = make("form", { class: "results", "aria-label": "Results of the tools" });
  const fields = answer.calls.map((call) => {
    const field = make("textarea", { class: "code", rows: "2", spellcheck: "false" });
    form.append(make("label", {}, `What ${call.name} returns`, field));
    return field;
  });
  form.append(make("button", { type: "submit", text: "Send results" }));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    const news = answer.calls.map((call, i) => ({
      role: "tool",
      tool_call_id: call.id,
      content: fields[i].value,
    }));
    const request = body([...turns, ...news]);
    if (await ask(request, news)) {
      for (const part of form.elements) part.disabled = true;
    }
  });
  return form;
}

/** The request that the composer would send now. */
export function showNext() {
  const content = find("message").value.trim() || "Hello!";
  showRequest(body([...turns, { role: "user", content }]));
}

function showRequest(request) {
  find("request").querySelector("code").textContent = asCurl(PATH, request);
  find("request").showModal();
}

/** Forget the conversation. */
export function clear() {
  stop();
  turns = [];
  for (const child of [...find("conversation").children]) {
    if (child.id !== "welcome") child.remove();
  }
  find("welcome").hidden = false;
  find("message").focus();
}
