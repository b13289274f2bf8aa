// Encoders of texts and images in one space, in Chromium and in Node: vectors against transformers' references, from
// pixels and from files, and what is refused.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { devicesIn, everywhere, places, published } from "./places.mjs";
import { repository } from "./server.mjs";
import { tensors } from "./tensors.mjs";

/** Mean and deviation of each channel, as the models' processors have them. */
const LEVELS = {
  clip: [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]],
  siglip2: [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]],
};
const SIDE = 48;
const DIMS = { clip: 40, siglip2: 64 };

const fileOf = (...path) => readFileSync(join(repository, "tests/data", ...path));

/** The files of a tiny model; texts become tokens of another one's vocabulary. */
function model(name, { leaveOut = [] } = {}) {
  const config = JSON.parse(fileOf("tiny-random-pictures", name, "config.json"));
  config.text_config.eos_token_id = 3;
  const files = {
    "config.json": Buffer.from(JSON.stringify(config)),
    "model.safetensors": fileOf("tiny-random-pictures", name, "model.safetensors"),
    "preprocessor_config.json": fileOf("tiny-random-pictures", name, "preprocessor_config.json"),
    "tokenizer.json": fileOf("encoders/nomic/tokenizer.json"),
  };
  return Object.fromEntries(Object.entries(files).filter(([file]) => !leaveOut.includes(file)));
}

/** References of a model: the vectors of images, and the first one's pixels as its processor resized it. */
function references(name) {
  const read = tensors(join(repository, "tests/data/tiny-random-pictures", name, "refs.safetensors"));
  const [mean, deviation] = LEVELS[name];
  const values = read("image.0.pixel_values");
  const data = new Uint8Array(SIDE * SIDE * 3);
  values.forEach((value, i) => {
    const [channel, at] = [Math.floor(i / SIDE ** 2), i % SIDE ** 2];
    data[3 * at + channel] = Math.round((value * deviation[channel] + mean[channel]) * 255);
  });
  const all = read("image_embeds");
  return { vectors: [0, 1, 2].map((i) => all.slice(i * DIMS[name], (i + 1) * DIMS[name])), pixels: Buffer.from(data).toString("base64") };
}

/** Runs in a place: vectors of an image's pixels and of files, alone and together. */
async function embedded({ Embedder }, { source, device, pixels, files, side }) {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const embedder = await Embedder.load(source, { device, maxBatchTokens: 80 });
  const image = { width: side, height: side, data: bytes(pixels) };
  const seen = [];
  const all = await embedder.embedImages([image, image, image, image, image], { onProgress: (it) => seen.push(it) });
  const [alone, short, text] = [await embedder.embedImages(image), await embedder.embedImages(image, { dimensions: 8 }), await embedder.embed("a quiet river")];
  const rgba = new Uint8ClampedArray(side * side * 4).fill(9);
  for (let i = 0; i < side * side; i += 1) rgba.set(image.data.subarray(3 * i, 3 * i + 3), 4 * i);
  const withAlpha = await embedder.embedImages({ width: side, height: side, data: rgba });
  const fromFiles = files && [...await embedder.embedImages(files.map((text, i) => i === 1 ? bytes(text) : new Blob([bytes(text)])))].map((vector) => [...vector]);
  const memory = await embedder.memory();
  const { info } = embedder;
  embedder.free();
  const alike = [...all].every((vector) => vector.every((value, i) => value === alone[i])) && withAlpha.every((value, i) => value === alone[i]);
  return { alone: [...alone], short: [...short], text: text.length, alike, n: all.count, seen, fromFiles, memory, takesImages: info.takesImages };
}

