// Pictures in the package: decoded as Pillow does, and answers of tiny models that match transformers' references, in Chromium and in Node.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { test } from "node:test";

import { pictureModel, references, templateOf } from "./picture-model.mjs";
import { chromium, everywhere, places, published, server } from "./places.mjs";
import { bytesInMemory, repository } from "./server.mjs";

const pictures = join(repository, "tests/data/pictures");
const picture = (name) => readFileSync(join(pictures, name));

/** Runs in a place: the greedy tokens after a conversation with a picture, and the first one's likeliest alternatives. */
async function answers({ Model }, { cases, device, isLost }) {
  const told = [];
  for (const { source, vision, pixels: { width, height, data } } of cases) {
    const notices = [];
    const model = await Model.load(source, { device, kvType: "f32", vision, onNotice: ({ message }) => notices.push(message) });
    const messages = [{ role: "user", content: [{ type: "image", image: { width, height, data: Uint8Array.from(atob(data), (c) => c.charCodeAt(0)) } }, { type: "text", text: "?" }] }];
    const ask = async (of = model) => {
      const generation = of.chat(messages, { maxTokens: 20, logprobs: 20, ignoreEos: true });
      const pieces = [];
      for await (const piece of generation) pieces.push(piece);
      return { ids: pieces.map(({ id }) => id), first: pieces[0].topLogprobs.map(({ id, logprob }) => [id, logprob]), usage: generation.usage };
    };
    const asked = [await ask()];
    if (isLost) {
      await model.destroyDevice();
      asked.push(await ask());
    } else {
      const engine = await model.engine({ maxSequences: 2 });
      asked.push(await ask(engine));
      engine.free();
    }
    told.push({ asked, tokens: await model.imageTokens(width, height), takesImages: model.info.takesImages, notices });
    model.free();
  }
  return told;
}

/** Each family with its own encoder, and one with that of a GGUF file. */
const CASES = [["qwen3-vl", false], ["lfm2-vl", false], ["qwen3-vl", true]];
const given = (place) => ({
  cases: CASES.map(([name, isGguf]) => {
    const { ids, pixels } = references(name);
    const mmproj = readFileSync(join(repository, "tests/data/tiny-random-pictures/qwen3-vl/mmproj-bf16.gguf"));
    return {
      source: published(place, name, pictureModel(name, templateOf(name, ids))),
      vision: isGguf ? { source: `${published(place, "encoder", { "mmproj.gguf": mmproj })}mmproj.gguf` } : true,
      pixels: { ...pixels, data: Buffer.from(pixels.data).toString("base64") },
    };
  }),
});

function areTheReferences(told, place) {
  assert.ok(told.length > 0);
  for (const [i, [name]] of CASES.slice(0, told.length).entries()) {
    const { ids, logits, greedy } = references(name);
    const highest = Math.max(...logits);
    const normalizer = highest + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
    const { asked, tokens, takesImages, notices } = told[i];
    assert.ok(takesImages);
    assert.ok(!notices.some((notice) => notice.includes("vision")), notices.join());
    assert.equal(tokens, ids.filter((id) => id === 287).length);
    for (const { ids: written, first, usage } of asked) {
      assert.equal(usage.promptTokens, ids.length, `${name} in ${place}`);
      const off = Math.max(...first.map(([id, logprob]) => Math.abs(logprob - (logits[id] - normalizer))));
      assert.ok(off < 4e-4, `${name} in ${place}: ${off}`);
      assert.equal(written.length, 20);
      assert.deepEqual(written.slice(0, greedy.length), greedy, `${name} in ${place}`);
    }
  }
}

everywhere("answers to pictures are the references', from a session and an engine", answers, areTheReferences, (place) => ({ ...given(place), device: "cpu" }));

test("Chromium: the same on a GPU, and on the one that is opened when the first is lost", { timeout: 180_000 }, async () => {
  // The software adapter takes its time to compile shaders.
  const cases = given("Chromium").cases.slice(0, 1);
  areTheReferences(await places.Chromium(answers, { cases, device: "gpu", isLost: true }), "Chromium on a GPU");
});

// Mesa's driver takes minutes to compile the shaders that Dawn gives it.
if (process.env.TILEWRIGHT_FULL) {
  test("Node: the same on Dawn", { timeout: 900_000 }, async () => {
    areTheReferences(await places.Node(answers, { cases: given("Node").cases.slice(0, 2), device: "gpu" }), "Node on Dawn");
  });
}

