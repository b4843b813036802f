// What attention did for one answer: figures out of `usage.attention`, and one token that all of them show.

import { el, percent, short, wide } from "./dom.js";
import { budgetChart } from "./budget.js";
import { errorFigure } from "./errors.js";
import { heatmap } from "./heatmap.js";
import { readingFigure } from "./reading.js";
import { describe } from "./fields.js";

// Ends of the density scale: sparse answers would all look alike on one that ends at 1.
const ENDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];

/** The ends of scales that fit all of some answers' usages: what is compared has the same. */
export function scalesFor(usages) {
  return { prefill: densityEnd(usages, "prefill"), decode: densityEnd(usages, "decode"), keys: keysEnd(usages) };
}

function densityEnd(usages, phase) {
  const all = usages.flatMap(({ attention }) => attention?.trace?.[phase]?.density.flat() || []);
  const most = all.reduce((a, b) => Math.max(a, b), 0);
  return ENDS.find((end) => end >= most - 1e-9) || 1;
}

/** The most keys that were there for any token of some answers. */
function keysEnd(usages) {
  const tokens = usages.flatMap(({ attention }) => attention?.trace?.tokens || []);
  return tokens.reduce((most, { position }) => Math.max(most, position + 1), 1);
}

/**
 * All pictures of one answer. `answer`: `{ usage, tokens, promptTokens, epsilon }`; `scales` are from `scalesFor`.
 * `auditAll` turns auditing on for the next answer, where nothing was audited.
 */
export function pictures({ usage, tokens, promptTokens, epsilon }, scales, auditAll) {
  const { attention } = usage;
  const element = el("div", { class: "pictures" }, phases(attention));
  const trace = attention.trace;
  if (!trace) {
    element.append(el("p", { class: "note" }, "For pictures by layer, head and token, switch “trace” on."));
    if (attention.decode.audit) element.append(errorFigure({ audit: attention.decode.audit, epsilon, points: [] }).figure);
    return element;
  }
  const views = [];
  let pinned = null;
  const show = (at) => at !== null && views.forEach((view) => view(at));
  const pick = (at) => {
    pinned = at;
    show(at);
  };
  const preview = (at) => show(at ?? pinned);

  element.append(heatmaps(attention, scales));
  const sequence = [...texts(promptTokens, usage.prompt_tokens), ...texts(tokens, usage.completion_tokens)];
  // The row at a position writes the token after it.
  const entries = new Map(trace.tokens.map((entry) => [entry.position + 1, entry]));
  const points = [...entries].sort(([a], [b]) => a - b).map(([at, entry]) => point(at, entry, sequence));
  if (points.length > 0) element.append(budgets(points, scales.keys, views, pick, preview));
  element.append(errors(attention, epsilon, points, views, pick, preview, auditAll));
  if (points.length > 0) {
    const pairs = trace.layers * trace.kv_heads;
    const reading = readingFigure({ tokens: sequence, prompt: usage.prompt_tokens, entries, pairs, pick, preview });
    views.push(reading.show);
    element.append(reading.figure);
    pick(points.at(-1).at);
  } else {
    element.append(el("p", { class: "note" }, "One token has no row of the decode method: it comes from the prompt's last row."));
  }
  return element;
}

function point(at, entry, sequence) {
  const there = entry.density > 0 ? entry.budget / entry.density : entry.position + 1;
  return { at, text: sequence[at] ?? "", budget: entry.budget, there, density: entry.density, error: entry.error };
}

function texts(known, count) {
  // What ends an answer has no text, or is not told.
  if (known?.length === count - 1) return [...known, "⟨end⟩"];
  if (known?.length === count) return known.map((text) => text || "⟨end⟩");
  return Array.from({ length: count }, (_, i) => `⟨${i}⟩`);
}

function heatmaps({ trace, prefill, decode }, scales) {
  const figures = [
    [trace.prefill, "Prompt", prefill, scales.prefill],
    [trace.decode, "Answer", decode, scales.decode],
  ].map(([phase, name, { method, density }, most]) => {
    const title = `${name} density, ${method}: ${percent(density)}`;
    if (phase) return heatmap({ title, density: phase.density, most });
    const why = name === "Prompt" ? "the whole prompt came from the prefix cache" : "no row was attended for by it";
    return el("figure", { class: "heatmap" }, el("figcaption", {}, `${name}: ${method}`), el("p", { class: "note" }, `Nothing to draw: ${why}.`));
  });
  return el("div", { class: "heatmaps" }, figures);
}

function budgets(points, keys, views, pick, preview) {
  const chart = budgetChart({
    points,
    top: keys,
    pick: (i) => pick(points[i].at),
    preview: (i) => preview(i === null ? null : points[i].at),
  });
  views.push((at) => {
    const index = points.findIndex((p) => p.at === at);
    if (index >= 0) chart.show(index);
  });
  return chart.figure;
}

function errors(attention, epsilon, points, views, pick, preview, auditAll) {
  const { audit } = attention.decode;
  if (!audit) {
    const button = el("button", { type: "button", class: "quiet", onclick: auditAll }, "Audit the next answers");
    const note = "Nothing of the answer was audited against dense attention. ";
    return el("figure", { class: "error-chart" }, el("figcaption", {}, "Audited error"), el("p", { class: "note" }, note, auditAll && button));
  }
  const audited = points.filter((p) => p.error !== undefined);
  const of = (p) => (p === null ? null : p.at);
  const chart = errorFigure({ audit, epsilon, points: audited, pick: (p) => pick(of(p)), preview: (p) => preview(of(p)) });
  views.push((at) => {
    const index = audited.findIndex((p) => p.at === at);
    chart.show(index < 0 ? null : index);
  });
  return chart.figure;
}

/** The usage's numbers of both phases. */
function phases(attention) {
  const { prefill, decode, speculation } = attention;
  const columns = [
    ["phase", (p) => p.name],
    ["method", (p) => p.method],
    ["over", (p) => p.over],
    ["density", (p) => (p.density === undefined ? null : percent(p.density))],
    ["keys read", (p) => (p.budget_mean === undefined ? null : short(p.budget_mean, 4))],
    ["at most", (p) => p.budget_max?.toLocaleString("en")],
    ["scored", (p) => (p.scored === undefined ? null : percent(p.scored))],
    ["promise", (p) => (p.promise ? `ε ${p.promise.epsilon}, δ ${p.promise.delta}` : null)],
    ["dense heads", (p) => p.dense_heads?.toLocaleString("en")],
    ["mass kept", (p) => (p.cra ? percent(p.cra.mean) : null)],
  ];
  const rows = [
    { name: "prompt", ...prefill },
    { name: "answer", ...decode },
  ];
  // Drafts that are all looked up read no keys.
  const draft = speculation?.draft ?? { method: "lookup" };
  if (speculation) rows.push({ name: `drafts, ${percent(speculation.acceptance)} right`, ...draft });
  const used = columns.filter(([, of]) => rows.some((row) => of(row) !== null && of(row) !== undefined));
  const head = el("tr", {}, used.map(([name]) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, used.map(([, of], i) => el(i === 0 ? "th" : "td", i === 0 ? { scope: "row" } : {}, of(row) ?? "–"))));
  return wide("Attention in numbers", el("table", { class: "phases" }, el("thead", {}, head), el("tbody", {}, body)));
}

/** The settings of an answer in a line. */
export function settingsLine(attention) {
  const { trace, ...rest } = attention;
  const parts = Object.entries(rest).map(([name, value]) => `${name} ${describe(value)}`);
  return parts.length > 0 ? parts.join(" · ") : "the server's default attention";
}
