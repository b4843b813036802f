// Keys read for each token, below the keys that were there.

import { el, percent, short, svg } from "./dom.js";
import { ends, frame, responsive, roundUp, walk } from "./charts.js";

const HEIGHT = 150;

/**
 * `points`: `{ at, text, budget, there, density }` by token. Returns the figure and `show(index)`, which moves the
 * cursor. `top` is the axis's end, shared by what is compared.
 */
export function budgetChart({ points, top, pick, preview }) {
  const scale = roundUp(top);
  const cursor = svg("g", { class: "cursor" });
  let place = null;
  let shown = points.length - 1;
  const plot = responsive((width) => {
    const size = { width, height: HEIGHT };
    const { root, x, y } = frame({ ...size, count: points.length, top: scale });
    const line = (of) => points.map((p, i) => `${i === 0 ? "M" : "L"}${x(i).toFixed(1)},${y(of(p)).toFixed(1)}`).join("");
    const down = `L${x(points.length - 1)},${y(0)}L${x(0)},${y(0)}Z`;
    root.append(
      svg("path", { class: "area", d: line((p) => p.budget) + down }),
      svg("path", { class: "line there", d: line((p) => p.there) }),
      svg("path", { class: "line budget", d: line((p) => p.budget) }),
      cursor,
    );
    ends({ root, ...size, first: `token ${points[0].at}`, last: `token ${points.at(-1).at}` });
    place = (i) => ({ x: x(i), y: y(points[i].budget), bottom: y(0), top: y(scale) });
    draw();
    return root;
  });
  const readout = el("output", { class: "readout" });
  const words = (i) => {
    const p = points[i];
    return `Token ${p.at} “${p.text}”: ${short(p.budget, 4)} keys of ${short(p.there, 4)} (${percent(p.density)})`;
  };
  const setSlider = walk(plot, { label: "Keys read by token", count: points.length, pick, preview, text: words });
  function draw() {
    if (!place) return;
    const at = place(shown);
    cursor.replaceChildren(
      svg("line", { x1: at.x, x2: at.x, y1: at.top, y2: at.bottom }),
      svg("circle", { cx: at.x, cy: at.y, r: 4 }),
    );
  }
  const show = (i) => {
    shown = i;
    readout.textContent = words(i);
    setSlider(i);
    draw();
  };
  show(shown);
  const key = el("span", { class: "key" }, el("i", { class: "budget" }), "read", el("i", { class: "there" }), "there", el("span", {}, "(means over layers and heads)"));
  const figure = el(
    "figure",
    { class: "budget-chart" },
    el("figcaption", {}, "Budget: keys read by token"),
    plot,
    el("div", { class: "under" }, key),
    readout,
  );
  return { figure, show };
}
