// Sampling options and log-probabilities of the package, in Chromium and in Node: penalties, biases and probabilities.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { everywhere, places } from "./places.mjs";
import { repository } from "./server.mjs";
import { withTemplate } from "./template.mjs";

const { cases } = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8"));

/** Runs in the place: pieces of greedy completions. */
async function piecesOf({ Model }, { device, texts }) {
  const model = await Model.builtin({ device, exact: true });
  const all = [];
  for (const { ids, options } of texts) {
    const pieces = [];
    for await (const piece of model.generate(ids, { temperature: 0, ignoreEos: true, ...options })) pieces.push(piece);
    all.push(pieces);
  }
  model.free();
  return all;
}

/** Compares with the reference, which has different arithmetic, by the margins between its top two logits. */
function areLikeReference(all, cases, n) {
  for (const [at, { greedy_ids: ids, greedy_margins: margins }] of cases.entries()) {
    assert.deepEqual(all[at].map(({ id }) => id), ids.slice(0, all[at].length));
    for (const [step, { id, logprob, topLogprobs }] of all[at].entries()) {
      const about = `case ${at}, token ${step}: ${JSON.stringify(topLogprobs)}`;
      assert.equal(topLogprobs.length, n, about);
      assert.deepEqual(topLogprobs[0], logprob, about);
      assert.equal(logprob.id, id, about);
      const values = topLogprobs.map(({ logprob }) => logprob);
      assert.ok(values.every((value, i) => i === 0 || value <= values[i - 1]), about);
      const sum = values.reduce((sum, value) => sum + Math.exp(value), 0);
      assert.ok(sum <= 1 + 1e-5 && sum > 0, about);
      assert.ok(Math.abs(values[0] - values[1] - margins[step]) < 5e-3, `${about}, expected a margin of ${margins[step]}`);
      for (const { text, bytes } of topLogprobs) assert.equal(text, new TextDecoder().decode(Uint8Array.from(bytes)));
    }
  }
}

everywhere(
  "probabilities of greedy tokens are the reference's",
  piecesOf,
  (all) => {
    areLikeReference(all, cases, 40);
    const [text] = all.map((pieces) => pieces.map(({ logprob }) => logprob.text).join(""));
    assert.ok(cases[0].greedy_text.startsWith(text.trimStart()), text);
  },
  { device: "cpu", texts: cases.map(({ ids }) => ({ ids, options: { maxTokens: 32, logprobs: 40 } })) },
);

test("Chromium: probabilities on a GPU are the reference's, with and without a constraint", { timeout: 120_000 }, async () => {
  const { ids } = cases[0];
  const responseFormat = { type: "regex", pattern: " (cat|dog) and [a-z]{3}" };
  const texts = [{ ids, options: { maxTokens: 6, logprobs: 3 } }, { ids, options: { maxTokens: 12, logprobs: 1, responseFormat } }];
  const [free, pieces] = await places.Chromium(piecesOf, { device: "gpu", texts });
  areLikeReference([free], cases.slice(0, 1), 3);
  for (const { id, logprob, topLogprobs } of pieces) {
    assert.deepEqual([topLogprobs.length, topLogprobs[0].id, logprob.id], [1, id, id]);
    assert.ok(logprob.logprob <= 0 && logprob.logprob > -15, JSON.stringify(pieces));
  }
});

const SETTINGS = [
  { presencePenalty: 5 },
  { frequencyPenalty: 3 },
  { logitBias: { [cases[0].greedy_ids[0]]: -3, [cases[0].greedy_ids[1]]: -2.5 } },
  { presencePenalty: -0.5, frequencyPenalty: 1.2, logitBias: { [cases[0].greedy_ids[2]]: -5, 332: 1.5 } },
];

everywhere(
  "penalties and biases are what the formulas say, and a bias bans a token and forces one",
  async ({ Model }, { prompt, settings }) => {
    const model = await Model.builtin({ device: "cpu" });
    const greedy = { temperature: 0, ignoreEos: true };
    const idsOf = async (prompt, options) => {
      const ids = [];
      for await (const { id } of model.generate(prompt, { ...greedy, ...options })) ids.push(id);
      return ids;
    };
    const penalised = [];
    for (const options of settings) {
      const ids = await idsOf(prompt, { maxTokens: 20, ...options });
      // The most likely tokens after each prefix, without any options.
      const likely = [];
      for (let n = 0; n < ids.length; n += 1) {
        for await (const { topLogprobs } of model.generate([...prompt, ...ids.slice(0, n)], { ...greedy, maxTokens: 1, logprobs: 100 })) {
          likely.push(topLogprobs.map(({ id, logprob }) => [id, logprob]));
        }
      }
      penalised.push({ ids, likely });
    }
    const plain = await idsOf(prompt, { maxTokens: 20 });
    const forced = await idsOf(prompt, { maxTokens: 5, logitBias: { 300: 100 } });
    const [first] = plain;
    const banned = [];
    for (let seed = 0; seed < 12; seed += 1) {
      banned.push(...await idsOf(prompt, { temperature: 1, topK: 0, topP: 1, minP: 0, seed, maxTokens: 4, logitBias: { [first]: -100 } }));
    }
    model.free();
    return { penalised, plain, forced, first, banned };
  },
  ({ penalised, plain, forced, first, banned }) => {
    for (const [at, { ids, likely }] of penalised.entries()) {
      const { presencePenalty = 0, frequencyPenalty = 0, logitBias = {} } = SETTINGS[at];
      for (const [step, id] of ids.entries()) {
        const count = (id) => ids.slice(0, step).filter((other) => other === id).length;
        const score = ([id, logprob]) => logprob - (count(id) > 0 ? presencePenalty : 0) - frequencyPenalty * count(id) + (logitBias[id] ?? 0);
        const scores = likely[step].map((token) => [token[0], score(token)]).sort((a, b) => b[1] - a[1]);
        assert.ok(scores[0][1] > likely[step].at(-1)[1], "the best of all tokens is among those reported");
        // Two that are equal up to rounding may swap places.
        if (scores[0][1] - scores[1][1] > 1e-3) assert.equal(id, scores[0][0], `${JSON.stringify(SETTINGS[at])}, token ${step}: ${JSON.stringify(scores.slice(0, 3))}`);
      }
      assert.notDeepEqual(ids, plain, JSON.stringify(SETTINGS[at]));
    }
    assert.deepEqual(forced, Array(5).fill(300));
    assert.ok(!banned.includes(first), `${first} in ${banned}`);
  },
  { prompt: cases[0].ids, settings: SETTINGS },
);

