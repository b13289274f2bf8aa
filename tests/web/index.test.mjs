// Vector search in Chromium and in Node, on WebGPU and on the CPU: hits against a sort of f64 scores, ties, filters,
// deletion, files, and refused input.

import assert from "node:assert/strict";
import { test } from "node:test";

import { everywhere, places, published, server } from "./places.mjs";
import { dataPath, lacksData } from "./server.mjs";
import { uniform } from "./tensors.mjs";

const DIMS = 37;
const COUNT = 1500;
const K = 10;

const rows = (vectors) => Array.from({ length: vectors.length / DIMS }, (_, i) => vectors.subarray(i * DIMS, (i + 1) * DIMS));
const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

/** Every fourth vector equals the previous one, so that scores tie. */
const vectors = uniform(COUNT * DIMS, 1);
for (let i = 3; i < COUNT; i += 4) vectors.copyWithin(i * DIMS, (i - 1) * DIMS, i * DIMS);
// Enough for two submissions; the first query is a vector that occurs twice.
const queries = uniform(35 * DIMS, 2);
queries.set(vectors.subarray(2 * DIMS, 3 * DIMS));

/** Ids and f64 scores of all vectors allowed by `isAllowed`, best first. */
function sorted(query, metric, isAllowed) {
  const score = (vector) => dot(query, vector) / (metric === "dot" ? 1 : Math.sqrt(dot(query, query) * dot(vector, vector)));
  const all = rows(vectors).map((vector, id) => ({ id, score: score(vector) })).filter(({ id }) => isAllowed(id));
  return all.sort((a, b) => b.score - a.score || a.id - b.id);
}

/** Rounding error of half a step, relative to the largest component, which is at most 1. */
const STEP = { f32: 2 ** -24, f16: 2 ** -11, int8: 1 / 254 };

/**
 * Compares lists of hits with the sort, up to the rounding of scores: a sum of D products of numbers rounded in
 * storage. Equal vectors have equal scores, so their order is exact.
 */
function checkHits(found, { metric, storage, isAllowed, asked }) {
  assert.equal(found.length, rows(asked).length);
  found.forEach((hits, i) => {
    const query = rows(queries)[i];
    const want = sorted(query, metric, isAllowed);
    const size = metric === "dot" ? query.reduce((sum, x) => sum + Math.abs(x), 0) : Math.sqrt(DIMS);
    const bound = (STEP[storage] * 1.01 + (DIMS + 4) * 2 ** -24) * size;
    const exact = new Map(want.map(({ id, score }) => [id, score]));
    assert.equal(hits.length, Math.min(K, want.length), `query ${i}`);
    assert.equal(new Set(hits.map(({ id }) => id)).size, hits.length, `query ${i}: an id twice`);
    hits.forEach(({ id, score }, rank) => {
      assert.ok(exact.has(id), `query ${i}: id ${id} must not be found`);
      assert.ok(Math.abs(score - exact.get(id)) <= bound, `query ${i}: id ${id} scores ${score}, expected ${exact.get(id)} ± ${bound}`);
      assert.ok(Math.abs(exact.get(id) - want[rank].score) <= 2 * bound, `query ${i}: id ${id} is not a hit of rank ${rank}`);
      const next = hits[rank + 1];
      assert.ok(!next || score > next.score || (score === next.score && id < next.id), `query ${i}: order at rank ${rank}`);
    });
  });
}

/** Runs in a page and in Node: appends in two parts, searches, filters, deletes, saves and loads. */
async function useIndex({ Index }, { device, metric, storage, dims, vectors, queries, k, cut, filter, deleted }) {
  const index = await Index.create({ dims, metric, storage, device, model: "numbers" });
  const all = Float32Array.from(vectors);
  const asked = Float32Array.from(queries);
  const firsts = [await index.append(all.subarray(0, cut * dims)), await index.append(all.subarray(cut * dims))];
  const outcome = { backend: index.device.backend, firsts, lengths: [index.length], kept: [all.length, asked.length] };
  outcome.plain = await index.search(asked, k);
  outcome.filtered = await index.search(asked, k, { filter });
  outcome.none = await index.search(asked.subarray(0, dims), k, { filter: [] });
  outcome.empty = await index.search(new Float32Array(0), k);
  outcome.nDeleted = [await index.delete(deleted), await index.delete(deleted.slice(0, 1))];
  outcome.lengths.push(index.length);
  outcome.after = await index.search(asked, k);
  const file = await index.save();
  outcome.bytes = file.size;
  const loaded = await Index.load(file, { device, model: "numbers" });
  outcome.savedAgain = String(new Uint8Array(await (await loaded.save()).arrayBuffer())) === String(new Uint8Array(await file.arrayBuffer()));
  outcome.info = loaded.info;
  outcome.again = await loaded.search(asked, k);
  outcome.next = await loaded.append(all.subarray(0, dims));
  loaded.free();
  index.free();
  return outcome;
}

