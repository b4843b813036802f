// One control for one parameter: a number, a choice, a switch, or JSON. Each knows its path in the request.

import { el, freshId, short } from "./dom.js";
import { inline } from "./inline.js";
import { choices, kindOf, rangeOf, same, show, wordOf } from "./schema.js";

/**
 * A control. `value()` is what it says (undefined: nothing), `set(value)` changes it, to its default if there is none,
 * `fail(message)` shows an error at it, or takes one away.
 */
export function field({ name, path, schema, fallback, onchange }) {
  const id = freshId("field");
  const kind = kindOf(schema);
  const input = { number, choice, switch: toggle, json }[kind](id, schema, fallback);
  const error = el("p", { class: "error", id: `${id}-error`, role: "alert", hidden: true });
  const reset = el("button", { type: "button", class: "reset", hidden: true, onclick: () => take(fallback) });
  const about = el("span");
  const range = el("span", { class: "range" }, input.range || "");
  const hint = el("p", { class: "hint", id: `${id}-hint` }, about, " ", range);
  const element = el(
    "div",
    { class: "field", dataset: { path, kind } },
    el("div", { class: "line" }, el("label", { for: id }, name), reset, input.element),
    error,
    hint,
  );
  input.control.setAttribute("aria-describedby", `${id}-hint ${id}-error`);

  const self = {
    element,
    path,
    value: () => input.get(),
    set(value) {
      input.set(value ?? fallback);
      refresh();
    },
    focus: () => input.control.focus(),
    fail(message) {
      error.textContent = message || "";
      error.hidden = !message;
      if (message) input.control.setAttribute("aria-invalid", "true");
      else input.control.removeAttribute("aria-invalid");
    },
  };

  function take(value) {
    self.set(value);
    onchange();
    input.control.focus();
  }
  function refresh() {
    const changed = !same(input.get(), fallback);
    element.classList.toggle("changed", changed);
    reset.hidden = !changed;
    const back = fallback === undefined ? "nothing" : show(fallback);
    reset.textContent = `↺ ${back}`;
    reset.setAttribute("aria-label", `Set ${name} back to ${back}`);
    about.replaceChildren(...inline([schema.description, input.hint()].filter(Boolean).join(" ")));
    self.fail(input.problem());
  }
  element.addEventListener("input", () => {
    refresh();
    onchange();
  });
  self.set(fallback);
  return self;
}

function number(id, schema) {
  const range = rangeOf(schema);
  const word = wordOf(schema);
  const box = el("input", {
    id,
    type: "number",
    step: range.step ?? "any",
    inputmode: range.whole ? "numeric" : "decimal",
    placeholder: word ?? "not set",
    autocomplete: "off",
  });
  const bounded = !range.whole && range.least >= 0 && range.most <= 1;
  const slider = el("input", { type: "range", min: 0, max: 1, step: 0.01, tabindex: "-1", "aria-hidden": "true" });
  slider.addEventListener("input", () => {
    box.value = slider.value;
  });
  box.addEventListener("input", () => {
    slider.value = box.value;
  });
  return {
    control: box,
    element: bounded ? el("span", { class: "pair" }, slider, box) : box,
    get: () => (box.value === "" ? word : Number(box.value)),
    set(value) {
      // `true` is all of a share.
      box.value = value === undefined || value === null || value === word ? "" : Number(value);
      slider.value = box.value;
    },
    hint: () => "",
    range: range.words && `${range.words[0].toUpperCase()}${range.words.slice(1)}${word ? `; empty: ${word}` : ""}.`,
    problem: () => (box.validity.badInput ? "This is not a number." : ""),
  };
}

function choice(id, schema, fallback) {
  const all = choices(schema);
  const options = all.map(({ value }, i) => el("option", { value: i }, show(value)));
  if (fallback === undefined) options.unshift(el("option", { value: "" }, "not set"));
  const select = el("select", { id }, options);
  return {
    control: select,
    element: select,
    get: () => (select.value === "" ? undefined : all[select.value].value),
    set(value) {
      const index = all.findIndex((one) => same(one.value, value));
      select.value = index < 0 ? "" : index;
    },
    hint: () => all[select.value]?.description || "",
    problem: () => "",
  };
}

function toggle(id) {
  const box = el("input", { id, type: "checkbox", class: "switch" });
  return {
    control: box,
    element: box,
    get: () => box.checked,
    set(value) {
      box.checked = Boolean(value);
    },
    hint: () => "",
    problem: () => "",
  };
}

function json(id, schema) {
  const box = el("textarea", { id, rows: 2, spellcheck: "false", autocomplete: "off", class: "json" });
  const parse = () => {
    try {
      return { value: box.value.trim() === "" ? undefined : JSON.parse(box.value) };
    } catch (error) {
      // Sent as it stands, so that the server says what belongs here.
      return { value: box.value, problem: `This is not JSON: ${error.message}` };
    }
  };
  return {
    control: box,
    element: box,
    get: () => parse().value,
    set(value) {
      box.value = value === undefined ? "" : JSON.stringify(value);
    },
    hint: () => (schema.type === "array" ? "A list, as JSON." : "JSON."),
    problem: () => parse().problem || "",
  };
}

/** What a settings object says, in a few words: `vattention epsilon 0.05`. */
export function describe(method) {
  if (typeof method !== "object" || method === null) return show(method);
  const { method: name, ...rest } = method;
  const parts = Object.entries(rest).map(([key, value]) => {
    const inner = typeof value === "number" ? short(value, 6) : describe(value);
    return `${key} ${typeof value === "object" && !Array.isArray(value) ? `(${inner})` : inner}`;
  });
  return [name === undefined ? null : describe(name), ...parts].filter(Boolean).join(" ");
}
