/** Public types; options of loads are in `load-options.ts`. All sizes are bytes and all times seconds. */

import type { SamplingNumbers } from "./options.generated.js";

/** One file of a model: an address, a path (Node and Deno), a picked file, its bytes, or an unread `Response`. */
export type FileSource = string | URL | Blob | ArrayBuffer | Uint8Array | Response;

/**
 * Where a model comes from.
 *
 * - an address, a `Blob`/`File`, an `ArrayBuffer`, a `Uint8Array` or a `Response`: a GGUF file, or a file of whisper.cpp
 *   for a {@link Transcriber},
 * - an address that ends in `/`, and in Node and Deno a folder's path: a Hugging Face folder with `config.json`,
 *   `tokenizer.json` and `*.safetensors`, and the files of sentence-transformers,
 * - an array: all shards of a split GGUF in order, or the files of a Hugging Face folder in any order, as from an
 *   `<input webkitdirectory>`. Bytes and unnamed `Blob`s count as GGUF,
 * - `hf:owner/repo[/path][:quantisation][@revision]`: a model on Hugging Face, by default in its best usual
 *   quantisation.
 *
 * Relative addresses are resolved against the page. In Node and Deno a string that is not an `http:`, `https:`,
 * `file:`, `data:` or `blob:` address is a path.
 */
export type ModelSource = FileSource | readonly FileSource[];

/** The device for a model. `auto`: the GPU if there is a real one, else the CPU. */
export type DeviceChoice = "auto" | "gpu" | "cpu";

/**
 * A family of kernels. Default: the fastest exact one that the adapter offers; `f16` rounds activations in the matrix
 * products of prompts.
 */
export type Tier = "baseline" | "f16" | "subgroups" | "scalar";

/** Options of {@link Kernels.open}. */
export interface KernelOptions {
  /** The device to use. Default `auto`. */
  device?: DeviceChoice;
  /** Kernels to use, for tests and comparisons. Default: the fastest that the adapter offers. */
  tier?: Tier;
  /** Whether to use subgroup operations where the browser has them. Default `true`. */
  subgroups?: boolean;
  /**
   * Threads of the CPU, if it runs there, at least 1. Pages that are not isolated from other origins have one. Default: as
   * many as there are processors.
   */
  threads?: number;
  /** Called for decisions that a user may want to know, such as the CPU in place of a GPU. */
  onNotice?: (notice: Notice) => void;
}

/** Options of addresses of a hub, `hf:owner/repo`. They are an error with any other source. */
export interface HubOptions {
  /** Branch, tag or commit, as after the `@` of an address. Default `main`. */
  revision?: string;
  /** Access token of an account. It is sent to the hub, and not to redirect targets. */
  token?: string;
  /** Headers of all requests to the hub. Redirects to other hosts drop `Authorization`, except in old browsers. */
  headers?: HeadersInit;
  /** Address of the hub. Default `https://huggingface.co`. */
  endpoint?: string | URL;
}

/** Options of all downloads. */
export interface SourceOptions extends HubOptions {
  /**
   * Required SHA-256 of the files, in hexadecimal digits: one digest for a single file, or digests by file name, such
   * as `{ "model.safetensors": "…" }`. A mismatch is the error `digest`: the file is neither used nor stored.
   */
  sha256?: string | Readonly<Record<string, string>>;
}

/** Facts from the headers of a model's files, and its memory here. */
export interface ModelReport {
  /** The class that loads it: `Model`, `Embedder` or `Reranker`; `other` for none of them. */
  kind: "model" | "embedder" | "reranker" | "other";
  /** From a GGUF file, or the name of a folder. */
  name?: string;
  architecture?: string;
  /** Number of weights. */
  parameters: number;
  /** The weights by storage type, largest first. */
  weights: WeightShare[];
  files: { name: string; sizeBytes?: number }[];
  /** Size of all files; absent if a server does not report it. */
  sizeBytes?: number;
  /** From the file or the hub: usually a short name such as `apache-2.0`. */
  licence?: string;
  /** Trained context length; of an encoder the length to which texts are cut. */
  maxContextLength?: number;
  /** Whether there is a chat template, in the files or a known one. */
  hasChatTemplate: boolean;
  /** Why it cannot be loaded, if so. */
  problem?: string;
  /** Planned memory on each available device. */
  memory: { gpu?: MemoryForecast; cpu?: MemoryForecast };
  /**
   * `true`, or a sentence that says why not. `gpu` and `cpu`: whether it can be loaded there, as far as limits are
   * known (no API reports the memory of a graphics card); some weights may stay in the files (notice
   * `weights_in_files`). `storage`: whether the browser can store it.
   */
  fits: { gpu?: true | string; cpu?: true | string; storage: true | string };
}

/** The weights of one type. */
export interface WeightShare {
  /** Such as `Q4_K`. */
  type: string;
  parameters: number;
  sizeBytes: number;
}

