// Retrieval by a mixture of logits in Chromium and in Node, on WebGPU and on the CPU: scores against the formula in
// plain numbers, each method's hits, sources, devices, and refused input.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { everywhere, places, published, server } from "./places.mjs";
import { bytesInMemory, repository } from "./server.mjs";
import { tensors, tinyEncoder, uniform, withMetadata } from "./tensors.mjs";

const [COUNT, QUERIES, K] = [300, 4, 20];
const [N, M, D] = [4, 4, 16];
const [QUERY_DIMS, ITEM_DIMS] = [36, 16];
const TEMPERATURE = 0.05;

const path = join(repository, "examples/mol/mol.safetensors");
const file = readFileSync(path);
const numbers = tensors(path);

// With the spread for which the weights were made.
const items = uniform(COUNT * ITEM_DIMS, 1).map((x) => x * 1.7);
const queries = uniform(QUERIES * QUERY_DIMS, 2).map((x) => x * 1.7);
const row = (all, dims, i) => [...all.subarray(i * dims, (i + 1) * dims)];

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const silu = (z) => z / (1 + Math.exp(-z));

/** `w x + b`; the bias is optional. */
function layer(name, x, biased = true) {
  const w = numbers(`${name}.weight`);
  const b = biased ? numbers(`${name}.bias`) : [];
  return Array.from({ length: w.length / x.length }, (_, i) => dot(w.slice(i * x.length, (i + 1) * x.length), x) + (b[i] ?? 0));
}

/** Vectors of unit length. */
function components(name, x) {
  const all = layer(name, x);
  return Array.from({ length: all.length / D }, (_, i) => {
    const component = all.slice(i * D, (i + 1) * D);
    const norm = Math.max(Math.sqrt(dot(component, component)), 1e-6);
    return component.map((x) => x / norm);
  });
}

/** A query's or item's inputs to the formula. */
const encoded = (vector, module, gate, [first, second]) => ({
  components: components(module, vector), gate: layer(`${gate}.${second}`, layer(`${gate}.${first}`, vector).map(silu), false),
});
const encodedQueries = Array.from({ length: QUERIES }, (_, i) => encoded(
  row(queries, QUERY_DIMS, i), "_query_embeddings_fn._query_emb_proj_module.1", "_gating_fn._query_only_partial_module", [0, 2]));
const encodedItems = Array.from({ length: COUNT }, (_, i) => encoded(
  row(items, ITEM_DIMS, i), "_item_embeddings_fn._item_emb_proj_module.1", "_gating_fn._item_only_partial_module", [1, 3]));

/** An item's logits for a query, its score, and the product of sum and mean. */
function measured(query, item) {
  const logits = query.components.flatMap((f) => item.components.map((g) => dot(f, g) / TEMPERATURE));
  const c = layer("_gating_fn._qi_partial_module.3", layer("_gating_fn._qi_partial_module.1", logits).map(silu));
  const gate = c.map((c, p) => silu(query.gate[p] * item.gate[p] + c));
  const weights = gate.map((z) => Math.exp(z - Math.max(...gate)));
  const average = logits.reduce((sum, l) => sum + l, 0) / M;
  return { logits, average, score: dot(weights, logits) / weights.reduce((sum, w) => sum + w, 0) };
}

const exact = encodedQueries.map((query) => encodedItems.map((item) => measured(query, item)));

/** Ids of the `n` items with the highest `value`. */
const best = (all, n, value) => all.map((_, id) => id).sort((a, b) => value(all[b]) - value(all[a]) || a - b).slice(0, n);
const naive = (all, n) => [...new Set(Array.from({ length: N * M }, (_, p) => best(all, n, ({ logits }) => logits[p])).flat())];

/** Methods, and their possible candidate ids. */
const METHODS = [
  [undefined, (all) => all.map((_, id) => id)],
  [{ kind: "bruteForce" }, (all) => all.map((_, id) => id)],
  [{ kind: "twoPass", candidates: 10 }, (all) => all.map((_, id) => id)],
  [{ kind: "highest", candidates: 30 }, (all) => best(all, 30, ({ logits }) => Math.max(...logits))],
  [{ kind: "avg", candidates: 30 }, (all) => best(all, 30, ({ average }) => average)],
  [{ kind: "naive", perPair: 3 }, (all) => naive(all, 3)],
  [{ kind: "comb", perPair: 2, candidates: 9 }, (all) => [...new Set([...naive(all, 2), ...best(all, 9, ({ average }) => average)])]],
  [{ kind: "hIndexer", candidates: COUNT, sample: COUNT }, (all) => all.map((_, id) => id)],
];

/** Runs in a page and in Node: appends in two parts and searches with each method. */
async function useMol({ Mol }, { bytes, device, storage, items, queries, cut, k, methods }) {
  const mol = await Mol.load(Uint8Array.from(bytes), { device, storage });
  const all = Float32Array.from(items);
  const asked = Float32Array.from(queries);
  const firsts = [await mol.append(all.subarray(0, cut)), await mol.append(all.subarray(cut))];
  const outcome = { backend: mol.device.backend, firsts, info: mol.info, length: mol.length, found: [] };
  for (const method of methods) outcome.found.push(await mol.search(asked, k, { method: method ?? undefined }));
  outcome.mips = await mol.search(asked, k, { method: { kind: "mips" } });
  outcome.kept = [all.length, asked.length];
  mol.free();
  return outcome;
}