const filter = Array.from({ length: COUNT }, (_, id) => id).filter((id) => id % 3 === 0);
const deleted = Array.from({ length: COUNT }, (_, id) => id).filter((id) => id % 5 === 2);
const CASES = [
  ["cpu", "cosine", "f32"], ["cpu", "dot", "f16"], ["cpu", "cosine", "int8"], ["gpu", "cosine", "f32"], ["gpu", "dot", "int8"],
];

for (const [place, execute] of Object.entries(places)) {
  // SwiftShader takes seconds for each search shape: it runs only a few.
  const ofPlace = place === "Node" ? CASES : CASES.slice(0, 4);
  for (const [device, metric, storage] of ofPlace) {
    const asked = place === "Chromium" && device === "gpu" ? queries.subarray(0, 3 * DIMS) : queries;
    test(`${place}, ${device}: ${metric}, ${storage}: finds what a sort finds, with ties, filter, deletion and files`, { timeout: 60_000 }, async (t) => {
      const given = { device, metric, storage, dims: DIMS, vectors: [...vectors], queries: [...asked], k: K, cut: 700, filter, deleted };
      let outcome;
      try {
        outcome = await execute(useIndex, given);
      } catch (error) {
        if (place === "Chromium" || error.code !== "webgpu_unavailable" || process.env.REQUIRE_ADAPTER) throw error;
        return t.skip(error.message);
      }
      assert.equal(outcome.backend, device === "cpu" ? "cpu" : "webgpu");
      assert.deepEqual([outcome.firsts, outcome.lengths], [[0, 700], [COUNT, COUNT - deleted.length]]);
      assert.deepEqual(outcome.kept, [vectors.length, asked.length], "the caller keeps its arrays");
      checkHits(outcome.plain, { metric, storage, asked, isAllowed: () => true });
      if (metric === "cosine") assert.deepEqual(outcome.plain[0].slice(0, 2).map(({ id }) => id), [2, 3], "equals by id");
      checkHits(outcome.filtered, { metric, storage, asked, isAllowed: (id) => id % 3 === 0 });
      assert.deepEqual([outcome.none, outcome.empty], [[[]], []]);
      assert.deepEqual(outcome.nDeleted, [deleted.length, 0]);
      checkHits(outcome.after, { metric, storage, asked, isAllowed: (id) => id % 5 !== 2 });
      assert.deepEqual(outcome.again, outcome.after, "a loaded index finds the same");
      assert.ok(outcome.savedAgain, "and has the same file");
      const { sizeBytes, ...info } = outcome.info;
      assert.deepEqual(info, { dims: DIMS, metric, storage, model: "numbers", length: COUNT - deleted.length, nIds: COUNT });
      const perNumber = { f32: 4, f16: 2, int8: 1 }[storage];
      assert.ok(outcome.bytes > COUNT * DIMS * perNumber && outcome.bytes < COUNT * (DIMS * perNumber + 8) + 1000, `${outcome.bytes} bytes`);
      assert.ok(sizeBytes >= COUNT * DIMS * perNumber, `${sizeBytes} bytes on the device`);
      assert.equal(outcome.next, COUNT);
    });
  }
}

