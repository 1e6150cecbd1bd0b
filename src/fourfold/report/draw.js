// Shared by the scripts of all pages: draws figures in the current colours of the style sheet.
"use strict";
const fourfold = (() => {
  // Replaces "var(--axis-x)" by the current colour: plotly does not read CSS variables.
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
  const node = (name) => document.getElementById(name);
  const data = JSON.parse(node("data").textContent);
  // plotly.js is in the page as compressed text. Its functions are there once this is done.
  const plotly = (async () => {
    const bytes = Uint8Array.from(atob(node("plotly").textContent), (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  })();
  // A figure may have another layout for a phone.
  const draw = async (name, { traces, layout, narrow = layout }, withBar) => {
    await plotly;
    const figure = { traces, layout: innerWidth > 600 ? layout : narrow };
    node(name).style.height = `${figure.layout.height}px`;
    const shown = resolve(figure, getComputedStyle(document.documentElement));
    // Only these buttons: some of plotly's own would upload the data. None on a phone, where they would cover the legend.
    const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];
    const bar = withBar && innerWidth > 860 ? "hover" : false;
    const config = { responsive: true, displaylogo: false, displayModeBar: bar, modeBarButtons: buttons };
    return Plotly.react(node(name), shown.traces, shown.layout, config);
  };
  return { data, node, draw };
})();
