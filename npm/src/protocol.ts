/** The messages between the caller's thread and the worker that owns the engine. */

import type { BenchProgress, BenchReport } from "./bench-types.js";
import type { WireError } from "./errors.js";
import type { GitBlob } from "./git.js";
import type { ModelRecord } from "./store.js";
import type {
  AvailableDevice, ChatMessage, ChatOptions, Counters, DeviceChoice, DeviceInfo, EmbedderInfo, EngineOptions, EngineStats, GenerateOptions,
  GenerateResult, HeadOptions, HeadWeights, Hit, IndexInfo, KeptSession, KvType, MemoryInfo, ModelInfo, ModelReport, MolInfo, MolMethod, Notice,
  Piece, Pooling, Progress, PromptOptions, Ranked, RerankerInfo, Tier, Timeline, VectorStorage,
} from "./types.js";

/** One file of a model, with its address made absolute. */
export type FileSpec =
  | { kind: "url" } & UrlSpec
  | { kind: "blob"; blob: Blob } & NamedSpec
  | PathSpec;

/** What is known of any file. */
interface NamedSpec {
  name: string;
  /** SHA-256 that it must have. */
  sha256?: string;
  /** Whether the caller says so, rather than a hub. */
  isPinned?: boolean;
}

/** A file with an address. */
export interface UrlSpec extends NamedSpec {
  url: string;
  /** Headers of each request for it. */
  headers?: Record<string, string>;
  /** What it must be by Git, where a hub says so and no SHA-256. */
  git?: GitBlob;
}

/** A file with a path, in Node and Deno. */
export interface PathSpec extends NamedSpec {
  kind: "path";
  path: string;
}

/** SHA-256 that the caller says files have: that of the one file, or of each by its name. */
export type Pins = string | Record<string, string>;

/**
 * A model's files, or the folder that they are to be looked up in, of which a path does not say which it is; and what that folder is
 * called, if it has a name.
 */
export type SourceSpec = (
  | { kind: "files"; files: FileSpec[] }
  | { kind: "folder"; url: string }
  | { kind: "path"; file: PathSpec }
  | { kind: "builtin" }
) & {
  name?: string;
  /** What a copy of it is remembered as, if it has addresses alone. */
  given?: Omit<ModelRecord, "files">;
  pins?: Pins;
  /** What the hub says of its licence. */
  licence?: string;
};

/** How to open a device. */
export interface DeviceRequest {
  choice: DeviceChoice;
  tier?: Tier;
  subgroups: boolean;
}

/** What is asked for, whatever is loaded. */
export interface CommonRequest {
  source: SourceSpec;
  device: DeviceRequest;
  /** Whose device to take instead of opening one. */
  on?: number;
  cache: boolean;
  /** Whether kept copies are compared with their digests after the load. */
  verify: boolean;
  /** Whether the caller has a `fetch` of its own for what is downloaded. */
  ownFetch?: boolean;
}

/** What the worker needs to load anything. */
export interface LoadRequest extends CommonRequest {
  settings: CommonSettings;
}

/** What the worker needs to look at a model's headers. */
export interface InspectRequest extends Pick<CommonRequest, "source" | "cache" | "ownFetch"> {
  /** What it should be planned for. */
  device: DeviceChoice;
  settings: Omit<ModelSettings, "fitContext">;
  contextLengths?: number[];
}

/** The files in which PEFT saves an adapter: its configuration and its weights. */
export const PEFT_FILES = ["adapter_config.json", "adapter_model.safetensors"] as const;

/** What the worker needs to load a model. */
export interface ModelRequest extends LoadRequest {
  /** Whether to measure the model's products on the device. */
  tune: boolean;
  settings: ModelSettings;
  adapter?: { source: SourceSpec; scale: number };
}

/** What the worker needs to load an encoder. */
export interface EmbedderRequest extends LoadRequest {
  settings: EmbedderSettings;
}

/** What the worker needs to load a cross-encoder. */
export interface RerankerRequest extends LoadRequest {
  settings: RerankerSettings;
}

/** Options of loads that the engine reads. */
interface CommonSettings {
  memoryLimit?: number;
}
export interface ModelSettings extends CommonSettings {
  contextLength?: number;
  fitContext?: boolean;
  kvType?: KvType;
}
export interface EmbedderSettings extends CommonSettings {
  maxTokens?: number;
  pooling?: Pooling;
  normalize?: boolean;
  maxBatchTokens?: number;
  cachedVectors?: number;
}
export interface RerankerSettings extends CommonSettings {
  maxTokens?: number;
  sigmoid?: boolean;
  maxBatchTokens?: number;
}

export type EngineSettings = EngineOptions;

/** A prompt: text, tokens, or a conversation for the model's template. */
export type Prompt =
  | { kind: "text"; text: string }
  | { kind: "tokens"; ids: Uint32Array }
  | { kind: "chat"; messages: ChatMessage[]; templateOptions: TemplateOptions };

