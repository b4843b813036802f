// Reads the JSON Schemas of /v1/attention/methods: which control fits a parameter, its range and default.

/** The name of the method that an object's schema describes. */
export function methodName(schema) {
  return schema?.properties?.method?.const;
}

/** The schemas of the methods that a parameter chooses from. */
export function methodsOf(schema) {
  return (schema.oneOf || []).filter((branch) => methodName(branch) !== undefined);
}

/** The control that fits: "method", "object", "choice", "switch", "number", or "json" for everything else. */
export function kindOf(schema) {
  const types = [schema.type].flat();
  if (methodsOf(schema).length > 0) return "method";
  if (types.includes("object") && schema.properties) return "object";
  if (choices(schema).length > 0) return "choice";
  if (types.includes("boolean")) return "switch";
  if (numbers(schema).length > 0) return "number";
  return "json";
}

/** The values of an enumeration, each with its description. */
export function choices(schema) {
  if (schema.enum) return schema.enum.map((value) => ({ value }));
  const branches = schema.oneOf || [];
  const constant = branches.length > 0 && branches.every((branch) => "const" in branch);
  return constant ? branches.map((branch) => ({ value: branch.const, description: branch.description })) : [];
}

/** The word that may stand in a number's place: `auto`. */
export function wordOf(schema) {
  return (schema.anyOf || []).find((branch) => typeof branch.const === "string")?.const;
}

/** The schemas of the numbers that a parameter may be. */
function numbers(schema) {
  const numeric = (s) => [s.type].flat().some((type) => type === "number" || type === "integer");
  const branches = (schema.oneOf || schema.anyOf || []).filter((s) => numeric(s) || "minimum" in s || "maximum" in s);
  if (branches.length > 0) return branches.map((branch) => ({ type: schema.type, ...branch }));
  return numeric(schema) ? [schema] : [];
}

/** What a number's control needs: whole or not, its ends, its step, and the range in words. */
export function rangeOf(schema) {
  const all = numbers(schema);
  const whole = all.every((s) => s.type === "integer");
  const least = Math.min(...all.map((s) => s.minimum ?? s.exclusiveMinimum ?? -Infinity));
  const most = Math.max(...all.map((s) => s.maximum ?? s.exclusiveMaximum ?? Infinity));
  const step = schema.multipleOf ?? (whole ? 1 : null);
  return { whole, least, most, step, words: all.map(words).filter(Boolean).join(", or ") };
}

function words(s) {
  const number = (value) => value.toLocaleString("en");
  const { minimum, exclusiveMinimum: above, maximum, exclusiveMaximum: below } = s;
  const start = above === undefined ? minimum : above;
  const end = below === undefined ? maximum : below;
  const least = start === undefined ? "" : above === undefined ? number(start) : `more than ${number(start)}`;
  const most = end === undefined ? "" : below === undefined ? number(end) : `less than ${number(end)}`;
  const join = above === undefined ? " to " : ", ";
  const span = least && most ? `${least}${join}${most}` : least ? `${least} or more` : most && `up to ${most}`;
  return [s.multipleOf > 1 ? `multiples of ${s.multipleOf},` : "", span].join(" ").trim();
}

/** Whether two JSON values are the same, in whatever order their fields stand. */
export function same(a, b) {
  if (a === b) return true;
  if (typeof a !== "object" || typeof b !== "object" || a === null || b === null) return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((k) => k in b && same(a[k], b[k]));
}

/** A value in a few characters. */
export function show(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