for (const [place, execute] of Object.entries(places)) {
  for (const device of place === "Chromium" ? ["cpu", "gpu"] : devicesIn(place)) {
    for (const name of ["clip", "siglip2"]) {
      test(`${place}: ${name}'s vectors of images are the references' (${device})`, { timeout: 180_000 }, async (t) => {
        const { vectors, pixels } = references(name);
        const files = place === "Chromium" ? ["a.png", "b.png", "c.png"].map((file) => fileOf("pictures", file).toString("base64")) : undefined;
        const found = await execute(embedded, { source: published(place, name, model(name)), device, pixels, files, side: SIDE });
        const off = Math.max(...found.alone.map((value, i) => Math.abs(value - vectors[0][i])));
        assert.ok(off <= 1e-5, `differs by ${off}`);
        assert.ok(found.alike, "the vector depends on the batch or on alpha");
        assert.deepEqual([found.n, found.text, found.takesImages], [5, DIMS[name], true]);
        // Two of 37 rows fit a batch of 80.
        assert.deepEqual(found.seen, [2, 4, 5].map((done) => ({ done, total: 5 })));
        const norm = Math.hypot(...found.short);
        assert.ok(found.short.length === 8 && Math.abs(norm - 1) < 1e-5, `${found.short.length} numbers of norm ${norm}`);
        // Files are resized by the module: pixels differ from the processor's by a level here and there.
        found.fromFiles?.forEach((vector, i) => {
          const cosine = vector.reduce((sum, value, k) => sum + value * vectors[i][k], 0);
          assert.ok(1 - cosine < 1e-5, `image ${i}: cosine distance ${1 - cosine}`);
        });
        t.diagnostic(`differs by ${off.toExponential(1)}, weights of ${found.memory.weightsBytes} bytes`);
      });
    }
  }
}

/** Runs in a place: the codes and messages of what is refused. */
async function refusals({ Embedder }, { clip, siglip, blind, broken }) {
  const told = {};
  const attempt = async (name, work) => {
    try {
      await work();
      told[name] = "nothing was refused";
    } catch (error) {
      told[name] = `${error.code ?? error.name}: ${error.message}`;
    }
  };
  const image = { width: 2, height: 2, data: new Uint8Array(12) };
  const embedder = await Embedder.load(clip, { device: "cpu" });
  await attempt("kind", () => embedder.embedImages([image, 7]));
  await attempt("one", () => embedder.embedImages(undefined));
  await attempt("bytes", () => embedder.embedImages([image, image, { ...image, data: new Uint8Array(5) }]));
  await attempt("file", () => embedder.embedImages([image, new Blob([broken])]));
  await attempt("dimensions", () => embedder.embedImages(image, { dimensions: 41 }));
  await attempt("option", () => embedder.embedImages(image, { prompt: "query" }));
  await attempt("abort", () => embedder.embedImages([image], { signal: AbortSignal.abort(new Error("no more")) }));
  const stop = new AbortController();
  await attempt("later", () => embedder.embedImages(Array(400).fill(image), { signal: stop.signal, onProgress: () => stop.abort(new Error("enough")) }));
  told.none = (await embedder.embedImages([])).count;
  told.after = (await embedder.embedImages(image)).length;
  const whole = (await embedder.memory()).weightsBytes;
  embedder.free();
  for (const [name, source, options] of [["textsOnly", clip, { textsOnly: true }], ["blind", blind, {}]]) {
    const alone = await Embedder.load(source, { device: "cpu", ...options });
    told[`${name}Takes`] = alone.info.takesImages;
    told[`${name}Smaller`] = (await alone.memory()).weightsBytes < whole;
    told[`${name}Text`] = (await alone.embed("a quiet river")).length;
    await attempt(name, () => alone.embedImages(image));
    alone.free();
  }
  const second = await Embedder.load(siglip, { device: "cpu" });
  told.siglip = (await second.embedImages(image)).length;
  second.free();
  return told;
}

everywhere("what is no image, and encoders of texts alone, are refused by name", refusals, (told) => {
  for (const [name, message] of Object.entries({
    kind: /^option: images\[1\] is Number, expected a Blob/,
    one: /^option: image is Undefined, expected a Blob/,
    bytes: /^option: images\[2\]: data has 5 bytes, expected 12 or 16/,
    file: /^format: images\[1\]: the file is of an unknown format/,
    dimensions: /^option: dimensions is 41, expected 1 to 40/,
    option: /^TypeError: embedImages: there is no option `prompt`/,
    abort: /no more$/,
    later: /enough$/,
    textsOnly: /^unsupported: .*embeds texts alone/,
    blind: /^unsupported: .*its image encoder cannot be loaded: .*preprocessor_config\.json/,
  })) assert.match(told[name], message, name);
  assert.deepEqual([told.none, told.after, told.siglip], [0, 40, 64]);
  for (const name of ["textsOnly", "blind"]) {
    assert.deepEqual([told[`${name}Takes`], told[`${name}Smaller`], told[`${name}Text`]], [false, true, 40], name);
  }
}, (place) => ({
  clip: published(place, "clip", model("clip")),
  siglip: published(place, "siglip", model("siglip2")),
  blind: published(place, "blind", model("clip", { leaveOut: ["preprocessor_config.json"] })),
  broken: "no picture",
}));
