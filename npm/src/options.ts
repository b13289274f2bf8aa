/** The names of all options, and the error for any other. */

import type { BenchOptions } from "./bench-types.js";
import { BOUNDS } from "./options.generated.js";
import type {
  AdapterOptions, CommonLoadOptions, EmbedderOptions, IndexOptions, InspectOptions, KeptOptions, LoadIndexOptions, LoadOptions, MolOptions,
  PrefetchOptions, RerankerOptions, TranscriberOptions, VisionOptions,
} from "./load-options.js";
import type {
  AttentionOptions, ChatOptions, ConfigureOptions, DetectLanguageOptions, EmbedImagesOptions, EmbedOptions, EngineChatOptions,
  EngineGenerateOptions, EngineOptions, GenerateOptions,
  HeadOptions, HubOptions, KernelOptions, MolSearchOptions, PromptOptions, RemoveOptions, RequestOptions, RerankOptions,
  RopeOptions, SaveSessionOptions, SearchOptions, SourceOptions, TextsOptions, TokenizeOptions, TranscribeOptions,
} from "./types.js";

/** Exactly the names that a type declares: the compiler refuses one too many and one too few. */
type Names<Options> = Readonly<Record<keyof Options, true | readonly number[]>>;

const TEXTS: Names<TextsOptions> = { signal: true, onProgress: true };
const PROMPT: Names<PromptOptions> = { prompt: true };
const DEVICE: Names<KernelOptions> = { device: true, tier: true, subgroups: true, threads: true, onNotice: true };
const PLACE: Names<KeptOptions> = { ...DEVICE, on: true };
const HUB: Names<HubOptions> = { revision: true, token: true, headers: true, endpoint: true };
const SOURCE: Names<SourceOptions> = { ...HUB, sha256: true };
const LOAD_ALONE: Names<Omit<CommonLoadOptions, "on" | "shared">> = {
  ...DEVICE, ...SOURCE, fetch: true, onProgress: true, signal: true, cache: true, verify: true, memoryLimit: true,
};
const LOAD: Names<CommonLoadOptions> = { ...LOAD_ALONE, on: true, shared: true };
const ENGINE_GENERATE: Names<EngineGenerateOptions> = {
  ...BOUNDS, signal: true, maxTokens: true, logitBias: true, logprobs: true, seed: true, stop: true, ignoreEos: true, slide: true,
  responseFormat: true, promptLookup: true,
};
const GENERATE: Names<GenerateOptions> = { ...ENGINE_GENERATE, tokensPerSubmit: true };
const CHAT: Names<Omit<ChatOptions, keyof GenerateOptions>> = {
  tools: true, toolChoice: true, parallelToolCalls: true, thinking: true, documents: true, templateVariables: true, templateName: true,
  continueFinalMessage: true,
};
const LOAD_MODEL: Names<LoadOptions> = { ...LOAD, tune: true, contextLength: true, kvType: true, exact: true, adapter: true, vision: true };
const REQUEST: Names<RequestOptions> = { signal: true };
const KEEP: Names<{ keep?: boolean }> = { keep: true };

/** The option names of each call. */
export const OPTIONS = {
  "configure": { workerUrl: true, wasmUrl: true, textWasmUrl: true, cpuUrl: true, cpuWasmUrl: true, speechWorkerUrl: true, speechWasmUrl: true } satisfies Names<ConfigureOptions>,
  "Model.load": LOAD_MODEL,
  "Model.builtin": LOAD_MODEL,
  "Model.inspect": {
    ...HUB, fetch: true, signal: true, on: true, device: true, cache: true, contextLengths: true, contextLength: true, kvType: true, memoryLimit: true,
  } satisfies Names<InspectOptions>,
  "Model.prefetch": { ...SOURCE, fetch: true, onProgress: true, onNotice: true, signal: true } satisfies Names<PrefetchOptions>,
  "Model.remove": { revision: true, endpoint: true } satisfies Names<RemoveOptions>,
  "adapter": { ...SOURCE, source: true, scale: true } satisfies Names<AdapterOptions>,
  "vision": { ...SOURCE, source: true, maxTokens: true } satisfies Names<VisionOptions>,
  "generate": GENERATE,
  "chat": { ...GENERATE, ...CHAT } satisfies Names<ChatOptions>,
  "Model.engine": { maxSequences: true, maxQueued: true, cacheTokens: true, deterministic: true, prefixCache: true } satisfies Names<EngineOptions>,
  "Engine.generate": ENGINE_GENERATE,
  "Engine.chat": { ...ENGINE_GENERATE, ...CHAT } satisfies Names<EngineChatOptions>,
  "saveSession": { maxBytes: true } satisfies Names<SaveSessionOptions>,
  "Model.attention": { layer: true, head: true, lastQueries: true } satisfies Names<HeadOptions>,
  "tokenize": { addSpecial: true } satisfies Names<TokenizeOptions>,
  "Embedder.load": {
    ...LOAD, maxTokens: true, pooling: true, normalize: true, maxBatchTokens: true, cachedVectors: true, textsOnly: true,
  } satisfies Names<EmbedderOptions>,
  "embedImages": { ...TEXTS, dimensions: true } satisfies Names<EmbedImagesOptions>,
  "embed": { ...TEXTS, ...PROMPT, dimensions: true } satisfies Names<EmbedOptions>,
  "Embedder.tokenize": PROMPT,
  "Reranker.load": { ...LOAD, maxTokens: true, sigmoid: true, maxBatchTokens: true } satisfies Names<RerankerOptions>,
  "rerank": { ...TEXTS, topK: true, instruction: true } satisfies Names<RerankOptions>,
  "Transcriber.load": { ...LOAD_ALONE, kvType: true } satisfies Names<TranscriberOptions>,
  "transcribe": {
    sampleRate: true, language: true, task: true, timestamps: true, words: true, prompt: true, followsText: true, temperatures: true,
    maxCompressionRatio: true, minLogProbability: true, maxNoSpeech: true, seed: true, onSegment: true, signal: true,
  } satisfies Names<TranscribeOptions>,
  "detectLanguage": { sampleRate: true, signal: true } satisfies Names<DetectLanguageOptions>,
  "Index.create": { ...PLACE, model: true, dims: true, metric: true, storage: true } satisfies Names<IndexOptions>,
  "Index.load": { ...PLACE, ...HUB, model: true, cache: true, signal: true } satisfies Names<LoadIndexOptions>,
  "Index.search": { filter: true, signal: true } satisfies Names<SearchOptions>,
  "Mol.load": { ...PLACE, ...SOURCE, storage: true, cache: true, signal: true } satisfies Names<MolOptions>,
  "Mol.search": { method: true, users: true, signal: true } satisfies Names<MolSearchOptions>,
  "Kernels.open": DEVICE,
  "bench": { ...DEVICE, quick: true, signal: true, onProgress: true } satisfies Names<BenchOptions>,
  "matmul": KEEP,
  "rmsNorm": KEEP,
  "layerNorm": KEEP,
  "softmax": KEEP,
  "rope": {
    ...KEEP, nHeads: true, headDim: true, firstPos: true, theta: true, style: true,
  } satisfies Names<RopeOptions & { keep?: boolean }>,
  "attention": { ...KEEP, nHeads: true, nKvHeads: true, headDim: true } satisfies Names<AttentionOptions & { keep?: boolean }>,
  // Its type names `Model`, which imports this module; the call of `known` compares the two.
  "createClient": { models: true },
  "createChatCompletion": REQUEST,
  "completions.create": REQUEST,
  "embeddings.create": REQUEST,
} as const;