/** Memory of a model on a device. */
export interface MemoryForecast {
  weightsBytes: number;
  /** Bytes per additional context token; 0 for an encoder. */
  cacheBytesPerToken: number;
  /** By context length, ascending; of an encoder with a full batch. */
  contexts: ContextMemory[];
}

/** Memory of a context, and the total with the weights. */
export interface ContextMemory extends Pick<MemoryInfo, "cacheBytes" | "activationsBytes" | "totalBytes"> {
  contextLength: number;
}

/** Options of {@link Model.remove}, for addresses of a hub: those of the load. */
export type RemoveOptions = Pick<HubOptions, "revision" | "endpoint">;

/** A model in the browser's storage. */
export interface CachedModel {
  /** Its source: `hf:owner/repo`, an absolute address, or several. */
  source: string | string[];
  /** Address of its hub, if it is not the default. */
  endpoint?: string;
  /** Size of all files; absent until a server reports it. */
  sizeBytes?: number;
  storedBytes: number;
  /** Whether all files are stored, so that a load needs no download. */
  complete: boolean;
  /** Time of the latest load, in milliseconds since 1970. */
  date: number;
}

/** Type of cached keys and values: exact, rounded to half precision, or in blocks of 32 signed bytes. */
export type KvType = "f32" | "f16" | "q8_0";

/** How an encoder pools its tokens' vectors: their mean, the first one (of `[CLS]`), or the last one. */
export type Pooling = "mean" | "cls" | "last";

/** Options of calls that take several texts or images. */
export interface TextsOptions {
  /** Stops after the current batch: the promise rejects with the signal's reason at once. */
  signal?: AbortSignal | undefined;
  /** Called after each batch. */
  onProgress?: ((progress: TextsProgress) => void) | undefined;
}

/** Prefix of a text. */
export interface PromptOptions {
  /** A name of `info.prompts`, such as `query`; `null` for none. Default: `info.prompt`. */
  prompt?: string | null | undefined;
}

/** Options of {@link Embedder.embedImages}. */
export interface EmbedImagesOptions extends TextsOptions {
  /**
   * Elements to keep of each vector, which is then normalised again if the model normalises vectors. Only vectors of
   * models trained for it (Matryoshka), such as EmbeddingGemma, keep their quality. Default: `info.dims`.
   */
  dimensions?: number | undefined;
}

/** Options of {@link Embedder.embed}. */
export interface EmbedOptions extends EmbedImagesOptions, PromptOptions {}

/** Options of {@link Reranker.rerank}. */
export interface RerankOptions extends TextsOptions {
  /** Return only the best documents, at most this many. Default: all. */
  topK?: number | undefined;
  /** What a document must do for the query, for rerankers with `info.instruction`, such as Qwen3-Reranker. Default: that. */
  instruction?: string | undefined;
}

/** A document's rank. */
export interface Ranked {
  /** Its position among the given documents. */
  index: number;
  /** Higher is more relevant. */
  score: number;
}

/** Number of finished texts or images; that of texts restarts if a device is lost. */
export interface TextsProgress {
  done: number;
  total: number;
}

/** Progress of a load. */
export interface Progress {
  /**
   * `download`: bytes from the network; `cache`: bytes from the browser's storage; `file`: bytes from a local file;
   * `prepare`: all bytes have arrived, and the device is prepared.
   */
  phase: "download" | "cache" | "file" | "prepare";
  /** Bytes of all files that have arrived. */
  loaded: number;
  /** Size of all files; absent until a server reports it. */
  total?: number;
  /** Over the last few seconds. */
  bytesPerSecond: number;
  /** Seconds until `loaded` reaches `total` at this rate; absent while one of them is unknown. */
  secondsLeft?: number;
}

/** Kind of a {@link Notice}. */
export type NoticeCode =
  /** The model runs on the CPU although the caller allowed a GPU. */
  | "cpu_fallback"
  /** The engine for the CPU does without its own module, or without some threads. */
  | "cpu_slow"
  /** The device was lost; another was opened, and the model was loaded again. */
  | "device_rebuilt"
  /** A download is not stored: no storage, not enough room, or another tab is writing the same file. */
  | "not_cached"
  /** The server did not confirm that the stored file is current; it was used anyway. */
  | "not_revalidated"
  /** The server has a newer file; it is downloaded, and then replaces the stored one. */
  | "cache_outdated"
  /** A stored file was damaged; it was deleted and is downloaded again. */
  | "cache_damaged"
  /** A connection broke and was opened again. */
  | "reconnected"
  /** Memory has no room for all weights: each pass reads some from the model's files, which is slow. */
  | "weights_in_files"
  /** A shader failed its test on this driver; another one is used. */
  | "shader_replaced"
  /** The result of `tune` could not be stored, or is of another version and not used. */
  | "tuning_ignored"
  /** The tab of a shared model is gone; another one has loaded it. */
  | "taken_over"
  /** A `shared` model belongs to this page alone: the browser offers no locks, as to pages without https. */
  | "not_shared"
  /** A saved session is not used, and the prompt is computed. A damaged or useless one was deleted. */
  | "session_dropped";

