// Every linked shader against Tint, the compiler of Chromium and Dawn. naga checks the same sources when the crate is
// built; each rejects some shaders that the other accepts.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";

/** Dawn crashes if its instance is collected before its adapters. */
let dawnInstance;

/** Runs in a page and in Node: compiles sources for an adapter, and creates a pipeline from every `stride`th. */
async function compileAll(adapter, variants, stride) {
  const available = ["shader-f16", "subgroups"].filter((name) => adapter.features.has(name));
  const device = await adapter.requestDevice({ requiredFeatures: available });
  const missing = { f16: "shader-f16", subgroups: "subgroups" };
  const results = [];
  for (const [i, { label, tier, source }] of variants.entries()) {
    const needed = missing[tier];
    if (needed && !available.includes(needed)) {
      results.push({ label, skipped: needed });
      continue;
    }
    device.pushErrorScope("validation");
    const module = device.createShaderModule({ label, code: source });
    const { messages } = await module.getCompilationInfo();
    const problems = messages.filter((it) => it.type !== "info").map((it) => `${it.type}, line ${it.lineNum}: ${it.message}`);
    if (i % stride === 0) {
      await device.createComputePipelineAsync({ label, layout: "auto", compute: { module } }).catch((error) => problems.push(error.message));
    }
    const error = await device.popErrorScope();
    if (error) problems.push(error.message);
    results.push({ label, problems });
  }
  device.destroy();
  return results;
}

function check(t, results) {
  const refused = results.filter((it) => it.problems?.length > 0);
  assert.deepEqual(refused, []);
  const skipped = results.filter((it) => it.skipped);
  const accepted = results.length - skipped.length;
  assert.ok(accepted > 0, "no shader was compiled");
  t.diagnostic(`${accepted} of ${results.length} accepted; ${skipped.length} need a feature that this adapter lacks`);
  return skipped;
}

// Chromium takes longer to translate a shader for its software adapter than to check it, and kernel tests translate
// anyway.
const STRIDE_IN_CHROMIUM = process.env.TILEWRIGHT_FULL ? 1 : 64;

test("Chromium accepts every shader that its adapter has the features for", { timeout: 300_000 }, async (t) => {
  const server = await startServer();
  const chromium = await openBrowser();
  try {
    const page = await chromium.open(`${server.origin}/blank.html`);
    const results = await page.evaluate(async ([compileAll, stride]) => {
      const { default: init, shaderVariants } = await import("/pkg/tilewright.js");
      await init();
      const compile = new Function(`return ${compileAll}`)();
      return compile(await navigator.gpu.requestAdapter(), shaderVariants(), stride);
    }, [compileAll.toString(), STRIDE_IN_CHROMIUM]);
    for (const { label, skipped } of check(t, results)) assert.equal(skipped, "shader-f16", label);
  } finally {
    await chromium.close();
    await server.stop();
  }
});

test("Dawn accepts every shader, on an adapter that has all features and computes nothing", { timeout: 300_000 }, async (t) => {
  const dawn = createRequire(join(repository, "npm/package.json")).resolve("webgpu");
  const { create, globals } = await import(pathToFileURL(dawn));
  Object.assign(globalThis, globals);
  dawnInstance = create(["backend=null"]);
  const adapter = await dawnInstance.requestAdapter();
  const { initSync, shaderVariants } = await import(pathToFileURL(join(repository, "pkg/tilewright.js")));
  initSync({ module: readFileSync(join(repository, "pkg/tilewright_bg.wasm")) });
  assert.deepEqual(check(t, await compileAll(adapter, shaderVariants(), 1)), []);
});
