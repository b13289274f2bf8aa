// Published vocabularies in the WASM module: llama.cpp's own texts with ids from Hugging Face's tokenizers. Native
// tests cover the same code in more depth; only its compilation may differ.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { smallModel } from "./big-model.mjs";
import { everywhere, server } from "./places.mjs";
import { bytesInMemory, dataPath, lacksData } from "./server.mjs";

const USUAL = ["falcon", "deepseek-coder", "phi-3"];
const ALL = [...USUAL, "command-r", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "mpt", "refact", "starcoder"];
const names = process.env.TILEWRIGHT_FULL ? ALL : USUAL;

const missing = lacksData(...names.map((name) => `vocab/ggml-vocab-${name}.gguf`));
if (missing) {
  test("published vocabularies give the ids of llama.cpp's texts", { skip: missing }, () => {});
}

for (const name of missing ? [] : names) {
  const path = dataPath(`vocab/ggml-vocab-${name}.gguf`);
  const texts = readFileSync(`${path}.inp`, "utf8").split("\n__ggml_vocab_test__\n");
  const lines = readFileSync(`${path}.out`, "utf8").split("\n");
  const expected = texts.map((_, i) => (lines[i] ?? "").split(" ").filter((id) => id !== "").map(Number));
  everywhere(
    `the vocabulary of ${name} gives the ids of llama.cpp's texts`,
    async ({ Model }, { url, texts }) => {
      const model = await Model.load(url, { device: "cpu" });
      const ids = [];
      for (const text of texts) ids.push([...(await model.tokenize(text, { addSpecial: false }))]);
      model.free();
      return ids;
    },
    (ids) => {
      assert.ok(texts.length > 40, `${texts.length} texts`);
      texts.forEach((text, i) => assert.deepEqual(ids[i], expected[i], JSON.stringify(text)));
    },
    () => {
      server.files.set(`${name}.gguf`, bytesInMemory(smallModel(readFileSync(path))));
      return { url: `${server.origin}/files/${name}.gguf`, texts };
    },
  );
}
