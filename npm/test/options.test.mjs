// Options: every call that has some knows exactly those that its type declares, and names the right one for a misspelt one.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as tilewright from "../build/index.js";
import { known, OPTIONS } from "../build/options.js";

/** The option names of a type: of an interface and its parents, or of `Omit` and `Pick`. */
function declared(type) {
  const [, how, base, listed] = /^(Omit|Pick)<(\w+), ([^>]*)>$/.exec(type) ?? [];
  if (how !== undefined) return declared(base).filter((option) => listed.includes(`"${option}"`) === (how === "Pick"));
  for (const file of ["types", "options.generated", "load-options", "bench-types", "openai/client"]) {
    const text = readFileSync(new URL(`../build/${file}.d.ts`, import.meta.url), "utf8");
    const [, alias] = new RegExp(`export type ${type} = ([^;]*);`).exec(text) ?? [];
    if (alias !== undefined) return declared(alias);
    const [, parents = "", body] = new RegExp(`export interface ${type}(?: extends ([^{]+))? \\{([^]*?)\\n\\}`).exec(text) ?? [];
    if (body === undefined) continue;
    const inherited = (parents.match(/\w+(<[^>]*>)?/g) ?? []).flatMap(declared);
    const own = [...body.replace(/\/\*\*[^]*?\*\//g, "").matchAll(/^ {4}(\w+)\??:/gm)].map((match) => match[1]);
    return [...inherited, ...own];
  }
  throw new Error(`${type} is declared nowhere`);
}

const TYPES = {
  "configure": "ConfigureOptions", "Model.inspect": "InspectOptions", "Model.prefetch": "PrefetchOptions", "Model.remove": "RemoveOptions",
  "Model.load": "LoadOptions", "Model.builtin": "LoadOptions", "adapter": "AdapterOptions", "vision": "VisionOptions", "generate": "GenerateOptions", "chat": "ChatOptions",
  "Model.engine": "EngineOptions", "Engine.generate": "EngineGenerateOptions", "Engine.chat": "EngineChatOptions",
  "saveSession": "SaveSessionOptions", "tokenize": "TokenizeOptions", "Embedder.load": "EmbedderOptions", "embed": "EmbedOptions", "embedImages": "EmbedImagesOptions", "Embedder.tokenize": "PromptOptions",
  "Reranker.load": "RerankerOptions", "Transcriber.load": "TranscriberOptions", "transcribe": "TranscribeOptions", "detectLanguage": "DetectLanguageOptions", "rerank": "RerankOptions", "Index.create": "IndexOptions", "Index.load": "LoadIndexOptions",
  "Index.search": "SearchOptions", "Mol.load": "MolOptions", "Mol.search": "MolSearchOptions", "Kernels.open": "KernelOptions",
  "bench": "BenchOptions", "rope": "RopeOptions", "attention": "AttentionOptions", "Model.attention": "HeadOptions", "createChatCompletion": "RequestOptions",
  "createClient": "ClientOptions", "completions.create": "RequestOptions", "embeddings.create": "RequestOptions",
};
const KERNELS = ["matmul", "rmsNorm", "layerNorm", "softmax", "rope", "attention"];

test("the table has the options that the types declare", () => {
  for (const [call, names] of Object.entries(OPTIONS)) {
    const expected = [...(call in TYPES ? declared(TYPES[call]) : []), ...(KERNELS.includes(call) ? ["keep"] : [])];
    assert.ok(expected.length > 0, call);
    assert.deepEqual(Object.keys(names).sort(), [...new Set(expected)].sort(), call);
  }
  assert.ok(declared("GenerateOptions").includes("maxTokens") && declared("LoadOptions").includes("signal"));
});

test("a misspelt option is a TypeError that names the right one", () => {
  const refused = (call, given, message) => assert.throws(() => known(call, { [given]: 1 }), { name: "TypeError", message });
  refused("generate", "max_tokens", "generate: there is no option `max_tokens`; did you mean `maxTokens`?");
  refused("generate", "maxtokens", /did you mean `maxTokens`/);
  refused("chat", "temprature", /^chat: .*did you mean `temperature`/);
  refused("generate", "top-k", /did you mean `topK`/);
  refused("generate", "max_new_tokens", /did you mean `maxTokens`/);
  refused("generate", "repetition_penalty", /did you mean `repeatPenalty`/);
  refused("Model.load", "context_length", /did you mean `contextLength`/);
  refused("Model.load", "onprogres", /did you mean `onProgress`/);
  refused("Model.load", "n_ctx", /did you mean `contextLength`/);
  refused("embed", "abortSignal", /did you mean `signal`/);
  // The name of another call's option, and one that is like none.
  refused("Model.load", "temperature", /it is one of `generate`, `chat`/);
  refused("rerank", "xyzzy", /there are `signal`, `onProgress`, `topK`/);
  for (const [call, names] of Object.entries(OPTIONS)) {
    assert.doesNotThrow(() => known(call, Object.fromEntries(Object.keys(names).map((name) => [name, undefined]))));
  }
});

test("options that are no object are refused", () => {
  for (const given of [null, 5, "text"]) assert.throws(() => known("generate", given), { name: "TypeError", message: /expected an object/ });
});

test("every call refuses what it does not know, before it starts anything", async () => {
  const { Embedder, Engine, Index, Kernels, Model, Mol, Reranker, Transcriber, createChatCompletion, createClient } = tilewright;
  const unknown = { sginal: 1 };
  const vectors = new Float32Array(2);
  // Objects that were never loaded: what is checked first must not need an engine.
  const bare = (type) => type === Kernels ? new Kernels({ connection: { close: async () => {} } }) : Object.create(type.prototype);
  const calls = {
    "configure": () => tilewright.configure(unknown),
    "Model.load": () => Model.load("model.gguf", unknown),
    "Model.builtin": () => Model.builtin(unknown),
    "Model.inspect": () => Model.inspect("model.gguf", unknown),
    "Model.prefetch": () => Model.prefetch("model.gguf", unknown),
    "Model.remove": () => Model.remove("model.gguf", unknown),
    "adapter": () => Model.builtin({ adapter: { source: "lora.gguf", ...unknown } }),
    "vision": () => Model.load("model.gguf", { vision: unknown }),
    "generate": () => bare(Model).generate("a", unknown),
    "chat": () => bare(Model).chat([], unknown),
    "Model.engine": () => bare(Model).engine(unknown),
    "Engine.generate": () => bare(Engine).generate("a", unknown),
    "Engine.chat": () => bare(Engine).chat([], unknown),
    "saveSession": () => bare(Model).saveSession(unknown),
    "tokenize": () => bare(Model).tokenize("a", unknown),
    "Model.attention": () => bare(Model).attention({ layer: 0, head: 0, ...unknown }),
    "Embedder.load": () => Embedder.load("folder/", unknown),
    "embed": () => bare(Embedder).embed("a", unknown),
    "embedImages": () => bare(Embedder).embedImages("a", unknown),
    "Embedder.tokenize": () => bare(Embedder).tokenize("a", unknown),
    "Reranker.load": () => Reranker.load("folder/", unknown),
    "rerank": () => bare(Reranker).rerank("a", ["b"], unknown),
    "Transcriber.load": () => Transcriber.load("folder/", unknown),
    "transcribe": () => bare(Transcriber).transcribe(vectors, unknown),
    "detectLanguage": () => bare(Transcriber).detectLanguage(vectors, unknown),
    "Index.create": () => Index.create({ dims: 2, ...unknown }),
    "Index.load": () => Index.load(new Uint8Array(8), unknown),
    "Index.search": () => bare(Index).search(vectors, 1, unknown),
    "Mol.load": () => Mol.load("mol.safetensors", unknown),
    "Mol.search": () => bare(Mol).search(vectors, 1, unknown),
    "Kernels.open": () => Kernels.open(unknown),
    "bench": () => tilewright.bench(unknown),
    "matmul": () => bare(Kernels).matmul(vectors, vectors, 1, 1, 2, unknown),
    "rmsNorm": () => bare(Kernels).rmsNorm(vectors, vectors, 1e-5, unknown),
    "layerNorm": () => bare(Kernels).layerNorm(vectors, vectors, vectors, 1e-5, unknown),
    "softmax": () => bare(Kernels).softmax(vectors, 2, unknown),
    "rope": () => bare(Kernels).rope(vectors, { nHeads: 1, headDim: 2, ...unknown }),
    "attention": () => bare(Kernels).attention(vectors, vectors, vectors, { nHeads: 1, headDim: 2, ...unknown }),
    "createClient": () => createClient({ models: {}, ...unknown }),
    "createChatCompletion": () => createChatCompletion({ info: { name: "fake" } }, { messages: [] }, unknown),
    "completions.create": () => createClient({ models: { m: bare(Model) } }).completions.create({ model: "m", prompt: "a" }, unknown),
    "embeddings.create": () => createClient({ models: { m: bare(Embedder) } }).embeddings.create({ model: "m", input: "a" }, unknown),
  };
  assert.deepEqual(Object.keys(calls).sort(), Object.keys(OPTIONS).sort());
  for (const [call, make] of Object.entries(calls)) {
    await assert.rejects(async () => make(), { name: "TypeError", message: new RegExp(`^${call}: there is no option \`sginal\``) }, call);
  }
});
