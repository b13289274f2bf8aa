// Tokens per second of a GGUF file in Chromium on the CPU: this package and the npm package `@wllama/wllama`, in turns, with
// each number of threads.
//
//     scripts/build-web && node benches/web/decode.mjs FILE.gguf [rounds] [threads,..]
//
// wllama is fetched from npm. Prompts differ from round to round, so that nobody has read them before.

import { readFileSync } from "node:fs";
import { basename } from "node:path";

import { openBrowser } from "../../tests/web/browser.mjs";
import { bytesInMemory, startServer } from "../../tests/web/server.mjs";
import { median, scriptPage, serveWllama } from "./wllama.mjs";

const [path, rounds = "7", threads = "1"] = process.argv.slice(2);
if (path === undefined) throw new Error("expected the path of a GGUF file");
const N_DECODE = 32;
const WORDS = "one day a cat and a dog went to the park to play with the red ball and the big tree was very happy";

const tilewright = (threads) => scriptPage(`
  import { Model } from "/npm/index.js";
  const model = await Model.load(location.origin + "/files/model.gguf", { device: "cpu", threads: ${threads}, cache: false, contextLength: 512 });
  window.device = model.device;
  window.run = async (prompt, count) => {
    const times = [];
    const begin = performance.now();
    for await (const { id } of model.generate(prompt, { maxTokens: count, ignoreEos: true, temperature: 0 })) times.push(performance.now() - begin);
    return times;
  };
  window.count = async (prompt) => (await model.tokenize(prompt)).length;`);

const wllama = (threads) => scriptPage(`
  import { Wllama } from "/files/wllama.js";
  const wllama = new Wllama({ default: location.origin + "/files/wllama.wasm" }, { suppressNativeLog: true });
  await wllama.loadModelFromUrl(location.origin + "/files/model.gguf", { n_gpu_layers: 0, n_threads: ${threads}, n_ctx: 512, useCache: false });
  window.run = async (prompt, count) => {
    const times = [];
    const begin = performance.now();
    const stream = await wllama.createCompletion({ prompt, max_tokens: count, temperature: 0, stream: true });
    for await (const chunk of stream) if (chunk.choices?.[0]?.text !== undefined) times.push(performance.now() - begin);
    return times;
  };`);

const server = await startServer();
try {
  const version = serveWllama(server);
  server.files.set("model.gguf", bytesInMemory(readFileSync(path)));
  const browser = await openBrowser({ gpu: false });
  const contenders = [];
  for (const n of threads.split(",")) {
    for (const [name, page] of [["tilewright", tilewright(n)], [`wllama ${version}`, wllama(n)]]) {
      server.files.set("page.html", page);
      const view = await browser.context.newPage();
      await view.goto(`${server.isolatedOrigin}/files/page.html`);
      await view.waitForFunction(() => window.run !== undefined, undefined, { timeout: 120_000 });
      const device = await view.evaluate(() => window.device);
      contenders.push({ name: `${name}, ${n} threads`, view, prefill: [], decode: [] });
      if (device !== undefined) console.log(`tilewright: ${device.name}, ${device.driver}`);
    }
  }
  const [{ view: counter }] = contenders;
  for (let round = 0; round <= Number(rounds); round++) {
    const prompt = `${String.fromCharCode(97 + (round % 26))} ${WORDS} ${WORDS}`;
    const nPrompt = await counter.evaluate((prompt) => count(prompt), prompt);
    for (const { view, prefill, decode } of contenders) {
      const times = await view.evaluate(([prompt, count]) => run(prompt, count), [prompt, N_DECODE]);
      // The first round warms up. A model that ends early is measured as far as it goes.
      if (round === 0 || times.length < 2) continue;
      prefill.push(nPrompt / (times[0] / 1000));
      decode.push((times.length - 1) / ((times.at(-1) - times[0]) / 1000));
    }
  }
  await browser.close();
  console.log(`${basename(path)}, ${readFileSync(path).length} bytes; median of ${rounds} rounds, in tokens/s (lowest to highest)`);
  const [base] = contenders;
  for (const contender of contenders) {
    const cells = ["prefill", "decode"].map((part) => {
      const values = contender[part];
      const ratio = median(base[part]) / median(values);
      return `${part} ${median(values).toFixed(1)} (${Math.min(...values).toFixed(1)} to ${Math.max(...values).toFixed(1)}), ${base.name} ${ratio.toFixed(2)}x`;
    });
    console.log(`${contender.name.padEnd(24)} ${cells.join("   ")}`);
  }
} finally {
  await server.stop();
}
