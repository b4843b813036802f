// The conversation: turns of one message and one answer, or two of them side by side. It lives in memory only.

import { Answer } from "./answer.js";
import { comparison } from "./compare.js";
import { el } from "./dom.js";
import { scalesFor } from "./pictures.js";

export class Chat {
  /** `log` holds the turns; `alert(message)` shows what no control is to blame for, `busy(on)` hears of runs, `reveal()` shows
   *  the controls, `giveBack(text)` takes a message that the server refused. */
  constructor({ settings, log, alert, busy, reveal, giveBack }) {
    Object.assign(this, { settings, log, alert, busy, reveal, giveBack });
    this.turns = [];
    this.stopper = null;
  }

  get running() {
    return this.stopper !== null;
  }

  stop() {
    this.stopper?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
    this.alert("");
  }

  /** What a side has heard and said so far; one that was not asked heard the other's. */
  history(name) {
    return this.turns.flatMap(({ user, answers }) => {
      const answer = answers.find((one) => one.side === name) || answers[0];
      return [
        { role: "user", content: user },
        { role: "assistant", content: answer.answer.text },
      ];
    });
  }

  /** Asks the last message once more, with the settings as they are now. */
  again() {
    const last = this.running ? undefined : this.turns.pop();
    if (!last) return;
    const old = this.log.lastElementChild;
    const focused = old.contains(document.activeElement);
    old.remove();
    this.send(last.user);
    // Whoever works by keys goes on from the turn that took the old one's place.
    if (focused) this.log.lastElementChild.focus();
  }

  async send(user) {
    const { settings } = this;
    settings.clearErrors();
    this.alert("");
    this.turns.at(-1)?.answers.forEach(({ answer }) => answer.fold());
    const sides = settings.active();
    const answers = sides.map((side) => {
      const request = settings.request(side, [...this.history(side.name), { role: "user", content: user }]);
      const name = sides.length > 1 ? side.name : null;
      const auditAll = settings.sides[0].controls.has("audit") ? () => settings.set("audit", 1) : null;
      const answer = new Answer({ request, name, epsilon: settings.epsilon(request), auditAll });
      answer.onrender = () => this.follow();
      return { side: side.name, answer };
    });
    const all = answers.map(({ answer }) => answer);
    const turn = el(
      "section",
      { class: "turn", tabindex: "-1", "aria-label": `Turn ${this.turns.length + 1}` },
      el("div", { class: "user" }, user),
      el("button", { type: "button", class: "quiet again", onclick: () => this.again() }, "↻ Ask again"),
      el("div", { class: `answers${all.length > 1 ? " two" : ""}` }, all.map((answer) => answer.element)),
    );
    this.log.append(turn);
    this.stuck = true;
    this.follow();
    await this.run(turn, user, answers, sides);
  }

  async run(turn, user, answers, sides) {
    const all = answers.map(({ answer }) => answer);
    const stopper = new AbortController();
    this.stopper = stopper;
    this.busy(true);
    const results = await Promise.allSettled(all.map((answer) => answer.run(stopper.signal)));
    const refused = results.map(({ reason }, i) => ({ reason, side: sides[i] })).filter(({ reason }) => reason);
    // What an answer said before it broke off stays.
    const said = refused.length < all.length || all.some((answer) => answer.text !== "");
    try {
      // A new conversation may have begun meanwhile.
      if (this.stopper !== stopper || !turn.isConnected) return;
      if (said) {
        this.turns.push({ user, answers });
      } else {
        turn.remove();
        this.giveBack(user);
      }
      await this.finish(turn, all);
      refused.forEach(({ reason, side }) => this.fail(reason, side));
    } finally {
      if (this.stopper === stopper) {
        this.stopper = null;
        this.busy(false);
      }
    }
  }

  async finish(turn, all) {
    await Promise.all(all.map((answer) => answer.learnPrompt()));
    const usages = all.map((answer) => answer.usage).filter(Boolean);
    const scales = scalesFor(usages);
    all.forEach((answer) => answer.draw(scales));
    const done = all.length === 2 && all.every((answer) => answer.state === "done");
    if (done) turn.append(comparison(...all));
    if (all.length === 2) turn.append(el("div", { class: "answers two" }, all.map((answer) => answer.pictures)));
  }

  /** At the control, if there is one to blame. */
  fail(error, side) {
    const named = this.settings.sides.length > 1 && this.settings.comparing ? `${side.name}: ` : "";
    if (error.param && this.settings.fail(side, error)) {
      this.reveal();
      this.alert(`${named}The server refused the setting ${error.param}.`);
    } else {
      this.alert(named + error.message);
    }
  }

  /** Keeps the end in view while a person has not scrolled away from it. */
  follow() {
    if (this.stuck) this.log.lastElementChild?.scrollIntoView({ block: "end" });
  }
}