/** Runs in a place: the messages of errors, of loads and of conversations. */
async function refusals({ Model, createChatCompletion }, { folder, gguf, file, loads, contents }) {
  const told = [];
  const attempt = async (work) => {
    try {
      await work();
      told.push("nothing was refused");
    } catch ({ code, message }) {
      told.push(`${code}: ${message}`);
    }
  };
  for (const vision of loads) await attempt(async () => (await Model.load(gguf, { device: "cpu", vision })).free());
  const [blind, model] = [await Model.load(folder, { device: "cpu" }), await Model.load(folder, { device: "cpu", vision: true })];
  const image = { width: 1, height: 1, data: new Uint8Array(3) };
  const ask = (it, content) => it.chat([{ role: "system", content: "a" }, { role: "user", content }], { maxTokens: 1 }).text();
  await attempt(() => ask(blind, [{ type: "image", image }]));
  for (const content of contents) await attempt(() => ask(model, content));
  await attempt(() => ask(model, [{ type: "text", text: "a" }, { type: "image", image: { ...image, data: new Uint8Array(5) } }]));
  await attempt(() => ask(model, [{ type: "image", image: new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]) }]));
  await attempt(() => createChatCompletion(model, { messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }] }] }));
  await attempt(() => ask(model, [{ type: "image", image }]));
  [blind, model].forEach((it) => it.free());
  return { told, blind: blind.info.takesImages };
}

const at = "messages\\[1\\]\\.content";
const CONTENTS = [
  [[{ type: "image" }], `^option: ${at}\\[0\\]\\.image is Undefined, expected a Blob`],
  [[{ type: "text", text: "a" }, { type: "image", image: "https://" }], `^option: ${at}\\[1\\]\\.image is "https://", expected an address`],
  [[{ type: "image_url", image_url: {} }], `^option: ${at}\\[0\\]\\.image_url\\.url is undefined`],
  [[{ type: "image", image: "data:image/svg+xml,<svg/>" }], `^format: ${at}\\[0\\]: the file is an SVG drawing`],
  [[{ type: "image", image: { width: 100_000, height: 100_000, data: {} } }], `^option: ${at}\\[0\\]\\.image is Object`],
];
const LOADS = [
  [true, /^option: vision is true, and the source is a GGUF file, expected vision: \{ source \}/],
  ["yes", /^option: vision is yes, expected true or/],
  [{ maxTokens: 0 }, /^option: vision\.maxTokens is 0/],
  [{ token: "x" }, /^option: vision\.token is for the option `source`/],
];

everywhere("what is no picture, and a model without an encoder, are refused by name", refusals, ({ told, blind }, place) => {
  const file = place === "Node" ? /^unsupported_platform: messages\[1\]\.content\[0\]: there is no decoder of PNG files here, expected \{ width, height, data \}/ : /^nothing/;
  const expected = [
    ...LOADS.map(([, message]) => message),
    /^unsupported: .*`qwen3-vl`, which was loaded without a vision encoder.*the option `vision`/,
    ...CONTENTS.map(([, message]) => new RegExp(message)),
    /^option: messages\[1\]\.content\[1\]: data has 5 bytes, expected 3 or 4/,
    file,
    /^format: messages\[0\]\.content\[0\]: the file is of an unknown format/,
    /^nothing/,
  ];
  assert.equal(told.length, expected.length);
  expected.forEach((message, i) => assert.match(told[i], message));
  assert.equal(blind, false);
}, (place) => ({
  folder: published(place, "qwen3-vl", pictureModel("qwen3-vl")),
  gguf: `${published(place, "text", { "model.gguf": readFileSync(join(repository, "assets/stories.gguf")) })}model.gguf`,
  file: picture("a.png").toString("base64"), loads: LOADS.map(([vision]) => vision), contents: CONTENTS.map(([content]) => content),
}));

/** `npm/src/worker/pixels.ts` as a script. */
async function pixelsScript() {
  const esbuild = createRequire(join(repository, "npm/package.json"))("esbuild");
  const { outputFiles } = await esbuild.build({ entryPoints: [join(repository, "npm/src/worker/pixels.ts")], bundle: true, format: "esm", write: false });
  return outputFiles[0].text;
}

