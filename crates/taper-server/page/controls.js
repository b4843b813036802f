// The attention panel, generated from /v1/attention/methods: no method or parameter is named here.
//
// A tree of nodes, each with `element`, `path`, `value()` (what to send: only what differs from its defaults) and
// `set(value)`. A method is a node whose children follow the choice; methods within methods come out of that.

import { el, freshId } from "./dom.js";
import { field } from "./fields.js";
import { inline } from "./inline.js";
import { kindOf, methodName, methodsOf, same } from "./schema.js";

/** The controls of one `attention` object. `onchange` is told of every change. */
export class Controls {
  constructor(document, onchange) {
    this.index = new Map(document.data.map((method) => [`${method.phase}/${method.name}`, method]));
    this.schema = document.schema;
    this.defaults = document.default || {};
    this.nodes = {};
    this.element = el("div", { class: "controls" });
    const changed = () => onchange(this);
    for (const [name, schema] of Object.entries(document.schema.properties)) {
      const place = { name, path: `attention.${name}`, schema, onchange: changed, controls: this };
      const node = make(place, this.defaults[name]);
      this.nodes[name] = { ...node, untouched: node.value() };
      this.element.append(node.element);
    }
  }

  /** The `attention` object to send: what differs from the server's default. */
  value() {
    const sent = {};
    for (const [name, node] of Object.entries(this.nodes)) {
      const value = node.value();
      if (value !== undefined && !same(value, node.untouched)) sent[name] = value;
    }
    return sent;
  }

  set(name, value) {
    this.nodes[name]?.set(value);
  }

  has(name) {
    return name in this.nodes;
  }

  reset() {
    for (const [name, node] of Object.entries(this.nodes)) node.set(this.defaults[name]);
  }