// Logits reach 20 in f32, and cosines are rounded to 11 and 8 bits.
const BOUNDS = { f32: 1e-3, f16: 0.05, int8: 0.5 };

/** Compares lists of hits with the formula: orders may differ up to the rounding of scores. */
function checkHits(found, bound, allowed, value) {
  assert.equal(found.length, QUERIES);
  found.forEach((hits, query) => {
    const all = exact[query];
    const candidates = new Set(allowed(all));
    const ids = best(all, COUNT, value).filter((id) => candidates.has(id));
    assert.equal(hits.length, Math.min(K, ids.length), `query ${query}`);
    hits.forEach(({ id, score }, rank) => {
      const want = value(all[id]);
      assert.ok(Math.abs(score - want) <= bound, `query ${query}: item ${id} scores ${score}, expected ${want}`);
      assert.ok(Math.abs(want - value(all[ids[rank]])) <= 2 * bound, `query ${query}: item ${id} is not the best of rank ${rank}`);
      const next = hits[rank + 1];
      assert.ok(!next || score > next.score || (score === next.score && id < next.id), `query ${query}: order at rank ${rank}`);
    });
  });
}

for (const [place, execute] of Object.entries(places)) {
  for (const [device, storage] of [["cpu", "f32"], ["cpu", "int8"], ["gpu", "f32"], ["gpu", "f16"]].slice(0, place === "Node" ? 4 : 3)) {
    test(`${place}, ${device}: ${storage}: finds what the formula finds, in each way`, { timeout: 120_000 }, async (t) => {
      // Rounding changes the candidates.
      const methods = METHODS.filter(([method], i) => storage === "f32" || i < 2);
      const given = {
        bytes: [...file], device, storage, items: [...items], queries: [...queries], cut: 100 * ITEM_DIMS, k: K,
        methods: methods.map(([method]) => method),
      };
      let outcome;
      try {
        outcome = await execute(useMol, given);
      } catch (error) {
        if (place === "Chromium" || error.code !== "webgpu_unavailable" || process.env.REQUIRE_ADAPTER) throw error;
        return t.skip(error.message);
      }
      assert.equal(outcome.backend, device === "cpu" ? "cpu" : "webgpu");
      assert.deepEqual([outcome.firsts, outcome.length, outcome.kept], [[0, 100], COUNT, [items.length, queries.length]]);
      const { sizeBytes, ...info } = outcome.info;
      assert.deepEqual(info, {
        queryDims: QUERY_DIMS, itemDims: ITEM_DIMS, queryComponents: N, itemComponents: M, componentDims: D, storage, length: COUNT,
      });
      assert.ok(sizeBytes >= COUNT * M * D, `${sizeBytes} bytes`);
      methods.forEach(([, allowed], i) => checkHits(outcome.found[i], BOUNDS[storage], allowed, ({ score }) => score));
      checkHits(outcome.mips, N * BOUNDS[storage], (all) => all.map((_, id) => id), ({ average }) => average);
    });
  }
}

everywhere(
  "weights come from an address too, name their encoder, and lie beside one until they are freed",
  async ({ Embedder, Mol }, { source, address, encoder, items, query }) => {
    const refused = (call) => Promise.resolve().then(call).then(() => "worked", ({ code }) => code);
    const embedder = await Embedder.load(encoder, { device: "cpu", cache: false });
    const mol = await Mol.load(source, { on: embedder, storage: "f16", cache: false });
    const other = await Mol.load(new URL(address), { on: embedder, cache: false });
    const outcome = { model: mol.info.model, storage: [mol.info.storage, other.info.storage], same: mol.device.name === embedder.device.name };
    await mol.append(Float32Array.from(items));
    outcome.empty = await other.search(Float32Array.from(query), 3);
    outcome.found = (await mol.search(Float32Array.from(query), 2)).map((hits) => hits.length);
    other.free();
    other.free();
    outcome.freed = await refused(() => other.append(Float32Array.from(items)));
    outcome.stays = (await mol.search(Float32Array.from(query), 2)).length;
    outcome.embeds = (await embedder.embed("a river")).length;
    embedder.free();
    outcome.alone = (await mol.search(Float32Array.from(query), 2)).length;
    mol.free();
    outcome.gone = await refused(() => mol.search(Float32Array.from(query), 2));
    outcome.missing = await refused(() => Mol.load(`${source}.gone`, { device: "cpu", cache: false }));
    outcome.aborted = await refused(() => Mol.load(source, { device: "cpu", cache: false, signal: AbortSignal.abort(Object.assign(new Error("x"), { code: "mine" })) }));
    return outcome;
  },
  (outcome, place) => assert.deepEqual(outcome, {
    model: "all-MiniLM-L6-v2", storage: ["f16", "f32"], same: true, empty: [[]], found: [2], freed: "disposed", stays: 1, embeds: 24,
    alone: 1, gone: "disposed", missing: place === "Chromium" ? "http" : "storage", aborted: "mine",
  }),
  (place) => {
    const source = `${published(place, "weights", { "mol.safetensors": withMetadata(file, { model: "all-MiniLM-L6-v2" }) })}mol.safetensors`;
    return {
      source, address: place === "Chromium" ? source : `file://${source}`,
      encoder: published(place, "nomic", tinyEncoder("nomic").files),
      items: [...items], query: row(queries, QUERY_DIMS, 0),
    };
  },
);

