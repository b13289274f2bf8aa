// Text encoders in Chromium and in Node, on WebGPU and on the CPU: token ids and vectors against references, batch
// invariance, sources, aborting, invalid input, lifetime.

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { after, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";

import { chromium, devicesIn, everywhere, places, published, server } from "./places.mjs";
import { dataPath, lacksData, repository } from "./server.mjs";
import { tensors, tinyEncoder } from "./tensors.mjs";

const DIMS = 384;
// SwiftShader takes seconds for a hundred tokens.
const SHORT = 100;
const limited = { timeout: process.env.TILEWRIGHT_FULL ? 600_000 : 120_000 };

/** A test that needs MiniLM, or a skipped one. */
function withData(name, run) {
  test(name, { ...limited, skip: lacksData("minilm-l6-v2") }, run);
}

/** Runs in both places, each with the result of `given`. */
const inBoth = (name, run, check, given) => {
  for (const [place, execute] of Object.entries(places)) {
    withData(`${place}: ${name}`, async () => check(await execute(run, given(place)), place));
  }
};

/** A folder of the test data in a form that a place can load. */
const folder = (place, name) => (place === "Chromium" ? `${server.origin}/data/${name}/` : `${dataPath(name)}/`);

/** MiniLM's reference texts: `{ name, text, maxTokens, ids, vector }`. */
function miniLm() {
  const at = dataPath("minilm-l6-v2");
  const rows = tensors(join(at, "embeddings.safetensors"))("f16");
  return JSON.parse(readFileSync(join(at, "cases.json"), "utf8")).cases.map(({ name, text, max_tokens: maxTokens, ids }, i) => ({
    name, text, maxTokens, ids, vector: rows.slice(i * DIMS, (i + 1) * DIMS),
  }));
}

function cosineDistance(a, b) {
  const dot = (a, b) => a.reduce((sum, it, i) => sum + it * b[i], 0);
  return 1 - dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

/** Runs in a page and in Node: ids and vectors of all texts, and of some of them alone. */
async function embedAll({ Embedder }, { source, device, batches }) {
  const outcome = { infos: [], ids: [], vectors: [], progress: [], differ: [] };
  for (const { maxTokens, texts } of batches) {
    const embedder = await Embedder.load(source, { device, maxTokens, cache: false });
    outcome.infos.push(embedder.info);
    outcome.on = embedder.device;
    for (const text of texts) outcome.ids.push([...(await embedder.tokenize(text))]);
    const seen = [];
    const all = await embedder.embed(texts, { onProgress: (it) => seen.push(it) });
    outcome.progress.push(seen);
    const [first, last] = [all.at(0), all.at(-1)];
    outcome.ends = [all.count, all.dims, last.length, all.at(texts.length), [...all].length];
    for (const vector of all) outcome.vectors.push([...vector]);
    for (const [i, vector] of [[0, first], [texts.length - 1, last]]) {
      const alone = await embedder.embed(texts[i]);
      outcome.differ.push(alone.filter((it, j) => !Object.is(it, vector[j])).length);
    }
    embedder.free();
  }
  return outcome;
}

for (const [place, execute] of Object.entries(places)) {
  for (const device of devicesIn(place)) {
    withData(`${place}, ${device}: MiniLM has its references' ids and vectors, and a text has one vector alone and in a batch`, async (t) => {
      const cases = miniLm().filter(({ ids }) => device === "cpu" || ids.length <= SHORT);
      assert.equal(cases.length, device === "cpu" ? 30 : 28);
      const batches = [...new Set(cases.map((it) => it.maxTokens))].map((maxTokens) => ({
        maxTokens, texts: cases.filter((it) => it.maxTokens === maxTokens).map((it) => it.text),
      }));
      const given = { source: folder(place, "minilm-l6-v2"), device, batches };
      let outcome;
      try {
        outcome = await execute(embedAll, given);
      } catch (error) {
        if (place === "Chromium" || error.code !== "webgpu_unavailable" || process.env.REQUIRE_ADAPTER) throw error;
        return t.skip(error.message);
      }
      assert.equal(outcome.on.backend, device === "cpu" ? "cpu" : "webgpu");
      let worst = 0;
      const inOrder = batches.flatMap(({ maxTokens }) => cases.filter((it) => it.maxTokens === maxTokens));
      inOrder.forEach(({ name, ids, vector }, i) => {
        assert.deepEqual(outcome.ids[i], ids, name);
        const distance = cosineDistance(outcome.vectors[i], vector);
        assert.ok(distance <= 1e-5, `${name}: cosine distance ${distance}`);
        worst = Math.max(worst, distance);
      });
      t.diagnostic(`${outcome.on.name}: ${cases.length} texts, cosine distance up to ${worst.toExponential(1)}`);
      assert.deepEqual(outcome.differ, outcome.differ.map(() => 0));
      const n = batches.at(-1).texts.length;
      assert.deepEqual(JSON.parse(JSON.stringify(outcome.ends)), [n, DIMS, DIMS, null, n]);
      outcome.progress.forEach((seen, i) => {
        const total = batches[i].texts.length;
        assert.deepEqual(seen.at(-1), { done: total, total });
        assert.ok(seen.every(({ done }, j) => j === 0 || done > seen[j - 1].done), JSON.stringify(seen));
      });
      const { dims, maxTokens, pooling, normalize, architecture, weightTypes, fileBytes } = outcome.infos[0];
      assert.deepEqual([dims, maxTokens, pooling, normalize, architecture], [DIMS, 256, "mean", true, "bert"]);
      assert.ok(weightTypes.includes("F16") && fileBytes > 45e6, `${weightTypes}, ${fileBytes} bytes`);
    });
  }
}

/** The tiny random BERT as published with sentence-transformers, with non-default pooling and length. */
function tinyFolder() {
  const at = mkdtempSync(join(tmpdir(), "tilewright-encoder-"));
  after(() => rmSync(at, { recursive: true, force: true }));
  const files = {
    "modules.json": [{ type: "sentence_transformers.models.Transformer" }, { type: "sentence_transformers.models.Pooling" }],
    "sentence_bert_config.json": { max_seq_length: 77 },
    "1_Pooling/config.json": { pooling_mode_cls_token: true },
    "2_Normalize/config.json": {},
  };
  for (const [name, content] of Object.entries(files)) {
    mkdirSync(join(at, name, ".."), { recursive: true });
    writeFileSync(join(at, name), JSON.stringify(content));
  }
  const names = ["config.json", "model.safetensors"];
  names.forEach((name) => cpSync(dataPath(`tiny-random/bert/${name}`), join(at, name)));
  cpSync(dataPath("minilm-l6-v2/tokenizer.json"), join(at, "tokenizer.json"));
  return { at, names: [...Object.keys(files), ...names, "tokenizer.json"] };
}

const tiny = lacksData("minilm-l6-v2") ? undefined : tinyFolder();

/** Runs in a page and in Node: the encoder's properties from each source. */
async function loadEach({ Embedder }, { sources }) {
  const infos = [];
  for (const source of sources) {
    const embedder = await Embedder.load(source, { device: "cpu" });
    infos.push(embedder.info);
    embedder.free();
  }
  return infos;
}

const publishedAs = ({ name, pooling, normalize, maxTokens, dims }) => [name, pooling, normalize, maxTokens, dims];
const PUBLISHED = ["cls", false, 77, 64];

withData("Node: folders, and lists of their paths in any order, say how the encoder is used", async () => {
  const paths = tiny.names.map((name) => join(tiny.at, name));
  const infos = await places.Node(loadEach, { sources: [tiny.at, `${tiny.at}/`, pathToFileURL(tiny.at).href, paths, paths.toReversed()] });
  assert.deepEqual(infos.map(publishedAs), Array(5).fill([basename(tiny.at), ...PUBLISHED]));
});

withData("Chromium: folders, and lists of their addresses in any order, say how the encoder is used", async () => {
  const files = Object.fromEntries(tiny.names.map((name) => [name, readFileSync(join(tiny.at, name))]));
  const [folder, onTheHub] = ["tiny one", "owner/tiny/resolve/main"].map((name) => published("Chromium", name, files));
  const urls = tiny.names.map((name) => `${folder}${name}`);
  const infos = await places.Chromium(loadEach, { sources: [folder, urls, urls.toReversed(), onTheHub] });
  assert.deepEqual(infos.map(publishedAs), ["tiny one", "tiny one", "tiny one", "tiny"].map((name) => [name, ...PUBLISHED]));
});

/** Runs in a page and in Node: ids and vector norms of all texts. */
async function tokenizeAll({ Embedder }, { source, texts }) {
  const embedder = await Embedder.load(source, { device: "cpu", pooling: "mean" });
  try {
    const ids = [];
    for (const text of texts) ids.push([...(await embedder.tokenize(text))]);
    return { ids, dims: (await embedder.embed(texts)).vectors.length / texts.length };
  } finally {
    embedder.free();
  }
}

const unigram = (name) => readFileSync(join(repository, "tests/data/unigram", name), "utf8");
// Sentences: on other texts Hugging Face's tokenizers can differ from SentencePiece.
const sentences = JSON.parse(unigram("cases.json")).cases.slice(9, 49);
everywhere(
  "XLM-RoBERTa's tokenizer.json, a Unigram, gives the ids of SentencePiece",
  tokenizeAll,
  ({ ids, dims }) => {
    assert.deepEqual(ids, sentences.map((it) => [0, ...it.ids, 2]));
    assert.equal(dims, 24);
  },
  (place) => {
    const files = { ...tinyEncoder("roberta-reranker").files, "tokenizer.json": unigram("tokenizer.json") };
    delete files["model.gguf"];
    return { source: published(place, "multilingual", files), texts: sentences.map(({ text }) => text) };
  },
);

withData("Chromium: a folder that the user picked says how the encoder is used", async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.setContent('<input type="file" webkitdirectory>');
  await page.locator("input").setInputFiles(tiny.at);
  const info = await page.evaluate(async () => {
    const { Embedder } = await import("/npm/index.js");
    const embedder = await Embedder.load([...document.querySelector("input").files], { device: "cpu" });
    const { info } = embedder;
    embedder.free();
    return info;
  });
  assert.deepEqual(publishedAs(info), [basename(tiny.at), ...PUBLISHED]);
  assert.deepEqual(page.problems, []);
  await page.close();
});

const nomic = tinyEncoder("nomic");

everywhere(
  "a prompt is put in front of texts by its name, and the model's files may choose one",
  async ({ Embedder }, { source, choosing, texts }) => {
    const embedder = await Embedder.load(source, { device: "cpu", cache: false, cachedVectors: 9 });
    const { prompts, prompt } = embedder.info;
    const vectors = async (embedder, options, texts) => Array.from(await embedder.embed(texts, options), (it) => [...it]);
    const outcome = { prompts, prompt, named: {}, ids: {} };
    for (const name of ["query", "document"]) {
      outcome.named[name] = [
        await vectors(embedder, { prompt: name }, texts),
        await vectors(embedder, { prompt: null }, texts.map((text) => prompts[name] + text)),
      ];
      outcome.ids[name] = [...(await embedder.tokenize(texts[0], { prompt: name }))];
    }
    outcome.plain = [await vectors(embedder, {}, texts), [...(await embedder.tokenize(texts[0]))]];
    outcome.refused = [];
    for (const prompt of ["title", 7]) {
      outcome.refused.push(await embedder.embed(texts, { prompt }).catch(({ code, message }) => [code, message]));
    }
    embedder.free();
    const chooser = await Embedder.load(choosing, { device: "cpu", cache: false });
    outcome.chosen = [chooser.info.prompt, await vectors(chooser, {}, texts), await vectors(chooser, { prompt: null }, texts)];
    chooser.free();
    return outcome;
  },
  ({ prompts, prompt, named, ids, plain, refused, chosen }) => {
    assert.deepEqual([prompts, prompt], [{ query: "search query : ", document: "search document : " }, ""]);
    for (const name of ["query", "document"]) {
      const cases = nomic.texts.filter((it) => it.prompt === name);
      assert.deepEqual(named[name][0], named[name][1], name);
      named[name][0].forEach((vector, i) => {
        const distance = cosineDistance(vector, cases[i].vector);
        assert.ok(distance <= 1e-6, `${name}, text ${i}: cosine distance ${distance}`);
      });
      assert.deepEqual(ids[name], cases[0].ids);
    }
    assert.notDeepEqual(plain[0], named.query[0]);
    assert.deepEqual(plain[1], nomic.texts[0].ids);
    assert.deepEqual(chosen, ["search query : ", named.query[0], plain[0]]);
    assert.deepEqual(refused.map(([code]) => code), ["option", "option"]);
    assert.match(refused[0][1], /prompt is title, expected document, query/);
  },
  (place) => ({
    source: published(place, "nomic", nomic.files),
    choosing: published(place, "choosing", {
      ...nomic.files,
      "config_sentence_transformers.json":
        JSON.stringify({ ...JSON.parse(nomic.files["config_sentence_transformers.json"]), default_prompt_name: "query" }),
    }),
    texts: nomic.texts.filter((it) => it.prompt === null).map((it) => it.text),
  }),
);

/** Runs in a page and in Node: embeds many texts, aborts midway, and embeds again. */
async function abortEmbedding({ Embedder }, { source, device }) {
  const embedder = await Embedder.load(source, { device, maxBatchTokens: 16, cache: false });
  const texts = Array.from({ length: 40 }, (_, i) => `text number ${i}`);
  const before = [...(await embedder.embed(texts[0]))];
  const controller = new AbortController();
  const reason = new Error("enough");
  let done = 0;
  const outcome = await embedder.embed(texts, {
    signal: controller.signal,
    onProgress(progress) {
      done = progress.done;
      controller.abort(reason);
    },
  }).then(() => "ended", (error) => (error === reason ? "its reason" : error.message));
  const atAbort = await embedder.counters();
  const late = [...(await embedder.embed(texts[0]))];
  const after = await embedder.counters();
  const early = await embedder.embed(texts, { signal: AbortSignal.abort(reason) }).catch((error) => error === reason);
  const queued = new AbortController();
  const waiting = embedder.embed(texts, { signal: queued.signal }).catch((error) => error.name);
  queued.abort();
  const result = {
    outcome, done, early, waiting: await waiting, same: late.every((it, i) => Object.is(it, before[i])),
    left: (after.dispatches - atAbort.dispatches),
  };
  const one = await embedder.counters();
  await embedder.embed(texts[0]);
  result.perBatch = (await embedder.counters()).dispatches - one.dispatches;
  embedder.free();
  return result;
}

function checkAbort({ outcome, done, early, waiting, same, left, perBatch }) {
  assert.equal(outcome, "its reason");
  assert.ok(done <= 6, `${done} texts were done`);
  assert.deepEqual([early, waiting, same], [true, "AbortError", true]);
  // Batches of two texts: most of the twenty must not have run.
  assert.ok(left <= 6 * perBatch, `${left} dispatches after the abort, ${perBatch} in a batch`);
}

inBoth("an abort ends the work between two batches with the signal's reason, and the encoder goes on to work", abortEmbedding, checkAbort,
  (place) => ({ source: folder(place, "minilm-l6-v2"), device: "cpu" }));

withData("Chromium: an abort on WebGPU leaves nothing behind that a later call would see", async () =>
  checkAbort(await places.Chromium(abortEmbedding, { source: folder("Chromium", "minilm-l6-v2"), device: "gpu" })));

inBoth(
  "bad input is an error with a code, no text gives no vector, and an empty text has one",
  async ({ Embedder, Model, TilewrightError }, { encoder, decoder, vector }) => {
    const codeOf = (call) => Promise.resolve().then(call).then(() => "worked", (error) => error instanceof TilewrightError && error.code);
    const load = (source, options) => Embedder.load(source, { device: "cpu", cache: false, ...options });
    const kinds = [await codeOf(() => load(decoder)), await codeOf(() => Model.load(encoder, { device: "cpu", cache: false }))];
    const options = [];
    for (const bad of [{ maxTokens: 0 }, { maxTokens: 1e6 }, { maxTokens: "x" }, { pooling: "max" }, { maxBatchTokens: 1 }]) {
      options.push(await codeOf(() => load(encoder, bad)));
    }
    const memory = await codeOf(() => load(encoder, { memoryLimit: 1e6 }));
    const embedder = await load(encoder, { cachedVectors: 2 });
    const messages = [];
    for (const bad of [undefined, 7, ["a", 7], [null], { length: 1 }]) {
      messages.push(await embedder.embed(bad).then(() => "worked", ({ code, message }) => [code, message]));
    }
    const none = await embedder.embed([]);
    const empty = await embedder.embed("");
    // The second time it is cached.
    const again = await embedder.embed([""]);
    const dot = empty.reduce((sum, it, i) => sum + it * vector[i], 0);
    const { totalBytes, weightsBytes } = await embedder.memory();
    embedder.free();
    return {
      kinds, options, memory, messages, dot, none: [none.count, none.vectors.length], same: empty.every((it, i) => Object.is(it, again.at(0)[i])),
      memoryIsKnown: weightsBytes > 20e6 && totalBytes > weightsBytes,
    };
  },
  ({ kinds, options, memory, messages, dot, none, same, memoryIsKnown }) => {
    assert.deepEqual(kinds, ["unsupported", "unsupported"]);
    assert.deepEqual(options, Array(5).fill("option"));
    assert.equal(memory, "memory");
    assert.deepEqual(messages, [
      ["option", "texts is Undefined, expected a text or a list of texts"],
      ["option", "texts is Number, expected a text or a list of texts"],
      ["option", "texts[1] is Number, expected a text"],
      ["option", "texts[0] is Null, expected a text"],
      ["option", "texts is Object, expected a text or a list of texts"],
    ]);
    assert.ok(Math.abs(dot - 1) <= 1e-5, `cosine ${dot}`);
    assert.deepEqual([none, same, memoryIsKnown], [[0, 0], true, true]);
  },
  (place) => ({
    encoder: folder(place, "minilm-l6-v2"),
    decoder: place === "Chromium" ? `${server.origin}/assets/stories.gguf` : join(repository, "assets/stories.gguf"),
    vector: miniLm().find(({ name }) => name === "empty").vector,
  }),
);

inBoth(
  "a freed encoder says so, and what was going on ends",
  async ({ Embedder }, { source }) => {
    const codeOf = (promise) => promise.then(() => "worked", (error) => error.code);
    const embedder = await Embedder.load(source, { device: "cpu", maxBatchTokens: 16, cache: false });
    const going = codeOf(embedder.embed(Array.from({ length: 100 }, (_, i) => `text number ${i}`)));
    await embedder[Symbol.asyncDispose]();
    embedder.free();
    return [await going, await codeOf(embedder.embed("a")), await codeOf(embedder.tokenize("a")), await codeOf(embedder.memory())];
  },
  (codes) => assert.deepEqual(codes, Array(4).fill("disposed")),
  (place) => ({ source: folder(place, "minilm-l6-v2") }),
);

withData("Chromium: an aborted load ends its worker, and a lost device is opened again for the same vectors", async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const seen = await page.evaluate(async (source) => {
    const { Embedder } = await import("/npm/index.js");
    const controller = new AbortController();
    const onProgress = ({ loaded }) => loaded > 1e6 && controller.abort();
    const error = await Embedder.load(source, { device: "cpu", cache: false, signal: controller.signal, onProgress }).catch((it) => it.name);
    const notices = [];
    const embedder = await Embedder.load(source, { device: "gpu", cache: false, onNotice: ({ code }) => notices.push(code) });
    const before = [...(await embedder.embed("a cat"))];
    await embedder.destroyDevice();
    const after = [...(await embedder.embed("a cat"))];
    const { backend } = embedder.device;
    embedder.free();
    return { error, notices, backend, same: before.every((it, i) => Object.is(it, after[i])) };
  }, folder("Chromium", "minilm-l6-v2"));
  assert.deepEqual(seen, { error: "AbortError", notices: ["device_rebuilt"], backend: "webgpu", same: true });
  for (let i = 0; i < 50 && page.workers().length > 0; i++) await sleep(100);
  assert.equal(page.workers().length, 0);
  await page.close();
});
