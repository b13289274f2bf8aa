// Continues a text in Node, Deno or Bun: on a GPU if there is one and the npm package `webgpu` is installed, else on
// the CPU.
//
//     npm install tilewright webgpu
//     node story.mjs "Once upon a time"                  the story model that comes with the package
//     node story.mjs "Once upon a time" model.gguf       a model of yours: a path, an address, or a folder that ends in /

import { Model } from "tilewright";

const [prompt = "Once upon a time", source] = process.argv.slice(2);
const options = { onNotice: ({ message }) => console.error(message) };

const model = source === undefined ? await Model.builtin(options) : await Model.load(source, options);
console.error(`${model.info.name} on ${model.device.name} (${model.device.backend}): ${model.device.reason}`);

process.stdout.write(prompt);
const generation = model.generate(prompt, { maxTokens: 100 });
for await (const { text } of generation) {
  process.stdout.write(text);
}
const { generatedTokens, decodeSeconds } = await generation.result;
console.error(`\n${generatedTokens} tokens, ${(generatedTokens / decodeSeconds).toFixed(0)} a second`);
model.free();
