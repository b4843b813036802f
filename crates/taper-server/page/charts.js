// What the charts share: drawing at the width there is, an axis with round numbers, a cursor that walks from point to
// point by pointer and arrows.

import { el, short, svg } from "./dom.js";

export const MARGIN = { left: 44, right: 12, top: 12, bottom: 22 };

/** The next round number. */
export function roundUp(value) {
  if (!(value > 0) || !Number.isFinite(value)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((f) => f * power >= value * (1 - 1e-9));
  return Number((factor * power).toPrecision(6));
}

/** Draws again whenever the width changes. */
export function responsive(draw) {
  const element = el("div", { class: "plot" });
  let width = 0;
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width || now < 80) return;
    width = now;
    element.replaceChildren(draw(width));
  }).observe(element);
  return element;
}

/** Lines and numbers of an axis from 0 to `top`, and the places of values on it. */
export function frame({ width, height, count, top, unit = "" }) {
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (index) => MARGIN.left + (count > 1 ? (index / (count - 1)) * inner.width : inner.width / 2);
  const y = (value) => MARGIN.top + inner.height * (1 - Math.min(value, top) / top);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    const at = y(top * share);
    root.append(
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, `${short(top * share)}${unit}`),
    );
  }
  return { root, x, y, inner };
}

/** The numbers of the first and last token under a chart. */
export function ends({ root, width, height, first, last }) {
  root.append(
    svg("text", { class: "tick", x: MARGIN.left, y: height - 5 }, first),
    svg("text", { class: "tick", x: width - MARGIN.right, y: height - 5, "text-anchor": "end" }, last),
  );
}

/**
 * Makes a plot a slider over `count` points: pointer, arrows, Home and End. `pick(index)` is told; `text(index)` is what
 * a screen reader says.
 */
export function walk(element, { label, count, pick, preview, text }) {
  let at = count - 1;
  const set = (index) => {
    at = Math.max(0, Math.min(count - 1, index));
    element.setAttribute("aria-valuenow", at);
    element.setAttribute("aria-valuetext", text(at));
  };
  const attributes = { role: "slider", tabindex: "0", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": count - 1 };
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(count / 10));
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -count, End: count };
    if (!(event.key in steps)) return;
    event.preventDefault();
    set(at + steps[event.key]);
    pick(at);
  });
  const nearest = (event) => {
    const box = element.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return Math.max(0, Math.min(count - 1, Math.round(share * (count - 1))));
  };
  element.addEventListener("pointermove", (event) => preview(nearest(event)));
  element.addEventListener("pointerleave", () => preview(null));
  element.addEventListener("click", (event) => pick(nearest(event)));
  set(at);
  return set;
}