/** A decision that is no error. */
export interface Notice {
  code: NoticeCode;
  /** A sentence for people. */
  message: string;
}

/** Options of {@link Model.generate} and {@link Model.chat}. The defaults are greedy and reproducible. */
export interface GenerateOptions extends SamplingNumbers {
  /** Aborts the generation: iteration throws the signal's reason. {@link Generation.stop} ends it without an error. */
  signal?: AbortSignal | undefined;
  /** Most tokens to generate. Default 256. */
  maxTokens?: number | undefined;
  /** Added to logits, by token id: -1000 to 1000. -100 all but forbids a token, 100 all but forces it. */
  logitBias?: Readonly<Record<number, number>> | undefined;
  /**
   * Adds log-probabilities to each piece: of its token, and of this many of the likeliest, 0 to 100. Tokens are then
   * computed one at a time. Not with `promptLookup`. Default: none.
   */
  logprobs?: number | undefined;
  /** A whole number. The same seed gives the same text on the same device. Default: random. */
  seed?: number | undefined;
  /** Texts that end the generation; they are not part of the result. */
  stop?: string[] | undefined;
  /** Continues after end-of-text tokens. Default `false`. */
  ignoreEos?: boolean | undefined;
  /**
   * When the context is full, keeps its first token and its latest half; a prompt that does not fit loses its middle.
   * Default `false`: such a prompt is the error `context_full`, and a generation ends there.
   */
  slide?: boolean | undefined;
  /**
   * Tokens per submission to a GPU, 1 to 16: more are faster and arrive in bursts. The text is the same.
   * Default: 4 for models of less than 64 MiB on a GPU, else 1. The CPU takes one at a time.
   */
  tokensPerSubmit?: number | undefined;
  /**
   * Speculative decoding by prompt lookup: draft tokens per step, 0 to 7. The text is the same, and faster where it
   * repeats its prompt. Needs a temperature of 0, and no penalty, bias, `logprobs`, `responseFormat` or `tools`.
   * Default 0.
   */
  promptLookup?: number | undefined;
  /**
   * A format that the text must match: forbidden tokens are never chosen. A stop text, `maxTokens` or the end of the
   * context may cut the text short. The first use fetches a module of 0.7 MB. Default `{ type: "text" }`.
   */
  responseFormat?: ResponseFormat | undefined;
}

/**
 * A format that a whole text must match.
 *
 * - `text`: any text.
 * - `json_object`: any JSON object.
 * - `json_schema`: JSON that is valid by a schema. Keywords that cannot be enforced (`not`, `if`, `uniqueItems`,
 *   `contains` and the like) are the error `constraint` where they would matter; unknown formats only describe; `$ref`
 *   must stay in the schema. Properties come in the schema's order.
 * - `regex`: a regular expression without assertions.
 * - `grammar`: a grammar in llguidance's variant of Lark's syntax, with the root rule `start`.
 * - `gbnf`: a grammar in llama.cpp's syntax, with the root rule `root`.
 */
export type ResponseFormat =
  | { type: "text" }
  | { type: "json_object" }
  | { type: "json_schema"; schema: object | boolean }
  | { type: "regex"; pattern: string }
  | { type: "grammar" | "gbnf"; grammar: string };

/**
 * Options of {@link Model.chat}: those of a generation, and those of the template.
 *
 * With `tools`, `toolChoice`, `thinking` or `responseFormat`, the output is parsed into thinking, text and tool calls.
 * Without them, all of it is text, with the model's markup.
 */
export interface ChatOptions extends GenerateOptions {
  /** Tools that the model may call, each as `{ type: "function", function: { name, description, parameters } }`. */
  tools?: readonly object[] | undefined;
  /**
   * Whether the model calls tools. Default `auto`: it decides. Calls are constrained to valid ones, with arguments
   * that match the tool's `parameters`; schemas that cannot be enforced are the error `constraint`. With a
   * `responseFormat` or `continueFinalMessage`, calls are parsed but not constrained.
   */
  toolChoice?: ToolChoice | undefined;
  /** Whether a reply may have several calls. Default `true`. */
  parallelToolCalls?: boolean | undefined;
  /**
   * Whether the model thinks first, for templates with the variable `enable_thinking` or `thinking`; `auto`: the
   * template's default. Thinking is separated from the text. Default: as `auto`, if another option has the output
   * parsed.
   */
  thinking?: boolean | "auto" | undefined;
  /** Texts such as `{ title, text }`, for templates that support documents. */
  documents?: readonly object[] | undefined;
  /** Variables of the template, such as `enable_thinking` or `reasoning_effort`. */
  templateVariables?: Readonly<Record<string, unknown>> | undefined;
  /** Name of one of the model's templates. Default: `tool_use` with tools, else `default`. */
  templateName?: string | undefined;
  /** Continues the last message, usually the assistant's. Default `false`. */
  continueFinalMessage?: boolean | undefined;
}

