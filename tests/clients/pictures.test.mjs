// Pictures through the npm clients of OpenAI and Ollama, unmodified, against a running server: both get the same answer.
// `scripts/serve-clients` starts it and puts its address in SERVER.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import OpenAI from "../../npm/node_modules/openai/index.mjs";
import { Ollama } from "../../target/tools/clients-npm/node_modules/ollama/dist/index.mjs";

const picture = readFileSync(new URL("../data/pictures/a.png", import.meta.url));
const url = `data:image/png;base64,${picture.toString("base64")}`;
const text = "What is it?";

test("a picture gets the same answer from both APIs", async () => {
  const openai = new OpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "a key", maxRetries: 0 });
  const answer = async (content) => {
    const request = { model: "pictures", messages: [{ role: "user", content }], max_tokens: 12, temperature: 0 };
    return (await openai.chat.completions.create(request)).choices[0].message.content;
  };
  const seen = await answer([{ type: "image_url", image_url: { url } }, { type: "text", text }]);
  assert.ok(seen && seen !== await answer([{ type: "text", text }]));
  const ollama = new Ollama({ host: process.env.SERVER, headers: { authorization: "Bearer a key" } });
  const messages = [{ role: "user", content: text, images: [new Uint8Array(picture)] }];
  const { message } = await ollama.chat({ model: "pictures", messages, options: { temperature: 0, num_predict: 12 } });
  assert.equal(message.content, seen);
});
