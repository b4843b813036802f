// Audited errors against the promised epsilon: over all audited heads, and token by token.

import { el, percent, short, svg } from "./dom.js";
import { MARGIN, ends, frame, responsive, roundUp, walk } from "./charts.js";

const HEIGHT = 130;
const ROW = 24;

/** `audit` is the usage's, `epsilon` what was promised if anything; `points`: `{ at, text, error }` by audited token. */
export function errorFigure({ audit, epsilon, points, pick, preview }) {
  const caption = "Audited error: relative to dense attention" + (epsilon ? `, promised ε ${short(epsilon)}` : "");
  const figure = el("figure", { class: "error-chart" }, el("figcaption", {}, caption));
  const over = audit.over_epsilon;
  const verdict = [`${audit.heads.toLocaleString("en")} heads audited`];
  if (over !== undefined) verdict.push(`${percent(over)} over ε`);
  figure.append(summary(audit, epsilon));
  const readout = el("output", { class: "readout" }, verdict.join(", "));
  let show = () => {};
  if (points.length > 1) {
    const chart = byToken(points, epsilon, pick, preview, readout, verdict.join(", "));
    figure.append(chart.plot);
    show = chart.show;
  }
  figure.append(readout);
  return { figure, show };
}

/** Mean, 99th percentile and largest error as bars, epsilon as a line through them. */
function summary(audit, epsilon) {
  const bars = [
    ["mean", audit.error_mean],
    ["p99", audit.error_p99],
    ["max", audit.error_max],
  ];
  const finite = bars.map(([, value]) => value).filter(Number.isFinite);
  const top = roundUp(Math.max(epsilon || 0, ...finite) * 1.05);
  const label = bars.map(([name, value]) => `${name} ${inWords(value)}`).join(", ") + (epsilon ? `; epsilon ${short(epsilon)}` : "");
  const height = bars.length * ROW + 18;
  const plot = responsive((width) => {
    const space = width - MARGIN.left - 64;
    const x = (value) => MARGIN.left + space * Math.min(1, value / top);
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    // Numbers stand above the line, which may cross them.
    const numbers = [];
    bars.forEach(([name, value], i) => {
      const y = i * ROW + 16;
      const long = Number.isFinite(value) ? value : top;
      const over = breaks(value, epsilon);
      root.append(
        svg("text", { class: "tick", x: MARGIN.left - 6, y: y + 12, "text-anchor": "end" }, name),
        svg("rect", { class: `bar${over ? " over" : ""}`, x: MARGIN.left, y, width: Math.max(1, x(long) - MARGIN.left), height: 16, rx: 2 }),
      );
      numbers.push(svg("text", { class: "value", x: x(long) + 5, y: y + 12 }, inWords(value)));
    });
    if (epsilon) root.append(...epsilonLine({ x1: x(epsilon), x2: x(epsilon), y1: 12, y2: height }, x(epsilon), 10, "middle"));
    root.append(...numbers);
    return root;
  });
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `Audited errors: ${label}`);
  plot.classList.add("summary");
  return plot;
}

function byToken(points, epsilon, pick, preview, readout, verdict) {
  const finite = points.map((p) => p.error).filter(Number.isFinite);
  const top = roundUp(Math.max(epsilon || 0, ...finite) * 1.05);
  const dots = [];
  let shown = null;
  const mark = () => dots.forEach((dot, i) => dot.classList.toggle("picked", i === shown));
  const plot = responsive((width) => {
    const size = { width, height: HEIGHT };
    const { root, x, y } = frame({ ...size, count: points.length, top });
    dots.splice(0);
    points.forEach((p, i) => {
      const over = breaks(p.error, epsilon);
      const dot = svg("circle", { class: `dot${over ? " over" : ""}`, cx: x(i), cy: y(Number.isFinite(p.error) ? p.error : top), r: 3 });
      dots.push(dot);
    });
    if (epsilon) {
      const at = y(epsilon);
      root.append(...epsilonLine({ x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }, width - MARGIN.right, at - 4, "end"));
    }
    root.append(...dots);
    ends({ root, ...size, first: `token ${points[0].at}`, last: `token ${points.at(-1).at}` });
    mark();
    return root;
  });
  const words = (i) => `Token ${points[i].at} “${points[i].text}”: mean error of its audited heads ${inWords(points[i].error)}`;
  const setSlider = walk(plot, {
    label: "Audited error by token",
    count: points.length,
    pick: (i) => pick(points[i]),
    preview: (i) => preview(i === null ? null : points[i]),
    text: words,
  });
  const show = (i) => {
    shown = i;
    if (i !== null) setSlider(i);
    readout.textContent = i === null ? verdict : words(i);
    mark();
  };
  return { plot, show };
}

function epsilonLine(ends, x, y, anchor) {
  return [svg("line", { class: "epsilon", ...ends }), svg("text", { class: "epsilon-label", x, y, "text-anchor": anchor }, "ε")];
}

/** JSON has no NaN and no infinity: they come as null. */
function breaks(value, epsilon) {
  return Boolean(epsilon) && !(Number.isFinite(value) && value <= epsilon);
}

function inWords(value) {
  return Number.isFinite(value) ? short(value) : "not finite";
}
