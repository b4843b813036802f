// Which tokens one token read: the text of prompt and answer, shaded by the share of layers and heads that read each.

import { el, percent, roving, setVars, short, svg } from "./dom.js";
import { legend } from "./heatmap.js";

/**
 * `tokens`: the texts of the whole sequence; the first `prompt` are the prompt's. `entries`: what trace says, by the
 * position of the token that the row wrote. `pairs`: layers × KV heads. `pick(at)` and `preview(at or null)` are told.
 */
export function readingFigure({ tokens, prompt, entries, pairs, pick, preview }) {
  const spans = tokens.map((text, at) => span(text, at, at < prompt));
  const readout = el("output", { class: "readout" });
  const under = el("output", { class: "readout key-readout" });
  const strip = svg("svg", { class: "strip", viewBox: `0 0 ${tokens.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  strip.append(svg("title", {}, "Where in the context; click to see the tokens there"));
  // What each token should show, and what it does: those out of sight follow when they are scrolled to.
  let shares = new Float32Array(tokens.length);
  const painted = new Float32Array(tokens.length);
  let shown = null;

  const quoted = (at) => `“${tokens[at] ?? ""}”`;
  const name = (at) => `${quoted(at)} (token ${at})`;
  function show(at) {
    spans[shown]?.classList.remove("picked");
    spans[shown]?.setAttribute("aria-selected", "false");
    shown = at;
    spans[at]?.classList.add("picked");
    spans[at]?.setAttribute("aria-selected", "true");
    // Another picture may have chosen one that is out of sight.
    if (spans[at]) bringIntoSight((at < prompt ? before : answer).text, spans[at], false);
    const entry = entries.get(at);
    readout.textContent = sentence(at, entry);
    under.textContent = "";
    shares = sharesOf(entry?.reads, tokens.length, pairs);
    strip.replaceChildren(strip.firstChild, ...stripes(shares));
    boxes.forEach(shade);
  }
  function sentence(at, entry) {
    if (entry === undefined) {
      const first = at === prompt ? "comes from the prompt's last row, which the prefill method attended for" : "has no row of the decode method";
      return `${name(at)} ${first}.`;
    }
    const error = entry.error === undefined ? "" : `; audited error ${short(entry.error)}`;
    const read = `${short(entry.budget, 4)} of ${short(entry.position + 1)} keys on average (${percent(entry.density)})${error}`;
    return `To write ${name(at)}, a head read ${read}.${entry.reads ? "" : " Which ones was not recorded: there were too many runs of them."}`;
  }
  function shade(box) {
    for (const at of inSight(box)) {
      const share = shares[at];
      if (share === painted[at]) continue;
      painted[at] = share;
      setVars(spans[at], { v: share });
      spans[at].classList.toggle("read", share > 0);
      // From where the ground is nearer to the other colour of text; the themes' scales differ there.
      spans[at].classList.toggle("half", share > 0.5);
      spans[at].classList.toggle("strong", share > 0.65);
    }
  }
  function sayKey(at) {
    const heads = Math.round(shares[at] * pairs);
    under.textContent = entries.get(shown)?.reads ? `${name(at)} was read by ${heads} of ${pairs} heads.` : "";
  }

  const before = box("list", "Prompt", spans.slice(0, prompt));
  const answer = box("listbox", "Answer: point at a token, or walk with the arrows", spans.slice(prompt));
  const boxes = [
    { text: before.text, spans: spans.slice(0, prompt), first: 0 },
    { text: answer.text, spans: spans.slice(prompt), first: prompt },
  ];
  for (const box of boxes) {
    box.text.addEventListener("scroll", () => shade(box), { passive: true });
    // Also when it is first laid out, or unfolded.
    new ResizeObserver(() => {
      if (spans[shown]?.parentElement === box.text) bringIntoSight(box.text, spans[shown], false);
      shade(box);
    }).observe(box.text);
  }
  // A place of the overview brings its tokens into view.
  strip.addEventListener("click", (event) => {
    const { left, width } = strip.getBoundingClientRect();
    const at = Math.floor(((event.clientX - left) / width) * tokens.length);
    const { text } = at < prompt ? before : answer;
    if (spans[at]) bringIntoSight(text, spans[at], true);
  });
  listen(before.text, spans, { over: sayKey, focus: sayKey });
  listen(answer.text, spans, { over: preview, focus: pick, click: pick, leave: () => preview(null) });
  const figure = el(
    "figure",
    { class: "reading" },
    el("figcaption", {}, "Which tokens one token read"),
    readout,
    strip,
    before.element,
    answer.element,
    el("div", { class: "under" }, under, legend(1, "share of layers and heads that read a token")),
  );
  return { figure, show };
}

function span(text, at, ofPrompt) {
  const line = text.includes("\n");
  const shown = line ? text.replaceAll("\n", "↵\n") : text;
  const special = /^<\|.*\|>$|^<\/?s>$|^\[\/?INST\]$/.test(text) ? " special" : "";
  return el("span", { class: `token${special}`, dataset: { at }, role: ofPrompt ? "listitem" : "option", "aria-label": text.trim() || "white space" }, shown);
}

function box(role, title, spans) {
  const text = el("div", { class: "tokens", role, "aria-label": title }, spans);
  roving(text, spans, (key, at) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 };
    if (key === "ArrowUp" || key === "ArrowDown") return otherLine(spans, at, key === "ArrowDown" ? 1 : -1);
    return key in to ? Math.max(0, Math.min(spans.length - 1, to[key])) : undefined;
  });
  return { text, element: el("div", { class: "box" }, el("p", {}, title), text) };
}

/** The token above or below. */
function otherLine(spans, from, direction) {
  const { offsetTop: top, offsetLeft: left } = spans[from];
  let best = from;
  let line = null;
  for (let at = from + direction; spans[at]; at += direction) {
    if (spans[at].offsetTop === top) continue;
    line ??= spans[at].offsetTop;
    if (spans[at].offsetTop !== line) break;
    const nearer = Math.abs(spans[at].offsetLeft - left) < Math.abs(spans[best].offsetLeft - left);
    if (best === from || nearer) best = at;
  }
  return best;
}

function listen(text, spans, { over, focus, click, leave }) {
  const at = (event) => {
    const index = event.target.dataset?.at;
    return index === undefined ? null : Number(index);
  };
  const on = (kind, handle) => {
    if (handle) text.addEventListener(kind, (event) => at(event) !== null && handle(at(event)));
  };
  on("pointerover", over);
  on("focusin", focus);
  on("click", (index) => {
    click?.(index);
    spans[index].focus();
  });
  if (leave) text.addEventListener("pointerleave", leave);
}

/** For each position the share of (layer, KV head) pairs that read it. */
export function sharesOf(reads, length, pairs) {
  const shares = new Float32Array(length);
  for (const [start, count, heads] of reads || []) shares.fill(Math.min(1, heads / pairs), start, start + count);
  return shares;
}

/** Scrolls a box alone, not what it stands in. */
function bringIntoSight(text, { offsetTop: top }, always) {
  const seen = top >= text.scrollTop && top < text.scrollTop + text.clientHeight - 16;
  if (always || !seen) text.scrollTop = top - text.clientHeight / 2;
}

/** The tokens of a box that can be seen, and as many above and below. */
function inSight({ text, spans, first }) {
  const { scrollTop, clientHeight } = text;
  // Lines follow each other, so the first one in sight can be looked for by halves.
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].offsetTop < scrollTop - clientHeight) low = middle + 1;
    else high = middle;
  }
  const end = scrollTop + 2 * clientHeight;
  const seen = [];
  for (let at = low; at < spans.length && spans[at].offsetTop <= end; at += 1) seen.push(first + at);
  return seen;
}

// A strip is hardly wider in pixels.
const STRIPES = 1000;

/** The overview: the largest share in each of at most so many stretches, drawn once for neighbours that are alike. */
function stripes(shares) {
  const step = Math.max(1, shares.length / STRIPES);
  const drawn = [];
  for (let start = 0; start < shares.length; start += step) {
    const from = Math.floor(start);
    const to = Math.min(shares.length, Math.floor(start + step));
    const v = Math.round(100 * shares.subarray(from, to).reduce((a, b) => Math.max(a, b), 0)) / 100;
    if (drawn.at(-1)?.v === v) drawn.at(-1).to = to;
    else drawn.push({ from, to, v });
  }
  const read = drawn.filter(({ v }) => v > 0);
  return read.map(({ from, to, v }) => svg("rect", { x: from, y: 0, width: to - from, height: 1, vars: { v } }));
}
