// Sharing: a model among tabs of a site, a worker and its device among models.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { chromium, devicesIn, places, published, server } from "./places.mjs";
import { repository } from "./server.mjs";
import { tinyEncoder } from "./tensors.mjs";

const [reference] = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases;
const LOAD = { device: "cpu", cache: false, shared: true };
const limited = { timeout: 120_000 };

/** Waits for a condition. */
async function until(isSo) {
  while (!await isSo()) await new Promise((resolve) => setTimeout(resolve, 20));
}

/** A tab that has loaded the model. */
async function tabWith(address, options = {}) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(async ([address, options]) => {
    globalThis.package = await import("/npm/index.js");
    globalThis.notices = [];
    globalThis.model = await globalThis.package.Model.load(address, { ...options, onNotice: ({ code }) => globalThis.notices.push(code) });
  }, [address, { ...LOAD, ...options }]);
  return page;
}

/** In a tab: a generation's result. */
const generated = (page, prompt, options) => page.evaluate(async ([prompt, options]) => {
  const generation = globalThis.model.generate(prompt, options);
  const ids = [];
  for await (const { id } of generation) ids.push(id);
  const { stopReason } = await generation.result;
  return { ids, text: await generation.text(), stopReason };
}, [prompt, options]);

const GREEDY = { temperature: 0, maxTokens: reference.greedy_ids.length, ignoreEos: true };

test("tabs: two share one model, which is loaded once, and each has its own texts", limited, async () => {
  const address = server.url("assets/stories.gguf");
  const [first, second] = [await tabWith(address), await tabWith(address)];
  assert.deepEqual([server.requests(address).length, first.workers().length, second.workers().length], [1, 1, 0]);
  const [memory, same] = [await first.evaluate(() => globalThis.model.memory()), await second.evaluate(() => globalThis.model.memory())];
  assert.deepEqual(same, memory);
  assert.equal(await second.evaluate(() => globalThis.model.device.backend), "cpu");
  const [one, two] = await Promise.all([generated(first, reference.ids, GREEDY), generated(second, reference.ids, { ...GREEDY, stop: [" named"] })]);
  assert.deepEqual(one.ids, reference.greedy_ids);
  assert.deepEqual(two.ids, reference.greedy_ids.slice(0, two.ids.length));
  assert.equal(two.stopReason, "stop_text");
  assert.deepEqual(await second.evaluate(async () => [...await globalThis.model.tokenize("Once upon a time")]), reference.ids);

  const code = (page, run) => page.evaluate((run) => new Function(`return ${run}`)()().then(() => "nothing", ({ code, name }) => code ?? name), run.toString());
  assert.equal(await code(second, () => globalThis.model.generate("Once", { maxTokens: -1 }).text()), "option");
  assert.equal(await code(second, async () => {
    const stop = new AbortController();
    for await (const _ of globalThis.model.generate("Once", { maxTokens: 400, signal: stop.signal })) stop.abort();
  }), 20);
  assert.deepEqual((await generated(second, reference.ids, GREEDY)).ids, reference.greedy_ids);

  // An endless completion in either tab ends when stopped, and so does a queued one.
  for (const page of [second, first]) {
    const [stopped, waiting, usage] = await page.evaluate(async () => {
      const endless = () => globalThis.model.generate("Once upon a time", { maxTokens: 2 ** 31 - 1, slide: true, ignoreEos: true });
      const [generation, next] = [endless(), endless()];
      next.stop();
      const waiting = await next.result;
      let n = 0;
      for await (const _ of generation) if (++n === 3) generation.stop();
      return [await generation.result, waiting, generation.usage];
    });
    assert.deepEqual([stopped.stopReason, stopped.promptTokens, waiting.stopReason, waiting.promptTokens], ["cancelled", reference.ids.length, "cancelled", 0]);
    assert.deepEqual([usage.promptTokens, usage.generatedTokens], [stopped.promptTokens, stopped.generatedTokens]);
  }

  // Other options load another model, and without the option each tab has its own.
  const third = await tabWith(address, { contextLength: 100 });
  const fourth = await tabWith(address, { shared: false });
  assert.deepEqual([third.workers().length, fourth.workers().length], [1, 1]);
});

