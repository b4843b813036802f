// Density per layer and KV head: a grid of cells that arrows walk through, with a legend and the number in words.

import { el, percent, roving, short } from "./dom.js";

/** `density[layer][head]`, coloured from 0 to `most`. */
export function heatmap({ title, density, most }) {
  const layers = density.length;
  const heads = density[0].length;
  const readout = el("output", { class: "readout" }, "Point at a cell, or walk through with the arrows.");
  const say = (cell) => {
    const { layer, head, value } = cell.dataset;
    readout.textContent = `Layer ${layer}, KV head ${head}: density ${short(Number(value), 4)}`;
  };
  const rows = [];
  const cells = [];
  for (let head = 0; head < heads; head += 1) {
    const row = density.map((ofLayer, layer) => {
      const value = ofLayer[head];
      return el("div", {
        class: "cell",
        role: "gridcell",
        "aria-label": `Layer ${layer}, KV head ${head}: ${percent(value)}`,
        dataset: { layer, head, value },
        vars: { v: Math.min(1, value / most) },
      });
    });
    cells.push(...row);
    rows.push(el("div", { role: "row", class: "row", vars: { layers } }, el("span", { class: "axis", role: "rowheader" }, head), row));
  }
  const grid = el("div", { class: "heat", role: "grid", "aria-label": `${title}; by layer and KV head` }, rows);
  roving(grid, cells, (key, at) => {
    const to = {
      ArrowRight: at % layers < layers - 1 ? at + 1 : at,
      ArrowLeft: at % layers > 0 ? at - 1 : at,
      ArrowDown: at + layers < cells.length ? at + layers : at,
      ArrowUp: at >= layers ? at - layers : at,
      Home: at - (at % layers),
      End: at - (at % layers) + layers - 1,
    };
    return to[key];
  });
  for (const kind of ["pointerover", "focusin"]) {
    grid.addEventListener(kind, (event) => event.target.classList.contains("cell") && say(event.target));
  }
  const ticks = el(
    "div",
    { class: "row ticks", "aria-hidden": "true", vars: { layers } },
    el("span", { class: "axis" }),
    density.map((_, layer) => el("span", {}, layer % tickStep(layers) === 0 ? layer : "")),
  );
  return el(
    "figure",
    { class: "heatmap" },
    el("figcaption", {}, title),
    el("div", { class: "wide" }, grid, ticks),
    el("div", { class: "under" }, el("span", { class: "axes" }, "→ layer, ↓ KV head"), legend(most, "density")),
    readout,
  );
}

/** The sequential scale with its ends. */
export function legend(most, of) {
  return el(
    "span",
    { class: "legend", role: "img", "aria-label": `Colour scale: ${of} from 0 to ${most}` },
    "0",
    el("span", { class: "ramp" }),
    short(most),
  );
}

function tickStep(layers) {
  return [1, 2, 5, 10, 20, 50].find((step) => layers / step <= 9) || 100;
}