/** Decoded pixels of files by name in Chromium, as `width x height` and numbers, or the error. */
async function decoded(files) {
  server.files.set("pixels.js", bytesInMemory(Buffer.from(await pixelsScript()), "text/javascript"));
  const page = await chromium.open(`${server.origin}/blank.html`);
  const all = await page.evaluate(async (files) => {
    const { pixelsOf } = await import("/files/pixels.js");
    const told = {};
    for (const [name, text] of Object.entries(files)) {
      const image = new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]);
      try {
        const { width, height, data } = await pixelsOf({ name: "it", image }, new AbortController().signal);
        // The driver is slow with long lists of numbers.
        let text = "";
        for (let at = 0; at < data.length; at += 8192) text += String.fromCharCode(...data.subarray(at, at + 8192));
        told[name] = { size: [height, width], data: btoa(text) };
      } catch ({ code, message }) {
        told[name] = `${code}: ${message}`;
      }
    }
    return told;
  }, Object.fromEntries(Object.entries(files).map(([name, bytes]) => [name, bytes.toString("base64")])));
  assert.deepEqual(page.problems, []);
  return Object.fromEntries(Object.entries(all).map(([name, it]) => [name, typeof it === "string" ? it : { ...it, data: Buffer.from(it.data, "base64") }]));
}

/** References of decoded files: Pillow's pixels. */
function pillow() {
  const file = picture("pixels.safetensors");
  const length = Number(file.readBigUInt64LE());
  const header = JSON.parse(file.subarray(8, 8 + length));
  // Of the large one the reference is smaller.
  const names = Object.keys(header).filter((name) => name.endsWith(".rgb") && !name.includes("large"));
  return Object.fromEntries(names.map((name) => {
    const { shape: [height, width], data_offsets: [start, end] } = header[name];
    return [name.slice(0, -4), { size: [height, width], data: file.subarray(8 + length + start, 8 + length + end) }];
  }));
}

/** Colours of transparent pixels that a GIF's decoder forgets, and Pillow's way with 16-bit grey. */
const UNLIKE_PILLOW = new Set(["odd/grey16.png", "odd/part.gif", "odd/transparent.gif"]);

test("Chromium: files are decoded to Pillow's pixels", { timeout: 120_000 }, async () => {
  const expected = pillow();
  const found = await decoded(Object.fromEntries(Object.keys(expected).map((name) => [name, picture(name)])));
  for (const [name, { size, data }] of Object.entries(expected)) {
    const it = found[name];
    assert.deepEqual(it.size, size, `${name}: ${it}`);
    const off = it.data.reduce((most, value, i) => Math.max(most, Math.abs(value - data[i])), 0);
    if (UNLIKE_PILLOW.has(name)) assert.ok(off > 0, `${name} is as Pillow has it by now`);
    else assert.equal(off, 0, name);
  }
});

test("Chromium: other files and broken ones are refused by name", { timeout: 60_000 }, async () => {
  const sized = Buffer.from(picture("a.png"));
  sized.writeUInt32BE(65_535, 16);
  sized.writeUInt32BE(65_535, 20);
  const spoilt = Buffer.from(picture("a.png"));
  spoilt.fill(0x5a, 60, 200);
  // A chunk whose length, rounded up, is no 32-bit number.
  const endless = Buffer.alloc(40);
  endless.write("RIFF");
  endless.writeUInt32LE(32, 4);
  endless.write("WEBPVP8X", 8);
  endless.writeUInt32LE(0xfffffff7, 16);
  const cut = (name) => picture(name).subarray(0, picture(name).length / 2);
  const refused = {
    "drawing.svg": [Buffer.from('<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'), /^format: it: the file is an SVG drawing.*expected PNG, JPEG, WebP or GIF/],
    "page.html": [Buffer.from("<!doctype html><p>"), /^format: it: the file is a web page/],
    "nothing": [Buffer.alloc(0), /^format: it: the file is empty/],
    "photo.heic": [Buffer.from("\0\0\0\x18ftypheic\0\0\0\0"), /^format: it: the file is an HEIC or AVIF image/],
    "cut.png": [cut("a.png"), /^truncated: it: the PNG file ends early, after \d+ bytes/],
    "cut.jpg": [cut("turned.jpg"), /^truncated: it: the JPEG file ends/],
    "cut.webp": [cut("odd/lossy.webp"), /^truncated: it: the WebP file ends early/],
    "header.png": [picture("a.png").subarray(0, 12), /^truncated: it: the file ends within its header/],
    "huge.png": [sized, /^unsupported: it: the PNG file has 65535 × 65535 pixels, expected 1 to 67108864/],
    "endless.webp": [endless, /^format: it: the WebP file is broken/],
    "spoilt.png": [spoilt, /^format: it: the PNG file is broken/],
  };
  const found = await decoded(Object.fromEntries(Object.entries(refused).map(([name, [bytes]]) => [name, bytes])));
  for (const [name, [, message]] of Object.entries(refused)) assert.match(String(found[name]), message, name);
});