everywhere(
  "all of 100,000 items are scored, and of more those that are promising, unless a search says otherwise",
  async ({ Mol }, { bytes, count }) => {
    const mol = await Mol.load(Uint8Array.from(bytes), { device: "cpu" });
    const { itemDims, queryDims } = mol.info;
    const query = Float32Array.from({ length: queryDims }, (_, i) => Math.sin(i));
    const found = async (options) => (await mol.search(query, 10_001, options))[0].length;
    await mol.append(Float32Array.from({ length: count * itemDims }, (_, i) => Math.sin(i)));
    const outcome = [await found()];
    await mol.append(new Float32Array(itemDims).fill(1));
    outcome.push(await found(), await found({ method: { kind: "bruteForce" } }));
    mol.free();
    return outcome;
  },
  (outcome) => assert.deepEqual(outcome, [10_001, 10_000, 10_001]),
  { bytes: [...file], count: 100_000 },
);

everywhere(
  "what is refused is an error with a code that says what and where",
  async ({ Mol }, { bytes, page }) => {
    const refused = (call) => Promise.resolve().then(call).then(() => "worked", ({ name, code, message }) => [name, code, message]);
    const load = (bytes, options) => refused(() => Mol.load(Uint8Array.from(bytes), { device: "cpu", ...options }));
    const outcome = {
      load: [await load([]), await load(bytes.slice(0, -1)), await load(bytes.slice(0, 100)), await load(bytes, { storage: "int4" })],
      search: [],
    };
    outcome.load.push(await refused(() => Mol.load(new Blob([page]), { device: "cpu" })));
    const mol = await Mol.load(Uint8Array.from(bytes), { device: "cpu" });
    outcome.append = [
      await refused(() => mol.append(new Float32Array(17))), await refused(() => mol.append(new Float32Array(16).fill(NaN))),
      await refused(() => mol.append([1])),
    ];
    await mol.append(new Float32Array(32).fill(1));
    const query = new Float32Array(36).fill(1);
    for (const [k, method] of [
      [0], [1.5], [1, { kind: "bruteforce" }], [1, { kind: "avg" }], [1, { kind: "naive", candidates: 3 }], [1, { kind: "avg", candidates: 0 }],
      [1, { kind: "avg", candidates: 1.5 }], [1, "mips"],
    ]) outcome.search.push(await refused(() => mol.search(query, k, { method })));
    outcome.search.push(await refused(() => mol.search(new Float32Array(35), 1)), await refused(() => mol.search(query, 1, { users: [1] })));
    outcome.after = [mol.length, (await mol.search(query, 5))[0].map(({ id }) => id)];
    mol.free();
    return outcome;
  },
  ({ load, append, search, after }) => {
    const all = [...load, ...append, ...search];
    assert.deepEqual(all.map(([name]) => name), all.map(() => "TilewrightError"), JSON.stringify(all, null, 1));
    assert.deepEqual(load.map(([, code]) => code), ["format", "format", "format", "option", "not_a_model"]);
    assert.deepEqual([...append, ...search].map(([, code]) => code), Array(append.length + search.length).fill("option"));
    assert.match(append[0][2], /vectors of 16 numbers/);
    assert.match(search[2][2], /bruteForce, naive, avg, comb, highest, twoPass, hIndexer, mips/);
    assert.match(search[3][2], /avg without one, expected a number as `candidates`/);
    assert.deepEqual(after, [2, [0, 1]]);
  },
  { bytes: [...file], page: "<!doctype html><title>Not here</title>" },
);

test("Chromium: items are lost with their device, and their calls say so", { timeout: 60_000 }, async () => {
  server.files.set("mol.safetensors", bytesInMemory(file));
  const outcome = await places.Chromium(async ({ Mol }, { url, items, query }) => {
    const load = () => Mol.load(url, { device: "gpu", cache: false });
    const first = await load();
    await first.append(Float32Array.from(items));
    await first.destroyDevice();
    const lost = await first.search(Float32Array.from(query), 1).catch(({ code }) => code);
    first.free();
    const second = await load();
    await second.append(Float32Array.from(items));
    const [hits] = await second.search(Float32Array.from(query), 1);
    second.free();
    return { lost, found: hits[0].id };
  }, { url: `${server.origin}/files/mol.safetensors`, items: [...items], query: row(queries, QUERY_DIMS, 0) });
  assert.deepEqual(outcome, { lost: "device_lost", found: best(exact[0], 1, ({ score }) => score)[0] });
});
