// The package's public API, in Chromium and in Node: generation and its options, aborting, concurrent generations and
// models, chat, OpenAI's API, kernels, lifetime of a model. Each test runs in both.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { chromium, everywhere, places, server } from "./places.mjs";
import { bytesInMemory, repository } from "./server.mjs";
import { withTemplate } from "./template.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));
const reference = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];

everywhere(
  "pieces come one by one, are the reference's tokens, and make up the text",
  async ({ Model }, { ids, count }) => {
    const model = await Model.builtin({ device: "cpu" });
    const pieces = [];
    const generation = model.generate(ids, { temperature: 0, maxTokens: count, ignoreEos: true });
    for await (const piece of generation) pieces.push(piece);
    const result = await generation.result;
    const again = await model.generate(ids, { temperature: 0, maxTokens: count, ignoreEos: true }).text();
    const { info, device } = model;
    model.free();
    return { pieces, result, again, info, device };
  },
  ({ pieces, result, again, info, device }) => {
    assert.deepEqual(pieces.map((piece) => piece.id), reference.greedy_ids);
    assert.equal(pieces.map((piece) => piece.text).join(""), again);
    assert.equal(again.trim(), reference.greedy_text.trim());
    assert.equal(result.stopReason, "max_tokens");
    assert.equal(result.promptTokens, reference.ids.length);
    assert.equal(result.generatedTokens, reference.greedy_ids.length);
    assert.ok(result.prefillSeconds > 0 && result.decodeSeconds > 0);
    assert.equal(device.backend, "cpu");
    assert.equal(info.architecture, "llama");
    assert.equal(info.fileBytes, stories.length);
    assert.ok(info.vocabSize > 0 && info.contextLength > 0 && info.contextLength <= info.maxContextLength);
  },
  { ids: reference.ids, count: reference.greedy_ids.length },
);

everywhere(
  "without options the text is the most likely one, as the types say",
  async ({ Model }, { ids }) => {
    const model = await Model.builtin({ device: "cpu" });
    const generated = [];
    for await (const { id } of model.generate(ids, { maxTokens: 20 })) generated.push(id);
    model.free();
    return generated;
  },
  (generated) => assert.deepEqual(generated, reference.greedy_ids.slice(0, 20)),
  { ids: reference.ids },
);

everywhere(
  "a text prompt is tokenized like the reference's, and tokens go back to text",
  async ({ Model }, { prompt }) => {
    const model = await Model.builtin({ device: "cpu" });
    const ids = [...(await model.tokenize(prompt))];
    const plain = [...(await model.tokenize(prompt, { addSpecial: false }))];
    const odd = "Ünïcode, 雪 and \u{1F600}!\n";
    const roundTrip = await model.detokenize(await model.tokenize(odd, { addSpecial: false }));
    const first = (await model.generate(prompt, { temperature: 0, maxTokens: 8 }).text());
    const fromIds = (await model.generate(ids, { temperature: 0, maxTokens: 8 }).text());
    model.free();
    return { ids, plain, odd, roundTrip, first, fromIds };
  },
  ({ ids, plain, odd, roundTrip, first, fromIds }) => {
    assert.deepEqual(ids, reference.ids);
    assert.deepEqual(plain, reference.ids.slice(1));
    assert.equal(roundTrip.trim(), odd.trim());
    assert.equal(first, fromIds);
  },
  { prompt: reference.prompt },
);

everywhere(
  "sampling: one seed one text, other seeds other texts, stop texts, limits",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const text = (options) => model.generate("Once upon a time", { maxTokens: 40, temperature: 1, ...options }).text();
    const same = [await text({ seed: 7 }), await text({ seed: 7 })];
    const others = [await text({ seed: 1 }), await text({ seed: 2 }), await text({ seed: 3 })];
    const greedy = await text({ temperature: 0 });
    const topOne = await text({ topK: 1, seed: 5 });
    const stopped = model.generate("Once upon a time", { temperature: 0, maxTokens: 40, stop: ["named"] });
    const stoppedText = await stopped.text();
    const three = await model.generate("Once upon a time", { maxTokens: 3, ignoreEos: true }).result;
    const result = { same, others, greedy, topOne, stoppedText, stopReason: (await stopped.result).stopReason, three };
    model.free();
    return result;
  },
  ({ same, others, greedy, topOne, stoppedText, stopReason, three }) => {
    assert.equal(same[0], same[1]);
    assert.equal(new Set(others).size, 3);
    assert.equal(topOne, greedy);
    assert.ok(greedy.includes("named") && !stoppedText.includes("named"), stoppedText);
    assert.ok(greedy.startsWith(stoppedText));
    assert.equal(stopReason, "stop_text");
    assert.equal(three.generatedTokens, 3);
  },
);

