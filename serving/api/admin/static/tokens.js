// An answer as its tokens, each tinted by its probability. The alternatives of one are shown beside
// it, when it is pointed at or has the focus: the list is one tab stop, arrow keys move in it.

import { find, make } from "./dom.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share > 0 && share < 0.05 ? "< 0.1 %" : `${share.toFixed(1)} %`;
};

/** Spaces and line ends made visible. */
const seen = (text) =>
  text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

/** The tokens of one answer. */
export class TokenList {
  constructor() {
    this.element = make("div", {
      class: "tokens",
      role: "listbox",
      tabindex: "0",
      "aria-label": "Tokens of the answer; arrow keys move",
    });
    this.entries = new Map(); // of elements
    this.text = "";
    this.decoder = new TextDecoder();
    this.element.addEventListener("focus", () => this.enter());
    this.element.addEventListener("keydown", (event) => this.move(event));
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("focusin", (event) => this.show(event.target));
    this.element.addEventListener("pointerover", (event) => this.show(event.target));
    this.element.addEventListener("pointerleave", hideTip);
  }

  /** Append tokens as the API gives them: choices[].logprobs.content. */
  add(content) {
    for (const entry of content) {
      // A token may be a part of a character, which comes with its last one.
      const text = entry.bytes
        ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true })
        : entry.token;
      this.text += text;
      const element = make("span", {
        role: "option",
        tabindex: "-1",
        "aria-selected": "false",
        "aria-label": `${seen(entry.token)}, ${percent(entry.logprob)}`,
        text: text || "·",
      });
      element.style.setProperty("--doubt", 1 - Math.exp(entry.logprob));
      this.entries.set(element, entry);
      this.element.append(element);
    }
  }

  /** Mark what is not a part of the text, such as the token that ends a turn. */
  finish(text) {
    const last = this.element.lastElementChild;
    if (last && this.text.length > text.length) last.classList.add("special");
  }

  enter() {
    (this.current ?? this.element.firstElementChild)?.focus();
  }

  move(event) {
    const here = document.activeElement;
    if (!this.entries.has(here)) return;
    const to = {
      ArrowRight: here.nextElementSibling,
      ArrowDown: here.nextElementSibling,
      ArrowLeft: here.previousElementSibling,
      ArrowUp: here.previousElementSibling,
      Home: this.element.firstElementChild,
      End: this.element.lastElementChild,
    }[event.key];
    if (event.key === "Escape") hideTip();
    else if (to) to.focus();
    else return;
    event.preventDefault();
  }

  show(element) {
    const entry = this.entries.get(element);
    if (!entry) return;
    if (document.activeElement === element) {
      // One tab stop: the token that had the focus last.
      this.current?.setAttribute("tabindex", "-1");
      this.current?.setAttribute("aria-selected", "false");
      this.current = element;
      this.element.setAttribute("tabindex", "-1");
      element.setAttribute("tabindex", "0");
      element.setAttribute("aria-selected", "true");
    }
    showTip(element, entry);
  }
}

function showTip(element, entry) {
  const tip = find("tip");
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  element.setAttribute("aria-describedby", "tip");
  const others = entry.top_logprobs;
  const among = others.findIndex((other) => other.token === entry.token);
  const alternatives = among < 0 ? [entry, ...others] : others.with(among, entry);
  tip.replaceChildren(
    ...alternatives.map((other) => {
      const bar = make("span", { class: "bar" });
      bar.style.inlineSize = `${100 * Math.exp(other.logprob)}%`;
      const chosen = other === entry;
      return make(
        "div",
        chosen ? { class: "chosen" } : {},
        make("code", { text: seen(other.token) }),
        make("span", { class: "share", text: percent(other.logprob) }),
        make("span", { class: "track" }, bar),
      );
    }),
  );
  tip.hidden = false;
  const at = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - width - 8);
  const below = at.bottom + 6;
  const fits = below + height < innerHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${fits ? below : at.top - height - 6}px`;
}

function hideTip() {
  find("tip").hidden = true;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
}

addEventListener("scroll", hideTip, { capture: true, passive: true });
