// One answer: streams it, renders its Markdown, times it, and draws what its attention did.

import { post, stream } from "./api.js";
import { el, short } from "./dom.js";
import { markdown } from "./markdown.js";
import { pictures, settingsLine } from "./pictures.js";

export class Answer {
  /** `request` is the body to send; `name` the side's in a comparison. */
  constructor({ request, name, epsilon, auditAll }) {
    Object.assign(this, { request, name, epsilon, auditAll });
    this.text = "";
    this.tokens = [];
    this.usage = null;
    this.times = {};
    this.state = "waiting";
    this.content = el("div", { class: "content", "aria-live": "polite", "aria-busy": "true" });
    this.status = el("p", { class: "status" });
    this.stats = el("dl", { class: "stats" });
    this.pictures = el("div", { class: "below" });
    this.element = el(
      "article",
      { class: "answer", "aria-label": name ? `Answer ${name}` : "Answer", dataset: { state: this.state } },
      el("header", {}, name && el("b", { class: "side", dataset: { side: name } }, name), el("span", { class: "settings" }, settingsLine(request.attention || {}))),
      this.content,
      this.status,
      this.stats,
      name ? null : this.pictures,
    );
  }

  /** Runs to the end; throws what the server refused. A stop is no error. */
  async run(signal) {
    const started = performance.now();
    this.times.started = started;
    this.to("streaming");
    try {
      for await (const chunk of stream("/v1/chat/completions", this.request, signal)) this.take(chunk);
      this.to("done");
    } catch (error) {
      this.to(error.name === "AbortError" ? "stopped" : "failed");
      if (error.name !== "AbortError") throw error;
    } finally {
      this.render();
      this.showStats();
    }
  }

  take(chunk) {
    const [choice] = chunk.choices;
    const text = choice?.delta?.content;
    const tokens = choice?.logprobs?.content || [];
    if (text || tokens.length > 0) {
      this.times.last = performance.now();
      this.times.first ??= this.times.last;
      this.tokens.push(...tokens.map(({ token }) => token));
      this.text += text || "";
      this.renderSoon();
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (chunk.usage) this.usage = chunk.usage;
  }

  /** At most once a frame. */
  renderSoon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.render());
  }

  render() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.content.replaceChildren(markdown(this.text));
    this.onrender?.();
  }

  to(state) {
    this.state = state;
    this.element.dataset.state = state;
    const busy = state === "streaming";
    this.content.setAttribute("aria-busy", busy);
    const words = { streaming: "", stopped: "Stopped. A stopped answer has no figures of its attention.", failed: this.text ? "Broken off." : "" };
    this.status.textContent = words[state] ?? (this.finish === "length" ? "Cut off at max_tokens." : "");
  }

  /** TTFT in milliseconds, tokens after the first per second. */
  measured() {
    const { started, first, last } = this.times;
    const count = this.usage?.completion_tokens ?? this.tokens.length;
    return {
      ttft: first === undefined ? null : first - started,
      rate: count > 1 && last > first ? ((count - 1) * 1000) / (last - first) : null,
      count,
    };
  }

  showStats() {
    const { ttft, rate, count } = this.measured();
    const { usage } = this;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const all = [
      ["TTFT", ttft === null ? null : `${short(ttft)} ms`, "Time to the first token"],
      ["tokens/s", rate === null ? null : short(rate), "Tokens after the first per second"],
      ["answer", count ? `${count} tokens` : null, ""],
      ["prompt", usage ? `${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}` : null, ""],
    ];
    const shown = all.filter(([, value]) => value !== null);
    this.stats.replaceChildren(...shown.map(([name, value, title]) => el("div", { title }, el("dt", {}, name), el("dd", {}, value))));
  }

  /** Asks for the texts of the prompt's tokens, which the pictures name. */
  async learnPrompt() {
    if (!this.usage?.attention?.trace) return;
    const { model, messages } = this.request;
    const body = { model, messages, return_token_strs: true };
    const answer = await post("/tokenize", body).catch(() => null);
    this.promptTokens = answer?.token_strs;
  }

  /** `scales` are shared by what is compared. */
  draw(scales) {
    if (!this.usage?.attention) return;
    const badge = this.name && el("b", { class: "side", dataset: { side: this.name } }, this.name);
    this.pictures.replaceChildren(
      el("details", { class: "what", open: true }, el("summary", {}, badge, "What attention did"), pictures(this, scales, this.auditAll)),
    );
  }

  fold() {
    this.pictures.querySelector("details")?.removeAttribute("open");
  }
}
