// The official client for Node against a running server, whose address is in TAPER_URL.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.TAPER_URL + "/v1", apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Name the capital city of France in one word." }];

test("a chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24 });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a stream says the same as an answer in one piece, and ends with its usage", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 24 };
  const whole = await client.chat.completions.create(body);
  const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
  let [text, usages, finish] = ["", [], null];
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
    if (chunk.usage) usages.push(chunk.usage);
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(finish, "stop");
  assert.equal(usages.length, 1);
  assert.equal(usages[0].completion_tokens, whole.usage.completion_tokens);
});

test("the client's own stream helper puts the pieces together", async () => {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 24 });
  const answer = await stream.finalChatCompletion();
  assert.match(answer.choices[0].message.content, /Paris/);
});

test("attention is a field of the request", async () => {
  const attention = { decode: { method: "vattention", epsilon: 0.1, delta: 0.1 }, audit: true, trace: true };
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 4, attention });
  const used = answer.usage.attention;
  assert.equal(used.decode.method, "vattention");
  assert.ok(used.decode.audit.heads > 0);
  assert.equal(used.trace.prefill.density.length, used.trace.layers);
});

test("a misspelt knob is a BadRequestError that says what was meant", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, epsilonn: 0.1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.match(error.message, /epsilon/);
    assert.equal(error.param, "epsilonn");
    return true;
  });
});

test("a stream that is left stops the work", async () => {
  const body = { model, messages, max_tokens: 400, ignore_eos: true, stream: true };
  const stream = await client.chat.completions.create(body);
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) break;
  }
  stream.controller.abort();
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24 });
  assert.match(answer.choices[0].message.content, /Paris/);
});

test("functions are called", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city", parameters } }];
  const answer = await client.chat.completions.create({
    model, messages: [{ role: "user", content: "How is the weather in Paris?" }], tools, tool_choice: "required", max_tokens: 60, temperature: 0,
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
});

test("an answer that must fit a schema fits it", async () => {
  const schema = { type: "object", properties: { city: { type: "string", enum: ["Paris", "Rome"] } }, required: ["city"] };
  const answer = await client.chat.completions.create({
    model, messages, temperature: 0, max_tokens: 60, response_format: { type: "json_schema", json_schema: { name: "city", schema } },
  });
  assert.ok(["Paris", "Rome"].includes(JSON.parse(answer.choices[0].message.content).city));
});

test("responses, whole and as events", async () => {
  const body = { model, input: "Name the capital city of France in one word.", temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(body);
  assert.match(whole.output_text, /Paris/);
  let [text, last] = ["", null];
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(last.type, "response.completed");
  assert.equal(text, whole.output_text);
});

test("text completions and embeddings", async () => {
  const text = await client.completions.create({ model, prompt: ["One, two,", "Monday, Tuesday,"], max_tokens: 4, temperature: 0 });
  assert.equal(text.choices.length, 2);
  const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
  assert.equal(data.length, 2);
  assert.ok(Math.abs(Math.hypot(...data[0].embedding) - 1) < 1e-3);
});
