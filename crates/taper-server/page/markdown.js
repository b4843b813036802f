// A small, safe Markdown renderer: text in, DOM nodes out. HTML in the text stays text.
//
// Blocks: headings, paragraphs, lists, quotes, fenced code, tables, rules. Inline (inline.js): code, emphasis, links.

import { el, wide } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;

/** The nodes of some Markdown. What is not closed yet, as in a stream, runs to the end. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (line.trim() === "") return [null, at + 1];
  let match;
  if ((match = FENCE.exec(line))) return fence(lines, at, match);
  if ((match = HEADING.exec(line))) return [el(`h${match[1].length}`, {}, inline(match[2] || "")), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (startsTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fence(lines, at, [, indent, mark, language]) {
  const end = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  const code = [];
  let next = at + 1;
  for (; next < lines.length && !end.test(lines[next]); next += 1) {
    code.push(lines[next].startsWith(indent) ? lines[next].slice(indent.length) : lines[next]);
  }
  const content = code.length > 0 ? `${code.join("\n")}\n` : "";
  const node = el("code", { dataset: language ? { language } : {} }, content);
  // Wide code scrolls in itself, which a keyboard must reach.
  return [el("pre", { tabindex: "0", "aria-label": language ? `Code in ${language}` : "Code" }, node), next + 1];
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length && QUOTE.test(lines[next]); next += 1) inner.push(QUOTE.exec(lines[next])[1]);
  return [el("blockquote", {}, blocks(inner, depth + 1)), next];
}

function list(lines, at, depth) {
  const [, indent, , number] = ITEM.exec(lines[at]);
  const ordered = number !== undefined;
  const items = [];
  let next = at;
  let loose = false;
  while (next < lines.length) {
    const match = ITEM.exec(lines[next]);
    if (match && match[1].length <= indent.length + 1 && !RULE.test(lines[next])) {
      if ((match[3] !== undefined) !== ordered) break;
      items.push([match[4] || ""]);
      next += 1;
    } else if (lines[next].trim() === "") {
      // A blank line ends the list unless what follows still belongs to it.
      const after = lines[next + 1];
      const more = after !== undefined && (/^\s{2,}\S/.test(after) || sameList(after, indent, ordered));
      if (!more) break;
      loose = loose || !sameList(after, indent, ordered);
      items.at(-1).push("");
      next += 1;
    } else if (/^\s{2,}\S/.test(lines[next]) && indentation(lines[next]) > indent.length) {
      items.at(-1).push(lines[next]);
      next += 1;
    } else {
      break;
    }
  }
  const start = ordered && Number(number) !== 1 ? { start: number } : {};
  return [el(ordered ? "ol" : "ul", start, items.map((item) => listItem(item, depth, loose))), next];
}

function sameList(line, indent, ordered) {
  const match = ITEM.exec(line);
  return match !== null && match[1].length <= indent.length + 1 && (match[3] !== undefined) === ordered;
}

function listItem([first, ...rest], depth, loose) {
  const width = Math.min(...rest.filter((line) => line.trim() !== "").map(indentation));
  const inner = blocks([first, ...rest.map((line) => line.slice(Number.isFinite(width) ? width : 0))], depth + 1);
  // In a tight list the text stands in the item itself.
  if (!loose && inner[0]?.tagName === "P") inner[0].replaceWith(...inner.splice(0, 1, ...inner[0].childNodes));
  return el("li", {}, inner);
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

function startsTable(lines, at) {
  const under = lines[at + 1];
  return lines[at].includes("|") && under !== undefined && under.includes("-") && under.includes("|") && TABLE_LINE.test(under);
}

function table(lines, at) {
  const align = cells(lines[at + 1]).map((cell) => {
    if (/^:-*:$/.test(cell)) return "center";
    return cell.endsWith(":") ? "right" : null;
  });
  const row = (line, tag) => {
    const all = cells(line);
    return el("tr", {}, align.map((side, i) => el(tag, side ? { class: side } : {}, inline(all[i] || ""))));
  };
  const body = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) body.push(row(lines[next], "td"));
  const node = el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, body));
  return [wide("Table", node), next];
}

/** The cells of a table's line; `\|` is no border. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function paragraph(lines, at, depth) {
  const text = [lines[at]];
  let next = at + 1;
  for (; next < lines.length && !interrupts(lines, next, depth); next += 1) text.push(lines[next]);
  // The text of models breaks lines where it means to.
  const parts = text.map((line) => inline(line.trim().replace(/\\$/, "")));
  const broken = parts.flatMap((part, i) => (i === 0 ? part : [el("br"), ...part]));
  return [el("p", {}, broken), next];
}

function interrupts(lines, at, depth) {
  const line = lines[at];
  if (line.trim() === "" || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line))) || startsTable(lines, at);
}
