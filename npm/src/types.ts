/** The types that people who use the package see; options of loads are in `load-options.ts`. All sizes are bytes and all times seconds. */

/**
 * One file of a model: an address, a path (Node and Deno), a file that the user picked, its bytes, or the answer to a request that
 * the caller made, of which nothing was read yet.
 */
export type FileSource = string | URL | Blob | ArrayBuffer | Uint8Array | Response;

/**
 * Where a model comes from.
 *
 * - an address, a `Blob`/`File`, an `ArrayBuffer`, a `Uint8Array` or a `Response`: a GGUF file,
 * - an address that ends in `/`, and in Node and Deno a folder's path: a Hugging Face folder with `config.json`, `tokenizer.json`
 *   and `*.safetensors`, and what sentence-transformers adds to them,
 * - an array: all shards of a split GGUF in order, or the files of a Hugging Face folder in any order, as from an
 *   `<input webkitdirectory>`. Bytes and a `Blob` without a name are taken for GGUF,
 * - `hf:owner/repo[/path][:quantisation][@revision]`: a model on Hugging Face, of the best usual quantisation if none is named.
 *
 * Relative addresses are resolved against the page. In Node and Deno a string that is not an `http:`, `https:`, `file:`, `data:` or
 * `blob:` address is a path.
 */
export type ModelSource = FileSource | readonly FileSource[];

/** What should run the model. `auto`: the GPU when there is a real one, else the CPU. */
export type DeviceChoice = "auto" | "gpu" | "cpu";

/**
 * A family of kernels. Left out, the engine takes the fastest that the adapter offers, of those that round nothing: `f16` rounds
 * activations in the matrix products of prompts.
 */
export type Tier = "baseline" | "f16" | "subgroups" | "scalar";

/** Options of {@link Kernels.open}. */
export interface KernelOptions {
  /** What should run the kernels. Default `auto`. */
  device?: DeviceChoice;
  /** Kernels to use. Default: the fastest that the adapter offers. */
  tier?: Tier;
  /** Whether to use subgroup operations where the browser has them. Default `true`. */
  subgroups?: boolean;
  /** Called when the CPU was taken instead of a GPU. */
  onNotice?: (notice: Notice) => void;
}

/** Options of addresses of a hub, `hf:owner/repo`. Of any other source they are an error. */
export interface HubOptions {
  /** Branch, tag or commit, as after the `@` of an address. Default `main`. */
  revision?: string;
  /** Token of an account, for models that not everyone may read. It goes to the hub, and not to where a redirect leads. */
  token?: string;
  /** Headers of all requests to the hub. Where a redirect leads to another host, they go along, but for `Authorization`, which old browsers leave there all the same. */
  headers?: HeadersInit;
  /** Address of the hub. Default `https://huggingface.co`. */
  endpoint?: string | URL;
}

/** Options of everything that is fetched. */
export interface SourceOptions extends HubOptions {
  /**
   * SHA-256 that the files must have, in hexadecimal digits: that of the one file, or of each by its name, such as
   * `{ "model.safetensors": "…" }`. Another one is the error `digest`, before anything runs with the file, and the file is not kept.
   */
  sha256?: string | Readonly<Record<string, string>>;
}

