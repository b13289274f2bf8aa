// Rounded next to exact activations on the CPU executor in Node: CPU milliseconds for a token, in one process by turns.
//
//     node benches/web/rounding.mjs MODEL.gguf.. [--rounds 6]

import { readFileSync } from "node:fs";
import { basename } from "node:path";
import { parseArgs } from "node:util";

import { Model } from "../../npm/dist/index.js";

const { positionals, values: { rounds } } = parseArgs({ allowPositionals: true, options: { rounds: { type: "string", default: "6" } } });
const N_DECODED = 16;
const N_PROMPT = 128;

/** CPU milliseconds of `work`, of all threads. */
async function milliseconds(work) {
  const start = process.cpuUsage();
  await work();
  const { user, system } = process.cpuUsage(start);
  return (user + system) / 1e3;
}

const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

for (const path of positionals) {
  const models = await Promise.all([true, false].map((exact) => Model.load(new Blob([readFileSync(path)]), { device: "cpu", contextLength: 512, exact })));
  const times = models.map(() => ({ decode: [], prefill: [] }));
  for (let round = 0; round < Number(rounds); round++) {
    for (const [i, model] of models.entries()) {
      const run = (ids, maxTokens) => model.generate(ids, { maxTokens, temperature: 0, ignoreEos: true }).result;
      const prompt = Array.from({ length: N_PROMPT }, (_, at) => 5 + round + (at * 37) % 900);
      times[i].decode.push(await milliseconds(() => run([7 + round, 9], N_DECODED)) / N_DECODED);
      times[i].prefill.push(await milliseconds(() => run(prompt, 1)) / N_PROMPT);
    }
  }
  for (const kind of ["decode", "prefill"]) {
    const [exact, rounded] = times.map((each) => median(each[kind]));
    console.log(`${basename(path)}, ${kind}: exact ${exact.toFixed(2)}, rounded ${rounded.toFixed(2)} ms a token, ${(exact / rounded).toFixed(2)} times as fast`);
  }
  models.forEach((model) => model.free());
}