/** What a chat template is told besides the messages. */
export type TemplateOptions = Omit<ChatOptions, keyof GenerateOptions | "toolChoice" | "parallelToolCalls" | "thinking">;

/** What a text must match, and whether it is taken apart. The module that does both is fetched if one of them is asked for. */
export interface OutputRequest {
  /** JSON of a `ResponseFormat`. */
  constraint?: string;
  /** JSON of the tools, if there are some, with which calls are read. */
  tools?: string;
  /** How calls are kept to what the tools take; if missing, they are not. */
  toolChoice?: "auto" | "none" | "required" | { name: string };
  /** Whether several calls may come where they are kept to anything. */
  parallel?: boolean;
  /** Whether thinking, text and calls are told apart. */
  reads: boolean;
  /** Whether a thought may come first where there is a constraint. */
  mayThink: boolean;
}

/** What is generated. */
export interface GenerateRequest {
  prompt: Prompt;
  options: Omit<GenerateOptions, "signal" | "responseFormat" | "logitBias"> & {
    logitBias?: [id: number, bias: number][];
    /** Tokens that were chosen already; they are given out once more. */
    replay?: number[];
  };
  output: OutputRequest;
}

/** What is told of a generation while it runs: first what its prompt is, then each token. */
export type GenerateEvent = Pick<GenerateResult, "promptTokens" | "cachedTokens"> | Piece;

/** A tensor that the worker keeps, by its number. */
export interface KeptTensor {
  kept: number;
  shape: number[];
}

/** What an index is for. */
export type IndexSettings = Pick<IndexInfo, "dims"> & Partial<Pick<IndexInfo, "metric" | "storage" | "model" | "pooling">>;

/** What the vectors of an index should be of. */
export type ExpectedModel = { model: string; dims?: number; pooling?: string };

/** Vectors that the worker holds, and what searches them. */
export interface MadeVectors<Info> {
  info: Info;
  device: DeviceInfo;
}

/** A device that is to be opened, or the number of something on one that is open. */
export type Where = DeviceRequest | number;

/** An operand of a kernel: numbers that come along, or the number of a tensor that the worker keeps. */
export type Operand = Float32Array | number;

/** A kernel's operands by name, its other arguments, and whether its result stays in the worker. */
interface KernelCall<Operands extends string, Options> {
  args: { operands: Record<Operands, Operand>; options: Options; keep: boolean };
  event: never;
  reply: Float32Array | KeptTensor;
}

/** The kernels. */
export interface KernelCalls {
  matmul: KernelCall<"a" | "b", { m: number; n: number; k: number }>;
  rmsNorm: KernelCall<"x" | "weight", { eps: number }>;
  layerNorm: KernelCall<"x" | "weight" | "bias", { eps: number }>;
  softmax: KernelCall<"x", { columns: number }>;
  rope: KernelCall<"x", { nHeads: number; headDim: number; firstPos: number; theta: number; style: "interleaved" | "halves" }>;
  attention: KernelCall<"q" | "k" | "v", { nHeads: number; nKvHeads: number; headDim: number }>;
}