/** Options of {@link Model.engine}. */
export interface EngineOptions {
  /** Most sequences per decode pass: 1 to 64. Default 16. */
  maxSequences?: number | undefined;
  /** Most queued requests; another one is the error `busy`. Default 1000. */
  maxQueued?: number | undefined;
  /** KV cache size in tokens, at least the model's context. Default: whatever fits, up to a context per sequence. */
  cacheTokens?: number | undefined;
  /** Whether sequences share the cache of common prefixes. Default `true`. */
  prefixCache?: boolean | undefined;
  /**
   * Whether a sequence's output must not depend on the sequences beside it. Otherwise decode passes of 16 sequences
   * and more may add in another order than those of 8 and fewer, which is faster. Default `false`.
   */
  deterministic?: boolean | undefined;
}

/** Options of {@link Engine.generate}: those of {@link Model.generate} but for `tokensPerSubmit`. */
export type EngineGenerateOptions = Omit<GenerateOptions, "tokensPerSubmit">;

/** Options of {@link Engine.chat}. */
export type EngineChatOptions = Omit<ChatOptions, "tokensPerSubmit">;

/** Counters of an engine. */
export interface EngineStats extends Pick<GenerateResult, "cachedTokens" | "generatedTokens" | "draftedTokens" | "acceptedTokens"> {
  nQueued: number;
  nRunning: number;
  /** Accepted requests. */
  nSubmitted: number;
  /** Requests refused because the queue was full. */
  nRefused: number;
  nFinished: number;
  /** Requests aborted or stopped. */
  nCancelled: number;
  /** Requests that ended with an error. */
  nFailed: number;
  /** Always 0: a panic ends the worker. */
  nPanics: number;
  /** Prompt tokens that were computed. */
  promptTokens: number;
  nDecodePasses: number;
  /** Decode passes submitted before the previous tokens were read. */
  nAheadPasses: number;
  /** Prefill passes. */
  nPromptPasses: number;
  /** Seconds in passes; on a GPU including the wait for them. */
  busySeconds: number;
  /** Size of the KV cache in tokens. */
  cacheTokens: number;
  /** Pages of the cache. */
  nPages: number;
  nFreePages: number;
  /** Unused pages that a prompt with the same prefix can reuse. */
  nKeptPages: number;
  /** Recoveries from a lost device. */
  nRecoveries: number;
}

/** The model decides; no call; at least one; a call of this tool. */
export type ToolChoice = "auto" | "none" | "required" | { type: "function"; function: { name: string } };

/** A tool call, in the form that chat templates expect in `tool_calls` of a message. */
export interface ToolCall {
  type: "function";
  /** The model's own id for the call, or a generated one. */
  id: string;
  function: {
    name: string;
    arguments: Record<string, unknown>;
  };
}

/** A token and its log-probability. */
export interface TokenLogprob {
  id: number;
  /** Natural log-probability after penalties, biases and `responseFormat`, before temperature and filters. */
  logprob: number;
  /** Its text; U+FFFD for a part of a character. */
  text: string;
  /** Its text in UTF-8. */
  bytes: number[];
}

/** A piece of generated text. It may be empty: incomplete characters are held back. */
export interface Piece {
  /** The token. */
  id: number;
  /** The text that it completed. Where the output is parsed (see {@link ChatOptions}), without thinking and calls. */
  text: string;
  /** More of the thinking. */
  thinking?: string;
  /** Calls that this token completed. */
  toolCalls?: ToolCall[];
  /** Why a part of `text` that began as a call is none. */
  problem?: string;
  /** With {@link GenerateOptions.logprobs}. */
  logprob?: TokenLogprob;
  /** The likeliest tokens that `responseFormat` allows, in descending order; of equal ones the lower id first. */
  topLogprobs?: TokenLogprob[];
  /**
   * With {@link GenerateOptions.logprobs}: number of latest tokens, this one included, whose text is still held back.
   * Their characters are incomplete, or may begin a stop text. If a stop text ended the generation, the last ones
   * belong to it.
   */
  held?: number;
}

/**
 * Why a generation ended. `complete`: the text matches `responseFormat`, and nothing may follow; `cancelled`: by
 * {@link Generation.stop} or by leaving its loop; `deadline`: its time was over.
 */
export type StopReason = "eos" | "complete" | "stop_text" | "max_tokens" | "context_full" | "cancelled" | "deadline";

/** The numbers of a generation. */
export interface GenerationUsage {
  /** Tokens of the prompt, cached ones included. */
  promptTokens: number;
  /** Prompt tokens that were not computed again. */
  cachedTokens: number;
  generatedTokens: number;
  /** Seconds to process the prompt. */
  prefillSeconds: number;
  decodeSeconds: number;
}

