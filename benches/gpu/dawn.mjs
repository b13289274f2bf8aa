// Rates of the npm package on one GGUF file in Node, on the GPU through Dawn (npm `webgpu`).
//
//     scripts/build-web && node benches/gpu/dawn.mjs MODEL.gguf [--prompt 512,2048] [--decode 128] [--rounds 5] [--package DIR]
//
// Prints one JSON object, like `tilewright bench`: a prompt's rate is its tokens by the time to the first token, so it
// contains that token; decoding is what follows. DIR is the built package, `npm/dist`. Dawn takes the first adapter of
// the Vulkan driver: VK_DRIVER_FILES says which.

import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const root = join(dirname(fileURLToPath(import.meta.url)), "../..");
const { values: options, positionals: [path] } = parseArgs({
  allowPositionals: true,
  options: {
    prompt: { type: "string", default: "512" },
    decode: { type: "string", default: "128" },
    rounds: { type: "string", default: "5" },
    package: { type: "string", default: join(root, "npm/dist") },
  },
});
if (path === undefined) throw new Error("expected the path of a GGUF file");
const prompts = options.prompt.split(",").map(Number);
const [nDecode, rounds] = [options.decode, options.rounds].map(Number);

const { Model } = await import(pathToFileURL(join(resolve(options.package), "index.js")));
const begin = performance.now();
const contextLength = Math.max(...prompts) + nDecode + 1;
const model = await Model.load(resolve(path), { device: "gpu", cache: false, contextLength });
const loadSeconds = (performance.now() - begin) / 1000;

// Letters that no prompt before began with, of as many tokens as asked for: each letter is one.
async function text(n, round) {
  const letters = Array.from({ length: n }, (_, i) => String.fromCharCode(97 + ((i * i + 7 * round + n) % 26))).join("");
  const extra = (await model.tokenize(letters)).length - n;
  const cut = letters.slice(0, n - Math.max(extra, 0));
  const found = (await model.tokenize(cut)).length;
  if (found !== n) throw new Error(`a prompt of ${n} tokens became one of ${found}`);
  return cut;
}

async function run(prompt, maxTokens) {
  const times = [];
  const start = performance.now();
  for await (const _ of model.generate(prompt, { maxTokens, ignoreEos: true, temperature: 0 })) times.push(performance.now() - start);
  return times.map((ms) => ms / 1000);
}

function spread(values) {
  values.sort((a, b) => a - b);
  return { lowest: values[0], median: values[values.length >> 1], highest: values.at(-1) };
}

const rows = [];
for (const n of prompts) {
  const rates = [];
  for (let round = 0; round <= rounds; round++) {
    const [first] = await run(await text(n, round), 1);
    if (round > 0) rates.push(n / first);
  }
  rows.push({ test: `pp${n}`, tokens_per_second: spread(rates) });
}
const rates = [];
for (let round = 0; round <= rounds; round++) {
  const times = await run(await text(8, round), nDecode + 1);
  if (round > 0) rates.push((times.length - 1) / (times.at(-1) - times[0]));
}
rows.push({ test: `tg${nDecode}`, tokens_per_second: spread(rates) });
console.log(JSON.stringify({ bench: "dawn", device: model.device, load_seconds: loadSeconds, rows }));
process.exit(0);