everywhere(
  "options that there are not are a TypeError that names the right one",
  async ({ Model, Index }) => {
    const outcome = async (run) => {
      try {
        await run();
        return "worked";
      } catch (error) {
        return `${error.name}: ${error.message}`;
      }
    };
    const model = await Model.builtin({ device: "cpu" });
    const outcomes = [
      await outcome(() => model.generate("a", { max_tokens: 2 }).text()),
      await outcome(() => model.chat([], { Temperature: 1 }).text()),
      await outcome(() => Model.builtin({ contextlength: 64 })),
      await outcome(() => Index.create({ dim: 3 })),
    ];
    model.free();
    return outcomes;
  },
  (outcomes) => assert.deepEqual(outcomes, [
    "TypeError: generate: there is no option `max_tokens`; did you mean `maxTokens`?",
    "TypeError: chat: there is no option `Temperature`; did you mean `temperature`?",
    "TypeError: Model.builtin: there is no option `contextlength`; did you mean `contextLength`?",
    "TypeError: Index.create: there is no option `dim`; did you mean `dims`?",
  ]),
);

everywhere(
  "bytes and responses are sources, and what is none is an error that says what would be",
  async ({ Model }, { base64, ids }) => {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    // A view of a larger array, to check that only the view is read.
    const around = new Uint8Array(bytes.length + 100);
    around.set(bytes, 50);
    const used = new Response(bytes);
    await used.arrayBuffer();
    const outcomes = [];
    for (const source of [bytes, bytes.buffer, around.subarray(50, 50 + bytes.length), new Response(bytes), [new Response(bytes)]]) {
      const model = await Model.load(source, { device: "cpu" });
      const generated = [];
      for await (const { id } of model.generate(ids, { maxTokens: 8 })) generated.push(id);
      outcomes.push(generated);
      model.free();
    }
    const errors = [];
    for (const source of [new Response("no", { status: 403 }), used, {}, undefined, 7, new Float32Array(3)]) {
      errors.push(await Model.load(source, { device: "cpu" }).then(() => "worked", ({ code, message, status }) => ({ code, message, status })));
    }
    return { outcomes, errors, length: bytes.length };
  },
  ({ outcomes, errors, length }) => {
    assert.equal(length, stories.length);
    for (const generated of outcomes) assert.deepEqual(generated, reference.greedy_ids.slice(0, 8));
    assert.deepEqual(errors.map(({ code }) => code), ["http", "option", "option", "option", "option", "option"]);
    assert.equal(errors[0].status, 403);
    assert.match(errors[1].message, /read already/);
    for (const { message } of errors.slice(2)) assert.match(message, /expected an address, a file, bytes, a Response, or a list of them/);
  },
  { base64: stories.toString("base64"), ids: reference.ids },
);

everywhere(
  "options that make no sense are errors with code `option`",
  async ({ Model, TilewrightError }) => {
    const model = await Model.builtin({ device: "cpu" });
    const bad = [{ temperature: -1 }, { temperature: NaN }, { topP: 2 }, { topP: -0.5 }, { minP: 3 }, { repeatPenalty: 0 }, { maxTokens: -1 }, { maxTokens: 1.5 }];
    const errors = [];
    for (const options of bad) {
      const error = await model.generate("a", { maxTokens: 2, ...options }).text().then(() => null, (it) => it);
      errors.push({ options: Object.keys(options)[0], code: error?.code, isOurs: error instanceof TilewrightError });
    }
    const works = await model.generate("Once", { temperature: 0, maxTokens: 2 }).text();
    model.free();
    return { errors, works };
  },
  ({ errors, works }) => {
    for (const { options, code, isOurs } of errors) assert.ok(code === "option" && isOurs, `${options}: ${code}`);
    assert.ok(works.length > 0);
  },
);

everywhere(
  "a prompt longer than the context is an error with code `context_full`",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu", contextLength: 32 });
    const error = await model.generate("once upon a time ".repeat(40), { temperature: 0, maxTokens: 2 }).text().then(() => null, (it) => it);
    const full = await model.generate("Once upon a time", { ignoreEos: true }).result;
    const slid = await model.generate("Once upon a time", { ignoreEos: true, slide: true, maxTokens: 60 }).result;
    const info = model.info;
    model.free();
    return { code: error?.code, full, slid, info };
  },
  ({ code, full, slid, info }) => {
    assert.equal(info.contextLength, 32);
    assert.equal(code, "context_full");
    assert.equal(full.stopReason, "context_full");
    assert.ok(full.promptTokens + full.generatedTokens <= 33);
    assert.equal(slid.generatedTokens, 60);
  },
);

everywhere(
  "an aborted generation throws the signal's reason, and the model goes on to work",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const outcomes = [];
    for (const reason of [undefined, new Error("enough")]) {
      const controller = new AbortController();
      let count = 0;
      try {
        for await (const _ of model.generate("Once upon a time", { ignoreEos: true, signal: controller.signal })) {
          if (++count === 5) controller.abort(reason);
        }
        outcomes.push("ended");
      } catch (error) {
        outcomes.push({ name: error.name, message: error.message, same: reason === undefined || error === reason, count });
      }
    }
    const before = AbortSignal.abort();
    outcomes.push(await model.generate("a", { signal: before }).text().catch((error) => ({ name: error.name, same: error === before.reason })));
    const later = await model.generate("Once upon a time", { temperature: 0, maxTokens: 10 }).text();
    const fresh = await Model.builtin({ device: "cpu" });
    const expected = await fresh.generate("Once upon a time", { temperature: 0, maxTokens: 10 }).text();
    model.free();
    fresh.free();
    return { outcomes, later, expected };
  },
  ({ outcomes: [plain, own, early], later, expected }) => {
    assert.equal(plain.name, "AbortError");
    assert.ok(plain.count < 12, `${plain.count} pieces arrived`);
    assert.deepEqual([own.message, own.same], ["enough", true]);
    assert.deepEqual(early, { name: "AbortError", same: true });
    assert.equal(later, expected);
  },
);