/** The result of a generation. */
export interface GenerateResult extends GenerationUsage {
  stopReason: StopReason;
  /** Draft tokens, with {@link GenerateOptions.promptLookup}. */
  draftedTokens: number;
  /** Draft tokens that were accepted. */
  acceptedTokens: number;
  /** Empty if the output was not parsed. */
  thinking: string;
  /** The tool calls in order; empty if the output was not parsed. */
  toolCalls: ToolCall[];
}

/** A message of a conversation. */
export interface ChatMessage {
  /** Usually `system`, `user`, `assistant` or `tool`; the model's template decides. */
  role: string;
  /**
   * Plain text, or parts: `{ type: "text", text }`, {@link ImagePart}, or OpenAI's `{ type: "image_url", image_url: { url } }`.
   * Control tokens in it stay text.
   */
  content?: string | readonly object[] | null;
  /** Other fields of the template: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`. */
  [field: string]: unknown;
}

/** An image in a message, for a model that was loaded with `vision`. */
export interface ImagePart {
  type: "image";
  image: ImageSource;
}

/**
 * An image: a PNG, JPEG, WebP or GIF file of up to 32 MiB and 67 million pixels, as a `Blob`/`File`, its bytes or its
 * address; an `ImageBitmap`; or pixels, such as `ImageData`. Files are turned as their EXIF data says; of an animation
 * the first frame counts. Alpha is dropped, so colours must not be multiplied by it (`premultiplyAlpha: "none"`).
 * Node and Deno decode no files, so there only pixels are accepted.
 */
export type ImageSource = Blob | ImageBitmap | ImagePixels | ArrayBuffer | Uint8Array | string | URL;

/** Pixels: rows from the top, 3 bytes (RGB) or 4 (RGBA) for each pixel. */
export interface ImagePixels {
  width: number;
  height: number;
  data: Uint8Array | Uint8ClampedArray;
}

/** A suggested model. */
export interface KnownModel {
  name: string;
  /** `hf:owner/repo:quantisation`. */
  address: string;
  use: "chat" | "embed" | "rerank" | "speech";
  quantisation: string | null;
  /** Approximate number of weights. */
  parameters: number;
  /** Approximate size of its files. */
  sizeBytes: number;
  /** Trained context length; of an encoder the length to which texts are cut. */
  maxContextLength: number;
  /** Bytes of one token's keys and values as f16; `null` for other uses than `chat`. */
  cacheBytesPerToken: number | null;
  licence: string;
  /** File in the same repository that adds images; see the option `vision` of {@link LoadOptions}. */
  vision?: string;
  /** Whether the project has run this model. */
  tried: boolean;
}

/** Options of {@link Model.saveSession}. */
export interface SaveSessionOptions {
  /** Most bytes of all saved sessions. Default 1 GiB. */
  maxBytes?: number;
}

/** A session in the browser's storage. */
export interface KeptSession {
  /** Digest of the model and the tokens. */
  id: string;
  /** Digest of the model's weights, its adapter and its KV type. */
  model: string;
  /** Tokens that need not be computed again. */
  nTokens: number;
  sizeBytes: number;
  /** Time of the latest use, in milliseconds since 1970. */
  date: number;
}

/** Options of {@link Model.attention}. */
export interface HeadOptions {
  /** From 0. */
  layer: number;
  /** From 0. */
  head: number;
  /** Number of latest tokens, 1 or more. Default 64; all of a shorter sequence. */
  lastQueries?: number;
}

/** Attention weights of one head: of each of the latest tokens over all tokens. */
export interface HeadWeights {
  /** All tokens as text, prompt included: the columns. Rows are the last of them. */
  tokens: string[];
  /**
   * Row by row. A row's sum is 1, or lower where the head has a sink (gpt-oss). Tokens after the row's own, or before
   * its window, have weight 0.
   */
  weights: Float32Array;
  rows: number;
  columns: number;
}

/** One dispatch of a pass. */
export interface TimelineDispatch {
  kernel: string;
  /** The variant of its shader: for a weight type, in a tier. */
  variant: string;
  /** From 0; absent before the first layer and after the last. */
  layer?: number;
  /** Workgroups in x, y and z. */
  grid: [number, number, number];
  /** Its duration in microseconds. */
  micros: number;
}

/** The pass over the latest token, dispatch by dispatch. */
export interface Timeline {
  /**
   * The source of the times: the GPU's timestamps, which browsers round (Chromium to 100 µs); the processor's clock;
   * or, for a GPU without timestamps, that clock around each dispatch, which includes the round trip to the GPU.
   */
  clock: "gpu" | "cpu" | "roundTrip";
  /** Of the token, from 0. */
  position: number;
  /** All dispatches together. */
  micros: number;
  /** In execution order. */
  dispatches: TimelineDispatch[];
}