everywhere(
  "what is refused is an error with a code that says what and where, and the index is as before",
  async ({ Index }) => {
    const refused = (call) => Promise.resolve().then(call).then(() => "worked", ({ name, code, message }) => [name, code, message]);
    const make = (options) => refused(() => Index.create({ device: "cpu", ...options }));
    const outcome = { create: [], append: [], search: [], ids: [], load: [] };
    for (const bad of [{}, { dims: 0 }, { dims: 1.5 }, { dims: -1 }, { dims: 70000 }, { dims: 3, metric: "l2" }, { dims: 3, storage: "int4" }]) {
      outcome.create.push(await make(bad));
    }
    const index = await Index.create({ dims: 3, device: "cpu", model: "a", storage: "f16" });
    await index.append(Float32Array.of(1, 0, 0, 0, 1, 0));
    for (const bad of [[1, 2], [1, 0, 0, 1, NaN, 0], [Infinity, 0, 0], [0, 0, 0]]) outcome.append.push(await refused(() => index.append(Float32Array.from(bad))));
    outcome.append.push(await refused(() => index.append([1, 2, 3])), await refused(() => index.append(new Float64Array(3))));
    for (const [query, k, options] of [
      [[1, 2], 1], [[1, NaN, 0], 1], [[0, 0, 0], 1], [[1, 0, 0], 0], [[1, 0, 0], 1025], [[1, 0, 0], 1.5], [[1, 0, 0], 1, { filter: [2] }],
      [[1, 0, 0], 1, { filter: [-1] }],
    ]) outcome.search.push(await refused(() => index.search(Float32Array.from(query), k, options)));
    outcome.ids.push(await refused(() => index.delete([0, 2])), await refused(() => index.delete(["0"])));
    const reason = await index.search(Float32Array.of(1, 0, 0), 1, { signal: AbortSignal.abort("enough") }).catch((it) => it);
    outcome.after = [index.length, (await index.search(Float32Array.of(1, 0, 0), 5))[0].map(({ id }) => id), reason];

    const bytes = new Uint8Array(await (await index.save()).arrayBuffer());
    const text = (bytes) => new TextDecoder("latin1").decode(bytes);
    const changed = (from, to) => Uint8Array.from(text(bytes).replace(from, to), (it) => it.charCodeAt(0));
    const last = bytes.slice();
    // NaN as the last component of the last vector.
    last.set([0, 126], last.length - 2);
    for (const bad of [
      new Uint8Array(0), bytes.subarray(0, 100), bytes.subarray(0, bytes.length - 1), changed("tilewright index", "tilewright indez"),
      changed('"version":"1"', '"version":"9"'), changed('"cosine"', '"cosinf"'), changed('"dims":"3"', '"dims":"4"'), last,
    ]) outcome.load.push(await refused(() => Index.load(bad, { device: "cpu" })));
    outcome.load.push(await refused(() => Index.load(7)), await refused(() => Index.load(new Response(bytes, { status: 404 }))));
    outcome.load.push(await refused(() => Index.load(bytes, { device: "cpu", token: "t" })));
    outcome.stream = await refused(() => index.saveTo(7));
    let whole = 0;
    const full = new WritableStream({ write: (piece) => { whole += piece.length; throw new Error("the disk is full"); } });
    outcome.full = [await index.saveTo(full).then(() => "worked", ({ message }) => message), full.locked, index.length];
    outcome.model = await refused(() => Index.load(bytes, { device: "cpu", model: "b" }));
    index.free();
    index.free();
    outcome.freed = [await refused(() => index.search(Float32Array.of(1, 0, 0), 1)), await refused(() => index.save())];
    return outcome;
  },
  ({ create, append, search, ids, after, load, model, stream, full, freed }) => {
    const all = [...create, ...append, ...search, ...ids, ...load, model, stream, ...freed];
    assert.deepEqual(all.map(([name]) => name), all.map(() => "TilewrightError"), JSON.stringify(all, null, 1));
    const codes = (list) => list.map(([, code]) => code);
    assert.deepEqual(codes(create), ["option", "index", "option", "option", "index", "option", "option"]);
    assert.deepEqual(codes(append), ["index", "index", "index", "index", "option", "option"]);
    assert.match(append[1][2], /record 1 is NaN in column 1, expected finite numbers/);
    assert.match(append[0][2], /record 0 is 2 numbers, expected 3 numbers/);
    assert.deepEqual(codes(search), ["index", "index", "index", "option", "option", "option", "index", "option"]);
    assert.match(search[1][2], /query 0 is NaN/);
    assert.deepEqual(codes(ids), ["index", "option"]);
    assert.deepEqual(after, [2, [0, 1], "enough"]);
    assert.deepEqual(codes(load), ["format", "format", "format", "format", "unsupported", "format", "format", "format", "option", "http", "option"]);
    assert.equal(stream[1], "option");
    assert.deepEqual(full, ["the disk is full", false, 2]);
    assert.match(load[7][2], /record 1 at byte \d+ is NaN, expected finite numbers/);
    assert.deepEqual(codes([model]), ["index"]);
    assert.match(model[2], /model is `a`, expected `b`/);
    assert.deepEqual(codes(freed), ["disposed", "disposed"]);
  },
);

