// Continuous batching by the package, in Node: each completion equals that of its own run. tests/engine.rs tests the
// engine's other features.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

import { repository } from "./server.mjs";

const { Model, TilewrightError } = await import(pathToFileURL(join(repository, "npm/dist/index.js")));
const { cases } = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8"));
const limited = { timeout: 300_000 };

const N_TOKENS = 10;
const greedy = { temperature: 0, maxTokens: N_TOKENS, ignoreEos: true };
/** Prompts with options: two greedy with log-probabilities, two sampled, one with penalties. */
const TEXTS = [
  ...cases.slice(0, 2).map(({ ids, greedy_ids: known }) => ({ prompt: ids, options: greedy, known: known.slice(0, N_TOKENS) })),
  ...[1, 2].map((seed) => ({ prompt: "Once upon a time", options: { ...greedy, temperature: 1, seed } })),
  { prompt: "The dog", options: { ...greedy, repeatPenalty: 1.3, logprobs: 2 } },
];

/** The tokens of a generation, from its pieces. */
async function tokensOf(generation) {
  const tokens = [];
  for await (const { id } of generation) tokens.push(id);
  return tokens;
}

/** A call's error. */
const refusal = (promise) => promise.then(() => "nothing", (error) => [error instanceof TilewrightError, error.code]);

// With an empty cache, Mesa's driver takes over a minute of CPU time to compile an engine's shaders from Dawn.
for (const device of process.env.TILEWRIGHT_FULL ? ["cpu", "gpu"] : ["cpu"]) {
  test(`${device}: texts at once are what they are alone, and an aborted one is missed by none`, limited, async () => {
    const notices = [];
    const model = await Model.builtin({ device, onNotice: ({ code }) => notices.push(code) });
    const engine = await model.engine({ maxSequences: 4, cacheTokens: 2048 });
    const begin = ({ prompt, options }) => engine.generate(prompt, options);
    const alone = [];
    for (const text of TEXTS) alone.push(await tokensOf(begin(text)));
    TEXTS.forEach(({ known }, i) => known && assert.deepEqual(alone[i], known));
    assert.notDeepEqual(alone[2], alone[3]);
    const session = await tokensOf(model.generate(TEXTS[0].prompt, TEXTS[0].options));
    assert.deepEqual(session, alone[0]);

    const before = await engine.stats();
    const abort = new AbortController();
    const aborted = engine.generate("A bird", { ...greedy, maxTokens: 400, signal: abort.signal });
    const stopped = engine.generate("A cat", { ...greedy, maxTokens: 400 });
    const all = TEXTS.map(begin);
    const first = all[0][Symbol.asyncIterator]();
    const tokens = [(await first.next()).value.id];
    abort.abort(new Error("enough"));
    stopped.stop();
    if (device === "gpu") await model.destroyDevice();
    for (let next; !(next = await first.next()).done;) tokens.push(next.value.id);
    assert.deepEqual([tokens, ...await Promise.all(all.slice(1).map(tokensOf))], alone);
    await assert.rejects(aborted.result, /^Error: enough$/);
    assert.equal((await stopped.result).stopReason, "cancelled");
    const { stopReason, promptTokens, generatedTokens, prefillSeconds, decodeSeconds } = await all[0].result;
    assert.deepEqual([stopReason, promptTokens, generatedTokens], ["max_tokens", TEXTS[0].prompt.length, N_TOKENS]);
    assert.ok(prefillSeconds > 0 && decodeSeconds > 0);
    assert.deepEqual([all[4].usage.generatedTokens, all[4].usage.promptTokens > 0], [N_TOKENS, true]);

    const stats = await engine.stats();
    const [nFinished, nCancelled] = ["nFinished", "nCancelled"].map((name) => stats[name] - before[name]);
    assert.deepEqual([nFinished, nCancelled, stats.nFailed, stats.nRunning, stats.nQueued], [TEXTS.length, 2, 0, 0, 0]);
    assert.ok(stats.nDecodePasses - before.nDecodePasses < stats.generatedTokens - before.generatedTokens, "no pass had several sequences");
    assert.ok(stats.busySeconds > 0);
    assert.deepEqual([stats.nRecoveries, notices.filter((code) => code === "device_rebuilt").length], device === "gpu" ? [1, 1] : [0, 0]);
    model.free();
  });
}

test("what texts have in common at their beginnings is computed once, a guide keeps one of several to a pattern, likelihoods are told", limited, async () => {
  const model = await Model.builtin({ device: "cpu" });
  const engine = await model.engine({ maxSequences: 3 });
  const story = (await tokensOf(model.generate("Once upon a time", { maxTokens: 140, ignoreEos: true }))).slice(0, 139);
  const run = async (ids) => (await engine.generate(ids, greedy).result).cachedTokens;
  assert.deepEqual([await run([...story, 300]), await run([...story, 301])], [0, 128]);
  const { cachedTokens, promptTokens } = await engine.stats();
  assert.deepEqual([cachedTokens, promptTokens], [128, 139 + 11]);

  const pattern = { type: "regex", pattern: " (red|blue) (cat|dog)" };
  const [kept, free] = [engine.generate("There was a", { responseFormat: pattern }), engine.generate("There was a", { ...greedy, logprobs: 1 })];
  assert.match(await kept.text(), /^ (red|blue) (cat|dog)$/);
  assert.equal((await kept.result).stopReason, "complete");
  for await (const { id, logprob, topLogprobs } of free) assert.deepEqual([logprob.id, topLogprobs[0].id], [id, id]);
  // Its beginning is short: nothing was cached.
  assert.deepEqual(await tokensOf(model.generate("There was a", greedy)), await tokensOf(engine.generate("There was a", greedy)));
  model.free();
});

