// Markdown as DOM nodes. marked only reads it. No HTML is ever parsed here, so none can run.

import { copyButton, make } from "./dom.js";
import { lexer } from "./marked.js";

const LONGEST = 300_000; // characters; longer texts stay as they are
const DEEPEST = 40; // levels of nested blocks
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([\da-f]{1,6}));/gi;

/** Text with characters for its entities. */
const decoded = (text) =>
  text.replace(ENTITY, (whole, name, decimal, hex) => {
    if (name) return NAMED[name.toLowerCase()];
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });

const children = (tokens) => tokens.map(node).filter(Boolean);
const around = (name) => ({ tokens }) => make(name, {}, ...children(tokens));
const literal = ({ raw }) => document.createTextNode(raw);

/** A link to another page on the web; any other link stays text. */
function link(token, ...content) {
  let url;
  try {
    url = new URL(decoded(token.href));
  } catch {
    return literal(token);
  }
  if (!["http:", "https:"].includes(url.protocol)) return literal(token);
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer" };
  return make("a", attributes, ...content);
}

/** A code block with its language and a copy button. */
function code(token) {
  const shown = make("code");
  const bar = make("div", { class: "bar" }, make("span"), copyButton(() => shown.textContent));
  const block = make("div", { class: "block" }, bar, make("pre", { tabindex: "0" }, shown));
  fill(block, token);
  return block;
}

/** Update a block with grown code. */
function fill(block, { text, lang }) {
  const shown = block.querySelector("code");
  const before = shown.textContent;
  if (text.startsWith(before)) shown.append(text.slice(before.length));
  else shown.textContent = text;
  block.querySelector(".bar span").textContent = lang ?? "";
}

function table({ header, rows }) {
  const row = (name, cells) =>
    make(
      "tr",
      {},
      ...cells.map(({ tokens, align }) => {
        const cell = make(name, name === "th" ? { scope: "col" } : {}, ...children(tokens));
        if (align) cell.style.textAlign = align;
        return cell;
      }),
    );
  const head = make("thead", {}, row("th", header));
  const body = make("tbody", {}, ...rows.map((cells) => row("td", cells)));
  const region = { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" };
  return make("div", region, make("table", {}, head, body));
}

function list({ ordered, start, items }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  const entry = ({ loose, tokens }) => {
    const parts = tokens.map((part) =>
      loose && part.type === "text" ? { ...part, type: "paragraph" } : part,
    );
    return make("li", {}, ...children(parts));
  };
  return make(ordered ? "ol" : "ul", attributes, ...items.map(entry));
}

const NODES = {
  blockquote: around("blockquote"),
  br: () => make("br"),
  checkbox: ({ checked }) => document.createTextNode(checked ? "☑ " : "☐ "),
  code,
  codespan: ({ text }) => make("code", { text }),
  def: () => null,
  del: around("del"),
  em: around("em"),
  escape: ({ text }) => document.createTextNode(text),
  // Models break lines in tables with this tag. Every other tag is shown as text.
  html(token) {
    if (/^<br\s*\/?>$/i.test(token.raw.trim())) return make("br");
    return token.block ? make("p", { class: "literal", text: token.raw.trimEnd() }) : literal(token);
  },
  heading: ({ depth, tokens }) => make(`h${Math.min(6, depth + 1)}`, {}, ...children(tokens)),
  hr: () => make("hr"),
  image: (token) => link(token, decoded(token.text) || token.href),
  link: (token) => link(token, ...children(token.tokens)),
  list,
  paragraph: around("p"),
  plain: ({ raw }) => make("p", { class: "literal", text: raw }),
  space: () => null,
  strong: around("strong"),
  table,
  text: ({ text, tokens }) =>
    tokens ? make("span", {}, ...children(tokens)) : document.createTextNode(decoded(text)),
};

let depth = 0;

function node(token) {
  if (depth === DEEPEST) return literal(token);
  depth += 1;
  try {
    return (NODES[token.type] ?? literal)(token);
  } finally {
    depth -= 1;
  }
}

/** Markdown blocks; null if the text is too long or nested too deeply. */
function read(text) {
  if (text.length > LONGEST) return null;
  try {
    return lexer(text, { gfm: true, breaks: true });
  } catch (error) {
    if (error instanceof RangeError) return null; // the stack is full
    throw error;
  }
}

/** A growing text, shown as Markdown. Only its last block is redrawn, so nothing flickers. */
export class Markdown {
  constructor() {
    this.element = make("div", { class: "text markdown" });
    this.source = "";
    this.settled = []; // the complete blocks' sources
    this.start = 0; // where the other blocks begin in `source`
    this.open = []; // the other blocks' nodes
  }

  add(text) {
    this.source += text;
    this.draw();
  }

  /** Redraw the whole text if it differs: a later line can change the blocks before it. */
  finish() {
    const tokens = this.plain ? null : read(this.source);
    const links = tokens?.some(({ type }) => type === "def");
    if (!tokens || (!links && this.settled.every((raw, i) => raw === tokens[i].raw))) return;
    this.element.replaceChildren(...children(tokens));
  }

  draw() {
    const tail = this.source.slice(this.start);
    const tokens = this.plain ? null : read(tail);
    if (!tokens) {
      this.plain = true;
      this.show([{ type: "plain", raw: tail }]);
      return;
    }
    this.show(tokens);
    // The last block may still grow. The blocks before it settle if their text is unchanged.
    const last = tokens.findLastIndex(({ type }) => type !== "space");
    for (const { raw } of tokens.slice(0, Math.max(0, last))) {
      if (!this.source.startsWith(raw, this.start)) return;
      this.settled.push(raw);
      this.start += raw.length;
      this.open.shift();
    }
  }

  /** Replace the open blocks; growing code keeps its node. */
  show(tokens) {
    const grows = this.open[0]?.className === "block" && tokens[0]?.type === "code";
    if (grows) fill(this.open[0], tokens[0]);
    const kept = grows ? 1 : 0;
    for (const old of this.open.slice(kept)) old?.remove();
    const fresh = tokens.slice(kept).map(node);
    this.open = [...this.open.slice(0, kept), ...fresh];
    this.element.append(...fresh.filter(Boolean));
  }
}
