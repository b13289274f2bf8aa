// The package outside Chromium and Node: a program's typical calls, on the CPU and, if available, on a GPU. A random
// one of the places with a GPU uses it. With TILEWRIGHT_FULL all of them do, and also run an encoder.
// `greedy.test.mjs` tests greedy tokens of all models with a reference.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { oneOf } from "./drawn.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";
import { tinyEncoder } from "./tensors.mjs";

const { cases } = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8"));
const [reference] = cases;

// Both compile shaders by the same wgpu, for a minute and a half on a software GPU.
const gpuPlaces = oneOf(["Firefox", "Deno"]);

/** Runs in the place: the ids after each prompt, and the model's device. */
async function continueAll({ Model }, { device, cases }) {
  const notices = [];
  const model = await Model.builtin({ device, onNotice: ({ code }) => notices.push(code) });
  const continuations = [];
  for (const { ids, greedy_ids } of cases) {
    const pieces = [];
    for await (const { id } of model.generate(ids, { temperature: 0, maxTokens: greedy_ids.length, ignoreEos: true })) pieces.push(id);
    continuations.push(pieces);
  }
  const { device: on } = model;
  model.free();
  return { on, notices, continuations };
}

/** Runs in the place: a program's typical calls besides reading to the end. */
async function useModel({ Model, TilewrightError }, { prompt }) {
  const model = await Model.builtin({ device: "cpu" });
  const ids = [...await model.tokenize(prompt)];
  const odd = "Ünïcode, 雪 and \u{1F600}!";
  const roundTrip = await model.detokenize(await model.tokenize(odd, { addSpecial: false }));
  const greedy = { temperature: 0, maxTokens: 40 };
  const text = await model.generate(prompt, greedy).text();
  const stopped = model.generate(prompt, { ...greedy, stop: [" named"] });
  const untilStop = await stopped.text();
  const { stopReason } = await stopped.result;
  const sample = (seed) => model.generate(prompt, { temperature: 1, seed, maxTokens: 30 }).text();
  const samples = [await sample(1), await sample(1), await sample(2)];
  const abort = new AbortController();
  const aborted = await (async () => {
    for await (const _ of model.generate(prompt, { ...greedy, maxTokens: 400, signal: abort.signal })) abort.abort();
  })().then(() => "nothing", ({ name }) => name);
  const again = await model.generate(prompt, greedy).text();
  const refused = await model.generate(prompt, { maxTokens: -1 }).text().then(() => "nothing", (error) => [error instanceof TilewrightError, error.code]);
  const together = await model.generate(prompt, { ...greedy, tokensPerSubmit: 4 }).text();
  const tooMany = await model.generate(prompt, { tokensPerSubmit: 17 }).text().then(() => "nothing", (error) => [error.code, error.message]);
  const longer = { ...greedy, maxTokens: 200, ignoreEos: true };
  const whole = await model.generate(prompt, longer).text();
  const guessing = model.generate(prompt, { ...longer, promptLookup: 7 });
  const lookedUp = { isSame: (await guessing.text()) === whole, ...(await guessing.result) };
  const drawn = await model.generate(prompt, { temperature: 1, promptLookup: 7 }).text().then(() => "nothing", ({ code, message }) => [code, message]);
  model.free();
  const freed = await model.generate(prompt, greedy).text().then(() => "nothing", ({ code }) => code);
  return { ids, odd, roundTrip, text, untilStop, stopReason, samples, aborted, again, refused, together, tooMany, lookedUp, drawn, freed };
}

/** Runs in the place: vectors of texts, and the texts nearest to each. */
async function embedAll({ Embedder, Index }, { source, device, texts }) {
  const embedder = await Embedder.load(source, { device });
  const ids = [];
  for (const text of texts) ids.push([...await embedder.tokenize(text)]);
  const all = await embedder.embed(texts);
  const index = await Index.create({ on: embedder });
  await index.append(all);
  const hits = await index.search(all, 1);
  const { device: on } = embedder;
  embedder.free();
  return { on, ids, vectors: [...all].map((vector) => [...vector]), nearest: hits.map(([{ id }]) => id) };
}