everywhere(
  "leaving the loop stops the generation, and the next one is as if it had not been",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    let count = 0;
    const broken = model.generate("Once upon a time", { ignoreEos: true, slide: true, maxTokens: 2 ** 31 - 1 });
    for await (const _ of broken) if (++count === 3) break;
    const result = await broken.result;
    const { usage } = broken;
    const text = await model.generate("Once upon a time", { temperature: 0, maxTokens: 10 }).text();
    const again = await model.generate("Once upon a time", { temperature: 0, maxTokens: 10 }).text();
    model.free();
    return { result, usage, text, again };
  },
  ({ result, usage, text, again }) => {
    assert.equal(result.stopReason, "cancelled");
    assert.ok(result.promptTokens > 3 && result.generatedTokens >= 3, JSON.stringify(result));
    assert.ok(result.prefillSeconds > 0 && result.decodeSeconds > 0, JSON.stringify(result));
    for (const [name, value] of Object.entries(usage)) assert.equal(value, result[name], name);
    assert.equal(text, again);
  },
);

everywhere(
  "a stopped generation ends with what came, at any time, and the numbers so far are there, also after an abort",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const options = { ignoreEos: true, maxTokens: 20, seed: 4, temperature: 1 };
    // Ends only when stopped.
    const endless = { ...options, maxTokens: 2 ** 31 - 1, slide: true };
    const whole = await model.generate("Once upon a time", options).text();
    const stopped = model.generate("Once upon a time", endless);
    const before = stopped.usage;
    const during = [];
    let pieces = "";
    for await (const { text } of stopped) {
      pieces += text;
      during.push(stopped.usage);
      if (during.length === 5) stopped.stop();
    }
    const middle = { text: await stopped.text(), result: await stopped.result, usage: stopped.usage };
    // Never read.
    const early = model.generate("The dog ran home. ".repeat(9), endless);
    early.stop();
    const first = { text: await early.text(), result: await early.result };
    // A generation that waits for another can end before it.
    const busy = model.generate("Once upon a time", endless);
    const queued = model.generate("Once upon a time", endless);
    queued.stop();
    const waiting = { text: await queued.text(), result: await queued.result };
    busy.stop();
    const over = model.generate("Once upon a time", options);
    const late = { text: await over.text(), result: await over.result };
    over.stop();
    late.again = await over.text();
    const controller = new AbortController();
    const aborted = model.generate("Once upon a time", { ...endless, signal: controller.signal });
    let n = 0;
    const error = await (async () => { for await (const _ of aborted) if (++n === 3) controller.abort(); })().catch(({ name }) => name);
    const { usage } = aborted;
    const again = await model.generate("Once upon a time", options).text();
    model.free();
    return { whole, before, during, pieces, middle, first, waiting, late, error, usage, again };
  },
  ({ whole, before, during, pieces, middle, first, waiting, late, error, usage, again }) => {
    assert.deepEqual(before, { promptTokens: 0, cachedTokens: 0, generatedTokens: 0, prefillSeconds: 0, decodeSeconds: 0 });
    const { result } = middle;
    assert.deepEqual([result.stopReason, middle.text], ["cancelled", pieces]);
    assert.ok(pieces.startsWith(whole) || whole.startsWith(pieces), pieces);
    assert.ok(result.generatedTokens >= 5, JSON.stringify(result));
    for (const [name, value] of Object.entries(middle.usage)) assert.equal(value, result[name], name);
    // The prompt is cached from the previous completion, except for its last token.
    assert.equal(result.cachedTokens, result.promptTokens - 1);
    for (const [at, { promptTokens, cachedTokens, generatedTokens, prefillSeconds, decodeSeconds }] of during.entries()) {
      assert.deepEqual([promptTokens, cachedTokens], [result.promptTokens, result.cachedTokens]);
      assert.ok(generatedTokens > at && prefillSeconds >= 0 && decodeSeconds >= 0, JSON.stringify(during[at]));
    }
    assert.deepEqual([first.text === "", first.result.stopReason], [first.result.generatedTokens === 0, "cancelled"]);
    assert.ok(first.result.promptTokens > 40 && first.result.cachedTokens < 5, JSON.stringify(first));
    assert.deepEqual([waiting.text, waiting.result.stopReason, waiting.result.promptTokens], ["", "cancelled", 0]);
    assert.deepEqual([late.text, late.again, late.result.stopReason], [whole, whole, "max_tokens"]);
    assert.equal(error, "AbortError");
    assert.ok(usage.promptTokens === result.promptTokens && usage.generatedTokens >= 3, JSON.stringify(usage));
    assert.equal(again, whole);
  },
);

