// The shape of OpenAI's chat completions, over a model that says what it is told to.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createChatCompletion, createClient } from "../build/index.js";

/** Answers in these pieces, texts or more than that, and remembers what it was asked, and what was stopped before its end. */
function fakeModel(given, stopReason = "eos") {
  const asked = [];
  const stopped = [];
  const pieces = given.map((piece) => typeof piece === "string" ? { text: piece } : { text: "", ...piece });
  const thinking = pieces.map((piece) => piece.thinking ?? "").join("");
  const toolCalls = pieces.flatMap((piece) => piece.toolCalls ?? []);
  const generation = (at) => {
    const stop = () => stopped.push(at);
    return {
      result: Promise.resolve({ stopReason, promptTokens: 7, cachedTokens: 2, generatedTokens: pieces.length, thinking, toolCalls }),
      stop,
      async *[Symbol.asyncIterator]() {
        let isOver = false;
        try {
          for (const [id, piece] of pieces.entries()) {
            if (stopped.includes(at)) return;
            yield { id, ...piece };
          }
          isOver = true;
        } finally {
          if (!isOver) stop();
        }
      },
    };
  };
  return {
    asked,
    stopped,
    info: { name: "fake" },
    chat(messages, options) {
      asked.push({ messages, options });
      return generation(asked.length - 1);
    },
    generate(prompt, options) {
      asked.push({ prompt, options });
      return generation(asked.length - 1);
    },
    detokenize: async (ids) => `<${ids.join()}>`,
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
  await refused({ messages: [{ role: "user", content: [{ type: "input_audio" }] }] }, /messages\[0\]\.content\[0\] has the type input_audio; only text and image_url/);
});

