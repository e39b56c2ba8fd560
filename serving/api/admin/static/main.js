// Puts the page together: panels, theme, keys, and what the server is.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { announce, find } from "./dom.js";
import { LiveView } from "./engine.js";
import * as settings from "./settings.js";

const AGAIN = 5000; // milliseconds until the next greeting, if there was no answer

const live = new LiveView(showStatus);

function showStatus(text) {
  const status = find("status");
  if (status.textContent === text) return;
  status.textContent = text;
  status.dataset.is = text;
}

async function greet() {
  try {
    const { data } = await api.get("v1/models");
    find("model").textContent = data[0].id;
    document.title = `${data[0].id} · weft`;
    chat.setModel(data[0].id);
    live.begin(); // only then may it say that the server is ready
  } catch (error) {
    if (error.status === 401) return wantKey();
    showStatus("no answer");
    setTimeout(greet, AGAIN);
  }
}

function wantKey() {
  showStatus("wants a key");
  open("settings", true);
  find("key").focus();
}

function open(name, is) {
  find(name).hidden = !is;
  document.body.dataset[name] = is ? "open" : "closed";
  document.querySelector(`[data-panel=${name}]`).setAttribute("aria-expanded", String(is));
  if (name === "engine") live.show(is);
}

function showTheme() {
  const { theme } = document.documentElement.dataset;
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  find("theme").setAttribute("aria-pressed", String(dark));
  return dark;
}

function start() {
  settings.start(greet);
  chat.followSize();
  chat.restore();
  for (const button of document.querySelectorAll("[data-panel]")) {
    const { panel } = button.dataset;
    button.addEventListener("click", () => open(panel, find(panel).hidden));
  }
  open("settings", innerWidth >= 900);
  open("engine", innerWidth >= 900 && innerHeight >= 640);

  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send(() => open("settings", true));
  });
  find("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("composer").requestSubmit();
  });
  find("settings-form").addEventListener("submit", (event) => event.preventDefault());
  find("stop").addEventListener("click", chat.stop);
  find("new-chat").addEventListener("click", chat.clear);
  find("show-request").addEventListener("click", chat.showNext);
  find("examples").addEventListener("click", (event) => {
    if (!(event.target instanceof HTMLButtonElement)) return;
    find("message").value = event.target.textContent;
    find("composer").requestSubmit();
  });

  const copy = find("copy-request");
  copy.hidden = !navigator.clipboard;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(find("request").querySelector("code").textContent);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  find("close-request").addEventListener("click", () => find("request").close());

  find("theme").addEventListener("click", () => {
    const theme = showTheme() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("weft-theme", theme);
    showTheme();
    announce(`${theme} theme`);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();
  document.addEventListener("key-wanted", wantKey);
  greet();
}

start();
