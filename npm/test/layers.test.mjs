// The order of the modules: each imports only modules below it, types included.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { posix } from "node:path";
import { test } from "node:test";

/** All modules of `npm/src`, the lowest first. A new one comes after all that it imports. */
const ORDER = [
  // What all others are about.
  "errors",
  "helpers",
  "platform",
  "options.generated",
  "types",
  "bench-types",

  // What the page and the worker tell each other.
  "git",
  "store",
  "protocol",
  "fetching",
  "tilewright",
  "tilewright_cpu",
  "tilewright_text",
  "tilewright_speech",

  // Options, and what is loaded.
  "connection",
  "loaded",
  "load-options",
  "options",
  "configure",

  // What callers give, where files come from, and where they are kept.
  "cache",
  "sessions",
  "download",
  "source",
  "embeddings",
  "arguments",
  "images",
  "sound",
  "hub",
  "spec",

  // What the worker runs.
  "classes",
  "cpu",
  "wasm",
  "text-module",
  "output-parser",
  "gpu",
  "tuning",
  "worker/port",
  "worker/turns",
  "worker/registry",
  "worker/progress",
  "worker/cpu-engine",
  "worker/files",
  "worker/place",
  "worker/handles",
  "worker/load",
  "worker/inspect",
  "worker/kernels",
  "worker/vectors",
  "worker/loaded-model",
  "worker/common-handlers",
  "worker/pixels",
  "worker/loaded-embedder",
  "worker/loaded-engine",
  "worker/loaded-text-model",
  "worker/handlers",
  "worker/transcriber",
  "worker/serve",
  "worker",
  "speech-worker",

  // What the page asks it for.
  "worker-connection",
  "shared",
  "load",
  "stored-models",
  "format",
  "generation",
  "engine",
  "models",
  "model",
  "embedder",
  "reranker",
  "transcriber",
  "kernels",
  "vectors",

  // The same in the shape of OpenAI's API.
  "openai/errors",
  "openai/request",
  "openai/common",
  "openai/chat",
  "openai/completions",
  "openai/embeddings",
  "openai/client",

  "index",
];

const FOLDER = new URL("../src/", import.meta.url);
const files = readdirSync(FOLDER, { recursive: true }).map((path) => path.replaceAll("\\", "/")).filter((path) => path.endsWith(".ts"));

/** A file's name in the list: imports name what is compiled, so `.d.ts` and `.ts` are the same. */
const moduleOf = (path) => path.replace(/(\.d)?\.ts$/, "");

/** Statements that import or export from a relative path or import for effect, and `import()` of values and types. */
const IMPORT = /^[ \t]*(?:import|export)\b(?:[\w$*,\s]|\{[^}]*\})*?["'](\.[^"']*)["']|\bimport\s*\(\s*["'](\.[^"']*)["']/gm;

/** A line for each import of a source that does not lead below it. */
function upwardImports(path, source, order = ORDER) {
  const place = order.indexOf(moduleOf(path));
  return [...source.matchAll(IMPORT)].flatMap(({ index, 1: statement, 2: call }) => {
    const given = statement ?? call;
    const at = order.indexOf(posix.join(posix.dirname(path), given).replace(/\.js$/, ""));
    const line = source.slice(0, index).split("\n").length;
    const problem = at < 0 ? "which is not in the list" : at >= place ? "which is not below it" : undefined;
    return problem === undefined ? [] : [`npm/src/${path}:${line} imports "${given}", ${problem}`];
  });
}

test("the list has every module once, and no other", () => {
  assert.deepEqual([...ORDER].sort(), files.map(moduleOf).sort());
});

test("modules import only what is below them", () => {
  const upward = files.flatMap((path) => upwardImports(path, readFileSync(new URL(path, FOLDER), "utf8")));
  assert.equal(upward.join("\n"), "");
});

test("upward imports of every form are found, with their lines", () => {
  const order = ["low", "folder/part", "high"];
  const found = (source, path = "low.ts") => upwardImports(path, source, order);
  const told = (line, given) => [`npm/src/low.ts:${line} imports "${given}", which is not below it`];
  assert.deepEqual(found('/** Text. */\n\nimport { a } from "./high.js";\n'), told(3, "./high.js"));
  assert.deepEqual(found('import type { A } from "./high.js";'), told(1, "./high.js"));
  assert.deepEqual(found('import a, { type B } from "./high.js";'), told(1, "./high.js"));
  assert.deepEqual(found('import * as part from "./folder/part.js";'), told(1, "./folder/part.js"));
  assert.deepEqual(found('import {\n  a,\n  type B,\n} from "./high.js";\n'), told(1, "./high.js"));
  assert.deepEqual(found('import "./high.js";'), told(1, "./high.js"));
  assert.deepEqual(found('import "node:fs";\nexport { a } from "./high.js";'), told(2, "./high.js"));
  assert.deepEqual(found('export type * from "./high.js";'), told(1, "./high.js"));
  assert.deepEqual(found('export interface A {\n  b: import("./high.js").B;\n}'), told(2, "./high.js"));
  assert.deepEqual(found('const a = await import("./high.js");'), told(1, "./high.js"));
  assert.deepEqual(found('import { a } from "./low.js";'), told(1, "./low.js"));
  assert.deepEqual(found('import { a } from "./gone.js";'), ['npm/src/low.ts:1 imports "./gone.js", which is not in the list']);
  assert.deepEqual(found('import { a } from "../high.js";\nimport { b } from "../low.js";', "folder/part.ts"), [
    'npm/src/folder/part.ts:1 imports "../high.js", which is not below it',
  ]);
  assert.deepEqual(found('import { a } from "./low.js";\nimport { b } from "./folder/part.js";\nimport c from "node:fs";', "high.d.ts"), []);
});
