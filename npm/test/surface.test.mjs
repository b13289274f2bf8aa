// What Rust and JavaScript share is written down in both: the classes of the WASM modules, and the names of errors, reasons and choices.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { codeOf, ENGINE_CODES, isTrap } from "../build/errors.js";

const read = (path) => readFileSync(new URL(`../../${path}`, import.meta.url), "utf8");
const withoutComments = (text) => text.replace(/\/\*[^]*?\*\/|\/\/[^\n]*/g, "");

/** How many parameters a list has: commas within brackets separate others. */
function count(list) {
  let [depth, n] = [0, list.trim() === "" ? 0 : 1];
  for (const sign of list.trim().replace(/,$/, "").replaceAll("=>", "")) {
    if ("([{<".includes(sign)) depth += 1;
    else if (")]}>".includes(sign)) depth -= 1;
    else if (sign === "," && depth === 0) n += 1;
  }
  return n;
}

/** The classes that a module declares: by their names the methods, with the numbers of their parameters. */
function classesOf(path) {
  const classes = {};
  for (const [, name, body] of withoutComments(read(path)).matchAll(/export class (\w+)(?:<[^>]*>)? \{([^]*?)\n\}/g)) {
    const methods = {};
    for (const [line, isStatic = "", method] of body.matchAll(/^ +(?:private )?(static )?(\w+)\(/gm)) {
      const from = body.indexOf(line) + line.length;
      let to = from;
      for (let depth = 1; depth > 0; to += 1) depth += body[to] === "(" ? 1 : body[to] === ")" ? -1 : 0;
      methods[`${isStatic}${method}`] = count(body.slice(from, to - 1));
    }
    classes[name] = methods;
  }
  return classes;
}

for (const [ours, built] of [
  ["npm/src/tilewright.d.ts", "pkg/tilewright.d.ts"], ["npm/src/tilewright.d.ts", "pkg-cpu/tilewright_cpu.d.ts"],
  ["npm/src/tilewright_speech.d.ts", "pkg-speech/tilewright_speech.d.ts"],
  ["npm/src/tilewright_text.d.ts", "pkg-text/tilewright_text.d.ts"],
]) {
  test(`${ours} declares the classes and methods of ${built}`, () => {
    const [declared, generated] = [classesOf(ours), classesOf(built)];
    assert.ok(Object.keys(generated).length > 0 && Object.values(generated).every((methods) => "free" in methods));
    assert.deepEqual(Object.keys(declared).sort(), Object.keys(generated).sort());
    for (const [name, methods] of Object.entries(generated)) {
      // Everything can be freed; where nobody does, it is not declared.
      const { free: _, ...others } = methods;
      const { free: __, ...known } = declared[name];
      assert.deepEqual(known, others, name);
    }
  });
}

/** Texts that the arms of a function or the variants of an enum in Rust stand for. */
function inRust(path, begin) {
  const source = withoutComments(read(path));
  const at = source.indexOf(begin);
  assert.ok(at >= 0, `${path} has no ${begin}`);
  const body = source.slice(at, source.indexOf(begin.startsWith("pub enum") ? "\n}" : "\n    }\n", at));
  return begin.startsWith("pub enum")
    ? [...body.matchAll(/^ {4}(\w+),/gm)].map(([, name]) => name.replace(/(?!^)[A-Z]/g, "_$&").toLowerCase())
    : [...body.matchAll(/=> "([^"]+)"/g)].map(([, name]) => name);
}

/** The texts that a type of the package is a union of. */
function inTypes(name, path = "npm/src/types.ts") {
  const [, union] = new RegExp(`export type ${name} =([^;]+);`).exec(withoutComments(read(path)));
  return [...union.matchAll(/"([^"]+)"/g)].map(([, text]) => text);
}

test("errors of the engine have the codes that the package declares", () => {
  // What is native alone.
  const codes = inRust("src/error.rs", "pub fn code(").filter((code) => !["io", "hub", "panic"].includes(code));
  assert.deepEqual(codes.sort(), [...ENGINE_CODES].sort());
  const declared = inTypes("ErrorCode", "npm/src/errors.ts");
  for (const code of codes) {
    assert.ok(declared.includes(code), code);
    assert.equal(codeOf(Object.assign(new Error("made up"), { code })), code);
  }
});

test("reasons, tiers, poolings and cache types are those of the engine", () => {
  assert.deepEqual(inTypes("StopReason").sort(), inRust("src/generate/generation.rs", "pub enum StopReason").sort());
  // Matrices of 8 and 16 are never in a browser.
  assert.deepEqual(inTypes("Tier").sort(), inRust("src/shaders.rs", "pub fn name(").filter((tier) => !tier.startsWith("matrix")).sort());
  assert.deepEqual(inTypes("Pooling").sort(), inRust("src/kernels/pool.rs", "pub fn name(").sort());
  assert.deepEqual(inTypes("SpeechTask").sort(), inRust("src/transcribe/options.rs", "pub fn name(").sort());
  assert.deepEqual(inTypes("KvType").sort(), inRust("src/kernels/cached.rs", "pub fn name(").sort());
});

test("a value that a trap left borrowed stands for the trap", () => {
  const message = "attempted to take ownership of Rust value while it was borrowed";
  assert.ok(readFileSync(new URL("../../pkg/tilewright_bg.wasm", import.meta.url)).includes(message), "wasm-bindgen says something else");
  assert.ok(isTrap(new Error(message)) && !isTrap(new Error("it is borrowed")));
});
