// The npm package `@wllama/wllama`, fetched into a temporary folder and served to the benches as `/files/wllama.js`.

import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { bytesInMemory } from "../../tests/web/server.mjs";

const WLLAMA = "@wllama/wllama@3.8";

/** A page whose script is a module. */
export const scriptPage = (script) =>
  bytesInMemory(Buffer.from(`<!doctype html><meta charset="utf-8"><title>bench</title><script type="module">${script}</script>`), "text/html");

/** Serves wllama and returns its version. */
export function serveWllama(server) {
  const folder = mkdtempSync(join(tmpdir(), "tilewright-wllama-"));
  try {
    execFileSync("npm", ["install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder, WLLAMA], { stdio: "ignore" });
    const installed = join(folder, "node_modules/@wllama/wllama");
    const file = (path, type) => bytesInMemory(readFileSync(join(installed, path)), type);
    server.files.set("wllama.js", file("esm/index.js", "text/javascript"));
    server.files.set("wllama.wasm", file("esm/wasm/wllama.wasm", "application/wasm"));
    return JSON.parse(readFileSync(join(installed, "package.json"), "utf8")).version;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

export const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
