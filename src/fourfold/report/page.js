// Draws the figures, follows the colour scheme, zooms figures together, colours the neighbours of a rank.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const names = Object.keys(figures);
  const node = (name) => document.getElementById(name);
  const byStep = names.filter((name) => figures[name].traces[0].type === "scatter");
  const logScale = new Set();

  // "var(--axis-x)" -> the colour that the style sheet gives it now
  const resolve = (value, styles) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => styles.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) {
      return value.map((item) => resolve(item, styles));
    }
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, styles)]));
    }
    return value;
  };

  const draw = (name) => {
    const figure = resolve(figures[name], getComputedStyle(document.documentElement));
    if (logScale.has(name)) {
      figure.layout.yaxis.type = "log";
    }
    // exactly these buttons: some of plotly's own would send the data elsewhere. On a phone they would cover the legend
    const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];
    const bar = byStep.includes(name) && innerWidth > 860 ? "hover" : false;
    const config = { responsive: true, displaylogo: false, displayModeBar: bar, modeBarButtons: buttons };
    return Plotly.react(node(name), figure.traces, figure.layout, config);
  };

  let following = false;
  const follow = (source, change) => {
    if (following) {
      return;
    }
    let wanted = null;
    if ("xaxis.range[0]" in change) {
      wanted = { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] };
    } else if (change["xaxis.range"]) {
      wanted = { "xaxis.range": change["xaxis.range"] };
    } else if (change["xaxis.autorange"]) {
      wanted = { "xaxis.autorange": true };
    }
    if (wanted) {
      following = true;
      const others = byStep.filter((name) => name !== source);
      Promise.all(others.map((name) => Plotly.relayout(node(name), wanted))).finally(() => { following = false; });
    }
  };

  const watchRanks = (grid) => {
    const axes = grid.dataset.axes.split(" ");
    const ranks = [...grid.querySelectorAll(".rank")];
    const coords = ranks.map((rank) => rank.dataset.coords.split(" "));
    const clear = () => ranks.forEach((rank) => {
      rank.classList.remove("here", "near");
      rank.style.removeProperty("--axis");
    });
    const show = (here) => {
      clear();
      ranks[here].classList.add("here");
      ranks.forEach((rank, there) => {
        const differ = axes.filter((_, place) => coords[here][place] !== coords[there][place]);
        if (differ.length === 1) {
          rank.classList.add("near");
          rank.style.setProperty("--axis", `var(--axis-${differ[0]})`);
        }
      });
    };
    ranks.forEach((rank, here) => {
      rank.addEventListener("mouseenter", () => show(here));
      rank.addEventListener("focus", () => show(here));
      rank.addEventListener("blur", clear);
    });
    grid.addEventListener("mouseleave", clear);
  };

  document.querySelectorAll(".ranks").forEach(watchRanks);
  document.querySelectorAll("[data-log]").forEach((button) => button.addEventListener("click", () => {
    const name = button.dataset.log;
    const on = !logScale.has(name);
    on ? logScale.add(name) : logScale.delete(name);
    button.setAttribute("aria-pressed", String(on));
    Plotly.relayout(node(name), { "yaxis.type": on ? "log" : "linear", "yaxis.autorange": true });
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => names.forEach(draw));

  Promise.all(names.map(draw)).then(() => {
    byStep.forEach((name) => node(name).on("plotly_relayout", (change) => follow(name, change)));
    document.documentElement.dataset.drawn = String(names.length);
  });
})();
