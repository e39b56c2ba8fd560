// Small helpers around the document.

export const find = (id) => document.getElementById(id);

/** An element with attributes and children; `class` and `text` are what they say. */
export function make(name, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(attribute.slice(2), value);
    else element.setAttribute(attribute, value);
  }
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** Say something to those who listen to the page. */
export function announce(text) {
  find("announcer").textContent = text;
}

/** A button that copies; there is none where the browser does not let a page copy. */
export function copyButton(text) {
  const button = make("button", { type: "button", class: "small", text: "Copy" });
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    announce("Copied");
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
