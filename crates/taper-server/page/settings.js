// The settings panel: attention for one side or two, and what else a request says.

import { Controls } from "./controls.js";
import { el, freshId, sentence } from "./dom.js";
import { field } from "./fields.js";
import { settingsLine } from "./pictures.js";
import { same } from "./schema.js";

// Greedy, so that two settings differ by their attention and not by their draws.
const COMMON = {
  max_tokens: { type: "integer", minimum: 1, default: 512, description: "The longest answer, in tokens." },
  temperature: { type: "number", minimum: 0, maximum: 2, default: 0, description: "0 takes the likeliest token each time." },
  top_p: { type: "number", exclusiveMinimum: 0, maximum: 1, description: "Only tokens that hold this share of the probability." },
  seed: { type: "integer", description: "Draws the same again, of tokens and of keys." },
};

export class Settings {
  /** `document` is what /v1/attention/methods answers. */
  constructor(document, model) {
    this.model = model;
    this.document = document;
    this.sides = ["A", "B"].map((name) => this.side(name));
    this.common = Object.entries(COMMON).map(([name, schema]) =>
      field({ name, path: name, schema, fallback: schema.default, onchange: () => {} }),
    );
    const id = freshId("system");
    this.system = el("textarea", { id, rows: 2, placeholder: "the model's own" });
    const system = el("div", { class: "field" }, el("label", { for: id }, "system prompt"), this.system);
    const rest = el("details", { class: "panel" }, el("summary", {}, "Answer: length and sampling"), system, this.common.map((one) => one.element));
    this.element = el("div", {}, this.sides.map((side) => side.element), rest);
    this.compare(false);
  }

  side(name) {
    const sent = el("code");
    const line = el("span", { class: "in-short" });
    const show = (controls) => {
      const value = controls.value();
      sent.textContent = JSON.stringify({ attention: value }, null, 2);
      line.textContent = settingsLine(value);
    };
    const controls = new Controls(this.document, show);
    // The pictures need it.
    controls.set("trace", true);
    show(controls);
    const reset = () => {
      controls.reset();
      controls.set("trace", true);
      show(controls);
    };
    const badge = el("b", { class: "side", dataset: { side: name } }, name);
    const title = el("summary", {}, badge, "Attention ", line);
    const element = el(
      "details",
      { class: "panel", open: true, dataset: { side: name } },
      title,
      controls.element,
      el("div", { class: "foot" }, el("button", { type: "button", class: "quiet", onclick: reset }, "Reset to the server's default")),
      el("details", { class: "sent" }, el("summary", {}, "What is sent"), el("pre", { tabindex: "0", "aria-label": "What is sent" }, sent)),
    );
    return { name, controls, badge, element, show: () => show(controls) };
  }

  /** One side or two. */
  compare(on) {
    this.comparing = on;
    const [a, b] = this.sides;
    b.element.hidden = !on;
    a.badge.hidden = b.badge.hidden = !on;
    // Of two, one is open at a time.
    for (const { element } of this.sides) {
      if (on) element.name = "side";
      else element.removeAttribute("name");
    }
    b.element.open = on;
    a.element.open = !on;
  }

  active() {
    return this.comparing ? this.sides : this.sides.slice(0, 1);
  }

  /** The body of a request; only what a person set goes with it. */
  request(side, messages) {
    const said = this.common.map((one) => [one.path, one.value()]).filter(([, value]) => value !== undefined);
    const attention = side.controls.value();
    const system = this.system.value.trim();
    return {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      ...Object.fromEntries(said),
      // The texts of the answer's tokens, which pictures by token need.
      ...(attention.trace ? { logprobs: true } : {}),
      ...(same(attention, {}) ? {} : { attention }),
    };
  }

  /** The epsilon that a side's decode method promises, as the request says it or by default. */
  epsilon(request) {
    const decode = request.attention?.decode ?? this.document.default?.decode;
    const of = (schema) => schema.properties?.method?.const === decode?.method;
    const schema = this.document.schema.properties.decode?.oneOf?.find(of);
    const promised = schema?.properties?.epsilon;
    return promised && (decode.epsilon ?? promised.default);
  }

  /** Shows an error at the control that it names; says whether there is one. */
  fail(side, { param, message: whole }) {
    // The control says where; what is wrong remains to be said.
    const message = whole.startsWith(`${param}: `) ? sentence(whole.slice(param.length + 2)) : whole;
    const common = this.common.find((one) => one.path === param);
    if (!common) return side.controls.fail(param, message);
    common.fail(message);
    common.element.closest("details").open = true;
    common.focus();
    return true;
  }

  clearErrors() {
    this.sides.forEach((side) => side.controls.clearErrors());
    this.common.forEach((one) => one.fail(""));
  }

  /** Sets a field of `attention` on all sides, as if by hand. */
  set(name, value) {
    for (const side of this.active()) {
      side.controls.set(name, value);
      side.show();
    }
  }
}
