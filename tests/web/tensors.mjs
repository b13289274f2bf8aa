// Reference numbers of the test data, tiny models, and small files of tensors.

import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";

import { repository } from "./server.mjs";

/** The files of a tiny model of `tests/data/encoders`, and its references. */
export function tinyEncoder(name) {
  const at = join(repository, "tests/data/encoders", name);
  const names = readdirSync(at, { recursive: true }).filter((file) => statSync(join(at, file)).isFile());
  const { "cases.json": cases, ...files } = Object.fromEntries(names.map((file) => [file, readFileSync(join(at, file))]));
  return { files, ...JSON.parse(cases) };
}

function headerOf(file) {
  const headerBytes = Number(file.readBigUInt64LE());
  return { header: JSON.parse(file.subarray(8, 8 + headerBytes).toString()), data: file.subarray(8 + headerBytes) };
}

/** Tensors of a small safetensors file, by name. */
export function tensors(path) {
  const { header, data } = headerOf(readFileSync(path));
  return (name) => {
    const { dtype, data_offsets: [start, end] } = header[name];
    const bytes = Uint8Array.from(data.subarray(start, end)).buffer;
    return [...(dtype === "F32" ? new Float32Array(bytes) : new Int32Array(bytes))];
  };
}

/** Rows of bytes of a safetensors file, by the name of their tensor. */
export function blocksIn(file) {
  const { header, data } = headerOf(file);
  return (name) => {
    const { shape: [n, size], data_offsets: [start] } = header[name];
    return Array.from({ length: n }, (_, i) => data.subarray(start + i * size, start + (i + 1) * size));
  };
}

/** The same safetensors file with other metadata. */
export function withMetadata(file, metadata) {
  const { header, data } = headerOf(file);
  return joined({ ...header, __metadata__: { ...header.__metadata__, ...metadata } }, data);
}

/** A safetensors file of F32 tensors: `{ name: { shape, values } }`. */
export function safetensors(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  const data = Object.entries(tensors).map(([name, { shape, values }]) => {
    header[name] = { dtype: "F32", shape, data_offsets: [end, end += 4 * values.length] };
    return new Uint8Array(Float32Array.from(values).buffer);
  });
  return joined(header, Buffer.concat(data));
}

function joined(header, data) {
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text, data]);
}

/** Repeatable numbers in [-1, 1): a linear congruential generator. */
export function uniform(length, seed) {
  let state = seed;
  return Float32Array.from({ length }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 31 - 1;
  });
}
