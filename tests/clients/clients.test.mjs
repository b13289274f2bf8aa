// OpenAI's npm client, unmodified, against a running server: `scripts/serve-clients` starts it and puts its address in
// SERVER.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "../../npm/node_modules/openai/index.mjs";

const client = new OpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "a key", maxRetries: 0 });
const messages = [{ role: "user", content: "Once upon a time there was a dragon." }];
const asked = { model: "story", messages, seed: 3, max_tokens: 200, reasoning_effort: "none" };
const parameters = {
  type: "object", properties: { day: { type: "integer", minimum: 1, maximum: 7 } }, required: ["day"], additionalProperties: false,
};

test("chats are the same whole and streamed", async () => {
  const request = { model: "story", messages, temperature: 0, max_tokens: 12 };
  const whole = await client.chat.completions.create(request);
  let text = "";
  for await (const { choices: [choice] } of await client.chat.completions.create({ ...request, stream: true })) text += choice?.delta.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  const final = await client.chat.completions.stream({ ...request, stream_options: { include_usage: true } }).finalChatCompletion();
  assert.deepEqual([final.choices[0].message.content, final.usage.completion_tokens], [text, 12]);
});

test("tools are run and answers are parsed", async () => {
  const given = [];
  const run = client.chat.completions.runTools({
    ...asked, tool_choice: "required", parallel_tool_calls: false,
    tools: [{ type: "function", function: { name: "sun", description: "Whether it shines.", parameters, parse: JSON.parse, function: (value) => given.push(value) && "yes" } }],
  }, { maxChatCompletions: 2 });
  await run.done();
  assert.ok(given.length >= 1 && given.every(({ day }) => day >= 1 && day <= 7), JSON.stringify(given));
  const format = { type: "json_schema", json_schema: { name: "sun", strict: true, schema: parameters } };
  const { choices: [{ message }] } = await client.chat.completions.parse({ ...asked, response_format: format });
  assert.ok(JSON.parse(message.content).day >= 1);
});

test("responses are streamed", async () => {
  const stream = client.responses.stream({ model: "story", input: "A dragon", max_output_tokens: 12, temperature: 0 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  const final = await stream.finalResponse();
  assert.deepEqual([final.output_text, final.status], [text, "incomplete"]);
});

test("vectors, models, errors and aborts", async () => {
  const { data } = await client.embeddings.create({ model: "nomic", input: ["a", "b"] });
  assert.equal(data.length, 2);
  assert.deepEqual((await client.models.list()).data.map(({ id }) => id), ["story", "nomic", "bert", "pictures", "whisper"]);
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.chat.completions.create({ ...asked, model: "none" }), OpenAI.NotFoundError);
  await assert.rejects(new OpenAI({ baseURL: client.baseURL, apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
  for await (const _ of stream) break;
  const ending = new AbortController();
  const answer = client.chat.completions.create({ ...asked, max_tokens: 400 }, { signal: ending.signal });
  ending.abort();
  await assert.rejects(answer, OpenAI.APIUserAbortError);
});
