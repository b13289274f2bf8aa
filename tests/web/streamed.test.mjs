// Models larger than memory: passes read layers from the model's files, which are in the browser's storage, picked by
// the user, or at a path.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { devicesIn, everywhere, places, published } from "./places.mjs";
import { dataPath, repository } from "./server.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));
const PROMPTS = ["Once upon a time", "One day, a girl"];

everywhere(
  "layers that memory has no room for are read from the files, and the text is the same",
  async ({ Model }, { source, devices, prompts }) => {
    const told = [];
    for (const device of devices) {
      const options = { device, contextLength: 64, subgroups: true };
      const generate = async (model) => {
        const texts = [];
        for (const prompt of prompts) texts.push(await model.generate(prompt, { maxTokens: 6 }).text());
        return texts;
      };
      const whole = await Model.load(source, options);
      const { totalBytes, weightsBytes, streamedBytes } = await whole.memory();
      const expected = await generate(whole);
      // Three layers share the memory of two.
      const memoryLimit = totalBytes - 1;
      const notices = [];
      const { fits } = await Model.inspect(source, { on: whole, device, contextLength: 64, memoryLimit });
      // On the same device, with compiled shaders.
      const model = await Model.load(source, { on: whole, contextLength: 64, memoryLimit, onNotice: ({ code }) => notices.push(code) });
      const memory = await model.memory();
      const alone = await generate(model);
      const refused = await model.saveSession().catch(({ code, message }) => [code, message]);
      // An engine has its own shaders, which Chromium's software adapter compiles for many seconds.
      let texts = alone;
      if (device === "cpu") {
        const engine = await model.engine({ maxSequences: 1, cacheTokens: 64 });
        texts = await Promise.all(prompts.map((prompt) => engine.generate(prompt, { maxTokens: 6 }).text()));
        engine.free();
      }
      model.free();
      whole.free();
      told.push({ expected, alone, texts, fits: fits[device], memory, memoryLimit, weightsBytes, streamedBytes, notices, refused });
    }
    return told;
  },
  (told) => {
    for (const { expected, alone, texts, fits, memory, memoryLimit, weightsBytes, streamedBytes, notices, refused } of told) {
      assert.deepEqual(alone, expected);
      assert.deepEqual(texts, expected);
      assert.equal(fits, true);
      assert.equal(streamedBytes, undefined);
      assert.ok(memory.streamedBytes > weightsBytes / 4 && memory.streamedBytes < weightsBytes, JSON.stringify(memory));
      assert.ok(memory.totalBytes <= memoryLimit, `${memory.totalBytes} of ${memoryLimit}`);
      assert.deepEqual(notices, ["weights_in_files"]);
      assert.deepEqual([refused[0], /all of whose weights are in memory/.test(refused[1])], ["option", true], refused[1]);
    }
  },
  (place) => ({ source: `${published(place, "streamed", { "stories.gguf": stories })}stories.gguf`, devices: devicesIn(place), prompts: PROMPTS }),
);

everywhere(
  "what cannot be read again is not left in the files, and a copy stays while it is read from",
  async ({ Model }, { source, place, bytes }) => {
    const options = { device: "cpu", contextLength: 64 };
    const whole = await Model.load(source, options);
    const { totalBytes, weightsBytes } = await whole.memory();
    const expected = await whole.generate("Once upon a time", { maxTokens: 8 }).text();
    whole.free();
    const limited = { ...options, memoryLimit: Math.round(totalBytes - weightsBytes * 0.3) };
    const told = { expected };
    const picked = await Model.load(new Blob([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))]), limited);
    told.picked = await picked.generate("Once upon a time", { maxTokens: 8 }).text();
    picked.free();
    if (place === "Chromium") {
      told.unkept = await Model.load(source, { ...limited, cache: false }).catch(({ code }) => code);
      const model = await Model.load(source, limited);
      told.kept = await model.generate("Once upon a time", { maxTokens: 8 }).text();
      // Another model may read it too.
      const second = await Model.load(source, options);
      told.second = await second.generate("Once upon a time", { maxTokens: 8 }).text();
      second.free();
      told.removed = await Model.remove(source).catch(({ code, message }) => [code, message]);
      told.still = await model.generate("Once upon a time", { maxTokens: 8 }).text();
      await model[Symbol.asyncDispose]?.();
      model.free();
      told.freed = await Model.remove(source);
    }
    return told;
  },
  ({ expected, picked, unkept, kept, second, removed, still, freed }, place) => {
    assert.equal(picked, expected);
    if (place === "Chromium") {
      assert.deepEqual([unkept, kept, second, still, freed], ["memory", expected, expected, expected, true]);
      assert.deepEqual([removed[0], /reads weights from it/.test(removed[1])], ["storage", true], removed[1]);
    }
  },
  (place) => ({ source: `${published(place, "again", { "stories.gguf": stories })}stories.gguf`, place, bytes: stories.toString("base64") }),
);

/** Tiny models by their offloaded parts: token tables only, or with less memory layers too. */
const SHARES = [["gemma4", 1], ["gemma4", 0.7], ["gpt-oss", 1], ["gpt-oss", 0.7], ["granite-hybrid", 0.7], ["lfm2-moe", 0.7], ["qwen35-moe", 0.9], ["gemma3", 0.5]];