everywhere(
  "generations on one model wait for each other, and two models work side by side",
  async ({ Model }) => {
    const [a, b] = await Promise.all([Model.builtin({ device: "cpu" }), Model.builtin({ device: "cpu" })]);
    const prompts = ["Once upon a time", "The dog", "Lily had a", "One day"];
    const alone = [];
    for (const prompt of prompts) alone.push(await a.generate(prompt, { temperature: 0, maxTokens: 12 }).text());
    const queued = await Promise.all(prompts.map((prompt) => b.generate(prompt, { temperature: 0, maxTokens: 12 }).text()));
    const both = await Promise.all([a.generate(prompts[0], { temperature: 0, maxTokens: 12 }).text(), b.generate(prompts[1], { temperature: 0, maxTokens: 12 }).text()]);
    a.free();
    b.free();
    return { alone, queued, both };
  },
  ({ alone, queued, both }) => {
    assert.deepEqual(queued, alone);
    assert.deepEqual(both, alone.slice(0, 2));
    assert.equal(new Set(alone).size, 4);
  },
);

everywhere(
  "a conversation that goes on computes only what is new",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const ids = [...(await model.tokenize("Once upon a time there was a little girl"))];
    const first = await model.generate(ids, { temperature: 0, maxTokens: 4 }).result;
    const longer = await model.generate([...ids, ...(await model.tokenize(" named Lily", { addSpecial: false }))], { temperature: 0, maxTokens: 4 }).result;
    model.free();
    return { count: ids.length, first, longer };
  },
  ({ count, first, longer }) => {
    assert.equal(first.cachedTokens, 0);
    assert.ok(longer.cachedTokens >= count - 1, `${longer.cachedTokens} of ${count} cached`);
  },
);

everywhere(
  "steady generation creates no buffers, and memory is accounted for",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    await model.generate("Once upon a time", { maxTokens: 4, ignoreEos: true }).text();
    const before = await model.counters();
    await model.generate("Once upon a time", { maxTokens: 30, ignoreEos: true }).text();
    const after = await model.counters();
    const memory = await model.memory();
    model.free();
    return { before, after, memory };
  },
  ({ before, after, memory }) => {
    assert.ok(after.dispatches > before.dispatches);
    assert.equal(after.buffersCreated, before.buffersCreated);
    assert.equal(after.bindGroupsCreated, before.bindGroupsCreated);
    assert.equal(memory.weightsBytes + memory.cacheBytes + memory.activationsBytes, memory.totalBytes);
    assert.ok(memory.weightsBytes > 0.8 * stories.length && memory.weightsBytes < 4 * stories.length);
    assert.ok(memory.wasmHeapBytes > memory.weightsBytes && memory.wasmHeapBytes < 64 << 20, `${memory.wasmHeapBytes}`);
  },
);

everywhere(
  "a freed model says so, twice is no harm, and what was going on ends",
  async ({ Model, TilewrightError }) => {
    const model = await Model.builtin({ device: "cpu" });
    const going = model.generate("Once upon a time", { ignoreEos: true }).text().then(() => "ended", (error) => error.code);
    await new Promise((resolve) => setTimeout(resolve, 50));
    model.free();
    model.free();
    const codes = [];
    for (const call of [() => model.generate("a").text(), () => model.tokenize("a"), () => model.memory(), () => model.detokenize([1])]) {
      codes.push(await Promise.resolve().then(call).then(() => "worked", (error) => error instanceof TilewrightError && error.code));
    }
    const disposable = await Model.builtin({ device: "cpu" });
    disposable[Symbol.dispose]();
    codes.push(await Promise.resolve().then(() => disposable.tokenize("a")).catch((error) => error.code));
    return { going: await going, codes };
  },
  ({ going, codes }) => {
    assert.equal(going, "disposed");
    assert.deepEqual(codes, Array(5).fill("disposed"));
  },
);

const TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
const chatModel = withTemplate(TEMPLATE);

everywhere(
  "chat renders the file's template, and what a user types never becomes a control token",
  async ({ Model }, { file }) => {
    const blob = new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]);
    const model = await Model.load(blob, { device: "cpu" });
    const answer = model.chat([{ role: "system", content: "Be kind." }, { role: "user", content: "Who are you?" }], { temperature: 0, maxTokens: 6 });
    const text = await answer.text();
    const rendered = [...(await model.tokenize("[system] Be kind. [user] Who are you? [assistant]"))];
    const plain = await model.generate(rendered, { temperature: 0, maxTokens: 6 }).text();
    const prompt = async (content) => (await model.chat([{ role: "user", content }], { temperature: 0, maxTokens: 1 }).result).promptTokens;
    const sizes = { control: await prompt("</s>"), text: await prompt("a"), bytes: (await model.tokenize("</s>", { addSpecial: false })).length };
    const { chatTemplate } = model.info;
    model.free();
    return { chatTemplate, text, plain, sizes, promptTokens: (await answer.result).promptTokens, rendered: rendered.length };
  },
  ({ chatTemplate, text, plain, sizes, promptTokens, rendered }) => {
    assert.equal(chatTemplate, "file");
    assert.ok(Math.abs(promptTokens - rendered) <= 1, `${promptTokens} tokens, ${rendered} expected`);
    assert.equal(text, plain);
    // As text it is at least "<", "/", "s", ">" in some split, and never one token.
    assert.ok(sizes.control > sizes.text + 1, JSON.stringify(sizes));
  },
  { file: chatModel.toString("base64") },
);

const TOLD = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for d in documents or [] %}({{ d.title }}){% endfor %}"
  + "{{ mood|default('') }}{% for m in messages %} {{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
  + "{{ m.content|map(attribute='text')|join }}{% endif %}{% endfor %}{% if add_generation_prompt %} assistant:{% endif %}";

