// OpenAI's own npm client, and our compatible API, over local models, in Chromium and in Node.

import assert from "node:assert/strict";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { everywhere, published } from "./places.mjs";
import { repository } from "./server.mjs";
import { withTemplate } from "./template.mjs";
import { tinyEncoder } from "./tensors.mjs";

const TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}";
const messages = [{ role: "user", content: "Once upon a time there was a dragon." }];

/** Arguments of the functions below: the client's modules, and a model with a template. */
const given = (more = {}) => (place) => ({
  openai: place === "Chromium" ? "/openai" : pathToFileURL(join(repository, "npm/node_modules/openai")).href,
  file: withTemplate(TEMPLATE).toString("base64"),
  messages,
  // Node resolves the client's import aliases itself.
  names: place === "Chromium" ? { "#x509-transport-state": "/openai/internal/auth/x509-transport-state.mjs" } : undefined,
  ...typeof more === "function" ? more(place) : more,
});

/**
 * Prefix of each function, because functions reach pages as source: both clients over a model `story`, its
 * generations, and the requests of OpenAI's client. `others` are further models, `changed` options that override every
 * request's.
 */
async function open({ Model, createClient }, { openai, file, names }, { others = {}, changed = {} } = {}) {
  if (names !== undefined) {
    const map = document.createElement("script");
    map.type = "importmap";
    map.textContent = JSON.stringify({ imports: names });
    document.head.append(map);
  }
  const { default: OpenAI } = await import(`${openai}/index.mjs`);
  const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
  const generations = [];
  const watched = (call) => (prompt, options) => {
    const generation = model[call](prompt, { ...options, ...changed });
    generations.push(generation);
    return generation;
  };
  const story = { info: model.info, chat: watched("chat"), generate: watched("generate"), detokenize: (ids) => model.detokenize(ids) };
  const ours = createClient({ models: { story, ...others } });
  const sent = [];
  const fetch = async (url, init) => {
    sent.push({ url, body: init.body === undefined ? undefined : JSON.parse(init.body) });
    return ours.fetch(url, init);
  };
  const theirs = new OpenAI({ apiKey: "local", baseURL: "http://local/v1", dangerouslyAllowBrowser: true, fetch });
  return { OpenAI, model, generations, ours, theirs, sent };
}

const withOpen = (run) => new Function(`return async (tilewright, given) => {
  ${open.toString()}
  return (${run.toString()})(tilewright, given, (options) => open(tilewright, given, options));
}`)();

const clients = (name, run, check, more) => everywhere(`OpenAI's client: ${name}`, withOpen(run), check, given(more));