/** Options of {@link Model.tokenize}. */
export interface TokenizeOptions {
  /** Whether to add the tokens that begin (and for some models end) a text. Default `true`. */
  addSpecial?: boolean;
}

/** Facts about anything that is loaded from a model's files. */
interface FileFacts {
  /** From a GGUF file, or the name of a Hugging Face folder. */
  name: string;
  architecture: string;
  nLayers: number;
  nHeads: number;
  vocabSize: number;
  /** Types of the stored weights, such as `Q4_0`. */
  weightTypes: string[];
  fileBytes: number;
}

/** Facts about a model. */
export interface ModelInfo extends FileFacts {
  /** Width of the residual stream. */
  dim: number;
  nKvHeads: number;
  contextLength: number;
  /** Trained context length. */
  maxContextLength: number;
  kvType: KvType;
  /** Origin of the chat template: `file`, the name of a known one such as `chatml`, or `none` for a base model. */
  chatTemplate: string;
  /** Whether it was loaded with a vision encoder, so that messages can have images. */
  takesImages: boolean;
}

/** Facts about an encoder or a reranker. */
export interface EncoderInfo extends FileFacts {
  /** Tokens to which a text (for a reranker a pair of them) is cut, special tokens included. */
  maxTokens: number;
  /** Tokens per batch. */
  maxBatchTokens: number;
}

/** Facts about an encoder. */
export interface EmbedderInfo extends EncoderInfo {
  /** Length of a vector. */
  dims: number;
  pooling: Pooling;
  /** Whether vectors have norm 1. */
  normalize: boolean;
  /** The model's prefixes for texts, by name. */
  prompts: Record<string, string>;
  /** The default prefix: empty for most models. */
  prompt: string;
  /** Whether it embeds images in one space with texts: CLIP, SigLIP and SigLIP 2. */
  takesImages: boolean;
}

/** Facts about a reranker. */
export interface RerankerInfo extends EncoderInfo {
  /** Whether scores are sigmoids of logits. */
  sigmoid: boolean;
  /** The default instruction of a language model such as Qwen3-Reranker; others take none. */
  instruction?: string;
}

/** Facts about a speech model. */
export interface TranscriberInfo extends Pick<FileFacts, "name" | "architecture" | "vocabSize" | "fileBytes"> {
  nEncoderLayers: number;
  nDecoderLayers: number;
  /** Tokens of a window of 30 seconds, with those before the text. */
  maxTokens: number;
  /** Codes of the languages that it knows, such as `en`. */
  languages: string[];
  /** Whether it can translate into English. */
  translates: boolean;
}

/** Use of a speech model. */
export interface TranscriberSettings {
  /** Type of cached keys and values. Default `"f16"`. */
  kvType?: KvType;
}

/** Use of an encoder. Defaults: as the model's files say. */
export interface EmbedderSettings {
  /** Tokens to which a text is cut, special tokens included. */
  maxTokens?: number;
  pooling?: Pooling;
  /** Whether vectors are divided by their Euclidean norm, so that a dot product is the cosine. */
  normalize?: boolean;
  /** Tokens per batch; a longer text is a batch by itself. Default: 8192 on a GPU, 1024 on the CPU. */
  maxBatchTokens?: number;
  /** Number of texts whose vectors are cached. Default 0. */
  cachedVectors?: number;
  /** Whether the image encoder of CLIP or SigLIP is left out, which takes most of the memory. Default `false`. */
  textsOnly?: boolean;
}

/** Use of a reranker. Defaults: as the model's files say. */
export interface RerankerSettings extends Pick<EmbedderSettings, "maxBatchTokens"> {
  /** Tokens to which a query with a document is cut, special tokens included: the longer text first. */
  maxTokens?: number;
  /** Whether a score is the sigmoid of the model's logit, 0 to 1, rather than the logit itself. */
  sigmoid?: boolean;
}

/** Similarity of vectors: cosine or dot product. */
export type Metric = "cosine" | "dot";

/** Storage of vectors: floats of 32 or 16 bits, or signed bytes with a scale for each 32. */
export type VectorStorage = "f32" | "f16" | "int8";

/** Facts about an index. */
export interface IndexInfo {
  /** Length of a vector. */
  dims: number;
  metric: Metric;
  storage: VectorStorage;
  /** The model of the vectors. */
  model?: string;
  /** That model's pooling. */
  pooling?: string;
  /** Vectors or items that can be found. */
  length: number;
  /** The next vector's id. Ids of deleted vectors are not reused. */
  nIds: number;
  /** Bytes of the vectors on the device, with some spare room. */
  sizeBytes: number;
}

/** A search result. */
export interface Hit {
  id: number;
  /** Cosine, dot product, or score of a mixture: higher is better. */
  score: number;
}

