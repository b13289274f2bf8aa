// The engine's module for the CPU: as its usual module, whatever the number of threads, to the last bit.

import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";

import { modelOfBlocks } from "./big-model.mjs";
import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";
import { blocksIn } from "./tensors.mjs";

/** Node 20 has no relaxed SIMD but behind a flag, and then its sums are wrong. */
const isOldNode = Number(process.versions.node.split(".")[0]) < 21;
const limited = { timeout: 180_000 };
const { ids: prompt, greedy_ids: expected } =
  JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];

/** Numbers of types in GGUF, and weights of a block: one of each number of bits and each kind of scale. */
const TYPES = {
  Q4_0: [2, 32], Q4_1: [3, 32], Q5_0: [6, 32], Q5_1: [7, 32], Q8_0: [8, 32], Q4_K: [12, 256], Q5_K: [13, 256], Q6_K: [14, 256],
  IQ4_NL: [20, 32], IQ4_XS: [23, 256], MXFP4: [39, 32],
};
const blocks = blocksIn(readFileSync(join(repository, "tests/data/quant-vectors/more.safetensors")));
const blocksOf = (type) => blocks(`${type}.blocks`).map((block, i) =>
  type === "MXFP4" ? Buffer.from([118 + i % 4, ...block.subarray(1)]) : block);
const models = Object.entries(TYPES).map(([type, [number, length]]) => modelOfBlocks(number, blocksOf(type), length).toString("base64"));

let server;
let chromium;
before(async () => {
  server = await startServer();
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

/** Runs in a place: devices, notices, greedy tokens of the built-in model, and log-probabilities of the others. */
async function results({ Model, configure }, { models, prompt, n, threads, cpuWasmUrl }) {
  configure({ cpuWasmUrl });
  const notices = [];
  const options = { device: "cpu", onNotice: ({ code }) => notices.push(code), ...threads === undefined ? {} : { threads } };
  const builtin = await Model.builtin(options);
  const ids = [];
  for await (const { id } of builtin.generate(prompt, { maxTokens: n, temperature: 0, ignoreEos: true })) ids.push(id);
  const rows = [];
  for (const file of models) {
    const bytes = Uint8Array.from(atob(file), (c) => c.charCodeAt(0));
    const model = await Model.load(new Blob([bytes]), { ...options, kvType: "f32" });
    for (const n of [1, 7, 45]) {
      const ids = Array.from({ length: n }, (_, i) => (7 * i + 3) % 20);
      for await (const { topLogprobs } of model.generate(ids, { maxTokens: 1, logprobs: 20, ignoreEos: true })) rows.push(topLogprobs);
    }
    model.free();
  }
  const { name, driver } = builtin.device;
  builtin.free();
  return { name, driver, notices: [...new Set(notices)], ids, rows };
}

const given = (more) => ({ models, prompt, n: expected.length, ...more });

async function inPage(origin, more) {
  const page = await chromium.open(`${origin}/blank.html`);
  const call = ([source, given]) => import("/npm/index.js").then((package_) => new Function(`return ${source}`)()(package_, given));
  const found = await page.evaluate(call, [results.toString(), given(more)]);
  assert.deepEqual(page.problems, []);
  await page.close();
  return found;
}

const inNode = async (more) =>
  JSON.parse(JSON.stringify(await results(await import(pathToFileURL(join(repository, "npm/dist/index.js"))), given(more))));

const one = "CPU, 1 thread";
const two = "CPU, 2 threads";
const relaxed = "relaxed SIMD";

for (const [place, run, nowhere, skip] of [
  ["Chromium", (more) => inPage(server.isolatedOrigin, more), () => `${server.isolatedOrigin}/npm/nowhere.wasm`, false],
  ["Node", inNode, () => "file:///nowhere.wasm", isOldNode],
]) {
  test(`${place}: the module for the CPU computes what the usual one does, with one thread and with several`, { skip, ...limited }, async () => {
    const usual = await run({ cpuWasmUrl: nowhere() });
    assert.deepEqual([usual.name, usual.driver, usual.notices], [one, "", ["cpu_slow"]]);
    assert.deepEqual(usual.ids, expected);
    assert.equal(usual.rows.length, 3 * models.length);
    for (const [threads, name] of [[1, one], [2, two], [4, "CPU, 4 threads"]]) {
      const found = await run({ threads });
      assert.deepEqual([found.name, found.driver, found.notices], [name, relaxed, []]);
      assert.deepEqual([found.ids, found.rows], [usual.ids, usual.rows], `${threads} threads`);
    }
  });
}

test("Chromium: a page that is not isolated has the module with one thread", limited, async () => {
  const found = await inPage(server.origin, { threads: 4 });
  assert.deepEqual([found.name, found.driver, found.notices, found.ids], [one, relaxed, [], expected]);
});

test("Node without relaxed SIMD: the usual module, without a notice", { skip: !isOldNode, ...limited }, async () => {
  const found = await inNode({ models: [], threads: 2 });
  assert.deepEqual([found.name, found.driver, found.notices, found.ids], [one, "", [], expected]);
});

test("Node: threads end with their model, and a failed one ends the model instead of keeping it", { skip: isOldNode, ...limited }, async () => {
  const { configure, Model } = await import(pathToFileURL(join(repository, "npm/dist/index.js")));
  const n = () => readdirSync("/proc/self/task").length;
  const before = n();
  const model = await Model.builtin({ device: "cpu", threads: 5 });
  assert.ok(n() >= before + 5, `${before}, then ${n()} threads`);
  model.free();
  for (const end = performance.now() + 20_000; n() > before + 1 && performance.now() < end;) await sleep(50);
  assert.ok(n() <= before + 1, `${before}, now ${n()} threads`);

  const folder = mkdtempSync(join(tmpdir(), "tilewright-cpu-"));
  try {
    // As a thread it says that it is ready, and is gone with the first work.
    const script = join(folder, "cpu.mjs");
    writeFileSync(script, `
      import { parentPort, workerData } from "node:worker_threads";
      const cpu = workerData ? {} : await import(${JSON.stringify(pathToFileURL(join(repository, "npm/dist/cpu.js")).href)});
      export default cpu.default;
      export const { CPU_THREAD, Device, Engine, failCpu, Header, Index, Loader, Pictures, PreparedPictures, setCpuHelpers, Sha256 } = cpu;
      if (workerData) parentPort.once("message", () => {
        parentPort.postMessage({ type: "ready" });
        setTimeout(() => { throw new Error("gone for a test"); }, 1000);
      });`);
    configure({ cpuUrl: pathToFileURL(script) });
    const broken = await Model.builtin({ device: "cpu", threads: 2 });
    await assert.rejects(async () => {
      for (;;) await broken.generate(prompt, { maxTokens: 64, ignoreEos: true }).result;
    }, { code: "worker_crashed", message: /a thread of the CPU failed/ });
  } finally {
    configure({ cpuUrl: undefined });
    rmSync(folder, { recursive: true, force: true });
  }
});

test("the number of threads is a whole one", async () => {
  const { Model } = await import(pathToFileURL(join(repository, "npm/dist/index.js")));
  for (const threads of [0, 1.5, "2"]) {
    await assert.rejects(Model.builtin({ device: "cpu", threads }), { code: "option", message: `threads is ${threads}, expected a whole number from 1` });
  }
});