/**
 * Runs in a page and in Node: creates an index beside a model, writes it twice and reads it, and returns the growth of
 * the engine's memory.
 */
async function followMemory({ Model, Index }, { count, dims, storage, step }) {
  const model = await Model.builtin({ device: "cpu" });
  const heap = async () => (await model.memory()).wasmHeapBytes;
  const index = await Index.create({ on: model, dims, storage, metric: "dot" });
  const vectors = new Float32Array(step * dims);
  for (let first = 0; first < count; first += step) {
    for (let i = 0; i < vectors.length; i += 1) vectors[i] = ((first * dims + i) * 7919) % 2001 / 1000 - 1;
    await index.append(vectors);
  }
  const outcome = { before: await heap(), nPieces: 0, largest: 0 };
  const written = [];
  let closed = false;
  await index.saveTo(new WritableStream({
    write(piece) {
      outcome.nPieces += 1;
      outcome.largest = Math.max(outcome.largest, piece.length);
      written.push(piece);
    },
    close: () => void (closed = true),
  }));
  const file = await index.save();
  outcome.saved = await heap();
  const equal = async (a, b) => {
    const [one, other] = (await Promise.all([a, b].map((it) => it.arrayBuffer()))).map((it) => new BigUint64Array(it, 0, it.byteLength >> 3));
    return a.size === b.size && one.every((word, i) => word === other[i]);
  };
  outcome.equal = [closed, await equal(file, new Blob(written))];
  const again = await Index.load(file, { on: model });
  Object.assign(outcome, { loaded: await heap(), fileBytes: file.size, sizeBytes: again.info.sizeBytes, length: again.length });
  outcome.equal.push(await equal(await again.save(), file));
  const query = vectors.subarray(0, dims);
  outcome.equal.push(JSON.stringify(await again.search(query, 3)) === JSON.stringify(await index.search(query, 3)));
  model.free();
  index.free();
  again.free();
  return outcome;
}

for (const [place, execute] of Object.entries(places)) {
  // The module is the same in both.
  const sizes = process.env.TILEWRIGHT_FULL ? [["f32", 100_000], ["int8", 100_000]] : place === "Node" ? [["f32", 20_000]] : [];
  for (const [storage, count] of sizes) {
    test(`${place}: the engine's memory never holds a file of ${count} vectors, ${storage}`, { timeout: 120_000 }, async (t) => {
      const outcome = await execute(followMemory, { count, dims: 384, storage, step: 2000 });
      const { before, saved, loaded, fileBytes, sizeBytes, length, nPieces, largest, equal } = outcome;
      t.diagnostic(`${fileBytes} bytes in ${nPieces} pieces: ${saved - before} more to write them, ${loaded - saved} for an index of ${sizeBytes}`);
      assert.deepEqual([length, equal], [count, [true, true, true, true]]);
      assert.ok(fileBytes >= count * 384 * (storage === "f32" ? 4 : 1), `${fileBytes} bytes`);
      assert.ok(nPieces > fileBytes / 5e6 && largest < 5e6, `${nPieces} pieces of up to ${largest} bytes`);
      // A few pieces, and an index's own overhead; for bytes also a number per 32 until their scales arrive.
      const slack = 16e6 + (storage === "int8" ? count * 384 / 8 : 0);
      assert.ok(saved - before < slack, `${saved - before} bytes more while ${fileBytes} were written`);
      assert.ok(loaded - saved < sizeBytes + slack, `${loaded - saved} bytes more for an index of ${sizeBytes} from a file of ${fileBytes}`);
    });
  }

  test(`${place}: an index comes from an address, a Response and a kept copy as from its file`, { timeout: 60_000 }, async () => {
    const make = async ({ Index }, { vectors, dims }) => {
      const index = await Index.create({ dims, storage: "int8", device: "cpu" });
      await index.append(Float32Array.from(vectors));
      const file = await index.save();
      index.free();
      return [...new Uint8Array(await file.arrayBuffer())];
    };
    const bytes = await execute(make, { dims: DIMS, vectors: [...vectors] });
    const address = `${published(place, "saved", { "index.safetensors": Uint8Array.from(bytes) })}index.safetensors`;
    const load = async ({ Index }, { address, bytes, query, remote }) => {
      const found = [];
      for (const [source, options] of [
        [Uint8Array.from(bytes), {}], [address, { cache: false }], [new Response(Uint8Array.from(bytes)), {}], ...remote ? [[address, {}], [new URL(address), {}]] : [],
      ]) {
        const index = await Index.load(source, { device: "cpu", ...options });
        found.push([index.length, (await index.search(Float32Array.from(query), 3))[0]]);
        index.free();
      }
      const aborted = await Index.load(address, { device: "cpu", signal: AbortSignal.abort("enough") }).catch((it) => it);
      return { found, aborted };
    };
    const { found, aborted } = await execute(load, { address, bytes, query: [...queries.subarray(0, DIMS)], remote: place === "Chromium" });
    assert.equal(found.length, place === "Chromium" ? 5 : 3);
    assert.equal(found[0][0], COUNT);
    found.forEach((it) => assert.deepEqual(it, found[0]));
    assert.equal(aborted, "enough");
  });
}

