// LoRA adapters of the package, in Chromium and in Node: probabilities match PEFT's logits.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { everywhere, places, published } from "./places.mjs";
import { repository } from "./server.mjs";
import { tensors } from "./tensors.mjs";

const adapters = join(repository, "tests/data/tiny-random-lora");
const base = readFileSync(join(repository, "tests/data/tiny-random/llama3-rope/model-f16.gguf"));
const peft = Object.fromEntries(["adapter_config.json", "adapter_model.safetensors"].map((name) => [name, readFileSync(join(adapters, "llama3-rope", name))]));
const gguf = readFileSync(join(adapters, "llama3-rope.gguf"));

/** Tokens, and log-probabilities of their successors, from a reference's logits. */
function reference(path) {
  const of = tensors(path);
  const [ids, logits] = [of("ids"), of("logits")];
  const last = logits.slice(-logits.length / ids.length);
  const highest = Math.max(...last);
  const normalizer = highest + Math.log(last.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
  return { ids, logprobs: last.map((logit) => logit - normalizer) };
}
const adapted = reference(join(adapters, "llama3-rope/refs.safetensors"));

/** Runs in a place: the likeliest next token with each adapter, or the reason for a refusal. */
async function likeliest({ Model }, { base, cases, ids, device, isLost = false }) {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const told = [];
  for (const { text, list, address, scale } of cases) {
    const source = address ?? (text === undefined ? list?.map(([name, text]) => new File([bytes(text)], name)) : bytes(text));
    const adapter = source === undefined ? {} : { adapter: { source, ...scale === undefined ? {} : { scale } } };
    try {
      const model = await Model.load(new Blob([bytes(base)]), { device, kvType: "f32", ...adapter });
      const ask = async () => {
        for await (const { topLogprobs } of model.generate(ids, { maxTokens: 1, logprobs: 20, ignoreEos: true })) {
          told.push(topLogprobs.map(({ id, logprob }) => [id, logprob]));
        }
      };
      await ask();
      if (isLost) {
        await model.destroyDevice();
        await ask();
      }
      model.free();
    } catch ({ code, message }) {
      told.push(`${code}: ${message}`);
    }
  }
  return told;
}

function areNear(told, { logprobs }, about) {
  const off = Math.max(...told.map(([id, logprob]) => Math.abs(logprob - logprobs[id])));
  assert.ok(off < 1e-3, `${about}: ${off}`);
}

const base64 = (bytes) => Buffer.from(bytes).toString("base64");
const foreign = Object.keys(peft).map((name) => [name, base64(readFileSync(join(adapters, "qwen3", name)))]);
const broken = Buffer.from(peft["adapter_config.json"].toString().replace(/"r": *\d+/, '"r": 0'));

everywhere(
  "an adapter adds what PEFT's does, as files, as GGUF and at an address, as strongly as is said",
  likeliest,
  ([without, files, one, address, none, half, wholly, bad, lone, other, endless]) => {
    for (const [name, told] of Object.entries({ files, one, address, wholly })) areNear(told, adapted, name);
    assert.ok(without.some(([id, logprob]) => Math.abs(logprob - adapted.logprobs[id]) > 1e-2), "differs without an adapter");
    areNear(none, { logprobs: Object.fromEntries(without) }, "scale 0");
    assert.ok(half.some(([id, logprob]) => Math.abs(logprob - adapted.logprobs[id]) > 1e-2), "differs at half strength");
    assert.match(bad, /^adapter: .*adapter_config\.json.* r is 0/);
    assert.match(lone, /^option: adapter\.source has 1 files/);
    assert.match(other, /^adapter: /);
    assert.match(endless, /^option: adapter\.scale is /);
  },
  (place) => ({
    base: base64(base), ids: adapted.ids, device: "cpu",
    cases: [
      {},
      { list: Object.entries(peft).map(([name, bytes]) => [name, base64(bytes)]) },
      { text: base64(gguf) },
      { address: published(place, "lora", peft) },
      { text: base64(gguf), scale: 0 },
      { text: base64(gguf), scale: 0.5 },
      { text: base64(gguf), scale: 1 },
      { list: [["adapter_config.json", base64(broken)], ["adapter_model.safetensors", base64(peft["adapter_model.safetensors"])]] },
      { list: [["adapter_config.json", base64(peft["adapter_config.json"])]] },
      { list: foreign },
      { text: base64(gguf), scale: "strong" },
    ],
  }),
);

test("Chromium: an adapter on a GPU, and on the one that is opened when the first is lost", { timeout: 120_000 }, async () => {
  const [first, second] = await places.Chromium(likeliest, { base: base64(base), ids: adapted.ids, device: "gpu", cases: [{ text: base64(gguf) }], isLost: true });
  areNear(first, adapted, "GPU");
  areNear(second, adapted, "GPU, after a loss");
});
