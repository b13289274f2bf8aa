// Kernels in Chromium on its software adapter: this package and the npm package `onnxruntime-web` with its WebGPU backend,
// the same shapes, in turns. A call's operands come from typed arrays and its result goes to one, for both.
//
//     scripts/build-web && node benches/web/kernels.mjs [rounds]
//
// onnxruntime-web is fetched from npm into a temporary folder.

import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { openBrowser } from "../../tests/web/browser.mjs";
import { bytesInMemory, startServer } from "../../tests/web/server.mjs";
import { median, scriptPage } from "./wllama.mjs";

const ORT = "onnxruntime-web";
const rounds = Number(process.argv[2] ?? 7);

// Enough of the ONNX format (onnx.proto3, IR version 8, opset 17) for a model of one node.
const varint = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...varint(Math.floor(n / 128))]);
const number = (field, n) => [...varint(field * 8), ...varint(n)];
const bytes = (field, content) => [...varint(field * 8 + 2), ...varint(content.length), ...content];
const text = (field, string) => bytes(field, [...Buffer.from(string)]);

/** A tensor of F32 among a graph's inputs or outputs. */
function value(name, shape) {
  const dims = shape.flatMap((n) => bytes(1, number(1, n)));
  return [...text(1, name), ...bytes(2, bytes(1, [...number(1, 1), ...bytes(2, dims)]))];
}

/** A model of one operator; `inputs` and `output` are shapes. */
function onnx(operator, inputs, output, opset = 17) {
  const names = inputs.map((_, i) => `x${i}`);
  const node = [...names.flatMap((name) => text(1, name)), ...text(2, "y"), ...text(4, operator)];
  const graph = [
    ...bytes(1, node), ...text(2, "g"), ...inputs.flatMap((shape, i) => bytes(11, value(names[i], shape))), ...bytes(12, value("y", output)),
  ];
  return Buffer.from([...number(1, 8), ...bytes(7, graph), ...bytes(8, number(2, opset))]);
}

// RMSNorm is LayerNormalization's closest kin in the package; ONNX has it since opset 23, which the backend lacks.
const CASES = [
  ...[256, 512, 1024].map((n) => ({ name: `matmul ${n}^3`, kernel: "matmul", inputs: [[n, n], [n, n]], output: [n, n], model: onnx("MatMul", [[n, n], [n, n]], [n, n]) })),
  { name: "matvec 1x1024x2816", kernel: "matmul", inputs: [[1, 1024], [1024, 2816]], output: [1, 2816], model: onnx("MatMul", [[1, 1024], [1024, 2816]], [1, 2816]) },
  { name: "softmax 512x4096", kernel: "softmax", inputs: [[512, 4096]], output: [512, 4096], model: onnx("Softmax", [[512, 4096]], [512, 4096]) },
  { name: "norm 512x4096", kernel: "rmsNorm", inputs: [[512, 4096], [4096]], output: [512, 4096], model: onnx("LayerNormalization", [[512, 4096], [4096]], [512, 4096]) },
];

const tilewright = scriptPage(`
  import { Kernels } from "/npm/index.js";
  const kernels = await Kernels.open({ device: "gpu" });
  window.about = kernels.device.name + ", " + kernels.device.tier;
  const data = (n) => Float32Array.from({ length: n }, (_, i) => ((i * 7919) % 1000) / 500 - 1);
  window.run = async ({ kernel, inputs, output }) => {
    const [a, b] = inputs.map((shape) => data(shape.reduce((x, y) => x * y)));
    const begin = performance.now();
    const y = kernel === "matmul" ? await kernels.matmul(a, b, output[0], output[1], inputs[0][1])
      : kernel === "softmax" ? await kernels.softmax(a, inputs[0][1]) : await kernels.rmsNorm(a, b);
    return [performance.now() - begin, y[1]];
  };`);

const ort = scriptPage(`
  import * as ort from "/files/ort/ort.webgpu.min.mjs";
  ort.env.wasm.wasmPaths = location.origin + "/files/ort/";
  ort.env.wasm.numThreads = 1;
  const sessions = new Map();
  const data = (n) => Float32Array.from({ length: n }, (_, i) => ((i * 7919) % 1000) / 500 - 1);
  window.about = "webgpu";
  window.run = async ({ name, inputs, model }) => {
    if (!sessions.has(name)) sessions.set(name, await ort.InferenceSession.create(Uint8Array.from(model), { executionProviders: ["webgpu"] }));
    const feeds = Object.fromEntries(inputs.map((shape, i) => ["x" + i, new ort.Tensor("float32", data(shape.reduce((x, y) => x * y)), shape)]));
    const begin = performance.now();
    const { y } = await sessions.get(name).run(feeds);
    const values = await y.getData();
    return [performance.now() - begin, values[1]];
  };`);

const folder = mkdtempSync(join(tmpdir(), "tilewright-ort-"));
const server = await startServer();
try {
  execFileSync("npm", ["install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder, ORT], { stdio: "ignore" });
  const installed = join(folder, "node_modules", ORT);
  const { version } = JSON.parse(readFileSync(join(installed, "package.json"), "utf8"));
  for (const name of readdirSync(join(installed, "dist"))) {
    const type = name.endsWith(".wasm") ? "application/wasm" : "text/javascript";
    if (/\.(mjs|wasm)$/.test(name)) server.files.set(`ort/${name}`, bytesInMemory(readFileSync(join(installed, "dist", name)), type));
  }
  server.files.set("tilewright.html", tilewright);
  server.files.set("ort.html", ort);
  const browser = await openBrowser();
  const contenders = [];
  for (const [name, page] of [["tilewright", "tilewright"], [`${ORT} ${version}`, "ort"]]) {
    const view = await browser.context.newPage();
    await view.goto(`${server.origin}/files/${page}.html`);
    await view.waitForFunction(() => window.run !== undefined);
    contenders.push({ name, view });
    console.log(`${name}: ${await view.evaluate(() => about)}`);
  }
  console.log(`median of ${rounds} rounds, in ms (lowest to highest)`);
  for (const { model, ...kernel } of CASES) {
    const times = contenders.map(() => []);
    const results = [];
    for (let round = 0; round <= rounds; round++) {
      for (const [i, { view }] of contenders.entries()) {
        const [ms, result] = await view.evaluate((it) => run(it), { ...kernel, model: [...model] });
        results[i] = result;
        // The first round compiles.
        if (round > 0) times[i].push(ms);
      }
    }
    const cells = times.map((ms, i) => `${contenders[i].name} ${median(ms).toFixed(1)} (${Math.min(...ms).toFixed(1)} to ${Math.max(...ms).toFixed(1)})`);
    console.log(`${kernel.name.padEnd(20)} ${cells.join("   ")}   ratio ${(median(times[1]) / median(times[0])).toFixed(2)}x   [1]: ${results.map((it) => it.toPrecision(5)).join(", ")}`);
  }
  await browser.close();
} finally {
  await server.stop();
  rmSync(folder, { recursive: true, force: true });
}
