// The inline part of Markdown: code, emphasis, links, escapes. Links go to http and https alone.

import { el } from "./dom.js";

const EMPHASIS = [
  ["***", (inner) => el("strong", {}, el("em", {}, inner))],
  ["**", (inner) => el("strong", {}, inner)],
  ["__", (inner) => el("strong", {}, inner)],
  ["~~", (inner) => el("del", {}, inner)],
  ["*", (inner) => el("em", {}, inner)],
  ["_", (inner) => el("em", {}, inner)],
];
const LINK = /\[((?:[^[\]\\]|\\.){1,500})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s()]{0,500}\))?[^\s<>()]{0,500})>?(?:\s+"[^"]{0,500}")?\s*\)/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const CODE = /(`+)/y;
const WORD = /[\p{L}\p{N}]/u;
const DEEPEST = 8;

/** The nodes of a line of text. */
export function inline(text, depth = 0) {
  const nodes = [];
  // Marks that nothing closes from here on: looking for each again would take quadratic time.
  const open = new Set();
  let plain = "";
  let at = 0;
  const push = (node, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    const found = special(text, at, depth, open);
    if (!found) {
      plain += text[at];
      at += 1;
    } else if (typeof found.node === "string") {
      plain += found.node;
      at += found.length;
    } else {
      push(found.node, found.length);
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function special(text, at, depth, open) {
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  switch (text[at]) {
    case "\\": {
      const escaped = match(ESCAPE);
      return escaped && { node: escaped[1], length: 2 };
    }
    case "`":
      return code(text, at, match(CODE)[1], open);
    case "[": {
      const link = match(LINK);
      const target = link && anchor(link[2], inline(link[1], depth + 1));
      return target && depth < DEEPEST ? { node: target, length: link[0].length } : null;
    }
    case "<": {
      const link = match(AUTOLINK);
      const target = link && anchor(link[1], [link[1]]);
      return target ? { node: target, length: link[0].length } : null;
    }
    case "h": {
      if (at > 0 && WORD.test(text[at - 1])) return null;
      const bare = match(BARE);
      // What ends the sentence does not belong to the address.
      const address = bare && bare[0].replace(/[.,;:!?*_)\]}]+$/, "");
      const target = address && anchor(address, [address]);
      return target ? { node: target, length: address.length } : null;
    }
    case "*":
    case "_":
    case "~":
      return depth < DEEPEST ? emphasis(text, at, depth, open) : null;
    default:
      return null;
  }
}

function code(text, at, ticks, open) {
  const none = { node: ticks, length: ticks.length };
  if (open.has(ticks)) return none;
  for (let end = at + ticks.length; end < text.length; end += 1) {
    if (text[end] !== "`") continue;
    let length = 1;
    while (text[end + length] === "`") length += 1;
    if (length === ticks.length) {
      const inner = text.slice(at + length, end).replace(/^ (.*\S.*) $/, "$1");
      return { node: el("code", {}, inner), length: end + length - at };
    }
    end += length - 1;
  }
  open.add(ticks);
  return none;
}

function emphasis(text, at, depth, open) {
  for (const [mark, make] of EMPHASIS) {
    if (open.has(mark) || !text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    // `_` inside a word, as in snake_case, and a mark before a space open nothing.
    if (/\s/.test(text[start] ?? " ") || text[start] === mark[0]) continue;
    if (mark[0] === "_" && at > 0 && WORD.test(text[at - 1])) continue;
    const end = closing(text, start, mark);
    if (end === null) open.add(mark);
    else return { node: make(inline(text.slice(start, end), depth + 1)), length: end + mark.length - at };
  }
  return null;
}

/** Where the mark stands that closes one: in a row of the same character that is long enough, at its end. */
function closing(text, start, mark) {
  for (let at = text.indexOf(mark[0], start + 1); at >= 0; at = text.indexOf(mark[0], at)) {
    let row = 1;
    while (text[at + row] === mark[0]) row += 1;
    // A row of two belongs to the pair that opened inside, not to a single mark.
    const long = row >= mark.length && !(mark.length === 1 && row === 2);
    const inWord = mark[0] === "_" && WORD.test(text[at + row] ?? " ");
    if (long && !/[\s\\]/.test(text[at - 1]) && !inWord) return at + row - mark.length;
    at += row;
  }
  return null;
}

function anchor(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return null;
  return el("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" }, children);
}