/** What the headers of a model's files say, and what it would take here. */
export interface ModelReport {
  /** What loads it: `Model`, `Embedder` or `Reranker`; `other` for what none of them does. */
  kind: "model" | "embedder" | "reranker" | "other";
  /** What a GGUF file calls itself, or the name of a folder. */
  name?: string;
  architecture?: string;
  /** Weights of all tensors that are read. */
  parameters: number;
  /** The weights by how they are stored, the type with most bytes first. */
  weights: WeightShare[];
  /** The model's files. */
  files: { name: string; sizeBytes?: number }[];
  /** Bytes of all files; missing where a server does not say. */
  sizeBytes?: number;
  /** As the file names it, or the hub: mostly a short name such as `apache-2.0`. */
  licence?: string;
  /** Tokens that the model was trained for; of an encoder those to which a text is cut. */
  maxContextLength?: number;
  /** Whether there is a chat template, in the files or a known one. */
  hasChatTemplate: boolean;
  /** Why nothing loads it, if so. */
  problem?: string;
  /** What it would take on the devices that it was planned for, as a load plans it. A device is missing that cannot be had. */
  memory: { gpu?: MemoryForecast; cpu?: MemoryForecast };
  /**
   * `true`, or a sentence that says why not. `gpu` and `cpu`: whether it can be loaded there, as far as limits are known: nobody tells how
   * much memory a graphics card has; some weights may stay in the files (notice `weights_in_files`). `storage`: whether the browser has room to keep it.
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

/** What a model would take on a device. */
export interface MemoryForecast {
  weightsBytes: number;
  /** What a long context takes for each further token; 0 for an encoder. */
  cacheBytesPerToken: number;
  /** With contexts of these lengths, the shortest first; of an encoder with a full batch. */
  contexts: ContextMemory[];
}

/** What a context takes besides the weights, and with them. */
export interface ContextMemory {
  contextLength: number;
  cacheBytes: number;
  activationsBytes: number;
  totalBytes: number;
}

/** Options of {@link Model.prefetch}. */
export interface PrefetchOptions extends SourceOptions {
  /** As of {@link CommonLoadOptions}. */
  fetch?: (url: string, init?: RequestInit) => Promise<Response>;
  /** Called about ten times a second while bytes arrive, and at the end. */
  onProgress?: (progress: Progress) => void;
  /** Called when a connection broke and was opened again, or a kept file was replaced. */
  onNotice?: (notice: Notice) => void;
  /** Ends the download with the signal's reason. What has come stays, and the next one goes on from there. */
  signal?: AbortSignal | undefined;
}

/** Options of {@link Model.remove}, for addresses of a hub: those that the model was loaded with. */
export interface RemoveOptions {
  revision?: string;
  endpoint?: string | URL;
}

/** A model in the browser's storage. */
export interface CachedModel {
  /** What it was loaded or fetched by, and can be again: `hf:owner/repo`, an absolute address, or several. */
  source: string | string[];
  /** Address of its hub, if it is not the usual one. */
  endpoint?: string;
  /** Bytes of all its files; missing while a server has not said. */
  sizeBytes?: number;
  /** Bytes of them that are stored. */
  storedBytes: number;
  /** Whether all files are there: then it is loaded without a download. */
  complete: boolean;
  /** When it was asked for last, in milliseconds since 1970. */
  date: number;
}

/** What keys and values are cached as: as they are computed, rounded to half precision, or in blocks of 32 signed bytes. */
export type KvType = "f32" | "f16" | "q8_0";

/** How an encoder makes one vector of those of a text's tokens: their mean, the first one (of `[CLS]`), or the last one. */
export type Pooling = "mean" | "cls" | "last";

/** Options of calls that take many texts. */
export interface TextsOptions {
  /** Ends the work between two batches: the promise is rejected with the signal's reason at once. */
  signal?: AbortSignal | undefined;
  /** Called after each batch. */
  onProgress?: ((progress: TextsProgress) => void) | undefined;
}

/** What is put in front of a text. */
export interface PromptOptions {
  /** A name among `info.prompts`, such as `query`; `null` for nothing. Default: what the model's files choose, `info.prompt`. */
  prompt?: string | null | undefined;
}

/** Options of {@link Embedder.embed}. */
export interface EmbedOptions extends TextsOptions, PromptOptions {}

/** Options of {@link Reranker.rerank}. */
export interface RerankOptions extends TextsOptions {
  /** Documents to give at most. Default: all. */
  topK?: number | undefined;
}

/** A document's place. */
export interface Ranked {
  /** Its number among those that were given. */
  index: number;
  /** The higher, the better it answers. */
  score: number;
}

/** How many texts are done, of how many. A device that is lost on the way begins anew. */
export interface TextsProgress {
  done: number;
  total: number;
}

/** How far a load has come. */
export interface Progress {
  /**
   * `download`: bytes from the network; `cache`: bytes from the browser's storage; `file`: bytes from a file of the user's;
   * `prepare`: everything is there, and the device gets ready.
   */
  phase: "download" | "cache" | "file" | "prepare";
  /** Bytes of all files that have arrived. */
  loaded: number;
  /** Bytes of all files together; missing while a server has not said. */
  total?: number;
  /** Bytes per second, over the last few seconds. */
  bytesPerSecond: number;
  /** Seconds until `loaded` reaches `total` at this rate; missing while one of them is unknown. */
  secondsLeft?: number;
}

/** What a {@link Notice} is about. */
export type NoticeCode =
  /** The model runs on the CPU although a GPU was not ruled out by the caller. */
  | "cpu_fallback"
  /** The device was lost; it was opened anew, the weights were loaded again, and work goes on. */
  | "device_rebuilt"
  /** A download will not be kept: no storage, not enough room, or another tab is writing the same file. */
  | "not_cached"
  /** The server could not be asked whether the kept file is still the newest; it was used as it is. */
  | "not_revalidated"
  /** The server's file is another than the kept one; it is downloaded anew, and the kept one is deleted when that is complete. */
  | "cache_outdated"
  /** A kept file is not what was downloaded; it was deleted and is downloaded again. */
  | "cache_damaged"
  /** A connection broke and was opened again. */
  | "reconnected"
  /** Memory has no room for all weights: each pass reads some from the model's files, which takes time. */
  | "weights_in_files"
  /** A shader computes wrongly on this driver, as a test before its first use found; another one is used. */
  | "shader_replaced"
  /** What was measured with `tune` could not be kept, or was of another version and is not used. */
  | "tuning_ignored"
  /** The tab that had a shared model is gone; another one has loaded it, and work goes on. */
  | "taken_over"
  /** A model that was to be shared among tabs is this page's alone: the browser gives it no locks, as pages without https. */
  | "not_shared"
  /** A kept session is not used, and the prompt is computed. One that is damaged or of no use to the model was deleted. */
  | "session_dropped";

/** Something that was decided on the way and is no error. */
export interface Notice {
  code: NoticeCode;
  /** A sentence for people. */
  message: string;
}

/** Options of {@link Model.generate} and {@link Model.chat}. The defaults give the most likely text, the same every time. */
export interface GenerateOptions {
  /** Ends the generation: the iteration throws the signal's reason. {@link Generation.stop} ends it without an error. */
  signal?: AbortSignal | undefined;
  /** Tokens to generate at most. Default 256. */
  maxTokens?: number | undefined;
  /** Divides the logits before the draw: lower is more predictable, 0 always takes the most likely token. Up to 100. Default 0. */
  temperature?: number | undefined;
  /** Draws, if `temperature` is above 0, among the `topK` most likely tokens; 0 for all. Default 40. */
  topK?: number | undefined;
  /** Draws among the most likely tokens that together have this probability; 1 for all. Default 0.95. */
  topP?: number | undefined;
  /** Draws among the tokens with at least this share of the most likely one's probability; 0 for all. Default 0.05. */
  minP?: number | undefined;
  /** Makes recent tokens less likely; 1 changes nothing. Default 1. */
  repeatPenalty?: number | undefined;
  /** Tokens that count as recent. Default 64. */
  repeatLastN?: number | undefined;
  /** Taken off the logits of tokens that were generated before, once: -100 to 100, of which OpenAI's API has -2 to 2. Default 0. */
  presencePenalty?: number | undefined;
  /** Taken off the logits of tokens that were generated before, as often as they were. Range as of `presencePenalty`. Default 0. */
  frequencyPenalty?: number | undefined;
  /** Added to the logits of tokens, by their ids: -1000 to 1000. With -100 a token hardly ever comes, with 100 hardly any other. */
  logitBias?: Readonly<Record<number, number>> | undefined;
  /**
   * Has each piece say how likely its token was, and which tokens were the likeliest, so many of them: 0 to 100. One token is computed
   * at a time then. Not with `promptLookup`. Default: nothing is said.
   */
  logprobs?: number | undefined;
  /** A whole number. The same seed gives the same text on the same device. Default: a new one each time. */
  seed?: number | undefined;
  /** Texts that end the generation; they are not part of the result. */
  stop?: string[] | undefined;
  /** Goes on after the token that ends a text. Default `false`. */
  ignoreEos?: boolean | undefined;
  /**
   * When the context is full, keeps its first token and its latest half and goes on; a prompt that does not fit loses its middle.
   * Default `false`: such a prompt is the error `context_full`, and a generation ends there.
   */
  slide?: boolean | undefined;
  /**
   * Tokens that one submission to a GPU computes, 1 to 16: more cost less time each and come in bursts. The text is the same.
   * Default: 4 for models of less than 64 MiB on a GPU, else 1. The CPU takes one at a time.
   */
  tokensPerSubmit?: number | undefined;
  /**
   * Tokens to guess from what followed the last ones before, 0 to 7, and to compute at a time: the same text, faster where it
   * repeats its prompt. Needs a temperature of 0 and no penalty or bias, and none of `logprobs`, `responseFormat` and `tools`. Default 0.
   */
  promptLookup?: number | undefined;
  /**
   * What the text must match: tokens that it forbids are never chosen. A stop text, `maxTokens` or the end of the context may end the text
   * before it is complete. A module of 0.7 MB is fetched when it is first used. Default `{ type: "text" }`.
   */
  responseFormat?: ResponseFormat | undefined;
}

/**
 * What a text must match, from its first character to its last.
 *
 * - `text`: nothing.
 * - `json_object`: it is a JSON object of any content.
 * - `json_schema`: it is JSON that is valid by a schema. Keywords that cannot be enforced (`not`, `if`, `uniqueItems`, `contains` and the
 *   like) are the error `constraint` where they say something; formats that are not known only describe; `$ref` leads to places in the same schema. Properties come in the schema's order.
 * - `regex`: a regular expression matches the whole of it; no assertions.
 * - `grammar`: it is a text of a grammar in llguidance's variant of Lark's syntax, whose rule `start` is the whole.
 * - `gbnf`: the same in llama.cpp's syntax, whose rule `root` is the whole.
 */
export type ResponseFormat =
  | { type: "text" }
  | { type: "json_object" }
  | { type: "json_schema"; schema: object | boolean }
  | { type: "regex"; pattern: string }
  | { type: "grammar" | "gbnf"; grammar: string };

/**
 * Options of {@link Model.chat}: those of a generation, and what the template is told besides the messages.
 *
 * With `tools`, `toolChoice`, `thinking` or `responseFormat`, an answer is taken apart: pieces say what is thinking, text and calls.
 * Without them, all of it is text, with the marks that the model writes.
 */
export interface ChatOptions extends GenerateOptions {
  /** What the model may call, each in the shape `{ type: "function", function: { name, description, parameters } }`. */
  tools?: readonly object[] | undefined;
  /**
   * Whether the answer calls tools. Default `auto`: as the model decides. Calls are such that they can be read, and their arguments are
   * valid by the tool's `parameters`; what of them cannot be enforced is the error `constraint`. A
   * `responseFormat`, or a message to go on with, leaves no room for that: then calls are read and not kept to anything.
   */
  toolChoice?: ToolChoice | undefined;
  /** Whether an answer may have several calls. Default `true`. */
  parallelToolCalls?: boolean | undefined;
  /**
   * Whether the model thinks before it answers, for templates that know the variable `enable_thinking` or `thinking`; `auto`: what the
   * template does by itself. Thoughts are told apart from the text. Default: as `auto`, if another option has the answer taken apart.
   */
  thinking?: boolean | "auto" | undefined;
  /** Texts to answer from, such as `{ title, text }`, for templates that know documents. */
  documents?: readonly object[] | undefined;
  /** Variables of the template, such as `enable_thinking` or `reasoning_effort`. */
  templateVariables?: Readonly<Record<string, unknown>> | undefined;
  /** Which of several templates of the model. Default: `tool_use` where there are tools, or else `default`. */
  templateName?: string | undefined;
  /** Goes on with the last message, usually the assistant's, instead of beginning an answer. Default `false`. */
  continueFinalMessage?: boolean | undefined;
}

/** Options of {@link Model.engine}. */
export interface EngineOptions {
  /** Texts that are computed together at most: 1 to 64. Default 16. */
  maxSequences?: number | undefined;
  /** Texts that wait at most, beside those that are computed; one more is the error `busy`. Default 1000. */
  maxQueued?: number | undefined;
  /** Tokens of all texts together that the cache holds; at least the model's context. Default: as many as the memory allows, up to the context of each text. */
  cacheTokens?: number | undefined;
  /** Whether what texts have in common at their beginnings is computed once. Default `true`. */
  prefixCache?: boolean | undefined;
}

/** Options of {@link Engine.generate}: those of {@link Model.generate} but for `tokensPerSubmit`. */
export type EngineGenerateOptions = Omit<GenerateOptions, "tokensPerSubmit">;

/** Options of {@link Engine.chat}. */
export type EngineChatOptions = Omit<ChatOptions, "tokensPerSubmit">;

/** What an engine has done since it was made, and what it does now. */
export interface EngineStats {
  /** Texts that wait. */
  nQueued: number;
  /** Texts that are computed. */
  nRunning: number;
  /** Texts that were taken. */
  nSubmitted: number;
  /** Texts that were refused because as many waited as may. */
  nRefused: number;
  /** Texts that ended by themselves. */
  nFinished: number;
  /** Texts that were aborted or stopped. */
  nCancelled: number;
  /** Texts that ended with an error. */
  nFailed: number;
  /** Steps that panicked; always 0, since a panic ends the worker here. */
  nPanics: number;
  /** Tokens of prompts that were computed. */
  promptTokens: number;
  /** Tokens of prompts that an earlier text had computed. */
  cachedTokens: number;
  generatedTokens: number;
  /** Passes that computed a token of each text. */
  nDecodePasses: number;
  /** Tokens that were guessed. */
  draftedTokens: number;
  /** Of these the ones that the model chose as well. */
  acceptedTokens: number;
  /** Of these the ones that were submitted before the tokens of the one before were read. */
  nAheadPasses: number;
  /** Passes over a part of a prompt. */
  nPromptPasses: number;
  /** Seconds in passes; on a GPU with the waiting for them. */
  busySeconds: number;
  /** Tokens that the cache has room for. */
  cacheTokens: number;
  /** Pages of the cache. */
  nPages: number;
  /** Pages that hold nothing. */
  nFreePages: number;
  /** Pages that no text has, and that one which begins alike can take. */
  nKeptPages: number;
  /** How often all texts went on after a lost device. */
  nRecoveries: number;
}

/** As the model decides; no call; at least one; one of this tool. */
export type ToolChoice = "auto" | "none" | "required" | { type: "function"; function: { name: string } };

/** A tool that the model calls, in the shape that chat templates take back in `tool_calls` of a message. */
export interface ToolCall {
  type: "function";
  /** The model's own name for the call, or one that was made up. */
  id: string;
  function: {
    name: string;
    arguments: Record<string, unknown>;
  };
}

/** A token, and how likely it was where it stands. */
export interface TokenLogprob {
  id: number;
  /**
   * Natural logarithm of its probability among all tokens: of the logits after penalties, biases and a `responseFormat`, and before
   * `temperature`, `topK`, `topP` and `minP`.
   */
  logprob: number;
  /** Its text; U+FFFD where it is a part of a character. */
  text: string;
  /** Its text in UTF-8. */
  bytes: number[];
}

/** A piece of generated text. One token may give no text yet: bytes of a character are held back until it is complete. */
export interface Piece {
  /** The token. */
  id: number;
  /** The text that it completed; may be empty. Where an answer is taken apart (see {@link ChatOptions}), thoughts and calls are no part of it. */
  text: string;
  /** Further text of a thought. */
  thinking?: string;
  /** Calls that are complete with this token. */
  toolCalls?: ToolCall[];
  /** Why a part of `text` that began as a call is none. */
  problem?: string;
  /** How likely the token was, with {@link GenerateOptions.logprobs}. */
  logprob?: TokenLogprob;
  /** The likeliest tokens, the first one most; of equals the lower id first. Those that a `responseFormat` forbids are not among them. */
  topLogprobs?: TokenLogprob[];
  /**
   * How many of the latest tokens, this one included, have no text in this piece or an earlier one, with {@link GenerateOptions.logprobs}:
   * their characters are incomplete, or may begin a stop text. Of a text that ended at a stop text, the last ones are that text's.
   */
  held?: number;
}

/**
 * Why a generation ended. `complete`: the text matches `responseFormat`, and nothing may follow; `cancelled`: {@link Generation.stop}, or its
 * loop was left; `deadline`: its time was over.
 */
export type StopReason = "eos" | "complete" | "stop_text" | "max_tokens" | "context_full" | "cancelled" | "deadline";

/** The numbers of a generation. */
export interface GenerationUsage {
  /** Tokens of the prompt, those found in the cache included. */
  promptTokens: number;
  /** Tokens of the prompt that did not need to be computed again. */
  cachedTokens: number;
  generatedTokens: number;
  /** Seconds until the prompt was read. */
  prefillSeconds: number;
  /** Seconds that the generated tokens took. */
  decodeSeconds: number;
}

/** What a generation came to. */
export interface GenerateResult extends GenerationUsage {
  stopReason: StopReason;
  /** Tokens that were guessed, with {@link GenerateOptions.promptLookup}. */
  draftedTokens: number;
  /** Those of them that the model chose as well. */
  acceptedTokens: number;
  /** What the model thought; empty if the answer was not taken apart. */
  thinking: string;
  /** The tools that it calls, in order; none if the answer was not taken apart. */
  toolCalls: ToolCall[];
}

/** A message of a conversation. */
export interface ChatMessage {
  /** Usually `system`, `user`, `assistant` or `tool`; the model's template decides. */
  role: string;
  /** Plain text, or parts such as `{ type: "text", text }`; control tokens that are spelt out in it stay text. */
  content?: string | readonly object[] | null;
  /** What else the template may look for: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`. */
  [field: string]: unknown;
}

/** A model that is known to run. */
export interface KnownModel {
  name: string;
  /** `hf:owner/repo:quantisation`. */
  address: string;
  use: "chat" | "embed";
  quantisation: string | null;
  /** Weights, about. */
  parameters: number;
  /** About the size of its files. */
  sizeBytes: number;
  /** Tokens that it was trained for; of an encoder those to which a text is cut. */
  maxContextLength: number;
  /** What keys and values of one token take as f16; `null` for an encoder. */
  cacheBytesPerToken: number | null;
  licence: string;
}

/** Options of {@link Model.saveSession}. */
export interface SaveSessionOptions {
  /** Bytes that all kept sessions may take together. Default 1 GiB. */
  maxBytes?: number;
}

/** A session in the browser's storage. */
export interface KeptSession {
  /** Digest of the model and the tokens. */
  id: string;
  /** Digest of the model's weights and its adapter, and the type of its cached keys. */
  model: string;
  /** Tokens that need not be computed again. */
  nTokens: number;
  sizeBytes: number;
  /** When it was used last, in milliseconds since 1970. */
  date: number;
}

/** Options of {@link Model.attention}. */
export interface HeadOptions {
  /** From 0 on. */
  layer: number;
  /** From 0 on. */
  head: number;
  /** How many of the latest tokens: 1 or more. Default 64; of a shorter text all. */
  lastQueries?: number;
}

/** How much each of the latest tokens takes from each token of the latest text, in one head. */
export interface HeadWeights {
  /** All tokens as text, prompt included: what the columns are. Rows are the last of them. */
  tokens: string[];
  /**
   * Row by row. A row's sum is 1, or lower where the head has a sink, which takes the rest (gpt-oss). A token takes nothing from those that
   * come after it or stand before its window.
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
  /** From 0 on; missing for what comes before the first layer and after the last. */
  layer?: number;
  /** Workgroups in x, y and z. */
  grid: [number, number, number];
  /** How long it took, in microseconds. */
  micros: number;
}

/** The pass over the latest token, dispatch by dispatch. */
export interface Timeline {
  /**
   * What the times are read from: the GPU's timestamps, which browsers round (Chromium to 100 µs), the processor's clock for a model on the
   * CPU, or for a GPU without timestamps that clock around each dispatch, most of which may be the way to the GPU and back.
   */
  clock: "gpu" | "cpu" | "roundTrip";
  /** Of the token, from 0 on. */
  position: number;
  /** All dispatches together. */
  micros: number;
  /** In the order in which they run. */
  dispatches: TimelineDispatch[];
}

/** Options of {@link Model.tokenize}. */
export interface TokenizeOptions {
  /** Whether to add the tokens that begin (and for some models end) a text. Default `true`. */
  addSpecial?: boolean;
}

/** What a model file says about itself. */
export interface ModelInfo {
  /** What a GGUF file calls itself, or the name of a Hugging Face folder. */
  name: string;
  architecture: string;
  /** Width of the residual stream. */
  dim: number;
  nLayers: number;
  nHeads: number;
  nKvHeads: number;
  vocabSize: number;
  /** Tokens that the context holds now. */
  contextLength: number;
  /** Tokens that the model was trained for. */
  maxContextLength: number;
  /** What keys and values are cached as. */
  kvType: KvType;
  /** Types of the stored weights, such as `Q4_0`. */
  weightTypes: string[];
  /** Bytes of the model's files. */
  fileBytes: number;
  /** Where the chat template comes from: `file`, the name of a known one such as `chatml`, or `none` for a base model. */
  chatTemplate: string;
}

/** What the files of an encoder or a cross-encoder say, and how it is used. */
export interface EncoderInfo {
  /** What a GGUF file calls itself, or the name of a Hugging Face folder. */
  name: string;
  architecture: string;
  nLayers: number;
  nHeads: number;
  vocabSize: number;
  /** Tokens to which a text (for a cross-encoder a pair of them) is cut, those around it included. */
  maxTokens: number;
  /** Tokens that are computed together. */
  maxBatchTokens: number;
  /** Types of the stored weights, such as `F16`. */
  weightTypes: string[];
  /** Bytes of the model's files. */
  fileBytes: number;
}

/** What an encoder's files say, and how it is used. */
export interface EmbedderInfo extends EncoderInfo {
  /** Numbers in a vector. */
  dims: number;
  pooling: Pooling;
  /** Whether vectors have norm 1. */
  normalize: boolean;
  /** Texts that the model's files have to be put in front of others, by name. */
  prompts: Record<string, string>;
  /** What is put in front of a text unless a call says otherwise: nothing, for most models. */
  prompt: string;
}

/** What a cross-encoder's files say, and how it is used. */
export interface RerankerInfo extends EncoderInfo {
  /** Whether scores are sigmoids of logits. */
  sigmoid: boolean;
}

/** What makes a vector good for a query: the cosine of the angle between them, or their dot product. */
export type Metric = "cosine" | "dot";

/** How an index stores vectors: as floats of 32 or 16 bits, or as signed bytes with a scale for each 32. */
export type VectorStorage = "f32" | "f16" | "int8";

/** What an index is for, and what it holds. */
export interface IndexInfo {
  /** Numbers in a vector. */
  dims: number;
  metric: Metric;
  storage: VectorStorage;
  /** The model that makes the vectors. */
  model?: string;
  /** How that model makes one vector of those of a text's tokens. */
  pooling?: string;
  /** Vectors that can be found. */
  length: number;
  /** Ids that were given out; the next vector gets this one. Ids of deleted vectors are not given out again. */
  nIds: number;
  /** Bytes that vectors take on the device, with room for some that are still to come. */
  sizeBytes: number;
}

/** A vector that was found. */
export interface Hit {
  id: number;
  /** Cosine, dot product, or score of a mixture: higher is better. */
  score: number;
}

/** Options of {@link Index.search}. */
export interface SearchOptions {
  /** Ids that may be found. Default: all. */
  filter?: Iterable<number>;
  /** Rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** What a mixture of logits is, and what items it holds. */
export interface MolInfo {
  /** Numbers in a query's vector. */
  queryDims: number;
  /** Numbers in an item's vector. */
  itemDims: number;
  /** Components of a query. */
  queryComponents: number;
  /** Components of an item. */
  itemComponents: number;
  /** Numbers in a component. */
  componentDims: number;
  storage: VectorStorage;
  /** The encoder whose vectors queries and items are, if the file names one. */
  model?: string;
  /** Items that can be found. */
  length: number;
  /** Bytes of a search's pass over all items. */
  sizeBytes: number;
}

/**
 * How to find the best items under a mixture of logits. `perPair`, `candidates` and `sample` are numbers of items.
 *
 * - `bruteForce`: scores all items.
 * - `highest`: scores the items whose highest logit is highest.
 * - `avg`: scores the best items by the dot product of the sum of the query's components with the mean of the item's.
 * - `naive`: scores the union of the best items by each pair of components alone.
 * - `comb`: scores the union of those of `naive` and `avg`.
 * - `twoPass`: exact; what is not among the candidates of `avg` is scored where one of its logits reaches the k-th best score of these.
 * - `hIndexer`: scores what passes a threshold by the product of `avg` in 8 bits, which a sample tells.
 * - `mips`: the best items by the dot product of `avg`; nothing is scored by the mixture.
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
export interface MolSearchOptions {
  /** How to find the best items. Default: `bruteForce` up to 100,000 items, then `highest` with 10,000 candidates. */
  method?: MolMethod;
  /** An id for each query, where the mixture has components of users. */
  users?: Iterable<number>;
  /** Rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** What runs a model. */
export interface DeviceInfo {
  /** The adapter's name, or the CPU's. */
  name: string;
  backend: "webgpu" | "cpu";
  /** Driver or browser, as far as it tells. */
  driver: string;
  /** The family of kernels in use. */
  tier: string;
  /** Why this device was taken. */
  reason: string;
  /** What went wrong while it was opened and does no harm. */
  notices: string[];
}

/** A device that could run a model here. */
export interface AvailableDevice {
  /** Pass it as {@link LoadOptions.device}. */
  choice: "gpu" | "cpu";
  name: string;
  /** An adapter that computes on the CPU: `auto` never takes it, because the engine's own CPU code is faster. */
  isSoftware: boolean;
  hasSubgroups: boolean;
  hasF16: boolean;
}

/** Memory that a model takes, in bytes. */
export interface MemoryInfo {
  weightsBytes: number;
  /** Keys and values of the context. */
  cacheBytes: number;
  activationsBytes: number;
  /** The three together. */
  totalBytes: number;
  /** Size of the WASM heap; on the CPU the other numbers are part of it. */
  wasmHeapBytes: number;
  /**
   * Bytes of layers that are not in memory, which each pass reads from the model's files; 0 if there are only tables of tokens, of which it
   * reads a few rows. Absent if all weights are in memory.
   */
  streamedBytes?: number;
}

/** What a device has done since it was opened. In steady generation only `dispatches`, `submits`, `reads` and `bytesRead` grow. */
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
  /** The address that it was downloaded from, without what signs it. */
  url: string;
  /** Bytes of the whole file; missing while a server has not said. */
  size?: number;
  /** Bytes that are stored. */
  stored: number;
  /** `false`: a download that was interrupted, and no earlier one is complete. The next load of this address goes on where it stopped. */
  complete: boolean;
  /** When it was stored, in milliseconds since 1970. */
  date: number;
  etag?: string;
  /** Hexadecimal digest, once complete. */
  sha256?: string;
}

/** Position encoding of a {@link rope}. */
export interface RopeOptions {
  nHeads: number;
  /** Numbers in a head. */
  headDim: number;
  /** Position of the first row. Default 0. */
  firstPos?: number;
  /** Base of the angles. Default 10000. */
  theta?: number;
  /** Which numbers of a head are rotated together: neighbours, as in Llama files of GGUF, or its two halves. Default `interleaved`. */
  style?: "interleaved" | "halves";
}

/** Heads of an {@link attention}. */
export interface AttentionOptions {
  nHeads: number;
  /** Heads of keys and values, a divisor of `nHeads`. Default `nHeads`. */
  nKvHeads?: number;
  /** Numbers in a head. */
  headDim: number;
}

/** Addresses of the package's files. Relative ones are relative to the page. */
export interface ConfigureOptions {
  /** `worker.js`. On another origin it is started through a `blob:` of one line. */
  workerUrl?: string | URL | undefined;
  /** `tilewright_bg.wasm`, the engine. */
  wasmUrl?: string | URL | undefined;
  /** `tilewright_text_bg.wasm`, constraints and answers, which is fetched when they are first asked for. */
  textWasmUrl?: string | URL | undefined;
}

/** What does not go into a request's JSON. */
export interface RequestOptions {
  /** Ends the work. */
  signal?: AbortSignal | undefined;
}