clients(
  "answers are those of our client and of the model, whole and streamed, with all that decides about tokens",
  async (tilewright, { messages }, open) => {
    const { model, ours, theirs } = await open();
    const request = {
      model: "story", messages, max_tokens: 12, temperature: 1, top_p: 0.9, seed: 7, n: 2, logprobs: true, top_logprobs: 3, frequency_penalty: 0.5,
      presence_penalty: 0.1, logit_bias: { 5: -100 },
    };
    const whole = await theirs.chat.completions.create(request);
    const same = await ours.chat.completions.create(request);
    const streams = {};
    for (const [name, client] of Object.entries({ theirs, ours })) {
      streams[name] = [];
      for await (const chunk of await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } })) streams[name].push(chunk);
    }
    const text = await model.chat(messages, {
      maxTokens: 12, temperature: 1, topP: 0.9, seed: 8, frequencyPenalty: 0.5, presencePenalty: 0.1, logitBias: { 5: -100 },
    }).text();
    const greedy = { model: "story", messages, max_tokens: 20, temperature: 0 };
    const plain = (await theirs.chat.completions.create(greedy)).choices[0].message.content;
    const stop = plain.slice(12, 17);
    const stopped = await theirs.chat.completions.create({ ...greedy, stop, logprobs: true });
    const pieces = [];
    for await (const { choices: [{ delta, logprobs }] } of await theirs.chat.completions.create({ ...greedy, stop: [stop], logprobs: true, stream: true })) {
      pieces.push([delta.content, (logprobs?.content ?? []).map(({ token }) => token)]);
    }
    const banned = (await theirs.chat.completions.create({ ...greedy, max_tokens: 3, logit_bias: { 300: 100 }, logprobs: true })).choices[0].logprobs.content;
    model.free();
    return { whole, same, streams, text, plain, stop, stopped, pieces, banned };
  },
  ({ whole, same, streams, text, plain, stop, stopped, pieces, banned }) => {
    const bare = ({ choices }) => choices.map(({ message, finish_reason, logprobs: { content } }) => [message, finish_reason, content.map(({ token }) => token)]);
    assert.deepEqual(bare(same), bare(whole));
    assert.equal(whole.choices[1].message.content, text);
    assert.notEqual(whole.choices[0].message.content, text);
    assert.ok(whole.choices.every(({ logprobs: { content } }) => content.every(({ top_logprobs }) => top_logprobs.length === 3)));
    for (const chunks of Object.values(streams)) {
      for (const { index, message: { content }, finish_reason, logprobs } of whole.choices) {
        const mine = chunks.flatMap(({ choices }) => choices.filter((choice) => choice.index === index));
        assert.equal(mine.map(({ delta }) => delta.content ?? "").join(""), content);
        assert.equal(mine.at(-1).finish_reason, finish_reason);
        assert.deepEqual(mine.flatMap(({ logprobs }) => logprobs?.content ?? []).map(({ token }) => token), logprobs.content.map(({ token }) => token));
      }
      assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
    }
    // Tokens of the stop string are omitted, but the answer's last token may begin it.
    const [{ message: { content }, finish_reason, logprobs }] = stopped.choices;
    assert.deepEqual([content, finish_reason], [plain.slice(0, plain.indexOf(stop)), "stop"]);
    const tokens = logprobs.content.map(({ token }) => token);
    assert.ok(tokens.join("").trimStart().startsWith(content.trimStart()) && !tokens.slice(0, -1).join("").trimStart().startsWith(content.trimStart()), `${JSON.stringify(tokens)} of ${content}`);
    assert.equal(pieces.map(([text]) => text ?? "").join(""), content);
    assert.deepEqual(pieces.flatMap(([, tokens]) => tokens), tokens);
    assert.ok(stopped.usage.completion_tokens > tokens.length, "usage includes the generated tokens of the stop string");
    assert.equal(new Set(banned.map(({ token }) => token)).size, 1);
  },
);

const CITY = { type: "object", properties: { city: { type: "string", pattern: "^[A-Z][a-z]{2,6}$" }, day: { type: "integer", minimum: 1, maximum: 7 } }, required: ["city", "day"], additionalProperties: false };