  /** Shows an error at the control that its path names, or the nearest one around it; says whether there is one. */
  fail(path, message) {
    const plain = (path || "").replaceAll(/\[(\d+)\]/g, ".$1");
    const all = Object.values(this.nodes).flatMap((node) => node.all());
    const around = all.filter((node) => plain === node.path || plain.startsWith(`${node.path}.`));
    const nearest = around.sort((a, b) => b.path.length - a.path.length)[0];
    if (!nearest) return false;
    nearest.fail(message);
    for (let at = nearest.element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    nearest.focus();
    return true;
  }

  clearErrors() {
    for (const node of Object.values(this.nodes)) node.all().forEach((one) => one.fail(""));
  }
}

function make(place, fallback) {
  const kind = kindOf(place.schema);
  if (kind === "method") return methodNode(place, fallback);
  if (kind === "object") return objectNode(place, fallback);
  return leaf(place, fallback);
}

/** A parameter with one value. */
function leaf(place, fallback = place.schema.default) {
  // A switch that nothing sets is off.
  const off = kindOf(place.schema) === "switch" ? false : undefined;
  const one = field({ ...place, fallback: fallback ?? off });
  return { ...one, all: () => [one] };
}

/** Fields of an object, each sent if it is required or differs from its default. */
function fieldsOf(schema, place, skip = []) {
  const nodes = Object.entries(schema.properties || {})
    .filter(([name]) => !skip.includes(name))
    .map(([name, inner]) => {
      const node = make({ ...place, name, path: `${place.path}.${name}`, schema: inner }, undefined);
      return { name, node, untouched: node.value(), required: (schema.required || []).includes(name) };
    });
  return {
    elements: nodes.map(({ node }) => node.element),
    all: () => nodes.flatMap(({ node }) => node.all()),
    value() {
      const said = nodes.map((one) => ({ ...one, value: one.node.value() }));
      const sent = said.filter((one) => one.value !== undefined && (one.required || !same(one.value, one.untouched)));
      return Object.fromEntries(sent.map(({ name, value }) => [name, value]));
    },
    set: (value) => nodes.forEach(({ name, node }) => node.set(value?.[name])),
  };
}

/** A choice of method with the parameters of the one that is chosen. */
function methodNode(place, fallback = place.schema.default) {
  const { name, path, schema, controls, onchange } = place;
  const methods = new Map(methodsOf(schema).map((inner) => [methodName(inner), inner]));
  const phase = schema["x-method-of"] || (path.startsWith("attention.prefill") ? "prefill" : "decode");
  const first = fallback?.method ?? methods.keys().next().value;
  const id = freshId("method");
  const select = el("select", { id }, [...methods.keys()].map((one) => el("option", { value: one }, one)));
  const error = el("p", { class: "error", id: `${id}-error`, role: "alert", hidden: true });
  const hint = el("p", { class: "hint", id: `${id}-hint` });
  select.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
  const body = el("div", { class: "parameters" });
  const element = el(
    "div",
    { class: "group", role: "group", "aria-labelledby": `${id}-name`, dataset: { path } },
    el("p", { class: "name", id: `${id}-name` }, name),
    el("div", { class: "field" }, el("div", { class: "line" }, el("label", { for: id }, "method"), select), error, hint),
    body,
  );
  // A method's parameters are kept while another one is looked at.
  const made = new Map();
  const chosen = () => {
    if (!made.has(select.value)) made.set(select.value, fieldsOf(methods.get(select.value), place, ["method"]));
    return made.get(select.value);
  };
  const self = {
    element,
    path,
    value: () => ({ method: select.value, ...chosen().value() }),
    set(value = fallback) {
      select.value = value?.method ?? first;
      chosen().set(value);
      show();
    },
    focus: () => select.focus(),
    fail(message) {
      error.textContent = message || "";
      error.hidden = !message;
      if (message) select.setAttribute("aria-invalid", "true");
      else select.removeAttribute("aria-invalid");
    },
    all: () => [self, ...chosen().all()],
  };
  function show() {
    const info = controls.index.get(`${phase}/${select.value}`);
    hint.replaceChildren(...inline(info?.summary || schema.description || ""));
    hint.title = info?.source || "";
    body.replaceChildren(...chosen().elements);
    body.hidden = body.childElementCount === 0;
    element.classList.toggle("changed", select.value !== first);
    self.fail("");
  }
  select.addEventListener("input", (event) => {
    event.stopPropagation();
    show();
    onchange();
  });
  self.set(fallback);
  return self;
}

/** An object with fields of its own; one that may be null has a switch. */
function objectNode(place, fallback) {
  const { name, path, schema, onchange } = place;
  const nullable = [schema.type].flat().includes("null");
  const inner = fieldsOf(schema, place);
  const id = freshId("object");
  const on = el("input", { id, type: "checkbox", class: "switch", "aria-describedby": `${id}-hint ${id}-error` });
  const error = el("p", { class: "error", id: `${id}-error`, role: "alert", hidden: true });
  const body = el("div", { class: "parameters" }, inner.elements);
  const element = el(
    "div",
    { class: "group", role: "group", "aria-label": name, dataset: { path } },
    nullable ? el("div", { class: "field" }, el("div", { class: "line" }, el("label", { for: id }, name), on)) : el("p", { class: "name" }, name),
    error,
    el("p", { class: "hint", id: `${id}-hint` }, inline(schema.description || "")),
    body,
  );
  const show = () => {
    body.hidden = nullable && !on.checked;
  };
  const self = {
    element,
    path,
    value: () => (nullable && !on.checked ? null : inner.value()),
    set(value = fallback) {
      on.checked = value !== undefined && value !== null;
      if (on.checked || !nullable) inner.set(value);
      show();
    },
    focus: () => (nullable ? on : body.querySelector("input, select, textarea"))?.focus(),
    fail(message) {
      error.textContent = message || "";
      error.hidden = !message;
    },
    all: () => (nullable && !on.checked ? [self] : [self, ...inner.all()]),
  };
  on.addEventListener("input", (event) => {
    event.stopPropagation();
    show();
    onchange();
  });
  self.set(fallback);
  return self;
}
