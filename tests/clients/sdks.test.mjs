// Anthropic's npm client and the AI SDK with `@ai-sdk/openai-compatible`, unmodified, against a running server:
// `scripts/serve-clients` installs them, starts it and puts its address in SERVER.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "../../target/tools/clients-npm/node_modules/@ai-sdk/openai-compatible/dist/index.mjs";
import { betaZodTool } from "../../target/tools/clients-npm/node_modules/@anthropic-ai/sdk/helpers/beta/zod.mjs";
import { zodOutputFormat } from "../../target/tools/clients-npm/node_modules/@anthropic-ai/sdk/helpers/zod.mjs";
import Anthropic from "../../target/tools/clients-npm/node_modules/@anthropic-ai/sdk/index.mjs";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "../../target/tools/clients-npm/node_modules/ai/dist/index.mjs";
import { z } from "../../target/tools/clients-npm/node_modules/zod/index.js";

const anthropic = new Anthropic({ baseURL: process.env.SERVER, apiKey: "a key", maxRetries: 0 });
const provider = createOpenAICompatible({
  name: "server", baseURL: `${process.env.SERVER}/v1`, apiKey: "a key", includeUsage: true, supportsStructuredOutputs: true,
});
const messages = [{ role: "user", content: "Once upon a time there was a dragon." }];
const day = z.object({ day: z.number().int().min(1).max(7) });

test("Anthropic's messages are the same whole and streamed", async () => {
  const asked = { model: "story", max_tokens: 12, messages, temperature: 0, system: "Tell.", metadata: { user_id: "x" } };
  const whole = await anthropic.messages.create(asked);
  const final = await anthropic.messages.stream(asked).finalMessage();
  assert.deepEqual([final.content, final.usage.output_tokens], [whole.content, 12]);
  assert.ok((await anthropic.messages.countTokens({ model: "story", messages })).input_tokens > 10);
  assert.equal((await anthropic.models.retrieve("story")).id, "story");
});

test("Anthropic's answers are parsed by their schema", async () => {
  // The client sends no bounds of numbers.
  const format = zodOutputFormat(z.object({ sunny: z.boolean() }));
  const asked = { model: "story", max_tokens: 200, messages, output_config: { format } };
  assert.equal(typeof (await anthropic.messages.parse(asked)).parsed_output.sunny, "boolean");
});

test("Anthropic's tool runner sends all messages, as the server has no threads", async () => {
  const given = [];
  const sun = betaZodTool({ name: "sun", description: "Whether it shines.", inputSchema: day, run: (input) => { given.push(input); return "yes"; } });
  await anthropic.beta.messages.toolRunner({
    model: "story", max_tokens: 200, messages, tools: [sun], max_iterations: 2, tool_choice: { type: "tool", name: "sun", disable_parallel_tool_use: true },
  });
  assert.ok(given.length >= 1 && given.every(({ day }) => day >= 1 && day <= 7), JSON.stringify(given));
});

test("the AI SDK's texts are the same whole and streamed", async () => {
  for (const model of [provider("story"), provider.completionModel("story")]) {
    const asked = { model, messages, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert.deepEqual([text, (await streamed.usage).outputTokens, whole.finishReason], [whole.text, 12, "length"]);
  }
});

test("the AI SDK's tools are called and objects follow their schema", async () => {
  const given = [];
  const sun = tool({ description: "Whether it shines.", inputSchema: day, execute: async (input) => { given.push(input); return "yes"; } });
  const providerOptions = { server: { reasoningEffort: "none", parallel_tool_calls: false } };
  await generateText({
    model: provider("story"), messages, tools: { sun }, toolChoice: { type: "tool", toolName: "sun" }, stopWhen: stepCountIs(2),
    maxOutputTokens: 200, maxRetries: 0, providerOptions,
  });
  assert.ok(given.length >= 1 && given.every(({ day }) => day >= 1 && day <= 7), JSON.stringify(given));
  const { output } = await generateText({
    model: provider("story"), messages, output: Output.object({ schema: day }), maxOutputTokens: 200, maxRetries: 0,
  });
  assert.ok(output.day >= 1);
});

test("the AI SDK's embeddings are shortened", async () => {
  const model = (provider.embeddingModel ?? provider.textEmbeddingModel)("nomic");
  const { embeddings } = await embedMany({ model, values: ["a dragon", "the sun"], maxRetries: 0, providerOptions: { server: { dimensions: 8 } } });
  assert.deepEqual(embeddings.map((vector) => vector.length), [8, 8]);
});