clients(
  "tools are run, and answers are parsed by a schema",
  async (tilewright, { openai, messages, schema }, open) => {
    const { model, theirs, sent } = await open();
    // A story model would not end its reasoning.
    const asked = { model: "story", messages, seed: 3, max_tokens: 200, reasoning_effort: "none" };
    const calls = [];
    const runner = theirs.chat.completions.runTools({
      ...asked, tool_choice: "required", parallel_tool_calls: false,
      tools: [{ type: "function", function: { name: "sun", description: "Whether it shines.", parameters: schema, parse: JSON.parse, function: (given) => calls.push(given) && "yes" } }],
    }, { maxChatCompletions: 2 });
    await runner.done();
    const messagesOfTools = sent.map(({ body }) => body.messages.slice(1));
    const { makeParseableResponseFormat } = await import(`${openai}/lib/parser.mjs`);
    const format = makeParseableResponseFormat({ type: "json_schema", json_schema: { name: "city", strict: true, schema } }, JSON.parse);
    const parsed = await theirs.chat.completions.parse({ ...asked, response_format: format, logprobs: true, top_logprobs: 20 });
    const streamed = await theirs.chat.completions.stream({ ...asked, response_format: format }).finalChatCompletion();
    const object = await theirs.chat.completions.create({ model: "story", messages, temperature: 0, max_tokens: 4, response_format: { type: "json_object" } });
    model.free();
    return { calls, messagesOfTools, parsed: parsed.choices[0], streamed: streamed.choices[0].message.parsed, object: object.choices[0].message.content };
  },
  ({ calls, messagesOfTools, parsed, streamed, object }) => {
    const isCity = ({ city, day }) => /^[A-Z][a-z]{2,6}$/.test(city) && Number.isInteger(day) && day >= 1 && day <= 7;
    assert.ok(calls.length >= 2 && calls.every(isCity), JSON.stringify(calls));
    assert.equal(messagesOfTools.length, 2);
    const [answer, ...results] = messagesOfTools[1];
    assert.deepEqual(results.map(({ role, tool_call_id, content }) => [role, tool_call_id, content]), answer.tool_calls.map(({ id }) => ["tool", id, "yes"]));
    assert.ok(isCity(parsed.message.parsed) && isCity(streamed), JSON.stringify([parsed.message, streamed]));
    const told = parsed.logprobs.content;
    assert.equal(told.map(({ token }) => token).join(""), parsed.message.content);
    // Forbidden tokens appear nowhere.
    assert.ok(told.every(({ logprob, top_logprobs }) => [logprob, ...top_logprobs.map(({ logprob }) => logprob)].every((value) => value > -1000)));
    assert.ok(told.some(({ top_logprobs }) => top_logprobs.length < 20) && told.every(({ top_logprobs }) => top_logprobs.length > 0));
    assert.match(object, /^\{/);
  },
  { schema: CITY },
);

clients(
  "an abort and a stream that is left stop the model, errors have their classes, and nothing is asked twice",
  async (tilewright, { messages }, open) => {
    const changed = {};
    const { OpenAI, model, generations, ours, theirs, sent } = await open({ changed });
    const long = { model: "story", messages, temperature: 1, seed: 1, stream: true };
    // They end only when stopped.
    Object.assign(changed, { slide: true, ignoreEos: true, maxTokens: 2 ** 31 - 1 });
    const ends = [];
    const outcome = async () => {
      const generation = generations.at(-1);
      const { stopReason } = await generation.result.catch((error) => ({ stopReason: error.name }));
      return { stopReason, ...generation.usage };
    };
    const signals = new AbortController();
    const aborted = await theirs.chat.completions.create(long, { signal: signals.signal });
    let n = 0;
    await (async () => { for await (const _ of aborted) if (++n === 4) signals.abort(); })().catch(() => {});
    ends.push(await outcome());
    for (const client of [theirs, ours]) {
      const left = await client.chat.completions.create(long);
      n = 0;
      for await (const _ of left) if (++n === 4) break;
      ends.push(await outcome());
    }
    const whole = new AbortController();
    const waiting = theirs.chat.completions.create({ ...long, stream: false }, { signal: whole.signal });
    while (!(generations.length === 4 && generations[3].usage.generatedTokens > 0)) await new Promise((resolve) => setTimeout(resolve, 1));
    whole.abort();
    const rejected = await waiting.then(() => "worked", (error) => [error instanceof OpenAI.APIUserAbortError, error.constructor === OpenAI.APIUserAbortError]);
    ends.push(await outcome());
    for (const name of Object.keys(changed)) delete changed[name];
    sent.length = 0;
    const refused = [];
    const refuse = async (work) => refused.push(await work.then(() => "worked", (error) => [
      ["BadRequestError", "NotFoundError", "InternalServerError"].find((name) => error instanceof OpenAI[name]), error.status, error.code, error.param, error.type,
    ]));
    const ask = (more) => theirs.chat.completions.create({ model: "story", messages, max_tokens: 2, ...more });
    await refuse(ask({ temperature: 5 }));
    await refuse(ask({ model: "gpt-5" }));
    await refuse(ask({ audio: { voice: "x" } }));
    await refuse(ask({ messages: [{ role: "user", content: "word ".repeat(3000) }], stream: true }));
    await refuse(ask({ response_format: { type: "json_schema", json_schema: { name: "x", schema: { not: {} } } } }));
    await refuse(theirs.models.retrieve("gpt-5"));
    await refuse(theirs.files.list());
    const nAsked = sent.length;
    const listed = [];
    for await (const { id } of theirs.models.list()) listed.push(id);
    const { id } = await theirs.models.retrieve("story");
    const after = (await ask({ temperature: 0 })).choices[0].message.content;
    const fresh = await model.chat(messages, { maxTokens: 2 }).text();
    model.free();
    await refuse(ask({}));
    return { ends, rejected, refused, nAsked, listed, id, after, fresh };
  },
  ({ ends, rejected, refused, nAsked, listed, id, after, fresh }) => {
    assert.deepEqual(ends.map(({ stopReason }) => stopReason), ["AbortError", "AbortError", "cancelled", "AbortError"]);
    for (const { promptTokens, cachedTokens, generatedTokens } of ends) {
      assert.ok(promptTokens > 5 && cachedTokens < promptTokens && generatedTokens > 0, JSON.stringify(ends));
    }
    assert.deepEqual(rejected, [true, true]);
    const bad = "invalid_request_error";
    assert.deepEqual(refused, [
      ["BadRequestError", 400, "invalid_value", "temperature", bad], ["NotFoundError", 404, "model_not_found", "model", bad],
      ["BadRequestError", 400, "unsupported_value", "audio", bad], ["BadRequestError", 400, "context_length_exceeded", null, bad],
      ["BadRequestError", 400, "constraint", null, bad], ["NotFoundError", 404, "model_not_found", "model", bad],
      ["NotFoundError", 404, "unknown_url", null, bad], ["InternalServerError", 500, "disposed", null, "server_error"],
    ]);
    assert.equal(nAsked, 7);
    assert.deepEqual([listed, id], [["story"], "story"]);
    assert.equal(after, fresh);
  },
);

clients(
  "vectors and plain texts",
  async (tilewright, { source, texts }, open) => {
    const embedder = await tilewright.Embedder.load(source, { device: "cpu" });
    const { model, theirs } = await open({ others: { minilm: embedder } });
    // Its default is base64.
    const bytes = await theirs.embeddings.create({ model: "minilm", input: texts });
    const numbers = await theirs.embeddings.create({ model: "minilm", input: texts[0], encoding_format: "float" });
    const vectors = [...await embedder.embed(texts)].map((vector) => [...vector]);
    let n = 0;
    for (const text of texts) n += (await embedder.tokenize(text)).length;
    const refused = await theirs.embeddings.create({ model: "minilm", input: "a", dimensions: 4000 }).then(() => "worked", ({ status, param }) => [status, param]);
    const plain = { model: "story", temperature: 0, max_tokens: 6 };
    const completed = await theirs.completions.create({ ...plain, prompt: ["Once upon", "The dog"], echo: true });
    const expected = [await model.generate("Once upon", { maxTokens: 6 }).text(), await model.generate("The dog", { maxTokens: 6 }).text()];
    const ids = [...await model.tokenize("Once upon")];
    const likely = (await theirs.completions.create({ ...plain, prompt: ids, logprobs: 2 })).choices[0];
    let streamed = "";
    for await (const { choices: [{ text }] } of await theirs.completions.create({ ...plain, prompt: "Once upon", stream: true })) streamed += text;
    embedder.free();
    model.free();
    return { bytes, numbers, vectors, n, refused, completed, expected, likely, streamed };
  },
  ({ bytes, numbers, vectors, n, refused, completed, expected, likely, streamed }) => {
    assert.deepEqual(bytes.data.map(({ embedding }) => embedding), vectors);
    assert.deepEqual(numbers.data.map(({ embedding }) => embedding), vectors.slice(0, 1));
    assert.equal(bytes.usage.prompt_tokens, n);
    assert.deepEqual(refused, [400, "dimensions"]);
    assert.deepEqual(completed.choices.map(({ text }) => text), [`Once upon${expected[0]}`, `The dog${expected[1]}`]);
    assert.equal(streamed, expected[0]);
    assert.equal(likely.text, expected[0]);
    const { tokens, text_offset: offsets, token_logprobs: values, top_logprobs: tops } = likely.logprobs;
    assert.deepEqual([tokens.length, offsets.length, values.length, tops.length], [6, 6, 6, 6]);
    for (const [at, token] of tokens.entries()) assert.ok(likely.text.startsWith(token, offsets[at]) && token in tops[at], JSON.stringify(likely));
  },
  (place) => {
    const { files, texts } = tinyEncoder("nomic");
    delete files["model.gguf"];
    return { source: published(place, "nomic", files), texts: texts.filter(({ prompt }) => prompt === null).slice(0, 3).map(({ text }) => text) };
  },
);
