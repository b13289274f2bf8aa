// The package in Firefox; with TILEWRIGHT_FULL also kernel conformance.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { test } from "node:test";

import { missingFirefox, openFirefox } from "./firefox.mjs";
import { browserPlace, lane } from "./lane.mjs";
import { repository } from "./server.mjs";

lane("Firefox", { missing: missingFirefox, open: browserPlace(openFirefox), devices: ["cpu", "gpu"] });

/**
 * Builds the conformance tests and serves them to browsers, as wasm-bindgen does without its own driver. Resolves with
 * the address and a function to stop.
 */
function serveConformance() {
  const command = "environment=$(scripts/wasm-toolchain) && eval \"$environment\" && "
    + "exec cargo test --locked --profile web --target wasm32-unknown-unknown -p tilewright --no-default-features --features web --test kernels";
  const environment = {
    ...process.env, NO_HEADLESS: "1", WASM_BINDGEN_TEST_ADDRESS: "127.0.0.1:0",
    CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER: "wasm-bindgen-test-runner",
  };
  // A separate process group, because the server is a grandchild.
  const child = spawn("bash", ["-c", command], { cwd: repository, env: environment, detached: true, stdio: ["ignore", "pipe", "pipe"] });
  const ended = new Promise((resolve) => child.on("exit", resolve));
  const close = async () => {
    try {
      process.kill(-child.pid);
    } catch (error) {
      if (error.code !== "ESRCH") throw error;
    }
    await ended;
  };
  return new Promise((resolve, reject) => {
    let output = "";
    const read = (text) => {
      output += text;
      const [, url] = /available at (http:\/\/[\d.:]+)/.exec(output) ?? [];
      if (url !== undefined) resolve({ url, close });
    };
    child.stdout.on("data", read);
    child.stderr.on("data", read);
    child.on("exit", (code) => reject(new Error(`the conformance tests ended with ${code}: ${output}`)));
  });
}

if (process.env.TILEWRIGHT_FULL) {
  test("Firefox: kernels conform on WebGPU", { skip: missingFirefox ?? false, timeout: 3_600_000 }, async (t) => {
    const conformance = await serveConformance();
    const firefox = await openFirefox();
    try {
      const output = await firefox.evaluate(conformance.url, async () => {
        for (;;) {
          const text = document.querySelector("#output").textContent;
          if (/test result: |Failed to/.test(text)) return text;
          await new Promise((resolve) => setTimeout(resolve, 500));
        }
      });
      const [, passed, failed] = /test result: ok\. (\d+) passed; (\d+) failed/.exec(output) ?? [];
      assert.equal(failed, "0", output);
      assert.ok(Number(passed) > 0, output);
      t.diagnostic(`${passed} tests`);
    } finally {
      await firefox.close();
      await conformance.close();
    }
  });
}