test("tabs: when the one with the model is closed in the middle of a text, the text goes on in another with the same tokens", limited, async (t) => {
  const drawn = { temperature: 1, seed: 7, repeatPenalty: 1.1, frequencyPenalty: 0.2, maxTokens: 60, ignoreEos: true };
  const schema = { type: "object", properties: { name: { type: "string", maxLength: 30 }, tags: { type: "array", items: { enum: ["red", "blue"] }, maxItems: 4 } }, required: ["name", "tags"] };
  const cases = [
    [GREEDY, 9], [drawn, 25], [{ ...drawn, seed: 3, responseFormat: { type: "json_schema", schema }, ignoreEos: false }, 12],
    // Before any token.
    [GREEDY, 0],
  ];
  const address = server.url("assets/stories.gguf");
  const alone = await tabWith(address, { shared: false });
  for (const [options, n] of cases) {
    const expected = await generated(alone, reference.ids, options);
    assert.ok(expected.ids.length > n);
    const before = server.requests(address).length;
    const first = await tabWith(address);
    const second = await tabWith(address);
    // The first tab stops responding after `n` tokens, like a closed one.
    await first.evaluate((n) => {
      const post = BroadcastChannel.prototype.postMessage;
      let left = n;
      BroadcastChannel.prototype.postMessage = function (message) {
        if (message.type === "event") left -= 1;
        if (left >= 0 && !(left === 0 && message.type === "reply")) post.call(this, message);
        if (left < 0 || message.type === "reply") globalThis.isSilent = true;
      };
    }, n);
    const going = generated(second, reference.ids, options);
    await until(() => first.evaluate(() => globalThis.isSilent === true));
    await first.close();
    assert.deepEqual(await going, expected);
    assert.deepEqual([server.requests(address).length - before, second.workers().length], [2, 1]);
    assert.deepEqual(await second.evaluate(() => globalThis.notices), ["taken_over"]);
    t.diagnostic(`${n} of ${expected.ids.length} tokens came from the closed tab`);
    await second.close();
  }
});

test("tabs: a tab that frees its model goes on to serve the others, and the last one ends the worker", limited, async () => {
  const address = server.url("assets/stories.gguf");
  const [first, second] = [await tabWith(address), await tabWith(address)];
  await first.evaluate(() => globalThis.model.free());
  assert.equal(await first.evaluate(() => globalThis.model.tokenize("a").catch(({ code }) => code)), "disposed");
  assert.deepEqual((await generated(second, reference.ids, GREEDY)).ids, reference.greedy_ids);
  assert.deepEqual([first.workers().length, second.workers().length, server.requests(address).length], [1, 0, 1]);
  await second.evaluate(() => globalThis.model.free());
  await until(() => first.workers().length === 0);

  // No tab is left: the next one loads.
  const third = await tabWith(address);
  assert.deepEqual([third.workers().length, server.requests(address).length], [1, 2]);
});

test("tabs: what does not belong on the channel is ignored, and what cannot be shared is refused", limited, async () => {
  const address = server.url("assets/stories.gguf");
  const page = await tabWith(address);
  const other = await tabWith(address);
  await other.evaluate(async () => {
    const [{ name: topic }] = (await navigator.locks.query()).held.filter(({ name }) => name.startsWith("tilewright/shared/"));
    const channel = new BroadcastChannel(topic);
    for (const message of [
      null, 7, "ready", {}, { type: "ready" }, { type: "nothing" }, { type: "call", from: "x", id: 1, name: "close", args: {} }, { type: "call", from: "x", id: 2, name: "generate", args: null },
      { type: "call", from: "x", id: 3, name: "__proto__" }, { type: "report", from: "x" }, { type: "abort", from: "nobody", id: 1 }, { type: "reply", to: "nobody", id: 0, value: 1 }, { type: "event" }, { type: "fail" },
    ]) channel.postMessage(message);
    channel.close();
  });
  assert.deepEqual((await generated(page, reference.ids, GREEDY)).ids, reference.greedy_ids);
  assert.deepEqual((await generated(other, reference.ids, GREEDY)).ids, reference.greedy_ids);
  assert.deepEqual([...page.problems, ...other.problems], []);
  const refused = await page.evaluate(async () => {
    const { Embedder, Model } = globalThis.package;
    const code = (load) => load.then(() => "worked", ({ code }) => code);
    return [
      await code(Model.load(new Blob(["x"]), { shared: true })), await code(Model.load("/assets/stories.gguf", { shared: true, on: globalThis.model })),
      await code(Embedder.load("/x/", { on: globalThis.model })), await code(Model.load("/gone.gguf", { shared: true, cache: false, device: "cpu" })),
    ];
  });
  assert.deepEqual(refused, ["option", "option", "option", "http"]);
});

