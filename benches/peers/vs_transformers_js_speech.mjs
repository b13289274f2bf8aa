// Transcripts next to transformers.js in one Chromium, on the CPU: the same weights and sounds, alternating rounds.
//
//     npm install --prefix benches/peers/target/js --ignore-scripts @huggingface/transformers@4
//     python benches/peers/vs_faster_whisper.py MODEL --rounds 0 --keep SOUNDS
//     python scripts/whisper_from_ctranslate2.py MODEL FOLDER && python benches/peers/whisper_onnx.py FOLDER ONNX
//     node benches/peers/vs_transformers_js_speech.mjs FOLDER ONNX SOUNDS [--rounds 3] [--sounds 10] [--dtypes fp32,q8]
//
// Greedy, without times, from samples at 16 kHz. Time on the clock, and processor time of all of the browser's processes: ONNX Runtime has
// threads in WASM, ours has one. Loading and a first round are not counted.

import { readdirSync } from "node:fs";
import { resolve } from "node:path";
import { parseArgs } from "node:util";

import { openBrowser } from "../../tests/web/browser.mjs";
import { PACKAGES, servePage } from "./page.mjs";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    rounds: { type: "string", default: "3" },
    sounds: { type: "string", default: "10" },
    dtypes: { type: "string", default: "fp32,q8" },
    packages: { type: "string", default: PACKAGES },
  },
});
const [folder, onnx, sounds] = positionals.map((path) => resolve(path));
const names = readdirSync(sounds).filter((name) => /^\d+\.wav$/.test(name)).sort().slice(0, Number(options.sounds));
const dtypes = options.dtypes.split(",");

/** In the page: the engines, and samples of the sounds. */
async function load([names, dtypes]) {
  const { pipeline } = await globalThis.transformers();
  const { Transcriber } = await import("/npm/dist/index.js");
  const ours = await Transcriber.load("/model/", { device: "cpu", cache: false });
  const settings = { timestamps: false, temperatures: [0] };
  globalThis.engines = { tilewright: async (samples) => (await ours.transcribe(samples, settings)).text };
  for (const dtype of dtypes) {
    const theirs = await pipeline("automatic-speech-recognition", "onnx", { dtype, device: "wasm" });
    globalThis.engines[`transformers.js ${dtype}`] = async (samples) => (await theirs(samples)).text;
  }
  globalThis.sounds = [];
  for (const name of names) {
    const bytes = await (await fetch(`/sounds/${name}`)).arrayBuffer();
    globalThis.sounds.push((await new OfflineAudioContext(1, 1, 16_000).decodeAudioData(bytes)).getChannelData(0));
  }
  const seconds = globalThis.sounds.reduce((sum, samples) => sum + samples.length / 16_000, 0);
  return { engines: Object.keys(globalThis.engines), seconds, isIsolated: crossOriginIsolated, nThreads: navigator.hardwareConcurrency };
}

/** In the page: what an engine hears, and how long it takes. */
async function hear(name) {
  const start = performance.now();
  const texts = [];
  for (const samples of globalThis.sounds) texts.push((await globalThis.engines[name](samples)).trim());
  return { texts, seconds: (performance.now() - start) / 1000 };
}

const median = (numbers) => numbers.toSorted((a, b) => a - b)[numbers.length >> 1];
const server = await servePage({ packages: options.packages, model: folder, onnx, sounds });
const browser = await openBrowser({ gpu: false });
try {
  const page = await browser.open(server.origin);
  page.setDefaultTimeout(0);
  const { engines, seconds, isIsolated, nThreads } = await page.evaluate(load, [names, dtypes]);
  const session = await browser.context.browser().newBrowserCDPSession();
  const processorTime = async () => (await session.send("SystemInfo.getProcessInfo")).processInfo.reduce((sum, { cpuTime }) => sum + cpuTime, 0);
  console.log(`${names.length} sounds of ${seconds.toFixed(1)} s, isolated ${isIsolated}, ${nThreads} threads, ${options.rounds} rounds`);
  const measured = Object.fromEntries(engines.map((name) => [name, { clock: [], processor: [] }]));
  const heard = {};
  for (let round = 0; round <= Number(options.rounds); round++) {
    for (const name of engines) {
      const before = await processorTime();
      const { texts, seconds } = await page.evaluate(hear, name);
      heard[name] = texts;
      if (round === 0) continue;
      measured[name].processor.push(await processorTime() - before);
      measured[name].clock.push(seconds);
    }
  }
  const ours = measured.tilewright;
  for (const [name, { clock, processor }] of Object.entries(measured)) {
    const nSame = heard[name].filter((text, i) => text === heard.tilewright[i]).length;
    const ratio = (kind, theirs) => (median(ours[kind]) / median(theirs)).toFixed(2);
    const compared = name === "tilewright" ? "" : `, ours takes ${ratio("clock", clock)} and ${ratio("processor", processor)} of it; ${nSame} texts are ours`;
    console.log(`${name.padEnd(20)} ${median(clock).toFixed(2)} s on the clock, ${median(processor).toFixed(2)} s of processors${compared}`);
  }
  for (const [i, name] of names.entries()) for (const engine of engines) console.log(`${name} ${engine}: ${heard[engine][i]}`);
  if (page.problems.length) console.log(page.problems);
} finally {
  await browser.close();
  server.close();
}
