// Ollama's npm client, unmodified, against a running server: `scripts/serve-clients` starts it and puts its address in
// SERVER.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Ollama } from "../../target/tools/clients-npm/node_modules/ollama/dist/index.mjs";

const client = new Ollama({ host: process.env.SERVER, headers: { authorization: "Bearer a key" } });
const options = { temperature: 0, num_predict: 12 };
const messages = [{ role: "user", content: "Once upon a time there was a dragon." }];

test("answers are the same whole and streamed", async () => {
  const whole = await client.chat({ model: "story", messages, options, logprobs: true, top_logprobs: 2 });
  let text = "";
  for await (const part of await client.chat({ model: "story", messages, options, stream: true })) text += part.message.content;
  assert.deepEqual([text, whole.done_reason, whole.logprobs.length], [whole.message.content, "length", 12]);
  const { response, context } = await client.generate({ model: "story", prompt: "Once", options });
  const after = await client.generate({ model: "story", prompt: "Twice", context, options });
  assert.ok(response && after.prompt_eval_count > context.length);
});

test("vectors and models", async () => {
  const { embeddings: [vector] } = await client.embed({ model: "nomic", input: "a dragon" });
  assert.deepEqual((await client.embeddings({ model: "nomic", prompt: "a dragon" })).embedding, vector);
  assert.equal((await client.embed({ model: "nomic", input: ["a", "b"], dimensions: 8 })).embeddings[1].length, 8);
  assert.equal((await client.show({ model: "story" })).model_info["general.architecture"], "llama");
  assert.ok((await client.ps()).models.every(({ digest, expires_at }) => digest.length === 64 && new Date(expires_at) > Date.now()));
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
});

test("models are pulled, named and deleted", async () => {
  const model = "hf.co/owner/name:Q8_0", seen = [];
  for await (const { status } of await client.pull({ model, stream: true })) seen.push(status);
  assert.deepEqual([seen[0], seen.at(-1)], ["pulling manifest", "success"]);
  await client.copy({ source: model, destination: "tale" });
  const names = async () => (await client.list()).models.map(({ name }) => name);
  assert.deepEqual((await names()).slice(-2), [model, "tale"]);
  assert.ok((await client.generate({ model: "tale", prompt: "Once", raw: true, options })).response);
  for (const name of ["tale", model]) await client.delete({ model: name });
  assert.ok(!(await names()).includes(model));
  await assert.rejects(client.create({ model: "x", from: "story" }), /not supported/);
  await assert.rejects(client.push({ model: "story" }), /not supported/);
});
