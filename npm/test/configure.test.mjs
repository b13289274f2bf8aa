// Where the package's files are: what `configure` takes and refuses, and that its last word counts. Nothing of it starts anything.

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { configure, fileUrls } from "../build/configure.js";
import { WorkerConnection } from "../build/worker-connection.js";

afterEach(() => {
  configure({ workerUrl: undefined, wasmUrl: undefined, textWasmUrl: undefined, speechWorkerUrl: undefined, speechWasmUrl: undefined });
  delete globalThis.document;
});

test("addresses are absolute in Node, and relative to a page where there is one", () => {
  configure({ workerUrl: new URL("file:///a/worker.js"), wasmUrl: "https://cdn.example/engine.wasm" });
  assert.deepEqual(fileUrls(), { workerUrl: "file:///a/worker.js", wasmUrl: "https://cdn.example/engine.wasm" });
  assert.throws(() => configure({ wasmUrl: "files/engine.wasm" }), { name: "TilewrightError", code: "option", message: /^configure: `wasmUrl` is "files\/engine.wasm", expected an absolute address/ });
  globalThis.document = { baseURI: "https://site.example/app/" };
  configure({ wasmUrl: "files/engine.wasm" });
  assert.equal(fileUrls().wasmUrl, "https://site.example/app/files/engine.wasm");
});

test("what a call does not name stays, and `undefined` is beside the package again", () => {
  configure({ workerUrl: "file:///a", textWasmUrl: "file:///b" });
  configure({ workerUrl: undefined });
  assert.deepEqual(fileUrls(), { textWasmUrl: "file:///b" });
});

test("what is no address is an error with code `option`, and changes nothing", () => {
  configure({ workerUrl: "file:///a" });
  for (const [given, found] of [[5, "of type number"], [null, "null"], [{}, "of type object"], ["http://[", '"http:\\/\\/\\["']]) {
    const message = new RegExp(`^configure: \`textWasmUrl\` is ${found}`);
    assert.throws(() => configure({ workerUrl: "file:///other", textWasmUrl: given }), { name: "TilewrightError", code: "option", message });
  }
  assert.deepEqual(fileUrls(), { workerUrl: "file:///a" });
});

test("a thread that cannot be started where `workerUrl` says is an error with a code that names it", async () => {
  configure({ workerUrl: "https://cdn.example/worker.js" });
  await assert.rejects(WorkerConnection.open(), { name: "TilewrightError", code: "unsupported_platform", message: /thread cannot be started from https:\/\/cdn\.example\/worker\.js/ });
  configure({ workerUrl: "file:///nowhere/worker.js" });
  await assert.rejects(WorkerConnection.open(), { name: "TilewrightError", code: "worker_crashed", message: /nowhere/ });
});