function cosineDistance(a, b) {
  const dot = (a, b) => a.reduce((sum, it, i) => sum + it * b[i], 0);
  return 1 - dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

/**
 * The tests of a place. `missing` is the reason for its absence, `open(server)` resolves with `{ run(run, given),
 * source(name, files), close() }`: `source` is a folder of files in a form that the place can load.
 */
export function lane(name, { missing, open, devices }) {
  const options = { skip: missing ?? false, timeout: 300_000 };
  let server;
  let place;
  before(async () => {
    if (missing !== undefined) return console.log(`skipped: ${name}: ${missing}`);
    server = await startServer();
    place = await open(server);
  });
  after(async () => {
    await place?.close();
    await server?.stop();
  });

  for (const device of devices.filter((device) => device !== "gpu" || gpuPlaces.includes(name))) {
    test(`${name}, ${device}: the built-in model's greedy tokens are the reference's`, options, async (t) => {
      // A software GPU is slow.
      const taken = device === "cpu" ? cases : cases.slice(0, 1);
      const { on, notices, continuations } = await place.run(continueAll, { device, cases: taken });
      t.diagnostic(`${name} is ${on.name} (${on.backend}${on.tier ? `, ${on.tier}` : ""})`);
      assert.equal(on.backend, device === "cpu" ? "cpu" : "webgpu");
      assert.deepEqual(notices, []);
      assert.deepEqual(continuations, taken.map(({ greedy_ids }) => greedy_ids));
    });

    // Compiling an encoder's shaders takes most of a minute in software, and tests little beyond the model.
    if (device === "gpu" && !process.env.TILEWRIGHT_FULL) continue;
    test(`${name}, ${device}: an encoder has its reference's ids and vectors, and a text is nearest to itself`, options, async () => {
      const { files, texts } = tinyEncoder("nomic");
      delete files["model.gguf"];
      const wanted = texts.filter(({ prompt }) => prompt === null);
      const given = { source: place.source("nomic", files), device, texts: wanted.map(({ text }) => text) };
      const { on, ids, vectors, nearest } = await place.run(embedAll, given);
      assert.equal(on.backend, device === "cpu" ? "cpu" : "webgpu");
      assert.deepEqual(ids, wanted.map((it) => it.ids));
      for (const [i, { text, vector }] of wanted.entries()) {
        const distance = cosineDistance(vectors[i], vector);
        assert.ok(distance <= 1e-5, `${text}: cosine distance ${distance}`);
        // Texts that the encoder tokenizes alike have one vector.
        assert.deepEqual(wanted[nearest[i]].ids, wanted[i].ids, text);
      }
    });
  }

  test(`${name}: texts, stop texts, seeds, an abort, errors and the end of a model`, options, async () => {
    const it = await place.run(useModel, { prompt: reference.prompt });
    assert.deepEqual(it.ids, reference.ids);
    assert.equal(it.roundTrip.trim(), it.odd);
    assert.ok(reference.greedy_text.startsWith(it.text.trimEnd()), it.text);
    assert.deepEqual([it.untilStop, it.stopReason], [it.text.slice(0, it.text.indexOf(" named")), "stop_text"]);
    assert.equal(it.samples[0], it.samples[1]);
    assert.notEqual(it.samples[0], it.samples[2]);
    assert.equal(it.aborted, "AbortError");
    assert.equal(it.again, it.text);
    assert.deepEqual(it.refused, [true, "option"]);
    assert.equal(it.together, it.text);
    assert.equal(it.tooMany[0], "option");
    assert.match(it.tooMany[1], /tokensPerSubmit/);
    assert.ok(it.lookedUp.isSame && it.lookedUp.draftedTokens > 0, JSON.stringify(it.lookedUp));
    assert.ok(it.lookedUp.acceptedTokens <= it.lookedUp.draftedTokens && it.lookedUp.generatedTokens === 200);
    assert.equal(it.drawn[0], "option");
    assert.match(it.drawn[1], /promptLookup/);
    assert.equal(it.freed, "disposed");
  });
}

/** A place for `lane` from a browser with `evaluate(url, run, ..given)`. */
export const browserPlace = (openBrowser) => async (server) => {
  const browser = await openBrowser();
  return {
    run: (run, given) => browser.evaluate(`${server.origin}/blank.html`, async (source, given) => {
      // JSON cannot express undefined.
      return await new Function(`return ${source}`)()(await import("/npm/index.js"), given) ?? null;
    }, run.toString(), given),
    source(name, files) {
      for (const [file, content] of Object.entries(files)) server.files.set(`${name}/${file}`, bytesInMemory(Buffer.from(content)));
      return `${server.origin}/files/${name}/`;
    },
    close: () => browser.close(),
  };
};
