// Cross-encoders in Chromium and in Node, on WebGPU and on the CPU: scores against references in float64, order,
// aborting, invalid input, a lost device.

import assert from "node:assert/strict";
import { test } from "node:test";

import { devicesIn, everywhere, places, published } from "./places.mjs";
import { tinyEncoder } from "./tensors.mjs";

const limited = { timeout: process.env.TILEWRIGHT_FULL ? 600_000 : 120_000 };

const tiny = Object.fromEntries(["bert-reranker", "roberta-reranker"].map((name) => [name, tinyEncoder(name)]));

/** Reference pairs by query: `{ query, documents, logits, scores }`. */
const queries = (name) => [...new Set(tiny[name].pairs.map(({ a }) => a))].map((query) => {
  const pairs = tiny[name].pairs.filter(({ a }) => a === query);
  return { query, documents: pairs.map(({ b }) => b), logits: pairs.map(({ logit }) => logit), scores: pairs.map(({ score }) => score) };
});

/** Runs in a page and in Node: scores of all pairs, with the model's default and with the other function. */
async function rerankAll({ Reranker }, { source, device, asked, sigmoid }) {
  const outcome = { own: [], other: [], progress: [] };
  const own = await Reranker.load(source, { device, cache: false });
  // The sigmoid is applied after the model: both variants run on each device, in one model or the other.
  const other = await Reranker.load(source, { device: "cpu", cache: false, sigmoid: !sigmoid });
  for (const { query, documents } of asked) {
    const seen = [];
    outcome.own.push(await own.rerank(query, documents, { onProgress: (it) => seen.push(it) }));
    outcome.other.push(await other.rerank(query, documents));
    outcome.progress.push(seen.at(-1));
  }
  Object.assign(outcome, { info: own.info, on: own.device });
  own.free();
  other.free();
  return outcome;
}

const logistic = (logit) => 1 / (1 + Math.exp(-logit));

for (const [place, execute] of Object.entries(places)) {
  for (const device of devicesIn(place)) {
    for (const [name, sigmoid] of [["bert-reranker", false], ["roberta-reranker", true]]) {
      test(`${place}, ${device}: ${name} has its references' scores, best first`, limited, async (t) => {
        const asked = queries(name);
        const given = { source: published(place, name, tiny[name].files), device, asked, sigmoid };
        let outcome;
        try {
          outcome = await execute(rerankAll, given);
        } catch (error) {
          if (place === "Chromium" || error.code !== "webgpu_unavailable" || process.env.REQUIRE_ADAPTER) throw error;
          return t.skip(error.message);
        }
        assert.equal(outcome.on.backend, device === "cpu" ? "cpu" : "webgpu");
        assert.deepEqual([outcome.info.name, outcome.info.sigmoid, outcome.info.fileBytes > 40_000], [name, sigmoid, true]);
        asked.forEach(({ documents, logits, scores }, i) => {
          const others = sigmoid ? logits : logits.map(logistic);
          for (const [ranked, want] of [[outcome.own[i], scores], [outcome.other[i], others]]) {
            assert.deepEqual(ranked.map(({ index }) => index), want.map((_, j) => j).sort((a, b) => want[b] - want[a]), `query ${i}`);
            for (const { index, score } of ranked) {
              const difference = Math.abs(score - want[index]);
              assert.ok(difference <= 2e-5 * (1 + Math.abs(want[index])), `query ${i}, document ${index}: ${score}, expected ${want[index]}`);
            }
          }
          assert.deepEqual(outcome.progress[i], { done: documents.length, total: documents.length });
        });
      });
    }
  }
}

everywhere(
  "equals keep their order, topK cuts, an abort ends the work, and what is no pair of texts is refused",
  async ({ Embedder, Reranker }, { source, encoder }) => {
    const refused = (call) => Promise.resolve().then(call).then(() => "worked", ({ code, message }) => [code, message]);
    const load = (source, options) => Reranker.load(source, { device: "cpu", cache: false, ...options });
    const reranker = await load(source, { maxBatchTokens: 16 });
    const documents = ["tax law", "a calm stream", "tax law", ""];
    const all = await reranker.rerank("what is tax law", documents);
    const outcome = { all, two: await reranker.rerank("what is tax law", documents, { topK: 2 }), none: await reranker.rerank("a", []) };
    const reason = new Error("enough");
    const controller = new AbortController();
    const onProgress = () => controller.abort(reason);
    const many = Array.from({ length: 60 }, () => "the old engine ran");
    const before = await reranker.counters();
    outcome.aborted = await reranker.rerank("a river", many, { signal: controller.signal, onProgress }).catch((error) => error === reason);
    outcome.again = await reranker.rerank("what is tax law", documents);
    outcome.dispatches = (await reranker.counters()).dispatches - before.dispatches;
    await reranker.rerank("what is tax law", documents);
    outcome.perCall = (await reranker.counters()).dispatches - before.dispatches - outcome.dispatches;
    outcome.bad = [];
    for (const [query, documents, options] of [[7, []], ["a", "b"], ["a", ["b", null]], ["a", ["b"], { topK: -1 }], ["a", ["b"], { topK: 1.5 }]]) {
      outcome.bad.push(await refused(() => reranker.rerank(query, documents, options)));
    }
    outcome.memory = (await reranker.memory()).weightsBytes;
    reranker.free();
    outcome.kinds = [
      await refused(() => load(encoder)), await refused(() => load(source, { maxTokens: 2 })), await refused(() => reranker.rerank("a", ["b"])),
    ];
    return outcome;
  },
  ({ all, two, none, aborted, again, dispatches, perCall, bad, memory, kinds }) => {
    const place = (index) => all.findIndex((it) => it.index === index);
    assert.deepEqual([place(0) + 1, all[place(0)].score], [place(2), all[place(2)].score]);
    assert.ok(all.every(({ score }, i) => i === 0 || score <= all[i - 1].score));
    assert.deepEqual([two, none, again], [all.slice(0, 2), [], all]);
    assert.equal(aborted, true);
    // A pair is a batch: most of the sixty must not have run.
    assert.ok(dispatches < 6 * perCall, `${dispatches} dispatches, ${perCall} for four pairs`);
    assert.deepEqual(bad, [
      ["option", "query is Number, expected a text"],
      ["option", "documents is String, expected a list of texts"],
      ["option", "documents[1] is Null, expected a text"],
      ["option", "topK is -1, expected a whole number"],
      ["option", "topK is 1.5, expected a whole number"],
    ]);
    assert.ok(memory > 20_000, `${memory} bytes`);
    assert.deepEqual(kinds.map(([code]) => code), ["unsupported", "option", "disposed"]);
  },
  (place) => ({
    source: published(place, "bert-reranker", tiny["bert-reranker"].files), encoder: published(place, "nomic", tinyEncoder("nomic").files),
  }),
);

test("Chromium: a lost device is opened again for the same scores", limited, async () => {
  const { files } = tiny["bert-reranker"];
  const seen = await places.Chromium(async ({ Reranker }, { source }) => {
    const notices = [];
    const reranker = await Reranker.load(source, { device: "gpu", cache: false, onNotice: ({ code }) => notices.push(code) });
    const rank = () => reranker.rerank("what is tax law", ["a calm stream", "tax law"]);
    const before = await rank();
    await reranker.destroyDevice();
    const after = await rank();
    const { backend } = reranker.device;
    reranker.free();
    return { notices, backend, before, after };
  }, { source: published("Chromium", "bert-reranker", files) });
  assert.deepEqual([seen.notices, seen.backend, seen.after], [["device_rebuilt"], "webgpu", seen.before]);
});
