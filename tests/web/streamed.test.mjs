// Models that memory has no room for: passes read layers from the model's files, which the browser's storage keeps, the user has picked, or have a path.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { devicesIn, everywhere, published, server } from "./places.mjs";
import { repository } from "./server.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));
const PROMPTS = ["Once upon a time", "The little dog", "One day, a girl"];

everywhere(
  "layers that memory has no room for are read from the files, and the text is the same",
  async ({ Model }, { source, devices, prompts }) => {
    const told = [];
    for (const device of devices) {
      const options = { device, contextLength: 64, subgroups: true };
      const generate = async (model) => {
        const texts = [];
        for (const prompt of prompts) texts.push(await model.generate(prompt, { maxTokens: 12 }).text());
        return texts;
      };
      const whole = await Model.load(source, options);
      const { totalBytes, weightsBytes, streamedBytes } = await whole.memory();
      const expected = await generate(whole);
      whole.free();
      // Three layers that share the room of two.
      const memoryLimit = totalBytes - 1;
      const notices = [];
      const { fits } = await Model.inspect(source, { device, contextLength: 64, memoryLimit });
      const model = await Model.load(source, { ...options, memoryLimit, onNotice: ({ code }) => notices.push(code) });
      const memory = await model.memory();
      const alone = await generate(model);
      const refused = await model.saveSession().catch(({ code, message }) => [code, message]);
      const engine = await model.engine({ maxSequences: 1, cacheTokens: 64 });
      const texts = await Promise.all(prompts.map((prompt) => engine.generate(prompt, { maxTokens: 12 }).text()));
      engine.free();
      model.free();
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
      // Another one may read it as well.
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