everywhere(
  "chat tells the template of tools, documents and variables, takes parts, and goes on with the last message",
  async ({ Model }, { file }) => {
    const blob = new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]);
    const model = await Model.load(blob, { device: "cpu" });
    const chat = (messages, options) => model.chat(messages, { maxTokens: 6, ...options }).text();
    const generate = async (text) => model.generate(await model.tokenize(text), { maxTokens: 6 }).text();
    const user = { role: "user", content: [{ type: "text", text: "a " }, { type: "text", text: "dog" }] };
    const told = {
      tools: [{ type: "function", function: { name: "sun" } }], documents: [{ title: "A day" }], templateVariables: { mood: "Happy" },
    };
    const texts = [
      [await chat([user], told), await generate("<sun>(A day)Happy user: a dog assistant:")],
      [
        await chat([user, { role: "assistant", content: "Once upon" }], { continueFinalMessage: true }),
        await generate(" user: a dog assistant: Once upon"),
      ],
    ];
    const unknown = await chat([user], { templateName: "rag" }).catch(({ code, message }) => `${code}: ${message}`);
    model.free();
    return { texts, unknown };
  },
  ({ texts, unknown }) => {
    for (const [found, expected] of texts) assert.equal(found, expected);
    assert.match(unknown, /^template: .*rag.*default/);
  },
  { file: withTemplate(TOLD).toString("base64") },
);

everywhere(
  "hostile templates end in an error with code `template`",
  async ({ Model }, { files }) => {
    const codes = [];
    for (const file of files) {
      const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
      codes.push(await model.chat([{ role: "user", content: "x" }], { temperature: 0, maxTokens: 1 }).text().then(() => "worked", (error) => error.code));
      model.free();
    }
    return codes;
  },
  (codes) => assert.deepEqual(codes, ["template", "template", "template"]),
  {
    files: [
      "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
      "{{ raise_exception('no') }}",
      "{% if %}",
    ].map((template) => withTemplate(template).toString("base64")),
  },
);

everywhere(
  "OpenAI's shape, at once and streamed",
  async ({ Model, createChatCompletion }, { file }) => {
    const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
    const messages = [{ role: "user", content: "Tell me a story" }];
    const whole = await createChatCompletion(model, { messages, temperature: 0, max_tokens: 12 });
    const chunks = [];
    const stream = await createChatCompletion(model, { messages, temperature: 0, max_completion_tokens: 12, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) chunks.push(chunk);
    const refused = [];
    for (const extra of [{ n: 0 }, { logit_bias: { 5: 101 } }, { store: true }, { temperature: -1 }, { messages: undefined }]) {
      const request = { messages, max_tokens: 2, ...extra };
      refused.push(await Promise.resolve().then(() => createChatCompletion(model, request)).then(() => "worked", (error) => error.code));
    }
    model.free();
    return { whole, chunks, refused };
  },
  ({ whole, chunks, refused }) => {
    assert.equal(whole.object, "chat.completion");
    assert.equal(whole.choices.length, 1);
    assert.equal(whole.choices[0].message.role, "assistant");
    assert.ok(whole.choices[0].message.content.length > 0);
    assert.ok(["stop", "length"].includes(whole.choices[0].finish_reason));
    assert.equal(whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage.total_tokens);
    assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.id === chunks[0].id));
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), whole.choices[0].message.content);
    assert.equal(chunks.filter((chunk) => chunk.choices[0]?.finish_reason).length, 1);
    assert.deepEqual(chunks.at(-1).choices, []);
    // The second prompt is cached, so only the details differ.
    const totals = ({ prompt_tokens, completion_tokens, total_tokens }) => [prompt_tokens, completion_tokens, total_tokens];
    assert.deepEqual(totals(chunks.at(-1).usage), totals(whole.usage));
    for (const code of refused) assert.ok(["option", "unsupported"].includes(code), refused.join());
  },
  { file: chatModel.toString("base64") },
);

