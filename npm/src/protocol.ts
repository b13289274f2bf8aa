/** The messages between the caller's thread and the worker that owns the engine. */

import type { BenchProgress, BenchReport } from "./bench-types.js";
import type { WireError } from "./errors.js";
import type { GitBlob } from "./git.js";
import type { ModelRecord } from "./store.js";
import type {
  AvailableDevice, ChatMessage, ChatOptions, Counters, DetectedLanguage, DeviceChoice, DeviceInfo, EmbedderInfo, EmbedderSettings, EngineOptions, EngineStats,
  GenerateOptions, GenerateResult, HeadOptions, HeadWeights, Hit, ImagePixels, IndexInfo, KeptSession, KvType, MemoryInfo, ModelInfo, ModelReport, MolInfo,
  MolMethod, Notice, Piece, Progress, PromptOptions, Ranked, RerankerInfo, RerankerSettings, TimedText, Tier, Timeline, TranscribeOptions,
  TranscriberInfo, TranscriberSettings, Transcript, TranscriptSegment, VectorStorage,
} from "./types.js";

/** One file of a model, with its address made absolute. */
export type FileSpec =
  | { kind: "url" } & UrlSpec
  | { kind: "blob"; blob: Blob } & NamedSpec
  | PathSpec;

interface NamedSpec {
  name: string;
  /** Its required SHA-256. */
  sha256?: string;
  /** Whether the caller requires it, rather than a hub. */
  isPinned?: boolean;
}

/** A file with an address. */
export interface UrlSpec extends NamedSpec {
  url: string;
  /** Headers of each request for it. */
  headers?: Record<string, string>;
  /** Its required Git digest, where a hub reports no SHA-256. */
  git?: GitBlob;
}

/** A file with a path, in Node and Deno. */
export interface PathSpec extends NamedSpec {
  kind: "path";
  path: string;
}

/** The caller's required SHA-256: of a single file, or by file name. */
export type Pins = string | Record<string, string>;

/** A model's files, or their folder; a path can be either. `name`: the folder's. */
export type SourceSpec = (
  | { kind: "files"; files: FileSpec[] }
  | { kind: "folder"; url: string }
  | { kind: "path"; file: PathSpec }
  | { kind: "builtin" }
) & {
  name?: string;
  /** Its record in the storage, if all files have addresses. */
  given?: Omit<ModelRecord, "files">;
  pins?: Pins;
  /** Licence, as the hub reports it. */
  licence?: string;
};

/** How to open a device. */
export interface DeviceRequest {
  choice: DeviceChoice;
  tier?: Tier;
  subgroups: boolean;
  /** Of the CPU. */
  threads?: number;
}

export interface CommonRequest {
  source: SourceSpec;
  device: DeviceRequest;
  /** The target whose device to share. */
  on?: number;
  cache: boolean;
  /** Whether stored copies are verified after the load. */
  verify: boolean;
  ownFetch?: boolean;
}

export interface LoadRequest<Settings = object> extends CommonRequest {
  settings: Settings & { memoryLimit?: number };
}

export interface InspectRequest extends Pick<CommonRequest, "source" | "cache" | "ownFetch"> {
  device: DeviceChoice;
  settings: Omit<ModelSettings, "fitContext">;
  contextLengths?: number[];
}

/** The files in which PEFT saves an adapter: its configuration and its weights. */
export const PEFT_FILES = ["adapter_config.json", "adapter_model.safetensors"] as const;

export interface ModelRequest extends LoadRequest<ModelSettings> {
  /** Whether to measure the model's kernels. */
  tune: boolean;
  adapter?: { source: SourceSpec; scale: number };
  /** Its vision encoder. `isOwn`: in the model's own files. */
  vision?: { source: SourceSpec; isOwn: boolean; maxTokens?: number };
}

/** Files of a folder that say how images are prepared, with either name. */
export const PREPROCESSOR_FILES: readonly string[] = ["preprocessor_config.json", "processor_config.json"];

/** An image of a message or a list, by its place there. Addresses are absolute. */
export interface GivenImage {
  name: string;
  image: Blob | ImageBitmap | ImagePixels | string;
}

export type EmbedderRequest = LoadRequest<EmbedderSettings>;

export type RerankerRequest = LoadRequest<RerankerSettings>;

export type TranscriberRequest = LoadRequest<TranscriberSettings>;

/** Options of a transcript without those of the caller's thread. */
export type TranscribeSettings = Omit<TranscribeOptions, "sampleRate" | "signal" | "onSegment">;

/** Formats of subtitles. */
export type SubtitleFormat = "srt" | "vtt";

export interface ModelSettings {
  memoryLimit?: number;
  contextLength?: number;
  fitContext?: boolean;
  kvType?: KvType;
  exact?: boolean;
}

