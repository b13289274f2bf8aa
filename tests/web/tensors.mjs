// Reference numbers of the test data.

import { readFileSync } from "node:fs";

/** Tensors of a small safetensors file, by name. */
export function tensors(path) {
  const file = readFileSync(path);
  const headerBytes = Number(file.readBigUInt64LE());
  const header = JSON.parse(file.subarray(8, 8 + headerBytes).toString());
  return (name) => {
    const { dtype, data_offsets: [start, end] } = header[name];
    const bytes = Uint8Array.from(file.subarray(8 + headerBytes + start, 8 + headerBytes + end)).buffer;
    return [...(dtype === "F32" ? new Float32Array(bytes) : new Int32Array(bytes))];
  };
}