/** Options of {@link Index.search}. */
export interface SearchOptions extends RequestOptions {
  /** Restricts the search to these ids. Default: all. */
  filter?: Iterable<number>;
}

/** Facts about a mixture of logits and its items. */
export interface MolInfo extends Pick<IndexInfo, "storage" | "length"> {
  /** Length of a query's vector. */
  queryDims: number;
  /** Length of an item's vector. */
  itemDims: number;
  queryComponents: number;
  itemComponents: number;
  /** Length of a component. */
  componentDims: number;
  /** The encoder of queries and items, if the file names one. */
  model?: string;
  /** Bytes that a search over all items reads. */
  sizeBytes: number;
}

/**
 * A search method under a mixture of logits. `perPair`, `candidates` and `sample` are numbers of items.
 *
 * - `bruteForce`: scores all items.
 * - `highest`: scores the items whose highest logit is highest.
 * - `avg`: scores the best items by the dot product of the sum of the query's components with the mean of the item's.
 * - `naive`: scores the union of the best items by each pair of components.
 * - `comb`: scores the union of those of `naive` and `avg`.
 * - `twoPass`: exact; items beyond the candidates of `avg` are scored if one of their logits reaches the k-th best
 *   score of these.
 * - `hIndexer`: scores items above a threshold of the product of `avg` in 8 bits; the threshold comes from a sample.
 * - `mips`: the best items by the dot product of `avg`, without scores of the mixture.
 */
export type MolMethod =
  | { kind: "bruteForce" }
  | { kind: "highest"; candidates: number }
  | { kind: "avg"; candidates: number }
  | { kind: "naive"; perPair: number }
  | { kind: "comb"; perPair: number; candidates: number }
  | { kind: "twoPass"; candidates: number }
  | { kind: "hIndexer"; candidates: number; sample: number }
  | { kind: "mips" };

/** Options of {@link Mol.search}. */
export interface MolSearchOptions extends RequestOptions {
  /** Default: `bruteForce` up to 100,000 items, then `highest` with 10,000 candidates. */
  method?: MolMethod;
  /** An id for each query, where the mixture has user components. */
  users?: Iterable<number>;
}

/** The device of a model. */
export interface DeviceInfo {
  /** The adapter's name, or the CPU's. */
  name: string;
  backend: "webgpu" | "cpu";
  /** Driver or browser, if reported; on the CPU `relaxed SIMD`, where its own module runs. */
  driver: string;
  /** The family of kernels in use. */
  tier: string;
  /** Why this device was chosen. */
  reason: string;
  /** Harmless problems when it was opened. */
  notices: string[];
}

/** A device that could run a model here. */
export interface AvailableDevice {
  /** Pass it as {@link LoadOptions.device}. */
  choice: "gpu" | "cpu";
  name: string;
  /** An adapter that computes on the CPU. `auto` never chooses it: the engine's own CPU code is faster. */
  isSoftware: boolean;
  hasSubgroups: boolean;
  hasF16: boolean;
}

/** Memory of a model, in bytes. */
export interface MemoryInfo {
  weightsBytes: number;
  /** Keys and values of the context. */
  cacheBytes: number;
  activationsBytes: number;
  /** The sum of the three. */
  totalBytes: number;
  /** Size of the WASM heap; on the CPU it includes the other numbers. */
  wasmHeapBytes: number;
  /** Bytes of layers read from files per pass; 0: rows of token tables alone. Absent: all weights are in memory. */
  streamedBytes?: number;
}

/** Counters of a device. Steady generation only raises `dispatches`, `submits`, `reads` and `bytesRead`. */
export interface Counters {
  dispatches: number;
  submits: number;
  buffersCreated: number;
  bindGroupsCreated: number;
  pipelinesCreated: number;
  bytesUploaded: number;
  /** Reads by the host. */
  reads: number;
  bytesRead: number;
}

/** A file in the browser's storage. */
export interface CacheEntry {
  /** Its address, without a signature. */
  url: string;
  /** Size of the whole file; absent until a server reports it. */
  size?: number;
  /** Bytes that are stored. */
  stored: number;
  /** `false` for an interrupted download without an earlier complete one. The next load continues it. */
  complete: boolean;
  /** Time of storage, in milliseconds since 1970. */
  date: number;
  etag?: string;
  /** Hexadecimal digest, once complete. */
  sha256?: string;
}

/** Position encoding of {@link rope}. */
export interface RopeOptions {
  nHeads: number;
  /** Length of a head. */
  headDim: number;
  /** Position of the first row. Default 0. */
  firstPos?: number;
  /** Base of the angles. Default 10000. */
  theta?: number;
  /** Pairs that are rotated: neighbours, as in Llama files of GGUF, or across the two halves. Default `interleaved`. */
  style?: "interleaved" | "halves";
}

/** Heads of {@link attention}. */
export interface AttentionOptions extends Pick<RopeOptions, "nHeads" | "headDim"> {
  /** Heads of keys and values, a divisor of `nHeads`. Default `nHeads`. */
  nKvHeads?: number;
}

