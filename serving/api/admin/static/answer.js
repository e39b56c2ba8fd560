// One answer in the conversation: what has come of it, and what can be done with it.

import { copyButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";
import { TokenList } from "./tokens.js";

const ENDS = {
  stop: "",
  length: "cut off: max tokens",
  tool_calls: "calls tools",
  content_filter: "filtered",
};

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

/** A fact with the dot before the next one: lines break between facts only. */
const fact = (text, i, { length }) => make("span", { text: text + (i < length - 1 ? " · " : "") });

export class Answer {
  /** `look` selects the view: tokens, Markdown, JSON. `onRequest` shows the answer's request. */
  constructor(look, onRequest) {
    this.content = "";
    this.reasoning = "";
    this.undrawn = { text: "", tokens: [] };
    this.calls = [];
    this.began = performance.now();
    this.tokens = look.tokens ? new TokenList() : null;
    this.markdown = look.markdown && !look.tokens && !look.json ? new Markdown() : null;
    this.wantsJson = look.json;
    this.text = (this.tokens ?? this.markdown)?.element ?? make("p", { class: "text" });
    this.note = make("p", { class: "note" });
    this.element = make(
      "article",
      { class: "answer", "aria-label": "Answer", "aria-busy": "true" },
      this.text,
      this.note,
    );
    this.note.append(make("span", { class: "wait", text: "Waiting for the first token" }));
    this.showRequest = make("button", { type: "button", class: "small", text: "curl", onclick: onRequest });
  }

  /** Restore an earlier answer from its `entry`. */
  static of({ message, reasoning, facts }, look, onRequest) {
    const answer = new Answer(look, onRequest);
    answer.content = answer.undrawn.text = message.content ?? "";
    answer.facts = facts;
    if (reasoning) answer.think(reasoning);
    message.tool_calls?.forEach((call, index) => answer.call({ index, ...call }));
    answer.finish();
    return answer;
  }

  /** Take in an event of the stream. */
  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || calls || reasoning || choice.logprobs?.content?.length) this.arrived();
    this.undrawn.tokens.push(...(choice.logprobs?.content ?? []));
    if (reasoning) this.think(reasoning);
    if (content) {
      this.content += content;
      this.undrawn.text += content;
    }
    for (const call of calls ?? []) this.call(call);
    if (choice.finish_reason) this.reason = choice.finish_reason;
  }

  /** Show what has come since: once a frame, for each time the whole text is laid out. */
  draw() {
    const { text, tokens } = this.undrawn;
    if (this.tokens) this.tokens.add(tokens);
    else if (text && this.markdown) this.markdown.add(text);
    else if (text) this.text.append(text);
    this.undrawn = { text: "", tokens: [] };
  }

  arrived() {
    this.last = performance.now();
    if (this.first) return;
    this.first = this.last;
    this.note.replaceChildren();
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = make("p", { class: "text" });
      const summary = make("summary", { text: "Reasoning" });
      this.element.prepend(make("details", { class: "reasoning" }, summary, this.thoughts));
    }
    this.reasoning += text;
    this.thoughts.append(text);
  }

  /** A piece of a tool call, in OpenAI's shape: the name comes first, arguments bit by bit. */
  call({ index, id, function: part = {} }) {
    let call = this.calls[index];
    if (!call) {
      const shown = make("code");
      call = this.calls[index] = { id, name: "", arguments: "", shown };
      call.title = make("strong");
      this.note.before(make("div", { class: "call" }, call.title, make("pre", { tabindex: "0" }, shown)));
    }
    call.id ??= id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
    call.title.textContent = `calls ${call.name}`;
    call.shown.textContent = call.arguments;
  }

  /** Nothing more comes. `how` says why, if it is not the model's end. */
  finish(how) {
    this.element.setAttribute("aria-busy", "false");
    this.draw();
    this.text.normalize();
    this.tokens?.finish(this.content);
    this.markdown?.finish();
    for (const call of this.calls) call.shown.textContent = pretty(call.arguments);
    if (!this.text.childNodes.length) this.text.remove();
    this.facts ??= [how ?? ENDS[this.reason] ?? this.reason, ...this.figures()].filter(Boolean);
    this.note.replaceChildren(make("span", { class: "facts" }, ...this.facts.map(fact)));
    if (this.content) this.note.append(copyButton(() => this.content));
    this.note.append(this.showRequest);
  }

  figures() {
    if (!this.first) return [];
    const facts = [`first token ${((this.first - this.began) / 1000).toFixed(2)} s`];
    const count = this.usage?.completion_tokens;
    if (count) {
      facts.unshift(`${count} tokens`);
      const seconds = (this.last - this.first) / 1000;
      if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(0)} tokens/s`);
    }
    if (this.wantsJson && this.content) facts.push(this.isJson() ? "valid JSON" : "not valid JSON");
    return facts;
  }

  isJson() {
    try {
      JSON.parse(this.content);
      return true;
    } catch {
      return false;
    }
  }

  /** The stored form of the answer, for `of`. */
  get entry() {
    return { message: this.message, reasoning: this.reasoning, facts: this.facts };
  }

  /** As a turn of the conversation that goes on. */
  get message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }
}
