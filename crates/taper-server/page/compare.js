// Two answers to one prompt: differing words marked, and their figures beside each other.

import { el, percent, short, wide } from "./dom.js";
import { markDifferences } from "./diff.js";

/** Marks what differs in two finished answers and returns the figures' table. */
export function comparison(a, b) {
  const { words, marked } = markDifferences(a.content, b.content);
  const same = marked[0] + marked[1] === 0;
  const line = same
    ? `Both say the same, in ${words[0]} words.`
    : `${marked[0]} of ${words[0]} words of A and ${marked[1]} of ${words[1]} of B are marked: the other answer lacks them there.`;
  return el("section", { class: "comparison", "aria-label": "A and B compared" }, el("p", { class: "verdict" }, line), table(a, b));
}

function table(a, b) {
  const rows = [
    ["TTFT", (x) => x.measured().ttft, (v) => `${short(v)} ms`],
    ["tokens/s", (x) => x.measured().rate, short],
    ["prompt density", (x) => x.usage?.attention?.prefill.density, percent],
    ["answer density", (x) => x.usage?.attention?.decode.density, percent],
    ["mean error", (x) => x.usage?.attention?.decode.audit?.error_mean, short],
    ["largest error", (x) => x.usage?.attention?.decode.audit?.error_max, short],
  ].map(([name, of, words]) => ({ name, values: [of(a), of(b)], words }));
  const known = rows.filter(({ values }) => values.some((v) => Number.isFinite(v)));
  const head = el("tr", {}, el("td"), ["A", "B"].map((side) => el("th", { scope: "col" }, el("b", { class: "side", dataset: { side } }, side))));
  const body = known.map(({ name, values, words }) => {
    const most = Math.max(...values.filter((v) => Number.isFinite(v)), 1e-12);
    return el("tr", {}, el("th", { scope: "row" }, name), values.map((value, i) => cell(value, most, words, "AB"[i])));
  });
  const note = "Both ran at the same time and shared the machine: alone, each is faster.";
  return el("div", {}, wide("A and B in numbers", el("table", { class: "versus" }, el("thead", {}, head), el("tbody", {}, body))), el("p", { class: "note" }, note));
}

function cell(value, most, words, side) {
  if (!Number.isFinite(value)) return el("td", {}, "–");
  return el("td", {}, el("span", { class: "beside", dataset: { side }, vars: { v: value / most } }), el("span", {}, words(value)));
}
