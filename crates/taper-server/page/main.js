// Wires the page: loads what the server offers, then hands messages to the conversation.

import { ApiError, get, key, onKeyWanted } from "./api.js";
import { Chat } from "./chat.js";
import { el, sentence } from "./dom.js";
import { inline } from "./inline.js";
import { Settings } from "./settings.js";
import { suggestions } from "./suggestions.js";

const $ = (id) => document.getElementById(id);
let chat = null;

function alert(message) {
  $("alert").textContent = message;
  $("alert").hidden = !message;
}

/** Asks for an API key; one dialog for however many requests want it. */
let asking = null;
onKeyWanted((why) => {
  asking ??= new Promise((done) => {
    const dialog = $("key-dialog");
    $("key-why").replaceChildren(...inline(sentence(why)));
    $("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const given = dialog.returnValue === "use" && $("key").value.trim() !== "";
        if (given) key.set($("key").value.trim());
        done(given);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
});

async function start() {
  try {
    const [models, methods] = await Promise.all([get("/v1/models"), get("/v1/attention/methods")]);
    const [model] = models.data;
    $("model").textContent = model.id;
    $("model").title = `Context of ${model.max_model_len?.toLocaleString("en")} tokens`;
    begin(new Settings(methods, model.id), model.max_model_len);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    alert(error.message);
    $("alert").append(" ", el("button", { type: "button", class: "quiet", onclick: () => location.reload() }, "Try again"));
  }
}

function begin(settings, context) {
  $("settings").replaceChildren(settings.element);
  const log = $("log");
  chat = new Chat({ settings, log, alert, busy, reveal: () => panel(true), giveBack });
  const fresh = () => {
    chat.clear();
    log.replaceChildren(
      suggestions(context, (text) => {
        $("prompt").value = text;
        grow();
        $("prompt").focus();
      }),
    );
  };
  fresh();
  $("send").disabled = false;
  $("new").addEventListener("click", () => {
    fresh();
    $("prompt").focus();
  });
  $("compare").addEventListener("click", () => {
    const on = $("compare").getAttribute("aria-pressed") !== "true";
    $("compare").setAttribute("aria-pressed", on);
    document.body.classList.toggle("comparing", on);
    settings.compare(on);
    if (on) panel(true);
  });
  const scroller = $("scroller");
  scroller.addEventListener("scroll", () => {
    chat.stuck = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  });
}

async function send() {
  const prompt = $("prompt");
  const text = prompt.value.trim();
  if (!chat || chat.running || text === "") return;
  $("log").querySelector(".welcome")?.remove();
  prompt.value = "";
  grow();
  await chat.send(text);
}

/** A refused message goes back to where it was written. */
function giveBack(text) {
  if ($("prompt").value !== "") return;
  $("prompt").value = text;
  grow();
}

function busy(on) {
  document.body.classList.toggle("running", on);
  $("send").textContent = on ? "Stop" : "Send";
  $("send").classList.toggle("stop", on);
  $("send").title = on ? "Esc" : "Enter";
}

function panel(open) {
  document.body.classList.toggle("panel-open", open);
  $("toggle").setAttribute("aria-expanded", open);
}

/** The field is as high as its text, up to a third of the window. */
function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat?.running) chat.stop();
  else send();
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  // A word that an input method composes ends with Enter, too.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat?.running) send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (chat?.running) chat.stop();
  else if (document.body.classList.contains("panel-open")) {
    panel(false);
    $("toggle").focus();
  }
});
$("toggle").addEventListener("click", () => panel(!document.body.classList.contains("panel-open")));
start();
