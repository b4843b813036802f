// Elements in one call. Text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: `el("p", { class: "hint", onclick: f, "aria-label": "x", dataset: { path } }, "text", child)`. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "vars") setVars(node, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** What scrolls sideways in itself where it is too wide, by keyboard too. */
export function wide(label, ...children) {
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, ...children);
}

/** CSS custom properties, through the object model: a strict content security policy has no style attributes. */
export function setVars(node, vars) {
  for (const [name, value] of Object.entries(vars)) node.style.setProperty(`--${name}`, value);
}

let last = 0;

/** An id that no other element has, for labels and descriptions. */
export function freshId(prefix) {
  last += 1;
  return `${prefix}-${last}`;
}

/** A number for people: few digits, none wasted. */
export function short(value, digits = 3) {
  if (!Number.isFinite(value)) return String(value);
  if (value !== 0 && Math.abs(value) < 0.0005) return value.toExponential(1);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** The server's messages begin small. */
export function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A share in per cent. */
export function percent(share) {
  return `${short(share * 100)} %`;
}

/**
 * Lets arrows walk through `items`, of which one at a time is in the tab order. `step(key, index)` gives the next index
 * or undefined. Returns a function that makes another item the current one.
 */
export function roving(container, items, step) {
  let current = 0;
  items.forEach((item, index) => item.setAttribute("tabindex", index === 0 ? "0" : "-1"));
  const move = (index) => {
    items[current]?.setAttribute("tabindex", "-1");
    current = index;
    items[current]?.setAttribute("tabindex", "0");
  };
  container.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const index = items.indexOf(event.target);
    const next = index < 0 ? undefined : step(event.key, index);
    if (next === undefined) return;
    event.preventDefault();
    if (next === index || !items[next]) return;
    move(next);
    items[next].focus();
  });
  container.addEventListener("focusin", (event) => {
    const index = items.indexOf(event.target);
    if (index >= 0) move(index);
  });
  return move;
}
