// The shape of OpenAI's chat completions, over a model that says what it is told to.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createChatCompletion } from "../build/openai.js";

/** Answers in these pieces, texts or more than that, and remembers what it was asked. */
function fakeModel(given, stopReason = "eos") {
  const asked = [];
  const pieces = given.map((piece) => typeof piece === "string" ? { text: piece } : { text: "", ...piece });
  const thinking = pieces.map((piece) => piece.thinking ?? "").join("");
  const toolCalls = pieces.flatMap((piece) => piece.toolCalls ?? []);
  return {
    asked,
    info: { name: "fake" },
    chat(messages, options) {
      asked.push({ messages, options });
      return {
        result: Promise.resolve({ stopReason, promptTokens: 7, cachedTokens: 2, generatedTokens: pieces.length, thinking, toolCalls }),
        text: async () => pieces.map(({ text }) => text).join(""),
        async *[Symbol.asyncIterator]() {
          for (const [id, piece] of pieces.entries()) yield { id, ...piece };
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
  await refused({ something_new: 1 }, /something_new/);
  await refused({ messages: [{ role: "user", content: [{ type: "image_url" }] }] }, /image_url/);
});

test("values out of range are errors that name the field, before the model is asked", async () => {
  const refused = async (extra, pattern) => {
    const model = fakeModel([]);
    for (const stream of [false, true]) {
      await assert.rejects(createChatCompletion(model, { messages, stream, ...extra }), { name: "TilewrightError", code: "option", message: pattern });
    }
    assert.equal(model.asked.length, 0);
  };
  for (const n of [0, -1, 1.5, 129, "2"]) await refused({ n }, /n is .*, expected a whole number from 1 to 128/);
  await refused({ presence_penalty: 2.1 }, /presence_penalty is 2.1, expected a number from -2 to 2/);
  await refused({ frequency_penalty: "1" }, /frequency_penalty is "1"/);
  await refused({ logprobs: true, top_logprobs: 21 }, /top_logprobs is 21/);
  await refused({ top_logprobs: 2 }, /top_logprobs is 2, expected none where logprobs is not true/);
  await refused({ logprobs: 3 }, /logprobs is 3/);
  await refused({ logit_bias: { 5: 101 } }, /logit_bias\["5"\] is 101/);
  await refused({ logit_bias: 5 }, /logit_bias is 5/);
});

const likely = (id, text, logprob) => ({ id, text, logprob, bytes: [...Buffer.from(text)] });
const shown = ({ text, logprob, bytes }) => ({ token: text, logprob, bytes });

test("penalties and biases are passed on, and probabilities come back in OpenAI's shape, without the token that ends the answer", async () => {
  const pieces = ["Good", "", " day", ""].map((text, at) => ({
    text, logprob: likely(at, text, -at), topLogprobs: [likely(at, text, -at), likely(9, "other", -5)],
  }));
  const model = fakeModel(pieces);
  const request = { messages, logprobs: true, top_logprobs: 2, presence_penalty: 0.5, frequency_penalty: -1, logit_bias: { 3: -100 } };
  const { choices: [choice] } = await createChatCompletion(model, request);
  const content = pieces.slice(0, 3).map(({ logprob, topLogprobs }) => ({ ...shown(logprob), top_logprobs: topLogprobs.map(shown) }));
  assert.deepEqual(choice.logprobs, { content, refusal: null });
  const { logprobs, presencePenalty, frequencyPenalty, logitBias } = model.asked[0].options;
  assert.deepEqual({ logprobs, presencePenalty, frequencyPenalty, logitBias }, { logprobs: 2, presencePenalty: 0.5, frequencyPenalty: -1, logitBias: { 3: -100 } });
  const chunks = [];
  for await (const { choices: [chunk] } of await createChatCompletion(model, { ...request, stream: true })) chunks.push(chunk);
  assert.deepEqual(chunks.map(({ delta }) => delta.content), ["", "Good", "", " day", undefined]);
  assert.deepEqual(chunks.flatMap(({ logprobs }) => logprobs?.content ?? []), content);
  // One that ended otherwise ends in a token of the text.
  const cut = await createChatCompletion(fakeModel(pieces, "max_tokens"), request);
  assert.equal(cut.choices[0].logprobs.content.length, 4);
  await createChatCompletion(model, { messages });
  assert.equal(model.asked.at(-1).options.logprobs, undefined);
});

test("several choices come one after the other, with seeds in a row, and their tokens are added up", async () => {
  const model = fakeModel(["Good", " day"]);
  const { choices, usage } = await createChatCompletion(model, { messages, n: 3, seed: 5 });
  assert.deepEqual(choices.map(({ index, message: { content } }) => [index, content]), [[0, "Good day"], [1, "Good day"], [2, "Good day"]]);
  assert.deepEqual(model.asked.map(({ options: { seed } }) => seed), [5, 6, 7]);
  assert.deepEqual(usage, { prompt_tokens: 7, completion_tokens: 6, total_tokens: 13, prompt_tokens_details: { cached_tokens: 2 } });
  await createChatCompletion(model, { messages, n: 2 });
  assert.deepEqual(model.asked.slice(3).map(({ options: { seed } }) => seed), [undefined, undefined]);
  const chunks = [];
  for await (const chunk of await createChatCompletion(model, { messages, n: 2, stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
  assert.deepEqual(chunks.map(({ choices: [choice] }) => [choice?.index, choice?.delta.content, choice?.finish_reason]), [
    ...[0, 1].flatMap((index) => [[index, "", null], [index, "Good", null], [index, " day", null], [index, undefined, "stop"]]),
    [undefined, undefined, undefined],
  ]);
  assert.equal(chunks.at(-1).usage.completion_tokens, 4);
});

const call = { type: "function", id: "call00100", function: { name: "sun", arguments: { day: 2 } } };
const tool = { type: "function", function: { name: "sun" } };

test("tools and what is to be matched are passed on, thoughts and calls come back", async () => {
  const model = fakeModel([{ thinking: "Sun?" }, "Let me see.", { toolCalls: [call] }]);
  const schema = { type: "boolean" };
  const request = { messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, response_format: { type: "json_schema", json_schema: { name: "x", schema } } };
  const { choices: [{ message, finish_reason }] } = await createChatCompletion(model, request);
  const wire = { ...call, function: { name: "sun", arguments: '{"day":2}' } };
  assert.deepEqual(message, { role: "assistant", content: "Let me see.", refusal: null, tool_calls: [wire], reasoning_content: "Sun?" });
  assert.equal(finish_reason, "tool_calls");
  const { tools, toolChoice, parallelToolCalls, responseFormat } = model.asked[0].options;
  assert.deepEqual({ tools, toolChoice, parallelToolCalls, responseFormat }, { tools: [tool], toolChoice: "required", parallelToolCalls: false, responseFormat: { type: "json_schema", schema } });
  const deltas = [];
  for await (const chunk of await createChatCompletion(model, { ...request, stream: true })) deltas.push(chunk.choices[0]);
  assert.deepEqual(deltas.map(({ delta }) => delta), [
    { role: "assistant", content: "" }, { reasoning_content: "Sun?" }, { content: "Let me see." }, { tool_calls: [{ index: 0, ...wire }] }, {},
  ]);
  assert.equal(deltas.at(-1).finish_reason, "tool_calls");
  // The answer goes back to templates with its arguments as an object.
  await createChatCompletion(model, { messages: [...messages, { ...message, content: null }, { role: "tool", tool_call_id: "call00100", content: "yes" }] });
  assert.deepEqual(model.asked[2].messages.slice(1), [
    { role: "assistant", content: "", tool_calls: [call] }, { role: "tool", content: "yes", tool_call_id: "call00100" },
  ]);
  await assert.rejects(createChatCompletion(model, { messages, response_format: { type: "json_schema" } }), { code: "option" });
});

test("fields that ask for nothing are fine", async () => {
  await createChatCompletion(fakeModel([]), {
    messages, tools: [], n: 1, frequency_penalty: 0, presence_penalty: null, response_format: { type: "text" }, logprobs: false, user: "me",
  });
});