/** A prompt: text, tokens, or a conversation for the model's template. */
export type Prompt =
  | { kind: "text"; text: string }
  | { kind: "tokens"; ids: Uint32Array }
  | { kind: "chat"; messages: ChatMessage[]; images: GivenImage[]; templateOptions: TemplateOptions };

export type TemplateOptions = Omit<ChatOptions, keyof GenerateOptions | "toolChoice" | "parallelToolCalls" | "thinking">;

/** Constraints on the output and how it is parsed. The module for both is fetched on first use. */
export interface OutputRequest {
  /** JSON of a `ResponseFormat`. */
  constraint?: string;
  tools?: string;
  /** How calls are constrained; absent: not at all. */
  toolChoice?: "auto" | "none" | "required" | { name: string };
  /** Whether constrained output may have several calls. */
  parallel?: boolean;
  /** Whether the output is parsed. */
  isParsed: boolean;
  /** Whether thinking may precede constrained output. */
  mayThink: boolean;
}

export interface GenerateRequest {
  prompt: Prompt;
  options: Omit<GenerateOptions, "signal" | "responseFormat" | "logitBias"> & {
    logitBias?: [id: number, bias: number][];
    /** Tokens that were chosen already; they are emitted again. */
    replay?: number[];
  };
  output: OutputRequest;
}

/** Events of a generation: first the numbers of its prompt, then each token. */
export type GenerateEvent = Pick<GenerateResult, "promptTokens" | "cachedTokens"> | Piece;

/** A tensor in the worker, by number. */
export interface KeptTensor {
  kept: number;
  shape: number[];
}

export type IndexSettings = Pick<IndexInfo, "dims"> & Partial<Pick<IndexInfo, "metric" | "storage" | "model" | "pooling">>;

/** The required model of an index. */
export type ExpectedModel = { model: string; dims?: number; pooling?: string };

export type MadeVectors<Info> = { info: Info; device: DeviceInfo };

/** A device to open, or the target whose device to share. */
export type Where = DeviceRequest | number;

/** An operand of a kernel: an array, or the number of a tensor in the worker. */
export type Operand = Float32Array | number;

/** Kernels by the names of the engine's methods, which take the operands and then the settings. */
export type KernelName = "matmul" | "rmsNorm" | "layerNorm" | "softmax" | "rope" | "attention";

/** All calls of the worker: arguments, events and reply. */
export interface Calls {
  loadModel: { args: ModelRequest; event: never; reply: ModelInfo };
  loadEmbedder: { args: EmbedderRequest; event: never; reply: EmbedderInfo };
  loadReranker: { args: RerankerRequest; event: never; reply: RerankerInfo };
  loadTranscriber: { args: TranscriberRequest; event: never; reply: TranscriberInfo };
  inspect: { args: InspectRequest; event: never; reply: ModelReport };
  /** Stores a model's files without loading it. Reports progress as a load does. */
  prefetch: { args: Pick<CommonRequest, "source" | "ownFetch">; event: never; reply: void };
  generate: { args: GenerateRequest; event: GenerateEvent; reply: GenerateResult };
  makeEngine: { args: EngineOptions; event: never; reply: number };
  /** Requests of an engine do not wait for each other. */
  generateWith: { args: GenerateRequest & { engine: number }; event: GenerateEvent; reply: GenerateResult };
  engineStats: { args: { engine: number }; event: never; reply: EngineStats };
  freeEngine: { args: { engine: number }; event: never; reply: void };
  saveSession: { args: { maxBytes: number }; event: never; reply: KeptSession };
  timeline: { args: Record<string, never>; event: never; reply: Timeline };
  headWeights: { args: Required<HeadOptions>; event: never; reply: HeadWeights };
  tokenize: { args: { text: string; addSpecial: boolean }; event: never; reply: Uint32Array };
  /** The number of tokens of an image of this size. */
  imageTokens: { args: { width: number; height: number }; event: never; reply: number };
  detokenize: { args: { ids: Uint32Array }; event: never; reply: string };
  /** The vectors in one array. Events: the number of finished texts. */
  embed: { args: { texts: string[]; dimensions?: number } & PromptOptions; event: number; reply: Float32Array };
  /** As `embed`, of images. */
  embedImages: { args: { images: GivenImage[]; dimensions?: number }; event: number; reply: Float32Array };
  encode: { args: { text: string } & PromptOptions; event: never; reply: Uint32Array };
  /** Events: the number of finished documents. */
  rerank: { args: { query: string; documents: string[]; topK?: number; instruction?: string }; event: number; reply: Ranked[] };
  /** Samples of one channel at 16 kHz. Events: the segments of each window. */
  transcribe: { args: { samples: Float32Array; settings: TranscribeSettings }; event: TranscriptSegment[]; reply: Transcript };
  detectLanguage: { args: { samples: Float32Array }; event: never; reply: DetectedLanguage | null };
  subtitles: { args: { segments: TimedText[]; format: SubtitleFormat }; event: never; reply: string };
  memory: { args: Record<string, never>; event: never; reply: MemoryInfo };
  counters: { args: Record<string, never>; event: never; reply: Counters };
  destroyDevice: { args: Record<string, never>; event: never; reply: void };
  /** Frees the target, and its device after the last user. */
  close: { args: Record<string, never>; event: never; reply: void };
  devices: { args: Record<string, never>; event: never; reply: AvailableDevice[] };
  openDevice: { args: DeviceRequest; event: never; reply: DeviceInfo };
  bench: { args: { quick: boolean }; event: BenchProgress; reply: BenchReport };
  runKernel: { args: { kernel: KernelName; operands: Operand[]; settings: (number | string)[]; keep: boolean }; event: never; reply: Float32Array | KeptTensor };
  keepTensor: { args: { data: Float32Array; shape: number[] }; event: never; reply: KeptTensor };
  readTensor: { args: { kept: number }; event: never; reply: Float32Array };
  freeTensor: { args: { kept: number }; event: never; reply: void };
  createIndex: { args: { where: Where; settings: IndexSettings }; event: never; reply: MadeVectors<IndexInfo> };
  loadIndex: { args: Pick<LoadRequest, "source" | "cache"> & { where: Where; expected?: ExpectedModel }; event: never; reply: MadeVectors<IndexInfo> };
  /** Of an index or a mixture. */
  appendVectors: { args: { vectors: Float32Array }; event: never; reply: { first: number; info: IndexInfo | MolInfo } };
  deleteVectors: { args: { ids: Uint32Array }; event: never; reply: { deleted: number; info: IndexInfo } };
  searchVectors: { args: { queries: Float32Array; k: number; filter?: Uint32Array }; event: never; reply: Hit[][] };
  /** Begins to write the index as it is now. Replies with the number of the save. */
  beginSave: { args: Record<string, never>; event: never; reply: number };
  savedPiece: { args: { save: number }; event: never; reply: Uint8Array | undefined };
  endSave: { args: { save: number }; event: never; reply: void };
  loadMol: { args: Pick<LoadRequest, "source" | "cache"> & { where: Where; storage?: VectorStorage }; event: never; reply: MadeVectors<MolInfo> };
  searchItems: { args: { queries: Float32Array; k: number; method?: MolMethod; users?: Uint32Array }; event: never; reply: Hit[][] };
}

