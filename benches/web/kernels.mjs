// Kernels in Chromium on its software adapter: this package and the npm package `onnxruntime-web` with its WebGPU backend,
// the same shapes, in turns. Twice: from typed arrays to a typed array, and on the device, where operands are there already
// and results stay. There onnxruntime-web has weights as part of its model and the rest as GPU buffers, and a round is a few
// calls and the read of 16 bytes that comes behind them.
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
const number = (field, n) => Buffer.from([...varint(field * 8), ...varint(n)]);
const bytes = (field, ...parts) => {
  const content = Buffer.concat(parts);
  return Buffer.concat([Buffer.from([...varint(field * 8 + 2), ...varint(content.length)]), content]);
};
const text = (field, string) => bytes(field, Buffer.from(string));

/** A tensor of F32 among a graph's inputs or outputs. */
const value = (name, shape) =>
  Buffer.concat([text(1, name), bytes(2, bytes(1, number(1, 1), bytes(2, ...shape.map((n) => bytes(1, number(1, n))))))]);

const size = (shape) => shape.reduce((x, y) => x * y);
const data = (n) => Float32Array.from({ length: n }, (_, i) => ((i * 7919) % 1000) / 500 - 1);

/** A tensor of F32 that is part of the model. */
const initializer = (name, shape) =>
  Buffer.concat([...shape.map((n) => number(1, n)), number(2, 1), text(8, name), bytes(9, Buffer.from(data(size(shape)).buffer))]);

/** A model of one operator. Its operands after the first come from outside or are part of it. */
function onnx(operator, inputs, output, hasWeights) {
  const names = inputs.map((_, i) => `x${i}`);
  const node = bytes(1, ...names.map((name) => text(1, name)), text(2, "y"), text(4, operator));
  const operands = inputs.map((shape, i) => (hasWeights && i > 0 ? bytes(5, initializer(names[i], shape)) : bytes(11, value(names[i], shape))));
  const graph = bytes(7, node, text(2, "g"), ...operands, bytes(12, value("y", output)));
  return Buffer.concat([number(1, 8), graph, bytes(8, number(2, 17))]);
}

const matmul = (m, n, k, calls) => ({ kernel: "matmul", operator: "MatMul", inputs: [[m, k], [k, n]], output: [m, n], calls });

// `calls` are those of a round on the device.
const CASES = [
  { name: "matmul 256^3", ...matmul(256, 256, 256, 4) },
  { name: "matmul 512^3", ...matmul(512, 512, 512, 4) },
  { name: "matmul 1024^3", ...matmul(1024, 1024, 1024, 1) },
  { name: "matvec 1x1024x2816", ...matmul(1, 2816, 1024, 4) },
  { name: "softmax 512x4096", kernel: "softmax", operator: "Softmax", inputs: [[512, 4096]], output: [512, 4096], calls: 4 },
  {
    name: "layer norm 512x4096", kernel: "layerNorm", operator: "LayerNormalization",
    inputs: [[512, 4096], [4096], [4096]], output: [512, 4096], calls: 4,
  },
];

const tilewright = scriptPage(`
  import { Kernels } from "/npm/index.js";
  const kernels = await Kernels.open({ device: "gpu" });
  const size = ${size}, data = ${data};
  window.about = kernels.device.name + ", " + kernels.device.tier;
  // An ONNX model without an epsilon has 1e-5, too.
  const call = ({ kernel, inputs, output }, [a, b, c], options) =>
    kernel === "matmul" ? kernels.matmul(a, b, output[0], output[1], inputs[0][1], options)
      : kernel === "softmax" ? kernels.softmax(a, inputs[0][1], options) : kernels.layerNorm(a, b, c, 1e-5, options);
  window.whole = async (it) => {
    const operands = it.inputs.map((shape) => data(size(shape)));
    const begin = performance.now();
    const y = await call(it, operands);
    return [performance.now() - begin, y[1]];
  };
  const kept = new Map();
  const small = await kernels.tensor(data(4), [4]);
  window.onDevice = async (it) => {
    if (!kept.has(it.name)) kept.set(it.name, await Promise.all(it.inputs.map((shape) => kernels.tensor(data(size(shape)), shape))));
    await small.read();
    const begin = performance.now();
    let y;
    for (let i = 0; i < it.calls; i++) {
      y?.free();
      y = await call(it, kept.get(it.name), { keep: true });
    }
    await small.read();
    const ms = (performance.now() - begin) / it.calls;
    const values = await y.read();
    y.free();
    return [ms, values[1]];
  };`);