type Call = keyof typeof OPTIONS;

/** Calls that have all of these names. */
type CallWith<Name> = { [C in Call]: [Name] extends [keyof (typeof OPTIONS)[C]] ? C : never }[Call];

/**
 * Checks and returns the options. The compiler compares the table with their type.
 *
 * @throws TypeError for an unknown name, with the likely one, and for anything but an object.
 */
export function known<T extends object>(call: CallWith<keyof T>, options: T): T {
  if (typeof options !== "object" || options === null) {
    throw new TypeError(`${call}: options is ${options === null ? "null" : typeof options}, expected an object`);
  }
  const names = Object.keys(OPTIONS[call]);
  for (const given of Object.keys(options)) {
    if (!names.includes(given)) {
      throw new TypeError(`${call}: there is no option \`${given}\`; ${advice(given, names)}`);
    }
  }
  return options;
}

function advice(given: string, names: readonly string[]): string {
  const best = nearest(given, names);
  if (best !== undefined) {
    return `did you mean \`${best}\`?`;
  }
  const elsewhere = Object.entries(OPTIONS).filter(([, others]) => Object.hasOwn(others, given)).map(([call]) => `\`${call}\``);
  return elsewhere.length > 0
    ? `it is one of ${elsewhere.join(", ")}`
    : `there are ${names.map((name) => `\`${name}\``).join(", ")}`;
}

/** Other engines' names, and ours. */
const SYNONYMS: Readonly<Record<string, string>> = {
  maxnewtokens: "maxTokens", maxcompletiontokens: "maxTokens", npredict: "maxTokens", maxlength: "maxTokens",
  cachetypek: "kvType", cachetypev: "kvType", cachetype: "kvType",
  nctx: "contextLength", contextsize: "contextLength", numctx: "contextLength", contextwindowsize: "contextLength",
  chattemplatekwargs: "templateVariables", enablethinking: "thinking", reasoning: "thinking", format: "responseFormat", grammar: "responseFormat",
  jsonschema: "responseFormat", abortsignal: "signal", repetitionpenalty: "repeatPenalty", stopsequences: "stop", topn: "topK",
  toplogprobs: "logprobs", nprobs: "logprobs",
  checksum: "sha256", integrity: "sha256", progresscallback: "onProgress", batchsize: "maxBatchTokens",
};

/** The likely name: another engine's word for it, or the closest one, ignoring case and separators. */
function nearest(given: string, names: readonly string[]): string | undefined {
  const plain = normalized(given);
  const synonym = SYNONYMS[plain];
  if (synonym !== undefined && names.includes(synonym)) {
    return synonym;
  }
  const [best] = names.map((name) => ({ name, edits: distance(plain, normalized(name)) })).sort((a, b) => a.edits - b.edits);
  // At most a third of the letters may be wrong.
  return best !== undefined && best.edits <= Math.floor(Math.max(plain.length, best.name.length) / 3) ? best.name : undefined;
}

function normalized(name: string): string {
  return name.replace(/[^a-z0-9]/gi, "").toLowerCase();
}

/** Levenshtein distance. */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i += 1) {
    const next = [i];
    for (let j = 1; j <= b.length; j += 1) {
      const replaced = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(replaced, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[b.length] ?? 0;
}
