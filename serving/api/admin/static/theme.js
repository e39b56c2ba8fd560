// Before the page is drawn: the theme that was chosen here before, else the system's.
"use strict";
try {
  const chosen = localStorage.getItem("weft-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's.
}