test("images are parts of a message, and are named where they are none", async () => {
  const model = fakeModel(["."]);
  const content = [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA", detail: "low" } }, { type: "text", text: "a" }];
  await createChatCompletion(model, { messages: [{ role: "user", content }] });
  assert.deepEqual(model.asked[0].messages, [{ role: "user", content }]);
  await assert.rejects(createChatCompletion(fakeModel([]), { messages: [{ role: "user", content: [content[1], { type: "image_url" }] }] }), {
    code: "option", param: "messages[0].content[1].image_url.url", message: /image_url\.url is missing, expected an address/,
  });
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
  await refused({ repeat_penalty: 101 }, /repeat_penalty is 101, expected a number from 0 to 100/);
  await refused({ repeat_last_n: 0.5 }, /repeat_last_n is 0.5, expected a whole number from 0 to 4294967295/);
  await refused({ logprobs: true, top_logprobs: 21 }, /top_logprobs is 21/);
  await refused({ top_logprobs: 2 }, /top_logprobs is 2, expected none unless logprobs is true/);
  await refused({ logprobs: 3 }, /logprobs is 3/);
  await refused({ logit_bias: { 5: 101 } }, /logit_bias\["5"\] is 101/);
  await refused({ logit_bias: 5 }, /logit_bias is 5/);
  await refused({ logit_bias: [[5, 1]] }, /logit_bias is \[\[5,1\]\], expected an object/);
  await refused({ logit_bias: { x: 1 } }, /logit_bias has the key "x"/);
  await refused({ temperature: 2.1 }, /temperature is 2.1, expected a number from 0 to 2/);
  await refused({ top_p: -0.1 }, /top_p is -0.1/);
  await refused({ seed: 1.5 }, /seed is 1.5, expected a whole number/);
  await refused({ seed: 2 ** 53 - 2, n: 3 }, /seed is 9007199254740990, expected a whole number from 0 to 9007199254740989/);
  await refused({ stop: ["a", ""] }, /stop is \["a",""\]/);
  await refused({ stream_options: { include_usage: 1 } }, /stream_options.include_usage is 1/);
  await refused({ tool_choice: "any", tools: [tool] }, /tool_choice is "any"/);
  await refused({ tools: [{ type: "function" }] }, /tools\[0\].function.name is missing/);
  await refused({ messages: undefined }, /messages is missing/);
  await refused({ messages: [null] }, /messages\[0\] is null/);
  await refused({ messages: [{ role: "user" }] }, /messages\[0\].content is missing/);
  await refused({ messages: [{ role: "assistant", tool_calls: [{ function: { name: "a", arguments: "{" } }] }] }, /messages\[0\].tool_calls\[0\].function.arguments/);
  await refused({ response_format: { type: "xml" } }, /response_format is/);
  await refused({ reasoning_effort: "much" }, /reasoning_effort is "much"/);
});

const likely = (id, text, logprob) => ({ id, text, logprob, bytes: [...Buffer.from(text)] });
const shown = ({ text, logprob, bytes }) => ({ token: text, logprob, bytes });

test("penalties and biases are passed on, and probabilities come back in OpenAI's shape, without the token that ends the answer", async () => {
  // The second token's text comes with the third one's.
  const pieces = ["Good", "", " day", ""].map((text, at) => ({
    text, logprob: likely(at, text, -at), topLogprobs: [likely(at, text, -at), likely(9, "other", -5)], held: [0, 1, 0, 1][at],
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
  assert.deepEqual(chunks.map(({ delta }) => delta.content), ["", "Good", " day", undefined]);
  assert.deepEqual(chunks.flatMap(({ logprobs }) => logprobs?.content ?? []), content);
  // One that ended otherwise ends in a token of the text.
  const cut = await createChatCompletion(fakeModel(pieces, "max_tokens"), request);
  assert.equal(cut.choices[0].logprobs.content.length, 4);
  // Of one that ended at a stop text, the tokens without text are that text's.
  const stopped = fakeModel([pieces[0], pieces[1]], "stop_text");
  assert.deepEqual((await createChatCompletion(stopped, request)).choices[0].logprobs.content, content.slice(0, 1));
  const told = [];
  for await (const { choices: [chunk] } of await createChatCompletion(stopped, { ...request, stream: true })) told.push(...chunk.logprobs?.content ?? []);
  assert.deepEqual(told, content.slice(0, 1));
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

test("how much a model thinks", async () => {
  const model = fakeModel([]);
  for (const reasoning_effort of ["none", "high", null]) await createChatCompletion(model, { messages, reasoning_effort });
  assert.deepEqual(model.asked.map(({ options: { thinking, templateVariables } }) => [thinking, templateVariables]), [
    [false, undefined], [undefined, { reasoning_effort: "high" }], [undefined, undefined],
  ]);
});

test("fields that ask for nothing are fine", async () => {
  await createChatCompletion(fakeModel([]), {
    messages, tools: [], n: 1, frequency_penalty: 0, presence_penalty: null, response_format: { type: "text" }, logprobs: false, user: "me",
  });
});

test("calls of several choices have different ids, and those that a conversation has are not given again", async () => {
  const other = { ...call, id: "own" };
  const request = { messages, tools: [tool], n: 3 };
  const model = fakeModel([{ toolCalls: [call, other] }]);
  const { choices } = await createChatCompletion(model, request);
  const ids = choices.flatMap(({ message }) => message.tool_calls.map(({ id }) => id));
  assert.deepEqual(ids, ["call00100", "own", "call00101", "call00102", "call00103", "call00104"]);
  const streamed = [];
  for await (const { choices: [{ delta }] } of await createChatCompletion(model, { ...request, stream: true })) {
    streamed.push(...(delta.tool_calls ?? []).map(({ id }) => id));
  }
  assert.deepEqual(streamed, ids);
});

test("a stream that is left at any chunk, or never read, ends its generation and begins no other", async () => {
  for (const nth of [1, 2, 3]) {
    const model = fakeModel(["a", "b", "c", "d"]);
    let n = 0;
    for await (const _ of await createChatCompletion(model, { messages, n: 3, stream: true })) if ((n += 1) === nth) break;
    assert.deepEqual([model.asked.length, model.stopped.includes(0)], [1, true], `left at chunk ${nth}`);
  }
  const unread = fakeModel(["a", "b"]);
  await (await createChatCompletion(unread, { messages, stream: true }))[Symbol.asyncIterator]().return();
  assert.deepEqual([unread.asked.length, unread.stopped.includes(0)], [1, true]);
  const returned = await createChatCompletion(fakeModel(["a"]), { messages, stream: true });
  await returned.return();
  assert.deepEqual(await returned.next(), { done: true, value: undefined });
  // What is waited for when it is left comes to its end, too.
  let stop;
  const stopping = new Promise((resolve) => stop = resolve);
  const slow = { ...fakeModel([]), chat: () => ({
    stop, result: stopping.then(() => ({ stopReason: "cancelled", toolCalls: [] })),
    async *[Symbol.asyncIterator]() {
      yield { id: 1, text: "a" };
      await stopping;
    },
  }) };
  const waiting = await createChatCompletion(slow, { messages, stream: true });
  for (const text of ["", "a"]) assert.equal((await waiting.next()).value.choices[0].delta.content, text);
  const [last] = await Promise.all([waiting.next(), waiting.return()]);
  assert.equal(last.value.choices[0].finish_reason, "stop");
  const aborted = fakeModel(["a", "b", "c", "d"]);
  const stream = await createChatCompletion(aborted, { messages, n: 2, stream: true });
  const texts = [];
  for await (const { choices: [{ delta }] } of stream) {
    texts.push(delta.content);
    if (delta.content === "b") stream.controller.abort();
  }
  assert.deepEqual([texts, aborted.asked.length], [["", "a", "b", undefined], 1]);
});

test("what is wrong with a generation is known before the stream is there", async () => {
  const error = new Error("no template");
  const model = { ...fakeModel([]), chat: () => ({ result: new Promise(() => {}), stop() {}, async *[Symbol.asyncIterator]() { throw error; } }) };
  await assert.rejects(createChatCompletion(model, { messages, stream: true }), error);
});

const clientOf = (model) => createClient({ models: { m: model } });

test("plain texts: prompts and choices in order, echo, offsets of tokens", async () => {
  const model = fakeModel(["Good", " day"], "max_tokens");
  const { completions } = clientOf(model);
  const answer = await completions.create({ model: "m", prompt: ["One", "Two"], n: 2, seed: 5, echo: true });
  assert.match(answer.id, /^cmpl-\w+$/);
  assert.equal(answer.object, "text_completion");
  assert.deepEqual(answer.choices.map(({ index, text, finish_reason, logprobs }) => [index, text, finish_reason, logprobs]), [
    [0, "OneGood day", "length", null], [1, "OneGood day", "length", null], [2, "TwoGood day", "length", null], [3, "TwoGood day", "length", null],
  ]);
  assert.deepEqual(answer.usage, { prompt_tokens: 14, completion_tokens: 8, total_tokens: 22, prompt_tokens_details: { cached_tokens: 4 } });
  assert.deepEqual(model.asked.map(({ prompt, options: { seed, maxTokens } }) => [prompt, seed, maxTokens]), [["One", 5, 16], ["One", 6, 16], ["Two", 5, 16], ["Two", 6, 16]]);
  const tokens = await completions.create({ model: "m", prompt: [[1, 2], [3]], echo: true, max_tokens: 1 });
  assert.deepEqual(tokens.choices.map(({ text }) => text), ["<1,2>Good day", "<3>Good day"]);
  const one = await completions.create({ model: "m", prompt: [4, 5] });
  assert.deepEqual([one.choices.length, model.asked.at(-1).prompt], [1, [4, 5]]);
  const chunks = [];
  for await (const chunk of await completions.create({ model: "m", prompt: ["One", "Two"], echo: true, stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
  assert.deepEqual(chunks.map(({ choices: [choice] }) => [choice?.index, choice?.text, choice?.finish_reason]), [
    ...["One", "Two"].flatMap((prompt, index) => [[index, `${prompt}Good`, null], [index, " day", null], [index, "", "length"]]), [undefined, undefined, undefined],
  ]);
  assert.equal(chunks.at(-1).usage.total_tokens, 18);
  // A token that is half a character begins where the character does.
  const halves = ["a", "\u00e9", "b"].flatMap((text) => [...Buffer.from(text)]).map((byte, id) => ({
    text: "", held: 0, logprob: { id, text: "?", logprob: -id, bytes: [byte] }, topLogprobs: [{ id: 9, text: "x", logprob: -1, bytes: [120] }],
  }));
  const { choices: [{ logprobs }] } = await clientOf(fakeModel(halves, "max_tokens")).completions.create({ model: "m", prompt: "a", logprobs: 1 });
  assert.deepEqual(logprobs.text_offset, [0, 1, 1, 2]);
  assert.deepEqual([logprobs.tokens.length, logprobs.token_logprobs, logprobs.top_logprobs[0]], [4, [-0, -1, -2, -3], { x: -1 }]);
  for (const extra of [{ suffix: "x" }, { best_of: 2 }, { echo: true, logprobs: 1 }]) {
    await assert.rejects(completions.create({ model: "m", prompt: "a", ...extra }), { code: "unsupported", param: Object.keys(extra).at(-1) });
  }
  for (const prompt of [undefined, null, 5, [], [[]], [1.5], ["a", [1]], [-1], {}]) {
    const asked = completions.create({ model: "m", prompt });
    if (Array.isArray(prompt) && prompt[0] === "a") await asked;
    else await assert.rejects(asked, { code: "option", param: "prompt" }, JSON.stringify(prompt));
  }
});

/** Its vectors are the numbers of letters, and its tokens letters. */
const encoder = {
  info: { name: "fake", dims: 2 },
  embed: async (texts, { dimensions = 2 }) => texts.map((text) => Float32Array.of(text.length, 0.1).slice(0, dimensions)),
  tokenize: async (text) => [...text],
};

test("vectors as numbers and as bytes, with the tokens of all texts", async () => {
  const { embeddings } = clientOf(encoder);
  const third = Math.fround(0.1);
  const answer = await embeddings.create({ model: "m", input: ["abc", "de"] });
  assert.deepEqual(answer, {
    object: "list", model: "m", usage: { prompt_tokens: 5, total_tokens: 5 },
    data: [{ object: "embedding", index: 0, embedding: [3, third] }, { object: "embedding", index: 1, embedding: [2, third] }],
  });
  const { data: [{ embedding }] } = await embeddings.create({ model: "m", input: "abc", encoding_format: "base64", dimensions: 2 });
  assert.deepEqual([...new Float32Array(Uint8Array.from(Buffer.from(embedding, "base64")).buffer)], [3, third]);
  const refused = (extra, code, param) => assert.rejects(embeddings.create({ model: "m", input: "a", ...extra }), { code, param });
  const short = await embeddings.create({ model: "m", input: "abc", dimensions: 1 });
  assert.deepEqual(short.data[0].embedding, [3]);
  await refused({ dimensions: 3 }, "option", "dimensions");
  await refused({ dimensions: "2" }, "option", "dimensions");
  await refused({ input: [1, 2] }, "unsupported", "input");
  await refused({ input: [[1], [2]] }, "unsupported", "input");
  for (const input of [undefined, null, [], ["a", 1], {}, Array(2049).fill("a")]) await refused({ input }, "option", "input");
  await refused({ encoding_format: "hex" }, "option", "encoding_format");
});

test("a client finds models by their names, also those that come later, and nothing else", async () => {
  const models = { m: fakeModel(["Hi"]), e: encoder };
  const client = createClient({ models });
  assert.deepEqual((await client.models.list()).data.map(({ id }) => id), ["m", "e"]);
  assert.deepEqual(await client.models.retrieve("e"), (await client.models.list()).data[1]);
  assert.equal((await client.chat.completions.create({ model: "m", messages })).model, "m");
  const refused = (work, code) => assert.rejects(work, { name: "TilewrightError", code, param: "model" });
  for (const model of ["later", "toString", "__proto__", ""]) await refused(client.chat.completions.create({ model, messages }), "model_not_found");
  await refused(client.models.retrieve("later"), "model_not_found");
  for (const model of [undefined, null, 5]) await refused(client.completions.create({ model, prompt: "a" }), "option");
  await refused(client.chat.completions.create({ model: "e", messages }), "option");
  await refused(client.embeddings.create({ model: "m", input: "a" }), "option");
  models.later = fakeModel(["Hi"]);
  assert.equal((await client.chat.completions.create({ model: "later", messages })).choices[0].message.content, "Hi");
  for (const models of [undefined, null, { m: {} }, { m: 5 }, { m: null }]) assert.throws(() => createClient({ models }), { code: "option" });
});

const asking = (client, path, body, init = {}) => client.fetch(`http://local/v1/${path}`, {
  method: "POST", headers: { "content-type": "application/json" }, body: typeof body === "string" ? body : JSON.stringify(body), ...init,
});

test("fetch: routes, errors with their statuses, and streams as events", async () => {
  const client = createClient({ models: { "a/b c": fakeModel(["Hi"]), e: encoder } });
  const whole = await asking(client, "chat/completions", { model: "a/b c", messages });
  assert.deepEqual([whole.status, whole.headers.get("content-type"), (await whole.json()).choices[0].message.content], [200, "application/json", "Hi"]);
  const stream = await asking(client, "chat/completions", { model: "a/b c", messages, stream: true });
  assert.equal(stream.headers.get("content-type"), "text/event-stream");
  const events = (await stream.text()).split("\n\n");
  assert.deepEqual([events.length, ...events.slice(-2)], [5, "data: [DONE]", ""]);
  assert.equal(JSON.parse(events[1].replace("data: ", "")).choices[0].delta.content, "Hi");
  assert.equal((await (await client.fetch(new Request("https://x.test/openai/v1/models"))).json()).data.length, 2);
  assert.equal((await (await client.fetch(new URL("http://local/v1/models/a%2Fb%20c"))).json()).id, "a/b c");
  assert.equal((await (await asking(client, "embeddings", { model: "e", input: "ab" })).json()).data[0].embedding[0], 2);
  const failing = async (response, status, code, param = null) => {
    const given = await response;
    const { error } = await given.json();
    assert.deepEqual([given.status, error.code, error.param], [status, code, param], error.message);
    assert.ok(error.message.length > 0 && given.headers.get("x-should-retry") === "false");
    return error;
  };
  const chat = (extra, init) => asking(client, "chat/completions", { model: "a/b c", messages, ...extra }, init);
  await failing(chat({ model: "gpt" }), 404, "model_not_found", "model");
  assert.equal((await failing(chat({ temperature: 3 }), 400, "invalid_value", "temperature")).type, "invalid_request_error");
  await failing(chat({ audio: {} }), 400, "unsupported_value", "audio");
  for (const body of ["null", "[]", "5"]) await failing(asking(client, "chat/completions", body), 400, "invalid_value", "model");
  await failing(asking(client, "chat/completions", "{"), 400, "invalid_json");
  await failing(client.fetch("http://local/v1/models/%E0%A4%A"), 404, "model_not_found", "model");
  await failing(client.fetch("http://local/v1/files"), 404, "unknown_url");
  await failing(client.fetch("http://local/chat/completions"), 404, "unknown_url");
  await failing(client.fetch("http://local/v1/chat/completions"), 405, "method_not_allowed");
  const form = new FormData();
  form.set("file", new Blob(["x"]));
  await failing(client.fetch("http://local/v1/embeddings", { method: "POST", body: form }), 415, "unsupported_media_type");
  const failed = { info: { name: "x" }, chat() { throw new Error("a fault"); } };
  assert.equal((await failing(asking(clientOf(failed), "chat/completions", { model: "m", messages }), 500, "internal")).type, "server_error");
  // An error after the first chunk is an event.
  const later = { ...fakeModel([]), chat: () => ({ result: new Promise(() => {}), stop() {}, async *[Symbol.asyncIterator]() { yield { id: 1, text: "a" }; throw new Error("late"); } }) };
  const broken = (await (await asking(clientOf(later), "chat/completions", { model: "m", messages, stream: true })).text()).trim().split("\n\n");
  assert.equal(JSON.parse(broken.at(-1).replace("data: ", "")).error.message, "late");
  // Whoever reads no further has the generation stopped.
  const left = fakeModel(["a", "b", "c"]);
  const reader = (await asking(clientOf(left), "chat/completions", { model: "m", messages, stream: true })).body.getReader();
  await reader.read();
  await reader.cancel();
  assert.deepEqual(left.stopped.slice(0, 1), [0]);
  await assert.rejects(chat({}, { signal: AbortSignal.abort(new Error("enough")) }), /enough/);
});