const ort = scriptPage(`
  import * as ort from "/files/ort/ort.webgpu.min.mjs";
  ort.env.wasm.wasmPaths = location.origin + "/files/ort/";
  ort.env.wasm.numThreads = 1;
  const size = ${size}, data = ${data};
  const sessions = new Map();
  const session = async (model, options) => {
    if (!sessions.has(model)) sessions.set(model, await ort.InferenceSession.create("/files/" + model, { executionProviders: ["webgpu"], ...options }));
    return sessions.get(model);
  };
  window.about = "webgpu";
  window.whole = async ({ name, inputs }) => {
    const model = await session(name + ".onnx", {});
    const feeds = Object.fromEntries(inputs.map((shape, i) => ["x" + i, new ort.Tensor("float32", data(size(shape)), shape)]));
    const begin = performance.now();
    const { y } = await model.run(feeds);
    const values = await y.getData();
    return [performance.now() - begin, values[1]];
  };
  const kept = new Map();
  window.onDevice = async ({ name, inputs, calls }) => {
    const model = await session(name + " with weights.onnx", { preferredOutputLocation: "gpu-buffer" });
    const device = await ort.env.webgpu.device;
    if (!kept.has(name)) {
      const gpuBuffer = device.createBuffer({ size: 4 * size(inputs[0]), usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC });
      device.queue.writeBuffer(gpuBuffer, 0, data(size(inputs[0])));
      kept.set(name, ort.Tensor.fromGpuBuffer(gpuBuffer, { dataType: "float32", dims: inputs[0] }));
    }
    const staging = device.createBuffer({ size: 16, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const read = async (buffer) => {
      const encoder = device.createCommandEncoder();
      encoder.copyBufferToBuffer(buffer, 0, staging, 0, 16);
      device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const [, value] = new Float32Array(staging.getMappedRange());
      staging.unmap();
      return value;
    };
    await read(kept.get(name).gpuBuffer);
    const begin = performance.now();
    let y;
    for (let i = 0; i < calls; i++) {
      y?.dispose();
      ({ y } = await model.run({ x0: kept.get(name) }));
    }
    const value = await read(y.gpuBuffer);
    const ms = (performance.now() - begin) / calls;
    y.dispose();
    staging.destroy();
    return [ms, value];
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
    await view.waitForFunction(() => window.onDevice !== undefined);
    contenders.push({ name, view });
    console.log(`${name}: ${await view.evaluate(() => about)}`);
  }
  for (const { name, operator, inputs, output } of CASES) {
    server.files.set(`${name}.onnx`, bytesInMemory(onnx(operator, inputs, output, false), "application/octet-stream"));
    server.files.set(`${name} with weights.onnx`, bytesInMemory(onnx(operator, inputs, output, true), "application/octet-stream"));
  }
  for (const [run, title] of [["whole", "from arrays to an array"], ["onDevice", "on the device"]]) {
    console.log(`\n${title}: median of ${rounds} rounds, in ms for each call (lowest to highest)`);
    for (const it of CASES) {
      const times = contenders.map(() => []);
      const results = [];
      for (let round = 0; round <= rounds; round++) {
        for (const [i, { view }] of contenders.entries()) {
          const [ms, result] = await view.evaluate(([run, it]) => window[run](it), [run, it]);
          results[i] = result;
          // The first round compiles.
          if (round > 0) times[i].push(ms);
        }
      }
      const cells = times.map((ms, i) => `${contenders[i].name} ${median(ms).toFixed(1)} (${Math.min(...ms).toFixed(1)} to ${Math.max(...ms).toFixed(1)})`);
      console.log(`${it.name.padEnd(20)} ${cells.join("   ")}   ratio ${(median(times[1]) / median(times[0])).toFixed(2)}x   [1]: ${results.map((it) => it.toPrecision(5)).join(", ")}`);
    }
  }
  await browser.close();
} finally {
  await server.stop();
  rmSync(folder, { recursive: true, force: true });
}
