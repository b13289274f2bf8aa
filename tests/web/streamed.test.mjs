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
      const texts = async (model) => {
        const [alone, engine] = [[], await model.engine({ maxSequences: 2 })];
        for (const prompt of prompts) alone.push(await model.generate(prompt, { maxTokens: 12 }).text());
        const together = await Promise.all(prompts.map((prompt) => engine.generate(prompt, { maxTokens: 12 }).text()));
        engine.free();
        return { alone, together };
      };
      const whole = await Model.load(source, options);
      const { totalBytes, weightsBytes } = await whole.memory();
      const expected = await texts(whole);
      const plain = await whole.memory();
      whole.free();
      // An engine for two takes a further context. Of five layers two can be left in the file at least.
      const memoryLimit = Math.round(totalBytes - weightsBytes * 0.3);
      const notices = [];
      const { fits } = await Model.inspect(source, { device, contextLength: 64, memoryLimit });
      const model = await Model.load(source, { ...options, memoryLimit, onNotice: ({ code }) => notices.push(code) });
      const memory = await model.memory();
      const prefix = [];
      for (const prompt of prompts) prefix.push(await model.generate(prompt, { maxTokens: 12 }).text());
      const refused = await model.saveSession().catch(({ code, message }) => [code, message]);
      model.free();
      told.push({ expected: expected.alone, together: expected.together, found: prefix, fits: fits[device], memory, memoryLimit, weightsBytes, notices, refused, plain: plain.streamedBytes });
    }
    return told;
  },
  (told) => {
    for (const { expected, together, found, fits, memory, memoryLimit, weightsBytes, notices, refused, plain } of told) {
      assert.deepEqual(found, expected);
      assert.deepEqual(together, expected);
      assert.equal(fits, true);
      assert.equal(plain, undefined);
      assert.ok(memory.streamedBytes > weightsBytes / 4 && memory.streamedBytes < weightsBytes, JSON.stringify(memory));
      assert.ok(memory.totalBytes <= memoryLimit, `${memory.totalBytes} of ${memoryLimit}`);
      assert.deepEqual(notices, ["layers_streamed"]);
      assert.deepEqual([refused[0], /all of whose layers are in memory/.test(refused[1])], ["option", true], refused[1]);
    }
  },
  (place) => ({ source: `${published(place, "streamed", { "stories.gguf": stories })}stories.gguf`, devices: devicesIn(place), prompts: PROMPTS }),
);

everywhere(
  "what cannot be read again is not left in the files, and a kept copy that is gone is an error",
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
      told.removed = await Model.remove(source);
      told.gone = await model.generate("Another text", { maxTokens: 8 }).text().catch(({ code, message }) => [code, message]);
      model.free();
    }
    return told;
  },
  ({ expected, picked, unkept, kept, removed, gone }, place) => {
    assert.equal(picked, expected);
    if (place === "Chromium") {
      assert.deepEqual([unkept, kept, removed], ["memory", expected, true]);
      assert.equal(gone[0], "storage", gone[1]);
    }
  },
  (place) => ({ source: `${published(place, "again", { "stories.gguf": stories })}stories.gguf`, place, bytes: stories.toString("base64") }),
);
