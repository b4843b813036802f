// The API's reference, drawn from /openapi.json: each endpoint, its fields and what it answers.

import { ApiError, get } from "./api.js";
import { el, wide } from "./dom.js";
import { inline } from "./inline.js";
import { rangeOf, show } from "./schema.js";

const docs = document.getElementById("docs");
let whole = null;

/** What a reference stands for; anything else is itself. */
function resolve(schema) {
  if (!schema?.$ref) return schema ?? {};
  return schema.$ref.replace("#/", "").split("/").reduce((at, name) => at[name], whole);
}

/** A schema without its null: whether a field may be absent is said by its being required. */
function plain(schema) {
  if (schema?.contentSchema) return { ...resolve(schema.contentSchema), description: schema.contentSchema.description };
  const parts = (schema?.oneOf ?? schema?.anyOf ?? []).filter((part) => part.type !== "null");
  const rest = parts.length === 1 ? { ...resolve(parts[0]), description: schema.description ?? resolve(parts[0]).description } : resolve(schema);
  return rest;
}

/** The fields of an object, its parts' with them, each with whether it must be there. */
function fieldsOf(schema) {
  const known = resolve(schema);
  const own = Object.entries(known.properties ?? {}).map(([name, field]) => [name, field, known.required?.includes(name)]);
  const parts = (known.allOf ?? []).flatMap(fieldsOf);
  return [...own, ...parts].sort((a, b) => Boolean(b[2]) - Boolean(a[2]));
}

/** A schema's type in a few words. */
function typeOf(schema) {
  const known = plain(schema);
  if ("const" in known) return show(known.const);
  if (known.enum) return known.enum.map(show).join(", ");
  const parts = known.oneOf ?? known.anyOf;
  if (parts) return [...new Set(parts.filter((part) => part.type !== "null").map(typeOf))].join(" or ");
  if (known.allOf) return "object";
  const types = [known.type].flat().filter((type) => type && type !== "null");
  const named = types.map((type) => (type === "array" ? `array of ${typeOf(known.items ?? {})}` : type));
  return named.join(" or ") || "anything";
}

function notes(schema) {
  const known = plain(schema);
  const { words } = rangeOf({ ...known, ...schema });
  const initial = schema.default ?? known.default;
  return [typeOf(schema), words, initial === undefined ? "" : `default ${show(initial)}`].filter(Boolean).join(" · ");
}

/** What stands inside of a field: an object's fields, or the kinds of which it is one. */
function inside(schema) {
  const known = plain(schema);
  const held = known.type === "array" ? plain(known.items) : known;
  const kinds = (held.oneOf ?? held.anyOf ?? []).map(resolve).filter((part) => part.properties);
  if (kinds.length > 0) {
    const name = (kind) => Object.values(kind.properties).find((field) => "const" in field || field.enum?.length === 1);
    const title = (kind) => show(name(kind)?.const ?? name(kind)?.enum?.[0] ?? kind.title ?? "object");
    return kinds.map((kind) => folded(title(kind), () => list(kind, kind.description)));
  }
  return fieldsOf(held).length > 0 ? [folded("fields", () => list(held))] : [];
}

/** What is made when it is opened: schemas hold each other. */
function folded(title, make) {
  const details = el("details", {}, el("summary", {}, title));
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && details.append(make()), { once: true });
  return details;
}

function list(schema, description) {
  const entry = ([name, field, required]) => {
    const text = field.description ?? plain(field).description;
    const head = [el("code", {}, name), " ", el("span", {}, notes(field)), required ? el("em", {}, " required") : null];
    return [el("dt", {}, ...head), el("dd", {}, text ? el("p", {}, ...inline(text)) : null, ...inside(field))];
  };
  const about = description ? el("p", { class: "hint" }, ...inline(description)) : null;
  return el("dl", { class: "fields" }, about && el("dt", {}, about), ...fieldsOf(schema).flatMap(entry));
}

function operation(path, method, about) {
  const body = about.requestBody?.content?.["application/json"]?.schema;
  const answers = Object.entries(about.responses).flatMap(([status, answer]) => {
    const kinds = Object.entries(answer.content ?? { "": {} });
    return kinds.map(([type, { schema }]) => [
      el("dt", {}, el("code", {}, status), " ", el("span", {}, type)),
      el("dd", {}, el("p", {}, answer.description), ...(schema ? inside(schema) : [])),
    ]);
  });
  const curl = `curl ${location.origin}${path}${body ? " -H 'Content-Type: application/json' -d '{…}'" : ""}`;
  return el(
    "details",
    { class: "operation" },
    el("summary", {}, el("b", {}, method.toUpperCase()), el("code", {}, path), el("span", {}, about.summary)),
    el(
      "div",
      {},
      about.description ? el("p", {}, ...inline(about.description)) : null,
      wide("Command", el("code", {}, curl)),
      body ? [el("h3", {}, "Request"), list(body)] : null,
      el("h3", {}, "Answers"),
      el("dl", { class: "fields" }, ...answers.flat()),
    ),
  );
}

/** Why there is nothing to see. */
function failure(error) {
  const status = error.status ? ` (status ${error.status})` : "";
  const key = ["Give its key on ", el("a", { href: "/" }, "the page for chats"), ", which keeps it for this tab, and come back. "];
  return el(
    "p",
    { class: "alert", role: "alert" },
    `The API's description could not be loaded${status}: `,
    ...inline(error.message),
    ". ",
    ...(error.status === 401 ? key : []),
    el("button", { type: "button", class: "quiet", onclick: () => location.reload() }, "Try again"),
  );
}

async function start() {
  // With the key that the page at / keeps, if it has one.
  whole = await get("/openapi.json");
  document.getElementById("version").textContent = whole.info.version;
  docs.append(el("p", { class: "about" }, ...inline(whole.info.description)));
  const tags = new Map();
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags[0];
      tags.set(tag, [...(tags.get(tag) ?? []), operation(path, method, about)]);
    }
  }
  for (const [tag, operations] of tags) docs.append(el("h2", {}, tag), ...operations);
}

start().catch((error) => {
  docs.replaceChildren(failure(error));
  if (!(error instanceof ApiError)) throw error;
});
