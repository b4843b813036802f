// Talks with the server that served this page: JSON, streamed answers, errors, and the API key if one is wanted.

const KEY = "taper-api-key";

/** An error as the server words it: `param` is the path of the field at fault, if one is. */
export class ApiError extends Error {
  constructor(status, { message, param } = {}) {
    super(message || `the server answered with status ${status}`);
    this.status = status;
    this.param = param || null;
  }
}

/** The key lives as long as the tab; where nothing may be stored, as long as the page. */
let kept = "";
export const key = {
  get: () => {
    try {
      return sessionStorage.getItem(KEY) || "";
    } catch {
      return kept;
    }
  },
  set: (text) => {
    kept = text;
    try {
      if (text) sessionStorage.setItem(KEY, text);
      else sessionStorage.removeItem(KEY);
    } catch {
      // It is kept here alone.
    }
  },
};

// Asks a person for a key, says whether there is a new one; main.js sets it.
let askForKey = async () => false;

export function onKeyWanted(ask) {
  askForKey = ask;
}

async function send(path, init = {}) {
  for (;;) {
    const used = key.get();
    const headers = { ...init.headers };
    if (init.body) headers["Content-Type"] = "application/json";
    if (used) headers.Authorization = `Bearer ${used}`;
    let response;
    try {
      response = await fetch(path, { ...init, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "the server cannot be reached" });
    }
    if (response.ok) return response;
    const error = await refusal(response);
    // Another request may have asked meanwhile.
    if (response.status === 401 && (key.get() !== used || (await askForKey(error.message)))) continue;
    throw error;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, body.error);
  const wait = response.headers.get("Retry-After");
  if (wait) error.message += ` (try again in ${wait} s)`;
  return error;
}

export async function get(path) {
  return (await send(path)).json();
}

export async function post(path, body, signal) {
  return (await send(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

/** Yields the chunks of a streamed answer; an error inside the stream is thrown. */
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code || 500, chunk.error);
    yield chunk;
  }
  throw new ApiError(0, { message: "the answer broke off before its end" });
}

/** The data of server-sent events. Comments, which keep connections open, have none. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const lines = buffer.split(/\r?\n/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