test("Node: models of all kinds choose the same tokens with a part of them in their files", { timeout: 120_000 }, async () => {
  const sources = SHARES.map(([name, share]) => [["config.json", "model.safetensors"].map((file) => dataPath(`tiny-random/${name}/${file}`)), share]);
  const told = await places.Node(async ({ Model }, { sources }) => {
    const options = { device: "cpu", contextLength: 64 };
    const ids = async (generation) => {
      const ids = [];
      for await (const { id } of generation) ids.push(id);
      return ids;
    };
    const found = [];
    for (const [source, share] of sources) {
      const generate = { maxTokens: 10, ignoreEos: true };
      const whole = await Model.load(source, options);
      const expected = await ids(whole.generate([1, 2, 3, 4, 5], generate));
      const { totalBytes, weightsBytes } = await whole.memory();
      whole.free();
      const model = await Model.load(source, { ...options, memoryLimit: Math.round(totalBytes - weightsBytes * (1 - share)) - 1 });
      found.push({ expected, ids: await ids(model.generate([1, 2, 3, 4, 5], generate)), streamedBytes: (await model.memory()).streamedBytes });
      model.free();
    }
    return found;
  }, { sources });
  told.forEach(({ expected, ids, streamedBytes }, i) => {
    const [name, share] = SHARES[i];
    assert.equal(ids.length, 10);
    assert.deepEqual(ids, expected, name);
    assert.equal(streamedBytes > 0, share < 1, `${name}: ${streamedBytes} bytes of layers`);
  });
});

/** Files of a mixture with random weights: eight layers of 32 experts, two per token. */
function mixture() {
  const [dim, hidden, layers, experts, vocab] = [64, 32, 8, 32, 256];
  const config = {
    ...JSON.parse(readFileSync(dataPath("tiny-random/mixtral/config.json"))),
    hidden_size: dim, intermediate_size: hidden, num_hidden_layers: layers, num_local_experts: experts, vocab_size: vocab,
  };
  const shapes = { "lm_head.weight": [vocab, dim], "model.embed_tokens.weight": [vocab, dim], "model.norm.weight": [dim] };
  for (let layer = 0; layer < layers; layer += 1) {
    const add = (name, ...shape) => (shapes[`model.layers.${layer}.${name}.weight`] = shape);
    add("input_layernorm", dim);
    add("post_attention_layernorm", dim);
    for (const [name, rows] of [["q", dim], ["k", dim / 2], ["v", dim / 2], ["o", dim]]) add(`self_attn.${name}_proj`, rows, dim);
    add("block_sparse_moe.gate", experts, dim);
    for (let i = 0; i < experts; i += 1) {
      for (const [name, rows, columns] of [["w1", hidden, dim], ["w2", dim, hidden], ["w3", hidden, dim]]) add(`block_sparse_moe.experts.${i}.${name}`, rows, columns);
    }
  }
  let [end, state] = [0, 1];
  const header = Object.fromEntries(Object.entries(shapes).map(([name, shape]) => {
    const begin = end;
    end += 2 * shape.reduce((product, n) => product * n, 1);
    return [name, { dtype: "BF16", shape, data_offsets: [begin, end] }];
  }));
  // Bits of bfloat16: numbers of both signs from 1/16 to 1/8, and ones for norms.
  const values = new Uint16Array(end / 2);
  for (const [name, { data_offsets: [begin, end] }] of Object.entries(header)) {
    for (let i = begin / 2; i < end / 2; i += 1) {
      state = Math.imul(state, 1_664_525) + 1_013_904_223 >>> 0;
      values[i] = name.includes("norm") ? 0x3f80 : (state >>> 31 << 15) | 0x3d80 | (state >>> 16 & 0x7f);
    }
  }
  const json = Buffer.from(JSON.stringify(header));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(json.length));
  const expertBytes = 2 * layers * experts * 3 * hidden * dim;
  return { expertBytes, files: { "config.json": JSON.stringify(config), "model.safetensors": Buffer.concat([size, json, Buffer.from(values.buffer)]) } };
}

const { expertBytes, files } = mixture();

everywhere(
  "experts that memory has no room for are read when tokens choose them",
  async ({ Model }, { source }) => {
    const options = { device: "cpu", contextLength: 64 };
    const ids = async (model) => {
      const ids = [];
      for await (const { id } of model.generate([1, 2, 3, 4, 5], { maxTokens: 20, ignoreEos: true })) ids.push(id);
      return ids;
    };
    const whole = await Model.load(source, options);
    const expected = await ids(whole);
    const { totalBytes, weightsBytes } = await whole.memory();
    whole.free();
    const model = await Model.load(source, { ...options, memoryLimit: Math.round(totalBytes - weightsBytes * 0.3) });
    const found = [await ids(model), await ids(model)];
    const { streamedBytes } = await model.memory();
    model.free();
    return { expected, found, streamedBytes };
  },
  ({ expected, found, streamedBytes }) => {
    assert.ok(new Set(expected).size > 3, `${expected}`);
    assert.deepEqual(found, [expected, expected]);
    // A pass of many tokens reads the experts of all layers; streaming whole layers would read some of them.
    assert.equal(streamedBytes, expertBytes);
  },
  (place) => ({ source: ["config.json", "model.safetensors"].map((name) => published(place, "mixture", files) + name) }),
);
