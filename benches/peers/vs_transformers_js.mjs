// Embeddings next to transformers.js in one Chromium: the same model, texts and batches, alternating rounds.
//
//     npm install --prefix benches/peers/target/js --ignore-scripts @huggingface/transformers@4
//     python benches/peers/minilm_onnx.py FOLDER model.onnx
//     node benches/peers/vs_transformers_js.mjs FOLDER model.onnx [--rounds 5] [--texts 64] [--only cpu|gpu]
//
// Both take texts and give normalised means. The page is cross-origin isolated, so that ONNX Runtime's WASM has its threads.
// Loading and a first round are not counted; the two must agree within a cosine distance of 1e-4.

import { basename, resolve } from "node:path";
import { parseArgs } from "node:util";

import { openBrowser } from "../../tests/web/browser.mjs";
import { PACKAGES, servePage } from "./page.mjs";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    rounds: { type: "string", default: "5" },
    texts: { type: "string", default: "64" },
    only: { type: "string" },
    packages: { type: "string", default: PACKAGES },
  },
});
const [folder, onnx] = positionals;
const SIZES = [1, 8, 32];
const WORDS = "the river runs quietly past an old engine that nobody has repaired since the spring flood".split(" ");
const texts = Array.from({ length: Number(options.texts) }, (_, i) =>
  Array.from({ length: 3 + ((i * i) % 58) }, (_, j) => WORDS[(i + j * 7) % 16]).join(" "));

// transformers.js looks for the graph in the model's folder.
const server = await servePage({ packages: options.packages, model: resolve(folder), onnx: resolve(onnx, "..") }, { "/model/onnx/model.onnx": `/onnx/${basename(onnx)}` });

/** In the page: both engines on one device, ready to embed batches. */
async function load(device) {
  const { pipeline } = await globalThis.transformers();
  const settings = { dtype: "fp32", device: device === "gpu" ? "webgpu" : "wasm" };
  const extract = await pipeline("feature-extraction", "model", settings);
  const { Embedder } = await import("/npm/dist/index.js");
  const embedder = await Embedder.load("/model/", { device, cache: false });
  globalThis.engines = {
    "transformers.js": async (batch) => {
      const tensor = await extract(batch, { pooling: "mean", normalize: true });
      return tensor.tolist();
    },
    tilewright: async (batch) => [...(await embedder.embed(batch))].map((vector) => [...vector]),
  };
  return [embedder.device, crossOriginIsolated, navigator.hardwareConcurrency];
}

/** In the page: texts per second of one engine. */
async function rate([name, texts, size]) {
  // Of one length as far as may be, as both are used.
  const order = size > 1 ? texts.toSorted((a, b) => a.length - b.length) : texts;
  const start = performance.now();
  for (let i = 0; i < order.length; i += size) await globalThis.engines[name](order.slice(i, i + size));
  return (texts.length * 1000) / (performance.now() - start);
}

/** In the page: the largest cosine distance between the two. */
async function difference(texts) {
  const [a, b] = await Promise.all(Object.values(globalThis.engines).map((embed) => embed(texts)));
  return Math.max(...a.map((vector, i) => 1 - vector.reduce((sum, it, j) => sum + it * b[i][j], 0)));
}

const median = (numbers) => numbers.toSorted((a, b) => a - b)[numbers.length >> 1];
const best = {};
const browser = await openBrowser();
try {
  for (const device of ["cpu", "gpu"].filter((it) => !options.only || it === options.only)) {
    const page = await browser.open(server.origin);
    page.setDefaultTimeout(0);
    const [on, isIsolated, n_threads] = await page.evaluate(load, device);
    const distance = await page.evaluate(difference, texts.slice(0, 4));
    if (!(distance < 1e-4)) throw new Error(`vectors differ: ${distance}`);
    console.log(`${device}: ${JSON.stringify(on)}, isolated ${isIsolated}, ${n_threads} threads, distance ${distance.toExponential(1)}`);
    for (const size of SIZES) {
      const rates = { "transformers.js": [], tilewright: [] };
      for (let round = 0; round <= Number(options.rounds); round++) {
        for (const [name, all] of Object.entries(rates)) {
          const found = await page.evaluate(rate, [name, texts, size]);
          if (round > 0) all.push(found);
        }
      }
      const [theirs, ours] = [median(rates["transformers.js"]), median(rates.tilewright)];
      (best[size] ??= { theirs: 0, ours: 0 }).theirs = Math.max(best[size].theirs, theirs);
      best[size].ours = Math.max(best[size].ours, ours);
      console.log(`  batches of ${String(size).padStart(2)}: transformers.js ${theirs.toFixed(1)}, tilewright ${ours.toFixed(1)} texts/s, ratio ${(ours / theirs).toFixed(2)}`);
    }
    if (page.problems.length) console.log(page.problems);
    await page.close();
  }
  for (const [size, { theirs, ours }] of Object.entries(best)) {
    console.log(`better executor of each, batches of ${size}: ratio ${(ours / theirs).toFixed(2)}`);
  }
} finally {
  await browser.close();
  server.close();
}