/** Everything that the worker does: arguments, what it sends meanwhile, what it replies. */
export interface Calls extends KernelCalls {
  loadModel: { args: ModelRequest; event: never; reply: ModelInfo };
  loadEmbedder: { args: EmbedderRequest; event: never; reply: EmbedderInfo };
  loadReranker: { args: RerankerRequest; event: never; reply: RerankerInfo };
  inspect: { args: InspectRequest; event: never; reply: ModelReport };
  /** Keeps a model's files without loading it. Tells how far it has come as a load does. */
  prefetch: { args: Pick<CommonRequest, "source" | "ownFetch">; event: never; reply: undefined };
  generate: { args: GenerateRequest; event: GenerateEvent; reply: GenerateResult };
  /** Replies with the engine's number. */
  makeEngine: { args: EngineSettings; event: never; reply: number };
  /** Texts of an engine do not wait for each other. */
  generateWith: { args: GenerateRequest & { engine: number }; event: GenerateEvent; reply: GenerateResult };
  engineStats: { args: { engine: number }; event: never; reply: EngineStats };
  freeEngine: { args: { engine: number }; event: never; reply: undefined };
  saveSession: { args: { maxBytes: number }; event: never; reply: KeptSession };
  timeline: { args: Record<string, never>; event: never; reply: Timeline };
  headWeights: { args: Required<HeadOptions>; event: never; reply: HeadWeights };
  tokenize: { args: { text: string; addSpecial: boolean }; event: never; reply: Uint32Array };
  detokenize: { args: { ids: Uint32Array }; event: never; reply: string };
  /** The vectors of texts, one after the other; tells meanwhile how many texts are done. */
  embed: { args: { texts: string[] } & PromptOptions; event: number; reply: Float32Array };
  /** Tokens of a text as the encoder reads it. */
  encode: { args: { text: string } & PromptOptions; event: never; reply: Uint32Array };
  /** The best documents; tells meanwhile how many are done. */
  rerank: { args: { query: string; documents: string[]; topK?: number }; event: number; reply: Ranked[] };
  memory: { args: Record<string, never>; event: never; reply: MemoryInfo };
  counters: { args: Record<string, never>; event: never; reply: Counters };
  destroyDevice: { args: Record<string, never>; event: never; reply: undefined };
  /** Frees the target, and its device if nothing else is there. */
  close: { args: Record<string, never>; event: never; reply: undefined };
  devices: { args: Record<string, never>; event: never; reply: AvailableDevice[] };
  openDevice: { args: DeviceRequest; event: never; reply: DeviceInfo };
  /** Tells each row as soon as it is there. */
  bench: { args: { quick: boolean }; event: BenchProgress; reply: BenchReport };
  keepTensor: { args: { data: Float32Array; shape: number[] }; event: never; reply: KeptTensor };
  readTensor: { args: { kept: number }; event: never; reply: Float32Array };
  freeTensor: { args: { kept: number }; event: never; reply: undefined };
  createIndex: { args: { where: Where; settings: IndexSettings }; event: never; reply: MadeVectors<IndexInfo> };
  loadIndex: { args: Pick<LoadRequest, "source" | "cache"> & { where: Where; expected?: ExpectedModel }; event: never; reply: MadeVectors<IndexInfo> };
  /** Of an index or a mixture. */
  appendVectors: { args: { vectors: Float32Array }; event: never; reply: { first: number; info: IndexInfo | MolInfo } };
  deleteVectors: { args: { ids: Uint32Array }; event: never; reply: { deleted: number; info: IndexInfo } };
  searchVectors: { args: { queries: Float32Array; k: number; filter?: Uint32Array }; event: never; reply: Hit[][] };
  /** Begins to write the index as it is now, and gives the number under which its pieces are asked for. */
  beginSave: { args: Record<string, never>; event: never; reply: number };
  /** The next piece, or nothing at the end. */
  savedPiece: { args: { save: number }; event: never; reply: Uint8Array | undefined };
  endSave: { args: { save: number }; event: never; reply: undefined };
  loadMol: { args: Pick<LoadRequest, "source" | "cache"> & { where: Where; storage?: VectorStorage }; event: never; reply: MadeVectors<MolInfo> };
  searchItems: { args: { queries: Float32Array; k: number; method?: MolMethod; users?: Uint32Array }; event: never; reply: Hit[][] };
}

/** Name of a call. */
export type CallName = keyof Calls;

/** Calls that load a model of some kind. */
export type LoadName = "loadModel" | "loadEmbedder" | "loadReranker";

/** Answers of a caller's own `fetch`. */
export type FetchToWorker =
  | { type: "fetched"; id: number; status: number; headers: Record<string, string>; hasBody: boolean }
  /** The next bytes, or the end. */
  | { type: "fetchedPart"; id: number; bytes?: Uint8Array }
  | { type: "fetchFailed"; id: number; message: string };

/** Requests for it. */
export type FetchFromWorker =
  | { type: "fetch"; id: number; url: string; method: string; headers: Record<string, string> }
  | { type: "fetchMore"; id: number }
  /** Nobody wants the rest. */
  | { type: "fetchEnd"; id: number };

/** From the caller's thread to the worker. What a call is about, its target, has a number that the caller chooses. */
export type ToWorker =
  /** Where the worker finds its WASM, if not beside itself; comes before any call. */
  | { type: "files"; wasm: string | undefined; textWasm: string | undefined }
  | FetchToWorker & { target: number }
  | { type: "call"; id: number; target: number; name: CallName; args: Calls[CallName]["args"] }
  | { type: "abort"; id: number }
  /** The call is to reply soon with what it has. */
  | { type: "stop"; id: number };

/** From the worker to whoever a target belongs to. */
export type ToTarget =
  | FetchFromWorker
  | { type: "notice"; notice: Notice }
  /** How far a load has come, the first one or one that replaces what was lost. */
  | { type: "progress"; progress: Progress }
  /** So many bytes more are kept in the browser's storage. */
  | { type: "stored"; bytes: number }
  | { type: "device"; device: DeviceInfo }
  /** Nothing more can be asked of the target. */
  | { type: "ended"; error: WireError };

/** What whoever uses a target is told of it. */
export type Report = Extract<ToTarget, { type: "notice" | "progress" | "device" }>;

/** From the worker to the caller's thread. */
export type FromWorker =
  | ToTarget & { target: number }
  /** The worker listens. It holds the lock of this name as long as it lives. */
  | { type: "ready"; lock?: string }
  | { type: "reply"; id: number; value: Calls[CallName]["reply"] }
  | { type: "event"; id: number; value: Calls[CallName]["event"] }
  | { type: "fail"; id: number; error: WireError }
  /** The engine is broken; nothing that was asked will be answered. */
  | { type: "fatal"; error: WireError };
