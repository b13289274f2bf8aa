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
const FAMILIES = ["qwen3-vl", "lfm2-vl"];

/** Runs in a place: the greedy tokens after a conversation with a picture, and the first one's likeliest alternatives. */
async function answers({ Model }, { folders, pixels, device, isLost }) {
  const told = [];
  for (const [i, source] of folders.entries()) {
    const model = await Model.load(source, { device, kvType: "f32", vision: true });
    const { width, height, data } = pixels[i];
    const messages = [{ role: "user", content: [{ type: "image", image: { width, height, data: Uint8Array.from(atob(data), (c) => c.charCodeAt(0)) } }, { type: "text", text: "?" }] }];
    const ask = async (of = model) => {
      const generation = of.chat(messages, { maxTokens: 20, logprobs: 20, ignoreEos: true });
      const pieces = [];
      for await (const piece of generation) pieces.push(piece);
      return { ids: pieces.map(({ id }) => id), first: pieces[0].topLogprobs.map(({ id, logprob }) => [id, logprob]), usage: generation.usage };
    };
    const asked = [await ask()];
    const engine = await model.engine({ maxSequences: 2 });
    asked.push(await ask(engine));
    engine.free();
    if (isLost) {
      await model.destroyDevice();
      asked.push(await ask());
    }
    told.push({ asked, tokens: await model.imageTokens(width, height), takesImages: model.info.takesImages });
    model.free();
  }
  return told;
}

const given = (place) => ({
  folders: FAMILIES.map((name) => published(place, name, pictureModel(name, templateOf(name, references(name).ids)))),
  pixels: FAMILIES.map((name) => ({ ...references(name).pixels, data: Buffer.from(references(name).pixels.data).toString("base64") })),
});

function areTheReferences(told, place) {
  for (const [i, name] of FAMILIES.entries()) {
    const { ids, logits, greedy } = references(name);
    const highest = Math.max(...logits);
    const normalizer = highest + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
    const { asked, tokens, takesImages } = told[i];
    assert.ok(takesImages);
    assert.equal(tokens, ids.filter((id) => id === 287).length);
    for (const { ids: written, first, usage } of asked) {
      assert.equal(usage.promptTokens, ids.length, `${name} in ${place}`);
      const off = Math.max(...first.map(([id, logprob]) => Math.abs(logprob - (logits[id] - normalizer))));
      assert.ok(off < 4e-4, `${name} in ${place}: ${off}`);
      assert.deepEqual(written, greedy, `${name} in ${place}`);
    }
  }
}

everywhere("answers to pictures are the references', from a session and an engine", answers, areTheReferences, (place) => ({ ...given(place), device: "cpu" }));

test("Chromium: the same on a GPU, and on the one that is opened when the first is lost", { timeout: 180_000 }, async () => {
  areTheReferences(await places.Chromium(answers, { ...given("Chromium"), device: "gpu", isLost: true }), "Chromium on a GPU");
});

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
    "spoilt.png": [spoilt, /^format: it: the PNG file is broken/],
  };
  const found = await decoded(Object.fromEntries(Object.entries(refused).map(([name, [bytes]]) => [name, bytes])));
  for (const [name, [, message]] of Object.entries(refused)) assert.match(String(found[name]), message, name);
});