test("texts go on beyond the context, each as it would alone", limited, async () => {
  const model = await Model.builtin({ device: "cpu", contextLength: 64 });
  const engine = await model.engine({ maxSequences: 2 });
  const options = { temperature: 0, ignoreEos: true, slide: true, maxTokens: 150 };
  const prompts = ["Once upon a time", "There was a", "The dragon"];
  const together = await Promise.all(prompts.map((prompt) => tokensOf(engine.generate(prompt, options))));
  for (const [i, prompt] of prompts.entries()) {
    assert.equal(together[i].length, 150);
    assert.deepEqual(together[i], await tokensOf(engine.generate(prompt, options)), prompt);
  }
  const { stopReason } = await engine.generate("Once upon a time", { ...options, slide: false }).result;
  assert.equal(stopReason, "context_full");
  model.free();
});

test("guessed tokens change no text", limited, async () => {
  const model = await Model.builtin({ device: "cpu" });
  const engine = await model.engine({ maxSequences: 8 });
  const options = { temperature: 0, ignoreEos: true, maxTokens: 60 };
  const prompts = ["Once upon a time ".repeat(3), "There was a dragon. ".repeat(3)];
  const want = await Promise.all(prompts.map((prompt) => tokensOf(engine.generate(prompt, options))));
  const before = await engine.stats();
  const texts = prompts.map((prompt) => engine.generate(prompt, { ...options, promptLookup: 4 }));
  assert.deepEqual(await Promise.all(texts.map(tokensOf)), want);
  const after = await engine.stats();
  const results = await Promise.all(texts.map((text) => text.result));
  const sum = (name) => results.reduce((sum, result) => sum + result[name], 0);
  assert.deepEqual([after.draftedTokens, after.acceptedTokens], [sum("draftedTokens"), sum("acceptedTokens")]);
  assert.ok(sum("draftedTokens") > 0 && before.draftedTokens === 0);
  model.free();
});

test("what an engine cannot do is refused, and what is freed is over", limited, async () => {
  const model = await Model.builtin({ device: "cpu" });
  for (const options of [{ maxSequences: 0 }, { maxSequences: 65 }, { maxSequences: 1.5 }, { maxSequences: -1 }, { cacheTokens: 0 }, { prefixCache: "yes" }]) {
    assert.deepEqual(await refusal(model.engine(options)), [true, "option"], JSON.stringify(options));
  }
  await assert.rejects(model.engine({ maxSequence: 2 }), /^TypeError: Model\.engine: there is no option `maxSequence`; did you mean `maxSequences`/);
  const engine = await model.engine({ maxSequences: 1, maxQueued: 1 });
  assert.throws(() => engine.generate("a", { tokensPerSubmit: 2 }), /^TypeError: Engine\.generate: there is no option `tokensPerSubmit`/);
  for (const [options, code] of [[{ temperature: -1 }, "option"], [{ topP: "high" }, "option"], [{ logitBias: { 1e6: 1 } }, "option"], [{ responseFormat: { type: "regex", pattern: "(" } }, "constraint"]]) {
    assert.deepEqual(await refusal(engine.generate("a", options).result), [true, code], JSON.stringify(options));
  }
  assert.deepEqual(await refusal(engine.generate([1e6]).result), [true, "tokenizer"]);
  assert.deepEqual(await refusal(engine.chat([{ role: "user", content: "a" }]).result), [true, "template"]);
  const [running, waiting, refused] = ["a", "b", "c"].map((prompt) => engine.generate(prompt, { ...greedy, maxTokens: 400 }));
  assert.deepEqual(await refusal(refused.result), [true, "busy"]);
  waiting.stop();
  const { stopReason, generatedTokens } = await waiting.result;
  assert.deepEqual([stopReason, generatedTokens], ["cancelled", 0], "one that waits ends before it begins");
  const over = [running, engine.generate("d", greedy)].map(({ result }) => refusal(result));
  await engine[Symbol.asyncDispose]();
  assert.deepEqual(await Promise.all(over), [[true, "disposed"], [true, "disposed"]]);
  assert.deepEqual(await refusal(engine.generate("a").result), [true, "disposed"]);
  assert.deepEqual(await refusal(engine.stats()), [true, "disposed"]);
  // The model still works, with its own sequence and with another engine.
  const other = await model.engine({ maxSequences: 1 });
  const [prompt] = cases;
  const both = [model, other].map((it) => tokensOf(it.generate(prompt.ids, greedy)));
  assert.deepEqual(await Promise.all(both), [prompt, prompt].map(({ greedy_ids: known }) => known.slice(0, N_TOKENS)));
  model.free();
  assert.deepEqual(await refusal(other.generate("a").result), [true, "disposed"]);
});
