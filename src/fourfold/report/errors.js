// Runs before everything else: shows the first error of the page to the reader. `data-errors` on <html> has all of them.
"use strict";
(() => {
  const errors = [];
  const report = (text) => {
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
  window.addEventListener("error", (event) => report(event.message || "a part of the page failed to load"), true);
  window.addEventListener("unhandledrejection", (event) => report(String(event.reason)));
  document.addEventListener("securitypolicyviolation", (event) => report(`refused to load ${event.blockedURI}`));
})();
