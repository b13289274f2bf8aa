// Rates of llama.cpp on one GGUF file, as prebuilt for the npm package `node-llama-cpp`: prompts, tokens one after the
// other, also behind long contexts, and tokens of many sequences at once.
//
//     node llama.mjs MODEL.gguf [--gpu cuda|vulkan] [--prompt 512,2048] [--decode 128] [--depth 8192,32768]
//                    [--sequences 1,8,32,64] [--rounds 5] [--root DIR]
//
// Prints one JSON object. DIR has the package in its `node_modules`. As in llama-bench, batches have 512 tokens at most,
// tokens are given, none is chosen, and each batch is waited for; loading and a warm-up are not counted. On a GPU
// prompts and decoding are measured with and without flash attention, the rest with it. Fails if a layer is not on the
// GPU. For the batches it uses what the package itself calls llama.cpp by, so the version is pinned by who installs it.

import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const { values: options, positionals: [path] } = parseArgs({
  allowPositionals: true,
  options: {
    gpu: { type: "string" },
    prompt: { type: "string", default: "512" },
    decode: { type: "string", default: "128" },
    depth: { type: "string", default: "" },
    sequences: { type: "string", default: "" },
    rounds: { type: "string", default: "5" },
    threads: { type: "string", default: "0" },
    root: { type: "string", default: "." },
  },
});
if (path === undefined) throw new Error("expected the path of a GGUF file");
const numbers = (list) => list.split(",").filter(Boolean).map(Number);
const [prompts, depths, sequences] = [options.prompt, options.depth, options.sequences].map(numbers);
const [nDecode, rounds, threads] = [options.decode, options.rounds, options.threads].map(Number);
const BATCH = 512;
// Decoded at each depth, and by each of many sequences.
const FEW = Math.min(nDecode, 32);

const entry = createRequire(join(resolve(options.root), "package.json")).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const log = [];
const llama = await getLlama({
  gpu: options.gpu ?? false,
  build: "never",
  progressLogs: false,
  logLevel: LlamaLogLevel.debug,
  logger: (_, message) => log.push(...message.split("\n").map((line) => line.trim())),
});
const model = await llama.loadModel({ modelPath: path, gpuLayers: options.gpu ? "max" : 0, ignoreMemorySafetyChecks: true });
const { totalLayers } = model.fileInsights;
if (options.gpu && (llama.gpu !== options.gpu || model.gpuLayers !== totalLayers)) {
  const devices = (await llama.getGpuDeviceNames()).join(", ") || "none";
  throw new Error(`${model.gpuLayers} of ${totalLayers} layers are on a GPU by ${options.gpu} (devices: ${devices})`);
}
const nTokens = model.fileInfo.metadata.tokenizer.ggml.tokens.length;
const token = (i) => 3 + ((7919 * i) % (nTokens - 3));

// A context with batches of its own: what the package's scheduler of batches would add is not llama.cpp's time.
async function withContext(nSequences, length, flashAttention, run) {
  const context = await model.createContext({
    sequences: nSequences,
    contextSize: length,
    batchSize: BATCH,
    flashAttention,
    threads,
    ignoreMemorySafetyChecks: true,
  });
  try {
    return await run(context._ctx);
  } finally {
    await context.dispose();
  }
}

// Tokens of each sequence from a position on, in one batch; logits of the last of each.
async function decode(context, nSequences, position, count) {
  context.initBatch(nSequences * count);
  const ids = Uint32Array.from({ length: count }, (_, i) => token(position + i));
  for (let s = 0; s < nSequences; s++) context.addToBatch(s, position, ids, Uint32Array.of(count - 1));
  await context.decodeBatch();
}

async function fill(context, from, to) {
  for (let at = from; at < to; at += BATCH) await decode(context, 1, at, Math.min(BATCH, to - at));
}

// Tokens per second of several runs behind a warm-up.
async function rate(count, reset, run, times = rounds) {
  const rates = [];
  for (let i = 0; i <= times; i++) {
    await reset();
    const start = performance.now();
    await run();
    if (i > 0) rates.push((count * 1000) / (performance.now() - start));
  }
  rates.sort((a, b) => a - b);
  return { lowest: rates[0], median: rates[rates.length >> 1], highest: rates.at(-1) };
}

const settings = {};
for (const flashAttention of options.gpu ? [false, true] : [false]) {
  const found = { prefill: {}, decode: null };
  await withContext(1, Math.max(...prompts, nDecode) + 1, flashAttention, async (context) => {
    const clear = () => context.disposeSequence(0);
    for (const n of prompts) found.prefill[n] = await rate(n, clear, () => fill(context, 0, n));
    const first = async () => (clear(), await decode(context, 1, 0, 1));
    found.decode = await rate(nDecode, first, async () => {
      for (let i = 1; i <= nDecode; i++) await decode(context, 1, i, 1);
    });
  });
  settings[flashAttention ? "flash attention" : "plain attention"] = found;
}

const atDepth = {};
for (const depth of depths) {
  await withContext(1, depth + FEW, Boolean(options.gpu), async (context) => {
    await fill(context, 0, depth);
    const reset = () => context.removeTokenCellsFromSequence(0, depth, -1);
    atDepth[depth] = await rate(FEW, reset, async () => {
      for (let i = 0; i < FEW; i++) await decode(context, 1, depth + i, 1);
    }, 2);
  });
}

const ofSequences = {};
for (const n of sequences) {
  await withContext(n, 16 + FEW, Boolean(options.gpu), async (context) => {
    const reset = async () => {
      for (let s = 0; s < n; s++) context.disposeSequence(s);
      await decode(context, n, 0, 1);
    };
    ofSequences[n] = await rate(n * FEW, reset, async () => {
      for (let i = 1; i <= FEW; i++) await decode(context, n, i, 1);
    }, 2);
  });
}

const { release, repo } = llama.llamaCppRelease;
console.log(JSON.stringify({
  version: `${repo} ${release}`,
  device: options.gpu ? (await llama.getGpuDeviceNames()).join(", ") : "CPU",
  // What backends say about themselves when they start, such as which kind of cooperative matrices they use.
  remarks: [...new Set(log.filter((line) => /^ggml_(vulkan|cuda)\w*: |^Device \d/.test(line)))].slice(0, 8),
  settings,
  depth: atDepth,
  sequences: ofSequences,
}));
await llama.dispose();
process.exit(0);