everywhere(
  "values that are out of range, or no use to the model, are errors that name the option, and the model answers all the same",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const told = [];
    for (const options of [
      { presencePenalty: 101 }, { frequencyPenalty: -101 }, { frequencyPenalty: NaN }, { logitBias: { 5: 1001 } }, { logitBias: { 1024: 1 } },
      { logitBias: { abc: 1 } }, { logitBias: { 5: "1" } }, { logitBias: 5 }, { logprobs: 101 }, { logprobs: 2, promptLookup: 3 },
      { logitBias: { 5: 1 }, promptLookup: 3 },
    ]) {
      told.push(await model.generate("Once upon", { maxTokens: 2, ...options }).text().then(() => "worked", ({ code, message }) => `${code}: ${message}`));
    }
    const after = await model.generate("Once upon", { maxTokens: 2, logitBias: {}, presencePenalty: 0 }).text();
    model.free();
    return { told, after };
  },
  ({ told, after }) => {
    const names = [
      "presencePenalty", "frequencyPenalty", "frequencyPenalty", "logitBias", "logitBias", "logitBias", "logitBias", "logitBias", "logprobs",
      "promptLookup", "promptLookup",
    ];
    assert.equal(told.length, names.length);
    for (const [at, name] of names.entries()) assert.match(told[at], new RegExp(`^option: .*${name}`));
    assert.ok(after.length > 0);
  },
);

const TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}";

everywhere(
  "OpenAI's shape: choices are those of single requests, the prompt is computed once, and probabilities belong to the text",
  async ({ Model, createChatCompletion }, { file }) => {
    const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
    const request = {
      messages: [{ role: "user", content: "Once upon a time there was a dragon." }], max_tokens: 12, temperature: 1, logprobs: true, top_logprobs: 3,
      frequency_penalty: 0.5, presence_penalty: 0.1, logit_bias: { 5: -100 },
    };
    const whole = await createChatCompletion(model, { ...request, seed: 7, n: 3 });
    const single = [];
    for (const seed of [7, 8, 9]) single.push(await createChatCompletion(model, { ...request, seed }));
    const chunks = [];
    const streamed = { ...request, seed: 7, n: 3, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await createChatCompletion(model, streamed)) chunks.push(chunk);
    model.free();
    return { whole, single, chunks };
  },
  ({ whole, single, chunks }) => {
    // Computing a prompt at once or only its last token changes rounding.
    const plain = ({ message, finish_reason, logprobs: { content } }) => ({
      message, finish_reason, tokens: content.map(({ token, bytes, logprob }) => [token, bytes, logprob.toFixed(3)]),
    });
    assert.deepEqual(whole.choices.map(plain), single.map(({ choices: [choice] }) => plain(choice)));
    assert.equal(new Set(whole.choices.map(({ message: { content } }) => content)).size, 3);
    for (const { index, message: { content }, logprobs } of whole.choices) {
      const bytes = logprobs.content.flatMap((token) => token.bytes);
      assert.equal(new TextDecoder().decode(Uint8Array.from(bytes)).trim(), content.trim());
      assert.ok(logprobs.content.every(({ logprob, top_logprobs }) => logprob <= 0 && top_logprobs.length === 3));
      const mine = chunks.flatMap(({ choices }) => choices.filter((choice) => choice.index === index));
      assert.equal(mine.map(({ delta }) => delta.content ?? "").join(""), content);
      assert.deepEqual(mine.flatMap(({ logprobs }) => logprobs?.content ?? []).map(({ token }) => token), logprobs.content.map(({ token }) => token));
    }
    assert.equal(whole.usage.completion_tokens, single.reduce((sum, { usage }) => sum + usage.completion_tokens, 0));
    // All of it was cached except the last token, which gives the answer's first token.
    const { prompt_tokens: prompt, prompt_tokens_details: { cached_tokens: cached } } = single[1].usage;
    assert.equal(cached, prompt - 1);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
  },
  { file: withTemplate(TEMPLATE).toString("base64") },
);