/**
 * A sound: samples of one channel, an `AudioBuffer`, or a file that the browser decodes (its bytes, a `Blob` or an address).
 * Where there is no `OfflineAudioContext`, as in Node and in workers: samples at 16 kHz.
 */
export type SoundSource = Float32Array | DecodedSound | Blob | ArrayBuffer | Uint8Array | string | URL;

/** What speech needs of an `AudioBuffer`. */
export interface DecodedSound {
  readonly numberOfChannels: number;
  readonly sampleRate: number;
  readonly duration: number;
  getChannelData(channel: number): Float32Array;
}

/** What becomes of speech: text in its language, or in English. */
export type SpeechTask = "transcribe" | "translate";

/** Options of {@link Transcriber.transcribe}. Defaults are those of OpenAI's `whisper`. */
export interface TranscribeOptions {
  /** Rate of given samples. Default 16000. */
  sampleRate?: number;
  /** The language that is spoken, by code or English name. Default: detected in the first window. */
  language?: string;
  /** Default `transcribe`. */
  task?: SpeechTask;
  /** Whether segments have times by the model's timestamps; otherwise each window is a segment. Default `true`. */
  timestamps?: boolean;
  /** Whether segments have words with times. Default `false`. */
  words?: boolean;
  /** A text before the first window: names, spelling, style. */
  prompt?: string;
  /** Whether the text of a window is the prompt of the next. Default `true`. */
  followsText?: boolean;
  /** Temperatures, the next of which is taken where a text seems wrong. Default 0, 0.2, .. 1. */
  temperatures?: readonly number[];
  /** A text is wrong whose bytes are more than so many times those of its zlib stream. Default 2.4. */
  maxCompressionRatio?: number;
  /** A text is wrong whose mean log-probability is lower. Default -1. */
  minLogProbability?: number;
  /** A window of a less likely text is silent if the probability of no speech is higher. Default 0.6. */
  maxNoSpeech?: number;
  /** Seed of what temperatures above 0 draw. Default 0. */
  seed?: number;
  /** Called for each segment, as soon as its window is heard. */
  onSegment?: (segment: TranscriptSegment) => void;
  /** Aborts the work: the call rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** Options of {@link Transcriber.detectLanguage}. */
export type DetectLanguageOptions = Pick<TranscribeOptions, "sampleRate" | "signal">;

/** The likeliest language of a sound. */
export interface DetectedLanguage {
  /** Its code. */
  language: string;
  /** Its probability among all languages that the model knows. */
  probability: number;
}

/** What was said. */
export interface Transcript {
  /** The text of all segments. */
  text: string;
  /** Code of the language, `en` if translated; empty where all was silence. */
  language: string;
  /** Length of the sound. */
  seconds: number;
  segments: TranscriptSegment[];
}

/** A text with its time. */
export interface TimedText {
  /** Seconds from the sound's beginning. */
  start: number;
  end: number;
  /** Mostly with a space before it. */
  text: string;
}

/** A part of a transcript. */
export interface TranscriptSegment extends TimedText {
  /** The tokens, timestamps included. */
  tokens: number[];
  /** Where its window begins, in hundredths of a second. */
  seek: number;
  /** Temperature of the window. */
  temperature: number;
  /** Mean logarithmic probability of the window's tokens. */
  meanLogProbability: number;
  /** Bytes of the window's text by those of its zlib stream. */
  compressionRatio: number;
  /** Probability of no speech in the window. */
  noSpeech: number;
  /** Its words, if asked for. */
  words?: TranscriptWord[];
}

/** A word with the punctuation at it. In languages without spaces: a character. */
export interface TranscriptWord extends TimedText {
  /** Mean probability of its tokens. */
  probability: number;
}

/** Addresses of the package's files. Relative ones are relative to the page. */
export interface ConfigureOptions {
  /** `worker.js`. One of another origin is started through a `blob:` of one line. */
  workerUrl?: string | URL | undefined;
  /** `tilewright_bg.wasm`, the engine. */
  wasmUrl?: string | URL | undefined;
  /** `tilewright_text_bg.wasm`, constraints and output parsing, which is fetched on first use. */
  textWasmUrl?: string | URL | undefined;
  /** `cpu.js`, the script of the engine for the CPU, which is fetched where there is no GPU. */
  cpuUrl?: string | URL | undefined;
  /** `tilewright_cpu_bg.wasm`, its module. */
  cpuWasmUrl?: string | URL | undefined;
  /** `speech-worker.js`, the worker of transcribers. */
  speechWorkerUrl?: string | URL | undefined;
  /** `tilewright_speech_bg.wasm`, the engine of transcribers. */
  speechWasmUrl?: string | URL | undefined;
}

/** Options of a request beside its JSON. */
export interface RequestOptions {
  /** Aborts the work: the call rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
}