test("tabs: a page that has no locks has a model of its own, and is told", limited, async () => {
  const page = await chromium.open(`${server.insecureOrigin}/blank.html`);
  const seen = await page.evaluate(async (ids) => {
    const { Model } = await import("/npm/index.js");
    const notices = [];
    const model = await Model.builtin({ device: "cpu", shared: true, onNotice: ({ code }) => notices.push(code) });
    const text = await model.generate(ids, { temperature: 0, maxTokens: 12 }).text();
    return { notices, text };
  }, reference.ids);
  assert.deepEqual(seen.notices, ["not_shared"]);
  assert.ok(reference.greedy_text.startsWith(seen.text) && seen.text !== "");
});

/** Runs in a place: models, an encoder and an index in one worker, then each alone. */
async function together({ Model, Embedder, Index }, { device, encoder, ids, lose }) {
  const options = { temperature: 0, maxTokens: 12, ignoreEos: true };
  const texts = ["the old engine", "a river in the rain", "the cat"];
  const notices = [];
  const onNotice = ({ code }) => notices.push(code);
  const use = async (model, other, embedder, index) => {
    const [story, again, vectors] = await Promise.all([model.generate(ids, options).text(), other.generate(ids, options).text(), embedder.embed(texts)]);
    await index?.append(vectors);
    return { story, again, vectors: [...vectors.vectors], hits: index === undefined ? undefined : await index.search(vectors, 2) };
  };
  const model = await Model.builtin({ device, onNotice });
  const other = await Model.builtin({ on: model, contextLength: 200, onNotice });
  const embedder = await Embedder.load(encoder, { on: model, cache: false, onNotice });
  const index = await Index.create({ on: embedder });
  const shared = await use(model, other, embedder, index);
  const memory = [await model.memory(), await other.memory(), await embedder.memory()].map(({ totalBytes }) => totalBytes);
  const both = await Model.load(encoder, { on: model, device: "cpu" }).catch(({ code }) => code);
  const tooLarge = await Model.builtin({ on: model, memoryLimit: 1 }).catch(({ code }) => code);
  let lost;
  if (lose) {
    await model.destroyDevice();
    lost = await use(model, other, embedder);
  }
  model.free();
  const left = await other.generate(ids, options).text();
  const freed = await model.tokenize("a").catch(({ code }) => code);
  for (const it of [other, embedder, index]) it.free();
  const [one, two, three] = [await Model.builtin({ device }), await Model.builtin({ device }), await Embedder.load(encoder, { device, cache: false })];
  const separate = await use(one, two, three, await Index.create({ on: three }));
  for (const it of [one, two, three]) it.free();
  return { shared, separate, memory, both, tooLarge, left, freed, lost, notices };
}

for (const [place, execute] of Object.entries(places)) {
  for (const device of devicesIn("both").length > 1 ? ["cpu", "gpu"] : ["cpu"]) {
    test(`${place}, ${device}: two models, an encoder and an index in one worker give what each gives by itself`, limited, async () => {
      const encoder = published(place, "nomic", tinyEncoder("nomic").files);
      const it = await execute(together, { device, encoder, ids: reference.ids, lose: device === "gpu" });
      assert.deepEqual(it.shared, it.separate);
      assert.equal(it.left, it.shared.story);
      assert.ok(it.memory.every((bytes) => bytes > 0) && it.memory[1] < it.memory[0], it.memory.join());
      assert.deepEqual([it.both, it.tooLarge, it.freed], ["option", "memory", "disposed"]);
      if (device === "gpu") {
        // Each was reloaded, on one device.
        assert.deepEqual(it.lost.story, it.shared.story);
        assert.deepEqual(it.notices, ["device_rebuilt", "device_rebuilt", "device_rebuilt"]);
      }
    });
  }
}

test("Chromium: models in one worker have one worker, and what nobody refers to is freed", limited, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const count = () => page.workers().length;
  await page.evaluate(async () => {
    const { Index, Kernels, Model } = await import("/npm/index.js");
    globalThis.model = await Model.builtin({ device: "cpu" });
    globalThis.others = [await Model.builtin({ on: globalThis.model }), await Index.create({ dims: 3, on: globalThis.model })];
    globalThis.alone = [await Index.create({ dims: 3, device: "cpu" }), await Kernels.open({ device: "cpu" })];
  });
  assert.equal(count(), 3);
  await page.evaluate(() => globalThis.model.free());
  assert.equal(count(), 3);
  // A running completion keeps its model.
  await page.evaluate(async () => {
    globalThis.text = globalThis.others[0].generate("Once", { maxTokens: 100, ignoreEos: true }).text();
    globalThis.others = undefined;
    gc();
  });
  assert.ok((await page.evaluate(() => globalThis.text)).length > 100);
  await page.evaluate(() => { globalThis.alone = undefined; });
  await until(async () => {
    await page.evaluate(() => gc());
    return count() === 0;
  });
});