export type CallName = keyof Calls;

/** Calls of a transcriber's worker. Others are those of the engine's, but for a few that both have. */
export type SpeechCallName = "loadTranscriber" | "transcribe" | "detectLanguage" | "subtitles";

export type LoadName = "loadModel" | "loadEmbedder" | "loadReranker" | "loadTranscriber";

/** Responses of a caller's own `fetch`. */
export type FetchToWorker =
  | { type: "fetched"; id: number; status: number; headers: Record<string, string>; hasBody: boolean }
  /** The next bytes, or the end. */
  | { type: "fetchedPart"; id: number; bytes?: Uint8Array }
  | { type: "fetchFailed"; id: number; message: string };

/** Requests for it. */
export type FetchFromWorker =
  | { type: "fetch"; id: number; url: string; method: string; headers: Record<string, string> }
  | { type: "fetchMore"; id: number }
  /** The rest is not needed. */
  | { type: "fetchEnd"; id: number };

/** From the caller's thread to the worker. The caller chooses the number of a call's target. */
export type ToWorker =
  /** Addresses of the WASM modules, if not beside the worker; sent before any call. `wasm`: the engine of this worker. */
  | { type: "files"; wasm: string | undefined; textWasm: string | undefined; cpu: string | undefined; cpuWasm: string | undefined }
  | FetchToWorker & { target: number }
  | { type: "call"; id: number; target: number; name: CallName; args: Calls[CallName]["args"] }
  | { type: "abort"; id: number }
  /** The call should reply with its result so far. */
  | { type: "stop"; id: number };

/** From the worker to the owner of a target. */
export type ToTarget =
  | FetchFromWorker
  | { type: "notice"; notice: Notice }
  | { type: "progress"; progress: Progress }
  /** This many more bytes are stored. */
  | { type: "stored"; bytes: number }
  | { type: "device"; device: DeviceInfo }
  /** The target is gone. */
  | { type: "ended"; error: WireError };

export type Report = Extract<ToTarget, { type: "notice" | "progress" | "device" }>;

/** From the worker to the caller's thread. */
export type FromWorker =
  | ToTarget & { target: number }
  /** The worker listens. It holds this lock as long as it lives. */
  | { type: "ready"; lock?: string }
  | { type: "reply"; id: number; value: Calls[CallName]["reply"] }
  | { type: "event"; id: number; value: Calls[CallName]["event"] }
  | { type: "fail"; id: number; error: WireError }
  /** The engine is broken; no call will settle. */
  | { type: "fatal"; error: WireError };
