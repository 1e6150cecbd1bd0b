// The page of a run: draws its figures, zooms them together, and colours the ranks that a rank communicates with.
"use strict";
(() => {
  const { data: figures, node } = fourfold;
  const names = Object.keys(figures);
  const byStep = names.filter((name) => figures[name].traces[0].type === "scatter");
  const logScale = new Set();

  const draw = (name) => {
    const { layout } = figures[name];
    const yaxis = logScale.has(name) ? { ...layout.yaxis, type: "log" } : layout.yaxis;
    return fourfold.draw(name, { ...figures[name], layout: { ...layout, yaxis } }, byStep.includes(name));
  };

  // Zooming one figure zooms the others; `following` stops their own events from starting it all over.
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

  // The ranks that differ from the one under the pointer on a single axis get the colour of that axis.
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
