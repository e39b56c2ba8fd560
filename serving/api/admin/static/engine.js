// The live view of the engine: GET /engine twice a second while the panel is open and the tab is
// seen, else now and then for the status alone.

import { get } from "./api.js";
import { find, make } from "./dom.js";

const OPEN = 500; // milliseconds between questions
const CLOSED = 5000;
const WINDOW = 60; // seconds that are shown
const DELAY = 0.6; // seconds that the picture lags behind, so that what it shows is known
const HEIGHTS = { queued: 2, prefill: 8, decode: 12 };
const LANE = 16; // pixels, at most
const MAX_ROWS = 30; // of the table
const SVG = "http://www.w3.org/2000/svg";

const draw = (name) => document.createElementNS(SVG, name);
const seconds = (value) => (value === 0 ? "–" : `${value.toFixed(2)} s`);

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** How long a request has been in each phase. */
function durations({ phases, ended }, now) {
  const sums = { queued: 0, prefill: 0, decode: 0 };
  phases.forEach(([phase, begin], i) => {
    sums[phase] += Math.max(0, (phases[i + 1]?.[1] ?? ended ?? now) - begin);
  });
  return sums;
}

export class LiveView {
  /** `onStatus` is told how the server stands. */
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.requests = new Map(); // id -> what the server said last, with its lane and its bars
    this.rates = [];
    this.svg = find("timeline");
    this.moving = draw("g");
    this.svg.append(this.moving);
    document.addEventListener("visibilitychange", () => this.wake());
    new ResizeObserver(() => this.last && this.place()).observe(this.svg);
    find("as-table").addEventListener("click", () => {
      const table = find("request-table");
      table.hidden = !table.hidden;
      find("as-table").setAttribute("aria-expanded", String(!table.hidden));
      this.fillTable();
    });
  }

  begin() {
    this.begun = true;
    this.wake();
  }

  show(is) {
    this.open = is;
    this.wake();
  }

  /** Ask at once, and from then on regularly. */
  async wake() {
    clearTimeout(this.timer);
    if (!this.begun || this.asking || document.hidden) return;
    this.asking = true;
    try {
      this.take(await get(`engine?since=${this.last?.now ?? 0}`));
      this.onStatus(this.last.status);
    } catch (error) {
      this.onStatus(error.status === 401 ? "wants a key" : "no answer");
      if (error.status === 401) return; // until there is another
    } finally {
      this.asking = false;
    }
    this.timer = setTimeout(() => this.wake(), this.open ? OPEN : CLOSED);
  }

  take(view) {
    if (this.last && view.now < this.last.now) this.forget(); // another start of the machine
    this.rate(view);
    this.last = view;
    this.heard = performance.now();
    for (const request of view.requests) {
      this.requests.set(request.id, { ...this.requests.get(request.id), ...request });
    }
    for (const [id, request] of this.requests) {
      if (request.ended !== null && request.ended < view.now - WINDOW - 1) this.remove(id);
    }
    if (!this.open) return;
    this.figures(view);
    this.place();
    this.fillTable();
  }

  forget() {
    for (const id of [...this.requests.keys()]) this.remove(id);
    this.last = undefined;
    this.rates = [];
  }

  remove(id) {
    this.requests.get(id).group?.remove();
    this.requests.delete(id);
  }

  rate({ now, stats }) {
    const before = this.last;
    const tokens = before ? stats.generation_tokens - before.stats.generation_tokens : 0;
    this.rates.push(before && tokens > 0 ? tokens / (now - before.now) : 0);
    this.rates.splice(0, this.rates.length - (WINDOW * 1000) / OPEN);
  }

  figures({ stats, places }) {
    find("running").textContent = stats.running;
    find("places").textContent = `of ${places}`;
    find("waiting").textContent = stats.waiting;
    find("blocks").textContent = stats.kv_blocks_used;
    find("blocks-total").textContent = `of ${stats.kv_blocks_total}`;
    const meter = find("blocks-meter");
    meter.setAttribute("aria-valuemax", stats.kv_blocks_total);
    meter.setAttribute("aria-valuenow", stats.kv_blocks_used);
    const share = stats.kv_blocks_used / Math.max(1, stats.kv_blocks_total);
    meter.firstElementChild.style.inlineSize = `${100 * share}%`;
    const rates = this.rates.map((_, i) => mean(this.rates.slice(Math.max(0, i - 3), i + 1)));
    find("rate").textContent = Math.round(rates.at(-1));
    const top = Math.max(1, ...rates);
    const step = 60 / ((WINDOW * 1000) / OPEN);
    const points = rates.map((rate, i) => {
      const x = 60 - (rates.length - 1 - i) * step;
      return `${x.toFixed(1)} ${(19 - (18 * rate) / top).toFixed(1)}`;
    });
    find("rate-line").firstElementChild.setAttribute("d", `M${points.join("L")}`);
  }

  // The picture. A request keeps its lane, in which another one may follow it.

  place() {
    const { now } = this.last;
    this.origin ??= now;
    const { width, height } = this.svg.getBoundingClientRect();
    this.scale = width / WINDOW;
    const lanes = [];
    for (const request of this.requests.values()) {
      const begin = request.phases[0][1];
      if (request.lane === undefined) {
        let lane = 0;
        while (lanes[lane] > begin - 0.3) lane += 1;
        request.lane = lane;
      }
      lanes[request.lane] = Math.max(lanes[request.lane] ?? 0, request.ended ?? Infinity);
    }
    const lane = Math.min(LANE, height / Math.max(1, lanes.length));
    for (const request of this.requests.values()) this.bars(request, lane);
    const live = [...this.requests.values()].filter((request) => request.ended === null);
    this.svg.setAttribute(
      "aria-label",
      `Requests of the last minute: ${live.length} under way, ` +
        `${this.requests.size - live.length} ended`,
    );
    this.move();
  }

  bars(request, lane) {
    if (!request.group) {
      request.group = draw("g");
      request.group.dataset.request = request.id;
      request.group.append(draw("title"));
      this.moving.append(request.group);
    }
    const { group, phases, ended } = request;
    group.classList.toggle("live", ended === null);
    while (group.children.length <= phases.length) group.append(draw("rect"));
    phases.forEach(([phase, begin], i) => {
      const end = phases[i + 1]?.[1] ?? ended ?? this.last.now + 2; // beyond the edge
      const rect = group.children[i + 1];
      const tall = Math.max(1.5, (HEIGHTS[phase] * lane) / LANE);
      const shape = {
        class: phase,
        x: (begin - this.origin) * this.scale,
        y: request.lane * lane + (lane - tall) / 2,
        width: Math.max(1.5, (end - begin) * this.scale),
        height: tall,
        rx: phase === "queued" ? 0 : Math.min(3, tall / 3),
      };
      for (const [name, value] of Object.entries(shape)) rect.setAttribute(name, value);
    });
    const spent = durations(request, this.last.now);
    group.firstElementChild.textContent =
      `Request ${request.id}: ${request.prompt_tokens} tokens in, ${request.output_tokens} out; ` +
      Object.entries(spent).map(([phase, value]) => `${phase} ${value.toFixed(2)} s`).join(", ");
  }

  /** Let time go on between answers, unless the reader wants no motion. */
  move() {
    cancelAnimationFrame(this.frame);
    const { width } = this.svg.getBoundingClientRect();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const since = still ? 0 : Math.min(1, (performance.now() - this.heard) / 1000);
    const edge = this.last.now + since - DELAY;
    const x = width - (edge - this.origin) * this.scale;
    this.moving.setAttribute("transform", `translate(${x} 0)`);
    const any = this.requests.size > 0;
    if (this.open && any && !still) this.frame = requestAnimationFrame(() => this.move());
  }

  fillTable() {
    if (find("request-table").hidden || !this.last) return;
    const latest = [...this.requests.values()].slice(-MAX_ROWS).reverse();
    find("request-table").querySelector("tbody").replaceChildren(
      ...latest.map((request) => {
        const spent = durations(request, this.last.now);
        const state = request.ended === null ? request.phases.at(-1)[0] : "ended";
        const cells = [state, request.prompt_tokens, request.output_tokens];
        cells.push(...Object.values(spent).map(seconds));
        return make(
          "tr",
          {},
          make("th", { scope: "row", text: request.id }),
          ...cells.map((text) => make("td", { text })),
        );
      }),
    );
  }
}
