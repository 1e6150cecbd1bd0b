// The page of a plan: draws its figures, and the panels that show the grid that the reader selects. Formats no number.
"use strict";
(() => {
  const { data: plan, node } = fourfold;
  const { figures, grids } = plan;
  const names = Object.keys(figures);
  const AXES = Object.keys(plan.cuts);
  let selected = 0;

  // Makes an element with attributes and children. Text is inserted as text, never as tags.
  const build = (space) => (tag, attributes = {}, ...children) => {
    const made = document.createElementNS(space, tag);
    for (const [key, value] of Object.entries(attributes)) {
      key.startsWith("on") ? made.addEventListener(key.slice(2), value) : made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  };
  const html = build("http://www.w3.org/1999/xhtml");
  const svg = build("http://www.w3.org/2000/svg");

  const draw = (name) => fourfold.draw(name, figures[name], name !== "parts");

  const mark = () => {
    const [seconds, memory] = grids[selected].at;
    Object.assign(figures.tradeoff.traces.at(-1), { x: [seconds], y: [memory] });
    const band = { type: "rect", xref: "paper", x0: 0, x1: 1, y0: selected - 0.5, y1: selected + 0.5 };
    const look = { layer: "below", fillcolor: "var(--line)", line: { width: 0 } };
    figures.parts.layout.shapes = selected < figures.parts.traces[0].y.length ? [{ ...band, ...look }] : [];
  };

  const showBar = (grid) => {
    const step = (to, text, label) => {
      const off = to < 0 || to >= grids.length || to === selected ? { disabled: "" } : {};
      return html("button", { type: "button", "aria-label": label, onclick: () => select(to), ...off }, text);
    };
    node("selected").replaceChildren(
      html("span", {}, "Selected: ", html("b", {}, `${grid.rank}. ${grid.name}`), ` ${grid.step}, ${grid.against}`),
      html("span", { class: "steps" }, step(selected - 1, "\u2039", "the next faster grid"), step(selected + 1, "\u203a", "the next slower grid"),
        step(0, "best", "the best grid")),
    );
  };

  const showChosen = (grid) => {
    const cards = grid.cards.map(([label, value, detail]) =>
      html("div", {}, html("dt", {}, label), html("dd", {}, value), html("dd", { class: "detail" }, detail)));
    const policy = grid.policy.map(([name, value]) => html("li", {}, `${name} `, html("b", {}, value)));
    const words = `${plan.command} ${grid.changes}`.split(" ").flatMap((word) => [html("span", {}, word), " "]);
    const lost = [html("p", {}, html("b", {}, "Why it is not the best: "), grid.reason || grid.against),
      html("p", { class: "hint" }, "To run it with the config above:"), html("pre", { class: "words" }, ...words)];
    node("chosen").replaceChildren(
      html("p", { class: "winner small" }, ...coloured(grid)), html("dl", { class: "cards" }, ...cards),
      html("ul", { class: "policy" }, ...policy), ...(selected ? lost : []),
    );
  };

  const coloured = (grid) => {
    const long = AXES.filter((axis) => grid.sizes[axis] > 1);
    const part = (axis) => html("span", { style: `--axis:var(--axis-${axis})` }, `${axis}=${grid.sizes[axis]}`);
    return long.length ? long.flatMap((axis) => [part(axis), " "]) : ["one device"];
  };

  const showMemory = (grid) => {
    const whole = Math.max(1, grid.peak);
    const kinds = grid.memory.map(([name, share, text], kind) => ({ name, share, text, kind })).filter(({ share }) => share > 0);
    const shade = ({ kind }) => `--kind:var(--kind-${kind % 8})`;
    const parts = kinds.map((part) =>
      html("i", { style: `${shade(part)};width:${100 * part.share / whole}%`, title: `${part.name}: ${part.text}` }));
    const limit = html("b", { style: `left:${100 / whole}%`, title: "usable memory of a device" });
    node("memory").replaceChildren(
      html("p", { class: "hint" }, `${grid.name}: ${grid.uses.join(", ")} of usable memory.`),
      html("div", { class: "stack" }, ...parts, limit),
      html("ul", { class: "kinds" }, ...kinds.map((part) =>
        html("li", { style: shade(part) }, html("i"), part.name, " ", html("b", {}, part.text)))),
    );
  };

  // The schedule of a grid with a pipe axis: one row per pipe rank, a box per action, bubbles left empty.
  const showPipeline = (grid) => {
    const host = node("pipeline");
    if (!host) return;
    if (!grid.pipeline) {
      host.replaceChildren(html("p", { class: "hint" }, `${grid.name} has no pipe axis.`));
      return;
    }
    const { text, rows, end } = grid.pipeline;
    const [left, wide, high, gap] = [150, 1000, 26, 6];
    const boxes = rows.flatMap(({ name, detail, spans }, row) => {
      const y = row * (high + gap);
      const label = [svg("text", { x: 0, y: y + 11, class: "rank" }, name), svg("text", { x: 0, y: y + 24 }, detail)];
      const drawn = spans.map(([kind, label, start, share, about]) => {
        const [x, width] = [left + start * wide, share * wide];
        const parts = [svg("rect", { x, y, width, height: high }), svg("title", {}, about)];
        if (width > 7 * label.length) parts.push(svg("text", { x: x + width / 2, y: y + 17 }, label));
        return svg("g", { class: `action ${kind}` }, ...parts);
      });
      return [...label, svg("rect", { class: "row", x: left, y, width: wide, height: high }), ...drawn];
    });
    const down = rows.length * (high + gap);
    host.replaceChildren(
      html("p", { class: "hint" }, text),
      html("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${left + wide} ${down + 16}`, role: "img" }, ...boxes,
        svg("text", { x: left, y: down + 12 }, "0"), svg("text", { x: left + wide, y: down + 12, "text-anchor": "end" }, end))),
      html("p", { class: "hint" }, "F: forward. B: gradient of the input. W: gradients of the weights. BW: both. What is empty is a bubble."),
    );
  };

  // The grid on its nodes: draws the ring of the axis `lit` that goes through the rank `base`.
  let lit = null;
  let base = 0;
  const coords = (grid, rank) => {
    const found = {};
    for (const axis of grid.order) {
      found[axis] = rank % grid.sizes[axis];
      rank = Math.floor(rank / grid.sizes[axis]);
    }
    return found;
  };

  const showNodes = (grid) => {
    const host = node("nodes");
    const axes = grid.order.filter((axis) => grid.sizes[axis] > 1);
    lit = axes.includes(lit) ? lit : axes[0] ?? null;
    const light = (axis) => () => {
      if (lit !== axis) {
        lit = axis;
        paint();
      }
    };
    const buttons = axes.map((axis) => html("button", {
      type: "button", "data-axis": axis, style: `--axis:var(--axis-${axis})`,
      onclick: light(axis), onmouseenter: light(axis), onfocus: light(axis),
    }, html("b", {}, `${axis}=${grid.sizes[axis]}`), ` ${grid.links[axis].short}`));
    const [caption, picture] = [html("p", { class: "ring-text", "aria-live": "polite" }), html("div")];
    const paint = () => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === lit)));
      const group = lit ? ring(grid, lit) : [];
      const drawn = drawNodes(grid, axes, group, host.clientWidth, (rank) => { base = rank; paint(); });
      picture.replaceChildren(drawn.picture);
      const unseen = group.filter((rank) => rank >= drawn.ranks).length;
      caption.textContent = lit === null ? "With one device nothing is communicated." :
        (plan.cuts[lit] ? `${lit} cuts ${plan.cuts[lit]}. ` : "") +
        `${grid.links[lit].text}. The ring through rank ${base} is drawn` +
        (unseen ? `; ${unseen} of its ${group.length} ranks are on nodes that are not drawn.` : ".");
    };
    host.replaceChildren(
      html("p", { class: "hint" }, "Point at an axis to see one of its rings. Select a device to see the ring through it."),
      html("div", { class: "axes-row" }, ...buttons), caption, picture,
      html("p", { class: "hint" }, `Each device shows its rank and, below it, its coordinates on ${axes.join(", ") || "no axis"}.`),
    );
    paint();
  };

  const ring = (grid, axis) => {
    const stride = grid.links[axis].stride;
    const first = base - coords(grid, base)[axis] * stride;
    return Array.from({ length: grid.sizes[axis] }, (_, place) => first + place * stride);
  };

  const drawNodes = (grid, axes, group, width, pick) => {
    const [wide, high, gap, pad, top] = [66, 36, 6, 8, 20];
    const columns = plan.perNode <= 2 ? plan.perNode : plan.perNode <= 4 ? 2 : 4;
    const across = columns * (wide + gap) - gap + 2 * pad;
    const down = Math.ceil(Math.min(plan.perNode, plan.devices) / columns) * (high + gap) - gap + 2 * pad + top;
    const all = Math.ceil(plan.devices / plan.perNode);
    const inRow = Math.max(1, Math.floor((width + 16) / (across + 16)));
    // Whole rows with about 64 devices, fewer on a phone. The last place says how many nodes are not drawn.
    const places = Math.max(1, Math.ceil((width > 600 ? 64 : 32) / plan.perNode / inRow)) * inRow;
    const shown = all <= places ? all : Math.max(1, places - 1);
    const corner = (place) => [(place % inRow) * (across + 16), Math.floor(place / inRow) * (down + 14)];
    const ranks = Math.min(plan.devices, shown * plan.perNode);
    const centre = (rank) => {
      const [left, upper] = corner(Math.floor(rank / plan.perNode));
      const inside = rank % plan.perNode;
      return [left + pad + (inside % columns) * (wide + gap) + wide / 2,
        upper + top + pad + Math.floor(inside / columns) * (high + gap) + high / 2];
    };
    const boxes = Array.from({ length: shown }, (_, place) => {
      const [x, y] = corner(place);
      return svg("g", {}, svg("rect", { class: "node", x, y, width: across, height: down, rx: 8 }),
        svg("text", { class: "name", x: x + pad, y: y + 16 }, `node ${place}`));
    });
    const seen = group.filter((rank) => rank < ranks);
    const closed = seen.length === group.length && seen.length > 2;
    const path = seen.map((rank, place) => `${place ? "L" : "M"}${centre(rank)}`).join("") + (closed ? "Z" : "");
    const line = seen.length > 1 ? [svg("path", { class: "ring", d: path, style: `--axis:var(--axis-${lit})` })] : [];
    const devices = Array.from({ length: ranks }, (_, rank) => {
      const [x, y] = centre(rank);
      const at = coords(grid, rank);
      const marks = axes.flatMap((axis, place) => [...(place ? [svg("tspan", { class: "dot" }, "\u00b7")] : []),
        svg("tspan", { style: `fill:var(--axis-${axis})` }, String(at[axis]))]);
      const kind = `device${seen.includes(rank) ? " near" : ""}${rank === base ? " here" : ""}`;
      const title = `rank ${rank}: ${AXES.map((axis) => `${axis}=${at[axis]}`).join(", ")}`;
      return svg("g", { class: kind, style: lit ? `--axis:var(--axis-${lit})` : "", onclick: () => pick(rank) },
        svg("title", {}, title),
        svg("rect", { x: x - wide / 2, y: y - high / 2, width: wide, height: high, rx: 5 }),
        svg("text", { x, y: y - 3 }, String(rank)), svg("text", { class: "at", x, y: y + 11 }, ...marks));
    });
    const [x, y] = corner(shown);
    const left = all - shown;
    const more = left ? [svg("text", { class: "more", x: x + across / 2, y: y + down / 2 },
      `\u2026 ${left} more node${left > 1 ? "s" : ""}`)] : [];
    const rows = Math.ceil((shown + (left ? 1 : 0)) / inRow);
    const size = { width: Math.min(inRow, shown + (left ? 1 : 0)) * (across + 16) - 16, height: rows * (down + 14) };
    return { ranks, picture: svg("svg", { ...size, role: "img", "aria-label": `${shown} of ${all} nodes` },
      ...boxes, ...line, ...devices, ...more) };
  };

  // A table in pages, with a filter: every word must occur in a row, and x=2 does not match x=24.
  const paged = (host, heads, rows, { size = 25, pick = null } = {}) => {
    let [page, found] = [0, rows.map((_, place) => place)];
    const [head, body, status] = [html("tr", {}, ...heads.map((name) => html("th", {}, name))), html("tbody"), html("span")];
    const show = () => {
      const last = Math.max(0, Math.ceil(found.length / size) - 1);
      page = Math.min(Math.max(page, 0), last);
      body.replaceChildren(...found.slice(page * size, (page + 1) * size).map((place) => {
        const act = pick ? { tabindex: "0", onclick: () => pick(place), onkeydown: (event) => event.key === "Enter" && pick(place) } : {};
        const here = pick && place === selected ? { class: "picked" } : {};
        return html("tr", { ...act, ...here }, ...rows[place].map((cell) => html("td", {}, cell)));
      }));
      status.textContent = found.length ? `${page * size + 1} to ${Math.min(found.length, (page + 1) * size)} of ${found.length}` : "none";
      [back.disabled, next.disabled] = [page === 0, page === last];
    };
    const turn = (by, text, label) => html("button", { type: "button", "aria-label": label, onclick: () => { page += by; show(); } }, text);
    const [back, next] = [turn(-1, "\u2039", "previous page"), turn(1, "\u203a", "next page")];
    const filter = html("input", { type: "search", placeholder: "filter, such as x=2 block", "aria-label": "filter", oninput: () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const text = (place) => ` ${rows[place].join(" ").toLowerCase()} `;
      const holds = (place) => words.every((word) => text(place).includes(word.includes("=") ? ` ${word} ` : word));
      [page, found] = [0, rows.map((_, place) => place).filter(holds)];
      show();
    } });
    host.replaceChildren(html("div", { class: "pages" }, filter, html("span", { class: "steps" }, status, " ", back, next)),
      html("div", { class: "scroll tall" }, html("table", {}, html("thead", {}, head), body)));
    show();
    return show;
  };

  const refresh = paged(node("ranking"), plan.heads, grids.map((grid) => grid.cells), { pick: (place) => select(place) });
  if (plan.refused.length) {
    paged(node("refused"), ["grid", "reason"], plan.refused);
  }

  const show = () => {
    const grid = grids[selected];
    mark();
    [showBar, showChosen, showMemory, showPipeline, showNodes].forEach((panel) => panel(grid));
    node("other").textContent = selected && figures.timeline ?
      `The plan has the timeline of its best grid only: this is ${grids[0].name}, not ${grid.name}.` : "";
    refresh();
    document.documentElement.dataset.selected = grid.name;
  };
  const select = (place) => {
    [selected, base] = [place, 0];
    show();
    ["tradeoff", "parts"].forEach(draw);
  };

  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    const source = node(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "copied";
    } catch { // the browser does not allow it here: select the text, so that the reader can copy it
      getSelection().selectAllChildren(source);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  }));
  // Without WebGL, as in some remote desktops, the points are drawn as SVG.
  if (!document.createElement("canvas").getContext("webgl")) {
    figures.tradeoff.traces.forEach((trace) => { trace.type = "scatter"; });
  }
  show();
  let width = node("nodes").clientWidth;
  addEventListener("resize", () => {
    if (node("nodes").clientWidth !== width) {
      width = node("nodes").clientWidth;
      showNodes(grids[selected]);
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => names.forEach(draw));
  Promise.all(names.map(draw)).then(() => {
    ["tradeoff", "parts"].forEach((name) =>
      node(name).on("plotly_click", ({ points }) => {
        if (Number.isInteger(points[0].customdata)) select(points[0].customdata);
      }));
    document.documentElement.dataset.drawn = String(names.length);
  });
})();
