// The shape of OpenAI's chat completions, over a model that says what it is told to.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createChatCompletion } from "../dist/openai.js";

/** Answers in these pieces and remembers what it was asked. */
function fakeModel(pieces, stopReason = "eos") {
  const asked = [];
  return {
    asked,
    info: { name: "fake" },
    chat(messages, options) {
      asked.push({ messages, options });
      return {
        result: Promise.resolve({ stopReason, promptTokens: 7, cachedTokens: 2, generatedTokens: pieces.length }),
        text: async () => pieces.join(""),
        async *[Symbol.asyncIterator]() {
          for (const [id, text] of pieces.entries()) yield { id, text };
        },
      };
    },
  };
}

const messages = [{ role: "user", content: "Hello!" }];

test("a whole answer", async () => {
  const model = fakeModel(["Good", " day"]);
  const answer = await createChatCompletion(model, { messages, model: "gpt-x", max_tokens: 5, stop: "END", seed: 3, top_p: 0.5 });
  assert.match(answer.id, /^chatcmpl-\w+$/);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.model, "gpt-x");
  assert.ok(Math.abs(answer.created - Date.now() / 1000) < 5);
  assert.deepEqual(answer.choices, [
    { index: 0, message: { role: "assistant", content: "Good day", refusal: null }, finish_reason: "stop", logprobs: null },
  ]);
  assert.deepEqual(answer.usage, {
    prompt_tokens: 7, completion_tokens: 2, total_tokens: 9, prompt_tokens_details: { cached_tokens: 2 },
  });
  const { maxTokens, stop, seed, topP, temperature } = model.asked[0].options;
  assert.deepEqual({ maxTokens, stop, seed, topP, temperature }, { maxTokens: 5, stop: ["END"], seed: 3, topP: 0.5, temperature: 1 });
});

test("a streamed answer: role, pieces, reason, usage", async () => {
  const chunks = [];
  const request = { messages, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await createChatCompletion(fakeModel(["Good", "", " day"], "max_tokens"), request)) chunks.push(chunk);
  assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.id === chunks[0].id));
  assert.deepEqual(chunks.map((chunk) => chunk.choices[0]?.delta), [
    { role: "assistant", content: "" }, { content: "Good" }, { content: " day" }, {}, undefined,
  ]);
  assert.deepEqual(chunks.map((chunk) => chunk.choices[0]?.finish_reason), [null, null, null, "length", undefined]);
  assert.deepEqual(chunks.map((chunk) => chunk.usage?.total_tokens), [undefined, undefined, undefined, undefined, 10]);
});

test("an empty answer has its role all the same", async () => {
  const chunks = [];
  for await (const chunk of await createChatCompletion(fakeModel([]), { messages, stream: true })) chunks.push(chunk);
  assert.deepEqual(chunks.map((chunk) => chunk.choices[0].delta), [{ role: "assistant", content: "" }, {}]);
  assert.ok(chunks.every((chunk) => !("usage" in chunk)));
});

test("parts of text are joined, and the developer is the system", async () => {
  const model = fakeModel(["."]);
  const parts = [{ type: "text", text: "a" }, { type: "text", text: "b" }];
  await createChatCompletion(model, { messages: [{ role: "developer", content: parts }] });
  assert.deepEqual(model.asked[0].messages, [{ role: "system", content: "ab" }]);
});

test("what is not supported is an error that names it", async () => {
  const refused = (extra, pattern) => assert.rejects(
    createChatCompletion(fakeModel([]), { messages, ...extra }), { name: "TilewrightError", code: "unsupported", message: pattern });
  await refused({ tools: [{ type: "function" }] }, /tools/);
  await refused({ n: 2 }, /n is 2/);
  await refused({ frequency_penalty: 0.5 }, /frequency_penalty/);
  await refused({ response_format: { type: "json_object" } }, /response_format/);
  await refused({ something_new: 1 }, /something_new/);
  await refused({ messages: [{ role: "user", content: [{ type: "image_url" }] }] }, /image_url/);
});

test("fields that ask for nothing are fine", async () => {
  await createChatCompletion(fakeModel([]), {
    messages, tools: [], n: 1, frequency_penalty: 0, presence_penalty: null, response_format: { type: "text" }, logprobs: false, user: "me",
  });
});