/** Reference kernels as plain loops over 64-bit numbers; share no code with the package. */
const plain = {
  matmul(a, b, m, n, k) {
    return Array.from({ length: m * n }, (_, i) => {
      let sum = 0;
      for (let p = 0; p < k; p++) sum += a[Math.trunc(i / n) * k + p] * b[p * n + (i % n)];
      return sum;
    });
  },
  rmsNorm(x, weight, eps) {
    const out = [];
    for (let row = 0; row < x.length; row += weight.length) {
      let sum = 0;
      for (let i = 0; i < weight.length; i++) sum += x[row + i] ** 2;
      for (let i = 0; i < weight.length; i++) out.push((x[row + i] * weight[i]) / Math.sqrt(sum / weight.length + eps));
    }
    return out;
  },
  layerNorm(x, weight, bias, eps) {
    const out = [];
    for (let row = 0; row < x.length; row += weight.length) {
      const values = x.slice(row, row + weight.length);
      const mean = values.reduce((a, b) => a + b) / values.length;
      const variance = values.reduce((sum, it) => sum + (it - mean) ** 2, 0) / values.length;
      for (let i = 0; i < values.length; i++) out.push(((values[i] - mean) * weight[i]) / Math.sqrt(variance + eps) + bias[i]);
    }
    return out;
  },
  softmax(x, columns) {
    const out = [];
    for (let row = 0; row < x.length; row += columns) {
      const values = x.slice(row, row + columns);
      const exponentials = values.map((it) => Math.exp(it - Math.max(...values)));
      const sum = exponentials.reduce((a, b) => a + b);
      out.push(...exponentials.map((it) => it / sum));
    }
    return out;
  },
  rope(x, { nHeads: heads, headDim, firstPos, theta, style }) {
    const out = [...x];
    for (let head = 0; head < x.length / headDim; head++) {
      const pos = firstPos + Math.trunc(head / heads);
      for (let pair = 0; pair < headDim / 2; pair++) {
        const angle = pos * theta ** ((-2 * pair) / headDim);
        const [i, j] = style === "halves" ? [pair, pair + headDim / 2] : [2 * pair, 2 * pair + 1];
        const [a, b] = [x[head * headDim + i], x[head * headDim + j]];
        out[head * headDim + i] = a * Math.cos(angle) - b * Math.sin(angle);
        out[head * headDim + j] = a * Math.sin(angle) + b * Math.cos(angle);
      }
    }
    return out;
  },
  attention(q, k, v, { nHeads: heads, nKvHeads: kvHeads = heads, headDim }) {
    const queries = q.length / (heads * headDim);
    const keys = k.length / (kvHeads * headDim);
    const out = [];
    for (let t = 0; t < queries; t++) {
      for (let head = 0; head < heads; head++) {
        const kvHead = Math.trunc(head / (heads / kvHeads));
        const at = (array, s, d) => array[(s * kvHeads + kvHead) * headDim + d];
        const visible = keys - queries + t + 1;
        const scores = Array.from({ length: visible }, (_, s) => {
          let dot = 0;
          for (let d = 0; d < headDim; d++) dot += q[(t * heads + head) * headDim + d] * at(k, s, d);
          return dot / Math.sqrt(headDim);
        });
        const probs = plain.softmax(scores, visible);
        for (let d = 0; d < headDim; d++) out.push(probs.reduce((sum, prob, s) => sum + prob * at(v, s, d), 0));
      }
    }
    return out;
  },
};