for (const [place, execute] of Object.entries(places)) {
  test(`${place}: an index lives on its encoder's device, knows its model, and outlives it until it is freed`, { timeout: 60_000, skip: lacksData("minilm-l6-v2") }, async () => {
    const folder = (name) => (place === "Chromium" ? `${server.origin}/data/${name}/` : `${dataPath(name)}/`);
    const outcome = await execute(
      async ({ Embedder, Index }, { source }) => {
        const refused = (call) => call.then(() => "worked", ({ code, message }) => [code, message]);
        const load = (options) => Embedder.load(source, { device: "cpu", cache: false, ...options });
        const embedder = await load();
        const texts = ["The cat sleeps on the sofa.", "Stocks rose on Monday.", "He boiled the pasta for nine minutes."];
        const index = await Index.create({ on: embedder, storage: "int8" });
        await index.append(await embedder.embed(texts));
        const [hits] = await index.search(await embedder.embed("cooking noodles"), 3);
        const { info } = index;
        const bytes = await index.save();
        index.free();
        const again = await Index.load(bytes, { on: embedder });
        const [same] = await again.search(await embedder.embed("cooking noodles"), 3);
        const other = await refused(Index.load(bytes, { on: embedder, model: "another" }));
        const pooled = await load({ pooling: "cls" });
        const pooling = await refused(Index.load(bytes, { on: pooled }));
        pooled.free();
        const small = await Index.create({ on: embedder, dims: 3 });
        const dims = await refused(Index.load(await small.save(), { on: embedder }));
        const query = await embedder.embed("cooking noodles");
        embedder.free();
        const [alone] = await again.search(query, 3);
        again.free();
        return { hits, same, alone, info, other, pooling, dims, gone: await refused(again.search(query, 1)) };
      },
      { source: folder("minilm-l6-v2") },
    );
    const { hits, same, alone, info, other, pooling, dims, gone } = outcome;
    assert.equal(hits[0].id, 2);
    assert.deepEqual(same, hits);
    assert.deepEqual(alone, hits);
    assert.deepEqual([info.dims, info.storage, info.metric, info.model, info.pooling, info.length], [384, "int8", "cosine", "minilm-l6-v2", "mean", 3]);
    assert.equal(other[0], "index");
    assert.deepEqual([pooling[0], dims[0], gone[0]], ["index", "index", "disposed"]);
    assert.match(pooling[1], /pooling is `mean`, expected `cls`/);
    assert.match(dims[1], /dims is 3, expected 384/);
  });
}

test("Chromium: an index is lost with its device, says so, and comes back from its file", { timeout: 60_000 }, async () => {
  const outcome = await places.Chromium(async ({ Index }) => {
    const vectors = Float32Array.of(1, 0, 0, 0, 1, 0);
    const first = await Index.create({ dims: 3, device: "gpu" });
    await first.append(vectors);
    const bytes = await first.save();
    await first.destroyDevice();
    const lost = await first.search(vectors, 1).catch(({ code }) => code);
    first.free();
    const second = await Index.load(bytes, { device: "gpu" });
    const found = await second.search(vectors, 1);
    second.free();
    return { lost, found: found.map(([hit]) => hit.id) };
  });
  assert.deepEqual(outcome, { lost: "device_lost", found: [0, 1] });
});
