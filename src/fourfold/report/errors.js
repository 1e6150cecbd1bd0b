// Stands before everything else: whatever goes wrong later, the reader is told. `data-errors` on <html> holds it all.
"use strict";
(() => {
  const errors = [];
  const tell = (text) => {
    errors.push(text);
    document.documentElement.dataset.errors = errors.join("\n");
    const main = document.querySelector("main");
    if (main && errors.length === 1) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `A figure could not be drawn: ${text}`;
      main.prepend(note);
    }
  };
  window.addEventListener("error", (event) => tell(event.message || "a part of the page failed to load"), true);
  window.addEventListener("unhandledrejection", (event) => tell(String(event.reason)));
  document.addEventListener("securitypolicyviolation", (event) => tell(`refused to load ${event.blockedURI}`));
})();
