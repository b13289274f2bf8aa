// Products of rounded activations on the CPU, of each weight type that has them, next to exact ones.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { modelOfBlocks } from "./big-model.mjs";
import { everywhere } from "./places.mjs";
import { repository } from "./server.mjs";
import { blocksIn } from "./tensors.mjs";

/** Numbers of types in GGUF, and weights of a block. */
const TYPES = {
  Q4_0: [2, 32], Q4_1: [3, 32], Q5_0: [6, 32], Q5_1: [7, 32], Q8_0: [8, 32], Q4_K: [12, 256], Q5_K: [13, 256], Q6_K: [14, 256],
  IQ4_NL: [20, 32], IQ4_XS: [23, 256], MXFP4: [39, 32],
};
const blocks = blocksIn(readFileSync(join(repository, "tests/data/quant-vectors/more.safetensors")));

/** Blocks of a type. Scales of MXFP4, the first byte, are any powers of two in the file: one block would outweigh the others. */
const blocksOf = (type) => blocks(`${type}.blocks`).map((block, i) =>
  type === "MXFP4" ? Buffer.from([118 + i % 4, ...block.subarray(1)]) : block);
const models = Object.entries(TYPES).map(([type, [number, length]]) =>
  [type, modelOfBlocks(number, blocksOf(type), length).toString("base64")]);

/** Runs in a place: log-probabilities of all tokens after short prompts and a long one, exact and rounded. */
async function logprobs({ Model }, { models }) {
  const ids = (n) => Array.from({ length: n }, (_, i) => (7 * i + 3) % 20);
  const found = [];
  for (const [type, file] of models) {
    const bytes = Uint8Array.from(atob(file), (c) => c.charCodeAt(0));
    for (const exact of [true, false]) {
      const model = await Model.load(new Blob([bytes]), { device: "cpu", kvType: "f32", exact });
      for (const n of [1, 7, 45]) {
        for await (const { topLogprobs } of model.generate(ids(n), { maxTokens: 1, logprobs: 20, ignoreEos: true })) {
          const row = Array(20).fill(0);
          for (const { id, logprob } of topLogprobs) row[id] = logprob;
          found.push({ type, exact, n, row });
        }
      }
      model.free();
    }
  }
  return found;
}

everywhere("rounding changes the CPU's log-probabilities little, unless the model is exact", logprobs, (found, place) => {
  assert.equal(found.length, 6 * models.length);
  for (const { type, n, row } of found.filter(({ exact }) => exact)) {
    const rounded = found.find((other) => other.type === type && other.n === n && !other.exact).row;
    const square = (values) => values.reduce((sum, value) => sum + value * value, 0);
    const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
    const error = square(row.map((value, i) => value - rounded[i])) / square(row.map((value) => value - mean));
    console.log(`${place}, ${type}, ${n} tokens: ${error.toExponential(1)}`);
    assert.ok(error > 1e-9 && error < 1e-2, `${type}, ${n} tokens: ${error}, of ${row} and ${rounded}`);
  }
}, { models });
