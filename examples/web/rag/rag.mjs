// Answers a question from text files and cites the passages used: an encoder finds passages, a chat model reads them.
//
//     npm install tilewright
//     node rag.mjs "Where do owls sleep?" notes/*.txt
//
// The environment variables ENCODER and MODEL select others: an address, a path, or a folder ending in /.

import { readFile } from "node:fs/promises";
import { Embedder, Index, Model } from "tilewright";

const [question, ...files] = process.argv.slice(2);
if (files.length === 0) {
  console.error('usage: node rag.mjs "QUESTION" FILE..');
  process.exit(2);
}
const { ENCODER = "hf:sentence-transformers/all-MiniLM-L6-v2", MODEL = "hf:Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M" } = process.env;

// Passages are paragraphs; split longer ones, since an encoder reads at most `embedder.info.maxTokens`.
const passages = [];
for (const file of files) {
  for (const text of (await readFile(file, "utf8")).split(/\n\s*\n/)) {
    if (text.trim() !== "") passages.push({ file, text: text.trim().replace(/\s+/g, " ") });
  }
}

const embedder = await Embedder.load(ENCODER);
const index = await Index.create({ on: embedder });
await index.append(await embedder.embed(passages.map(({ text }) => text)));
const [hits] = await index.search(await embedder.embed(question), 3);
const found = hits.map(({ id }) => passages[id]);
embedder.free();

// The schema makes the model cite its sources, and only existing ones.
const answer = {
  type: "object",
  properties: {
    answer: { type: "string", maxLength: 400 },
    sources: { type: "array", items: { enum: found.map((_, i) => i + 1) }, minItems: 1, maxItems: found.length },
  },
  required: ["answer", "sources"],
  additionalProperties: false,
};
const passagesText = found.map(({ text }, i) => `[${i + 1}] ${text}`).join("\n");
const messages = [
  { role: "system", content: "Answer from the passages alone, in a sentence or two, and list the numbers of those that you used." },
  { role: "user", content: `${passagesText}\n\nQuestion: ${question}` },
];
const model = await Model.load(MODEL);
const reply = await model.chat(messages, { maxTokens: 300, responseFormat: { type: "json_schema", schema: answer } }).text();
model.free();

const { answer: text, sources } = JSON.parse(reply);
console.log(text);
for (const i of [...new Set(sources)].sort()) console.log(`[${i}] ${found[i - 1].file}: ${found[i - 1].text}`);
