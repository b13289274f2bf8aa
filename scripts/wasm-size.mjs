// Prints sizes of built files and a WASM module's largest parts, and fails if the module is too large:
//
//     node scripts/wasm-size.mjs --limit BYTES --named LINKED.wasm MODULE.wasm FILE..
//
// The limit is for MODULE compressed by gzip -9. LINKED is the same module before wasm-bindgen and wasm-opt strip the
// function names; its code is summed by crate. A generic function counts for the crate that defines it.

import { readFileSync } from "node:fs";
import { relative } from "node:path";
import { parseArgs } from "node:util";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";

const CODE = 10;
const DATA = 11;
const IMPORT = 2;
const CUSTOM = 0;
const FUNCTION_NAMES = 1;

/** Parses the needed parts of the binary format (WebAssembly core specification, chapter 5). */
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.offset = 0;
  }

  get done() {
    return this.offset >= this.bytes.length;
  }

  byte() {
    return this.bytes[this.offset++];
  }

  number() {
    let value = 0;
    for (let shift = 0; ; shift += 7) {
      const byte = this.byte();
      value += (byte & 0x7f) * 2 ** shift;
      if (byte < 0x80) return value;
    }
  }

  take(length) {
    const part = this.bytes.subarray(this.offset, this.offset + length);
    this.offset += length;
    return new Reader(part);
  }

  text() {
    return new TextDecoder().decode(this.take(this.number()).bytes);
  }

  limits() {
    const flags = this.number();
    this.number();
    if (flags & 1) this.number();
  }
}

/** Number of imported functions: they come first in the function index space. */
function importedFunctions(section) {
  let functions = 0;
  for (let left = section.number(); left > 0; left--) {
    section.text();
    section.text();
    const kind = section.byte();
    if (kind === 0) {
      functions++;
      section.number();
    } else if (kind === 1) {
      section.byte();
      section.limits();
    } else if (kind === 2) {
      section.limits();
    } else {
      section.take(2);
    }
  }
  return functions;
}

/** The crate at the start of a mangled function name. */
function crateOf(name) {
  const v0 = /^_R.*?C(?:s[0-9A-Za-z]*_)(\d+)_?/.exec(name);
  if (v0) return name.slice(v0[0].length, v0[0].length + Number(v0[1]));
  const legacy = /^_ZN(\d+)/.exec(name);
  if (!legacy) return "(other)";
  const first = name.slice(legacy[0].length, legacy[0].length + Number(legacy[1]));
  // A trait implementation begins with `<type as trait>`; its first path names the crate.
  return first.startsWith("_$LT$") ? (/([A-Za-z_]\w*)\.\./.exec(first)?.[1] ?? "(other)") : first;
}

/** Code bytes per crate, and data bytes. */
function breakdown(path) {
  const file = new Reader(readFileSync(path));
  file.take(8);
  let imported = 0;
  let dataBytes = 0;
  const sizes = [];
  const names = new Map();
  while (!file.done) {
    const id = file.byte();
    const section = file.take(file.number());
    if (id === IMPORT) imported = importedFunctions(section);
    if (id === DATA) dataBytes = section.bytes.length;
    if (id === CODE) {
      for (let left = section.number(); left > 0; left--) {
        const size = section.number();
        section.take(size);
        sizes.push(size);
      }
    }
    if (id === CUSTOM && section.text() === "name") {
      while (!section.done) {
        const kind = section.byte();
        const part = section.take(section.number());
        if (kind !== FUNCTION_NAMES) continue;
        for (let left = part.number(); left > 0; left--) {
          const index = part.number();
          names.set(index, part.text());
        }
      }
    }
  }
  const crates = new Map();
  sizes.forEach((size, index) => {
    const crate = crateOf(names.get(imported + index) ?? "");
    crates.set(crate, (crates.get(crate) ?? 0) + size);
  });
  return { crates, dataBytes };
}

const kb = (bytes) => (bytes / 1000).toFixed(1);

function table(rows) {
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  for (const row of rows) {
    console.log(row.map((cell, i) => (i === 0 ? cell.padEnd(widths[i]) : cell.padStart(widths[i]))).join("  "));
  }
}

const { values, positionals } = parseArgs({
  options: { limit: { type: "string" }, named: { type: "string" } },
  allowPositionals: true,
});
const gzipped = (bytes) => gzipSync(bytes, { level: 9 }).length;
const brotli = (bytes) =>
  brotliCompressSync(bytes, { params: { [constants.BROTLI_PARAM_SIZE_HINT]: bytes.length } }).length;

const rows = [["size in KB (1000 bytes)", "raw", "gzip -9", "brotli"]];
for (const path of positionals) {
  const bytes = readFileSync(path);
  rows.push([relative(".", path), kb(bytes.length), kb(gzipped(bytes)), kb(brotli(bytes))]);
}
console.log();
table(rows);

const { crates, dataBytes } = breakdown(values.named);
const codeBytes = [...crates.values()].reduce((sum, size) => sum + size, 0);
const share = (bytes) => `${((100 * bytes) / (codeBytes + dataBytes)).toFixed(1)} %`;
const largest = [...crates].sort((a, b) => b[1] - a[1]);
const shown = largest.slice(0, 20);
const rest = largest.slice(20).reduce((sum, [, size]) => sum + size, 0);
console.log();
table([
  ["what takes the space, before wasm-opt", "KB", "share"],
  ["data: tables, shaders, texts", kb(dataBytes), share(dataBytes)],
  ...shown.map(([crate, size]) => [`code of ${crate}`, kb(size), share(size)]),
  ...(rest > 0 ? [[`code of ${largest.length - shown.length} others`, kb(rest), share(rest)]] : []),
]);

const size = gzipped(readFileSync(positionals[0]));
const limit = Number(values.limit);
if (size > limit) {
  console.error(`\n${positionals[0]} is ${kb(size)} KB gzipped, more than the ${kb(limit)} KB allowed`);
  process.exitCode = 1;
} else {
  console.log(`\n${positionals[0]}: ${kb(size)} KB gzipped of ${kb(limit)} KB allowed`);
}