/** Seeded numbers in [-2, 2) (mulberry32). */
function numbers(count, seed) {
  let state = seed;
  return Array.from({ length: count }, () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    // Rounded to f32, so that both sides use the same numbers.
    return Math.fround(((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 30 - 2);
  });
}

const kernelCases = [
  ...[[1, 1, 1], [3, 5, 7], [17, 33, 65], [64, 64, 64]].map(([m, n, k]) => ["matmul", [numbers(m * k, 1), numbers(k * n, 2), m, n, k]]),
  ...[[1, 1], [3, 255], [2, 257]].map(([rows, columns]) => ["rmsNorm", [numbers(rows * columns, 3), numbers(columns, 4), 1e-5]]),
  ...[[1, 1], [3, 255], [2, 260]].map(([rows, columns]) => ["layerNorm", [numbers(rows * columns, 13), numbers(columns, 14), numbers(columns, 15), 1e-5]]),
  ...[[1, 1], [4, 33], [2, 1000]].map(([rows, columns]) => ["softmax", [numbers(rows * columns, 5), columns]]),
  ...["interleaved", "halves"].map((style) => ["rope", [numbers(3 * 2 * 8, 6), { nHeads: 2, headDim: 8, firstPos: 5, theta: 10000, style }]]),
  ["attention", [numbers(3 * 4 * 8, 7), numbers(5 * 2 * 8, 8), numbers(5 * 2 * 8, 9), { nHeads: 4, nKvHeads: 2, headDim: 8 }]],
  ["attention", [numbers(4 * 16, 10), numbers(4 * 16, 11), numbers(4 * 16, 12), { nHeads: 1, headDim: 16 }]],
];

/** Runs in a page and in Node: all cases on one device, and an operand of invalid length. */
async function runKernels({ Kernels }, { cases, device }) {
  const typed = (values) => values.map((it) => (Array.isArray(it) ? new Float32Array(it) : it));
  const kernels = await Kernels.open({ device });
  const results = [];
  for (const [name, values] of cases) results.push([...(await kernels[name](...typed(values)))]);
  const error = await kernels.matmul(new Float32Array(5), new Float32Array(4), 2, 2, 2).then(() => null, (it) => it);
  const { backend } = kernels.device;
  kernels.free();
  return { results, code: error?.code, message: error?.message, backend };
}

function checkKernels({ results, code, message }) {
  kernelCases.forEach(([name, values], i) => {
    const want = plain[name](...values);
    assert.equal(results[i].length, want.length, name);
    const scale = Math.max(1, ...want.map(Math.abs));
    const worst = Math.max(...want.map((it, j) => Math.abs(it - results[i][j])));
    assert.ok(worst <= 1e-5 * scale, `${name}, case ${i}: differs by ${worst}`);
  });
  // An array has a length and no shape.
  assert.equal(code, "operand");
  assert.match(message, /`a`/);
}

everywhere("kernels on the CPU agree with plain loops, and name an operand of the wrong length", runKernels, checkKernels, { cases: kernelCases, device: "cpu" });

test("Chromium: kernels on WebGPU agree with plain loops", { timeout: 120_000 }, async () => {
  const outcome = await places.Chromium(runKernels, { cases: kernelCases, device: "gpu" });
  assert.equal(outcome.backend, "webgpu");
  checkKernels(outcome);
});

/** Runs in a page and in Node: a layer's steps on tensors on the device, and the same calls between arrays. */
async function chainKernels({ Kernels }, { x, weights, norm, device }) {
  const kernels = await Kernels.open({ device });
  const heads = { nHeads: 4, headDim: 8 };
  const [T, C] = [6, 32];
  const calls = async (x, norm, [q, k, v, out], keep, done) => {
    const normed = await kernels.rmsNorm(x, norm, 1e-5, keep);
    const [queries, keys, values] = await Promise.all([[q, 32], [k, 16], [v, 16]].map(([w, n]) => kernels.matmul(normed, w, T, n, C, keep)));
    const turnedQueries = await kernels.rope(queries, { ...heads, firstPos: 3, ...keep });
    const turnedKeys = await kernels.rope(keys, { nHeads: 2, headDim: 8, firstPos: 3, ...keep });
    const mixed = await kernels.attention(turnedQueries, turnedKeys, values, { ...heads, nKvHeads: 2, ...keep });
    const logits = await kernels.matmul(mixed, out, T, C, C, keep);
    const probs = await kernels.softmax(logits, C, keep);
    done(normed, queries, keys, values, turnedQueries, turnedKeys, mixed, logits);
    return probs;
  };
  const columns = [32, 16, 16, 32];
  const arrays = weights.map((it) => new Float32Array(it));
  const fromArrays = await calls(new Float32Array(x), new Float32Array(norm), arrays, {}, () => {});
  const tensors = await Promise.all(arrays.map((it, i) => kernels.tensor(it, [C, columns[i]])));
  const input = await kernels.tensor(new Float32Array(x), [T, C]);
  const weight = await kernels.tensor(new Float32Array(norm), [C]);
  const states = [];
  let onDevice;
  for (let round = 0; round < 3; round++) {
    states.push(await kernels.counters());
    const result = await calls(input, weight, tensors, { keep: true }, (...inner) => inner.forEach((it) => it.free()));
    states.push(await kernels.counters());
    onDevice = { shape: result.shape, values: [...(await result.read())], again: [...(await result.read())] };
    result.free();
  }
  kernels.free();
  return { fromArrays: [...fromArrays], onDevice, states };
}

function checkChain({ fromArrays, onDevice, states }) {
  assert.deepEqual(onDevice.values, fromArrays);
  assert.deepEqual(onDevice.again, fromArrays);
  assert.deepEqual(onDevice.shape, [6, 32]);
  // Rows of probabilities.
  for (let row = 0; row < 6; row++) assert.ok(Math.abs(onDevice.values.slice(row * 32, row * 32 + 32).reduce((a, b) => a + b) - 1) < 1e-5);
  const [before, after] = states.slice(-2);
  assert.equal(after.bytesRead, before.bytesRead);
  assert.equal(after.pipelinesCreated, before.pipelinesCreated);
  // Only the angles and positions of RoPE and attention are uploaded.
  assert.ok(after.bytesUploaded - before.bytesUploaded < 1000, `${after.bytesUploaded - before.bytesUploaded} bytes were sent`);
}

const chain = { x: numbers(6 * 32, 13), norm: numbers(32, 14), weights: [32, 16, 16, 32].map((n, i) => numbers(32 * n, 15 + i)) };
everywhere("kernels are chained on tensors that stay on the CPU executor", chainKernels, checkChain, { ...chain, device: "cpu" });

test("Chromium: kernels are chained on tensors that stay on the GPU", { timeout: 120_000 }, async () =>
  checkChain(await places.Chromium(chainKernels, { ...chain, device: "gpu" })));

/** Runs in a page and in Node: an array larger than an upload chunk but not a multiple of one, and a part of it. */
async function copyTensors({ Kernels }, { device }) {
  const kernels = await Kernels.open({ device });
  const data = Float32Array.from({ length: 200_003 }, (_, i) => i);
  const whole = await kernels.tensor(data, [data.length]);
  const part = await kernels.tensor(data.subarray(5, 11), [2, 3]);
  data.fill(-1);
  const [values, again, rows] = [await whole.read(), await whole.read(), await part.read()];
  kernels.free();
  const wrong = [values, again].map((array) => array.findIndex((it, i) => it !== i));
  return { lengths: [data.length, values.length, again.length], wrong, rows: [...rows], shape: part.shape };
}

function checkCopies({ lengths, wrong, rows, shape }) {
  assert.deepEqual(lengths, [200_003, 200_003, 200_003]);
  assert.deepEqual(wrong, [-1, -1]);
  assert.deepEqual(rows, [5, 6, 7, 8, 9, 10]);
  assert.deepEqual(shape, [2, 3]);
}

everywhere("a tensor is a copy of what it was made of, and is read as often as wanted", copyTensors, checkCopies, { device: "cpu" });

test("Chromium: a tensor on the GPU is a copy of what it was made of", { timeout: 120_000 }, async () =>
  checkCopies(await places.Chromium(copyTensors, { device: "gpu" })));

everywhere(
  "a tensor that was freed, of another device or of the wrong shape is refused by name; what was asked before it was freed works",
  async ({ Kernels }) => {
    const [kernels, others] = await Promise.all([Kernels.open({ device: "cpu" }), Kernels.open({ device: "cpu" })]);
    const four = new Float32Array([1, 2, 3, 4]);
    const tensor = await kernels.tensor(four, [2, 2]);
    const foreign = await others.tensor(four, [2, 2]);
    const freed = await kernels.tensor(four, [2, 2]);
    const asked = kernels.matmul(freed, tensor, 2, 2, 2);
    freed.free();
    freed.free();
    const refusals = [];
    for (const call of [
      () => kernels.matmul(tensor, freed, 2, 2, 2),
      () => freed.read(),
      () => kernels.rmsNorm(foreign, tensor),
      () => kernels.matmul(tensor, four, 4, 1, 1),
      () => kernels.matmul(tensor, four, 2, 3, 2),
      () => kernels.softmax(tensor, 4),
      () => kernels.softmax(tensor, 3),
      () => kernels.attention(tensor, tensor, four.subarray(1), { nHeads: 1, headDim: 2 }),
      () => kernels.softmax([1, 2, 3, 4], 2),
      () => kernels.softmax(new Float32Array(0), 2),
      () => kernels.tensor(four, [3]),
      () => kernels.tensor(four, [-2, -2]),
      () => kernels.tensor(four, []),
    ]) refusals.push(await call().then(() => "worked", ({ code, message }) => [code, message]));
    const alive = [...(await tensor.read())];
    const product = [...(await asked)];
    kernels.free();
    const late = await tensor.read().then(() => "worked", ({ code }) => code);
    tensor.free();
    others.free();
    return { refusals, alive, product, late };
  },
  ({ refusals, alive, product, late }) => {
    assert.deepEqual(refusals, [
      ["operand", "matmul: `b` is a tensor that was freed, expected a tensor of this device"],
      ["operand", "read: `tensor` is a tensor that was freed, expected a tensor of this device"],
      ["operand", "rmsNorm: `x` is a tensor of another device, expected a tensor of this device"],
      ["shape", "matmul: `a` has shape [2, 2], expected [4, 1]"],
      ["operand", "matmul: `b` is 4 elements, expected as many as shape [2, 3]"],
      ["shape", "softmax: `x` has shape [2, 2], expected [1, 4]"],
      ["operand", "softmax: `x` is of shape [2, 2], expected whole rows of 3 elements, at least one"],
      ["operand", "attention: `v` is 3 elements, expected as many as shape [2, 2]"],
      ["operand", "softmax: `x` is Array, expected a Float32Array or a tensor of this device"],
      ["operand", "softmax: `x` is empty, expected at least one number"],
      ["operand", "tensor: `shape` is [3], expected positive whole numbers whose product is 4, the length of `data`"],
      ["operand", "tensor: `shape` is [-2, -2], expected positive whole numbers whose product is 4, the length of `data`"],
      ["operand", "tensor: `shape` is [], expected positive whole numbers whose product is 4, the length of `data`"],
    ]);
    assert.deepEqual(alive, [1, 2, 3, 4]);
    assert.deepEqual(product, [7, 10, 15, 22]);
    assert.equal(late, "disposed");
  },
);

test("Chromium: memory of tensors that are freed serves the next ones", { timeout: 120_000 }, async () => {
  const created = await places.Chromium(async ({ Kernels }) => {
    const kernels = await Kernels.open({ device: "gpu" });
    const weight = await kernels.tensor(new Float32Array(64 * 64).fill(0.01), [64, 64]);
    let x = await kernels.tensor(new Float32Array(64 * 64).fill(1), [64, 64]);
    const counts = [];
    for (let round = 0; round < 40; round++) {
      const y = await kernels.matmul(x, weight, 64, 64, 64, { keep: true });
      x.free();
      x = y;
      counts.push((await kernels.counters()).buffersCreated);
    }
    kernels.free();
    return counts[39] - counts[9];
  });
  // Each call creates a buffer for its params, and none for its result.
  assert.equal(created, 30);
});

everywhere(
  "kernels are there as functions, on a device that they share",
  async ({ softmax, matmul }) => [...(await softmax(new Float32Array([0, 0, 0, 0]), 2)), ...(await matmul(new Float32Array([2]), new Float32Array([3]), 1, 1, 1))],
  (values) => assert.deepEqual(values.map((it) => Number(it.toFixed(6))), [0.5, 0.5, 0.5, 0.5, 6]),
);

test("Chromium: each model has a worker, and none is left when all are freed", { timeout: 60_000 }, async () => {
  server.files.set("chat.gguf", bytesInMemory(chatModel));
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(async (url) => {
    const { Model } = await import("/npm/index.js");
    const models = await Promise.all([Model.load(url, { device: "cpu" }), Model.builtin({ device: "cpu" })]);
    await Promise.all(models.map((model) => model.generate("Once", { temperature: 0, maxTokens: 3 }).text()));
    for (const model of models) model.free();
  }, server.url("files/chat.gguf"));
  for (let i = 0; i < 50 && page.workers().length > 0; i++) await new Promise((resolve) => setTimeout(resolve, 100));
  assert.equal(page.workers().length, 0);
  await page.close();
});
