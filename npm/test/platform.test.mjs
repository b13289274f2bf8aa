// Where the code runs. Electron and NW.js give pages a `process` of Node; they are browsers all the same.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { promisify } from "node:util";

const run = promisify(execFile);
const platform = new URL("../build/platform.js", import.meta.url).href;

/** What the package takes a process for, after it was made to look like another. */
async function seen(disguise) {
  const script = `${disguise};
    const { isNode, hasPaths } = await import(${JSON.stringify(platform)});
    process.stdout.write(JSON.stringify({ isNode, hasPaths }));`;
  return JSON.parse((await run(process.execPath, ["--input-type=module", "--eval", script])).stdout);
}

const versions = (more) => `Object.defineProperty(process, "versions", { value: { ...process.versions, ...${JSON.stringify(more)} } })`;

test("Node is Node, also with a document of jsdom", async () => {
  assert.deepEqual(await seen(""), { isNode: true, hasPaths: true });
  assert.deepEqual(await seen("globalThis.window = globalThis; globalThis.document = {}"), { isNode: true, hasPaths: true });
});

test("Electron's main and utility processes are Node, its pages and their workers are browsers", async () => {
  for (const [type, isNode] of [["browser", true], ["utility", true], ["renderer", false], ["worker", false]]) {
    const disguise = `${versions({ electron: "33.0.0", chrome: "130.0.0" })}; process.type = ${JSON.stringify(type)}`;
    assert.deepEqual(await seen(disguise), { isNode, hasPaths: isNode }, type);
  }
});

test("a page of NW.js is a browser", async () => {
  assert.deepEqual(await seen(`${versions({ nw: "0.90.0" })}; globalThis.document = {}`), { isNode: false, hasPaths: false });
});
