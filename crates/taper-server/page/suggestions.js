// What an empty conversation offers: first messages, one of them long enough for sparse attention to leave something out.

import { el } from "./dom.js";

const PLACES = ["the harbour", "the old mill", "the market", "the station", "the library", "the lighthouse", "the bakery", "the bridge"];
const THINGS = ["boats", "clocks", "apples", "letters", "lanterns", "maps", "violins", "keys"];
const WEATHER = ["fog", "bright sun", "light rain", "a strong wind", "the first snow", "a clear night"];

/** A dull report of some lines, in the middle of which a code stands that the end asks for. */
export function needle(lines) {
  const days = Array.from({ length: lines }, (_, i) => {
    const place = PLACES[(i * 5 + 2) % PLACES.length];
    const thing = THINGS[(i * 3 + 1) % THINGS.length];
    return `Day ${i + 1}: at ${place} they counted ${(i * 37) % 90 + 7} ${thing} in ${WEATHER[(i * 7) % WEATHER.length]}.`;
  });
  days.splice(Math.floor(lines / 2), 0, "The secret code of the archive is 7391.");
  return `${days.join("\n")}\n\nWhat is the secret code of the archive?`;
}

/** The welcome with its buttons; `use(text)` takes one. */
export function suggestions(context, use) {
  const lines = context && context < 4096 ? Math.floor(context / 50) : 60;
  const all = [
    ["A short question", "Why is the sky blue? Answer in three sentences."],
    ["Markdown", "List three uses of a paper clip as a Markdown list, each with a bold name."],
    [`A code hidden in a report of ${lines} days`, needle(lines)],
  ];
  return el(
    "div",
    { class: "welcome" },
    el("h2", {}, "Attention is a setting here."),
    el("p", {}, "Choose how the prompt is attended to and how the answer is generated, ask, and see what was read. Sparse methods show most on long prompts."),
    el("div", { class: "ideas" }, all.map(([title, text]) => el("button", { type: "button", onclick: () => use(text) }, title))),
  );
}
