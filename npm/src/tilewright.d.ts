/** What the WASM module exports, as this package uses it. The module itself is built from the Rust crate, beside the compiled worker. */

import type { EmbedderRequest, ExpectedModel, GenerateRequest, IndexSettings, ModelSettings, RerankerRequest } from "./protocol.js";
import type {
  AvailableDevice, Counters, DeviceChoice, DeviceInfo, EmbedderInfo, EngineOptions, EngineStats, GenerateResult, Hit, IndexInfo, KvType, MemoryInfo, ModelInfo, ModelReport,
  MolInfo, MolMethod, Ranked, RerankerInfo, Tier, Timeline, VectorStorage, WeightShare,
} from "./types.js";

export type Adapter = Omit<AvailableDevice, "choice">;
export type GenerationOptions = GenerateRequest["options"] & { stopIds?: number[] };

export type FileInfo = { name: string; size?: number };

export default function init(input?: { module_or_path: BufferSource | string | URL }): Promise<{ memory: WebAssembly.Memory }>;
export function version(): string;

export class Device {
  private constructor();
  static open(choice: DeviceChoice, adapter: Adapter | undefined, tier?: Tier): Promise<Device>;
  info(): DeviceInfo;
  counters(): Counters;
  isGpu(): boolean;
  /** Bytes that a model can take here, where that can be known. */
  availableBytes(): number | undefined;
  /** What the self-test has had to say since this was last asked for. */
  takeNotices(): string[];
  destroy(): void;
  free(): void;
  /** Measures what the device does; `half` is the same adapter in the tier `f16`, and goes with the call. Rows and result are JSON. */
  bench(half: Device | undefined, quick: boolean, onRow: (json: string, done: number, total: number) => void): Promise<string>;
  upload(data: Float32Array, shape?: Uint32Array): Promise<DeviceTensor>;
  matmul(a: DeviceTensor, b: DeviceTensor, m: number, n: number, k: number): DeviceTensor;
  rmsNorm(x: DeviceTensor, weight: DeviceTensor, eps: number): DeviceTensor;
  layerNorm(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor, eps: number): DeviceTensor;
  softmax(x: DeviceTensor, columns: number): DeviceTensor;
  rope(x: DeviceTensor, nHeads: number, headDim: number, firstPos: number, theta: number, style: "interleaved" | "halves"): DeviceTensor;
  attention(q: DeviceTensor, k: DeviceTensor, v: DeviceTensor, nHeads: number, nKvHeads: number, headDim: number): DeviceTensor;
}

export class DeviceTensor {
  private constructor();
  shape(): Uint32Array;
  compute(): void;
  read(): Promise<Float32Array>;
  free(): void;
}

export type ReadFile = (file: number, offset: number, length: number) => Promise<Uint8Array | undefined>;

export class Loader<Loaded> {
  private constructor();
  /** `read` gives bytes of a file, after all files were pushed, for weights that do not fit in memory. */
  static model(device: Device, files: FileInfo[], options: ModelSettings, read: ReadFile | undefined): Loader<Model>;
  static embedder(device: Device, files: FileInfo[], options: EmbedderRequest["settings"]): Loader<Embedder>;
  static reranker(device: Device, files: FileInfo[], options: RerankerRequest["settings"]): Loader<Reranker>;
  /** Of a file of so many bytes, if that is known. */
  static index(device: Device, size: number | undefined): Loader<Index>;
  static mol(device: Device, size: number | undefined, storage: VectorStorage | undefined): Loader<Mol>;
  /** Says what the folder of the files is called. */
  setFolder(name: string): void;
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): Promise<void>;
  end(): void;
  /** For models: makes one follow what `tune` returned; returns why that is of no use, if so. */
  useTuning(text: string): string | undefined;
  tune(): Promise<string>;
  finish(): Promise<Loaded>;
  free(): void;
}

/** What the headers of a model's files say. What is missing is `null`. */
export type HeaderFacts = {
  kind: ModelReport["kind"];
  name: string | null;
  architecture: string | null;
  licence: string | null;
  maxContextLength: number | null;
  chatTemplate: boolean;
  weights: WeightShare[];
  problem: string | null;
};

/** The headers of a model's files, whose bytes are pushed as to a {@link Loader}. */
export class Header {
  constructor(files: FileInfo[]);
  setFolder(name: string): void;
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): void;
  end(): void;
  facts(): HeaderFacts;
  /** Memory that the model would take there, whatever there is. */
  plan(device: Device, options: PlanOptions): Omit<MemoryInfo, "wasmHeapBytes">;
  /** Throws what loading would throw by the headers. */
  check(device: Device, options: PlanOptions & { readsAgain?: boolean }): void;
  free(): void;
}

export type PlanOptions = { contextLength?: number; kvType?: KvType; memoryLimit?: number };

export class Model {
  private constructor();
  info(): Omit<ModelInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** Bytes of layers that each pass reads from the files, beside rows of tables; nothing where all is on the device. */
  streamedBytes(): number | undefined;
  tokenize(text: string, addSpecial: boolean): Uint32Array;
  detokenize(ids: Uint32Array): string;
  chatTokens(messages: readonly object[], options: { now?: number }): Uint32Array;
  /** What ends the assistant's turn besides the tokens that end a text. */
  chatStops(): { ids: number[]; texts: string[] };
  /** The sources of all chat templates. */
  templates(): string;
  /** What the module of constraints and answers has to know of the vocabulary. */
  tokens(): Uint32Array;
  tokenBytes(): Uint8Array;
  endIds(): Uint32Array;
  /** What each token is by itself. */
  pieces(ids: Uint32Array): string[];
  encodeWithin(text: string): Uint32Array | undefined;
  /** Tells the weights, with those of an adapter, and the type of cached keys from others'. */
  digest(): string | undefined;
  mostBack(): number | undefined;
  /** Has new sessions use a LoRA adapter: a GGUF file, or PEFT's weights and their configuration. */
  useAdapter(weights: Uint8Array, config: Uint8Array | undefined, scale: number): void;
  session(): Session;
  free(): void;
}

/** Says which tokens may come next: a bit for each. */
export interface TokenGuide {
  allowed(): Uint32Array;
  /** Returns the tokens that must follow, or nothing where the text is complete. */
  accept(id: number): Uint32Array | undefined;
}

/** What a text came to, without what is not known of it in WASM. */
export type EngineOutcome = Omit<GenerateResult, "thinking" | "toolCalls">;

export class Engine {
  constructor(model: Model, options: EngineOptions);
  /** Resolves to what lost the device, or to nothing when there is nothing left to do. */
  run(onTurn: () => Promise<void>): Promise<unknown>;
  resume(model: Model): void;
  fail(): void;
  submit(ids: Uint32Array, options: GenerationOptions, guide: TokenGuide | undefined): Text;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  stats(): Omit<EngineStats, "busySeconds"> & { busyMicros: number };
  free(): void;
}

export class Text {
  private constructor();
  pieces(
    onBegin: (cachedTokens: number) => void, onPiece: (id: number, text: string, isLast: boolean, logprobs: string | undefined) => boolean | Promise<boolean>,
  ): Promise<EngineOutcome>;
  cancel(): void;
  free(): void;
}

export class Session {
  private constructor();
  generate(
    ids: Uint32Array,
    options: GenerationOptions,
    guide: TokenGuide | undefined,
    /** Called first, with the number of cached ids. */
    onBegin: (nCached: number) => void,
    /** `logprobs`: JSON of the token, of the likeliest ones, and of how many have no text out, if they were asked for. */
    onPiece: (id: number, text: string, isLast: boolean, logprobs: string | undefined) => Promise<boolean>,
    onLost: (error: Error) => Promise<Model>,
  ): Promise<Omit<GenerateResult, "thinking" | "toolCalls">>;
  timeline(): Promise<Timeline>;
  /** Row by row; a row has a weight for each token. */
  headWeights(layer: number, head: number, lastQueries: number): Promise<Float32Array>;
  cancel(): void;
  /** The sequence. */
  tokens(): Uint32Array;
  /** How many of its tokens need not be computed again. */
  nCached(): number;
  /** These tokens, and what is computed of them, as a file's content. */
  saving(): Saving;
  /** Goes on with a file of so many bytes; `read` resolves to some of those from an offset on, to none at the end. */
  restore(size: number, read: (offset: number) => Promise<Uint8Array>): Promise<void>;
  free(): void;
}

export class Embedder {
  private constructor();
  info(): Omit<EmbedderInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** Tokens of a text as the encoder reads it. */
  encode(text: string, prompt?: string | null): Uint32Array;
  /** The vectors of texts, one after the other, or nothing if `cancel` came first. */
  embed(texts: string[], prompt: string | null | undefined, onProgress: (done: number) => void): Promise<Float32Array | undefined>;
  cancel(): void;
  free(): void;
}

export class Reranker {
  private constructor();
  info(): Omit<RerankerInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** The best documents, or nothing if `cancel` came first. */
  rerank(query: string, documents: string[], topK: number | undefined, onProgress: (done: number) => void): Promise<Ranked[] | undefined>;
  cancel(): void;
  free(): void;
}

export class Index {
  private constructor();
  static create(device: Device, options: IndexSettings): Index;
  /** Refuses vectors of another model. */
  expect(wanted: ExpectedModel): void;
  /** What is missing is `null`. */
  info(): Omit<IndexInfo, "model" | "pooling"> & { model: string | null; pooling: string | null };
  /** Returns the first vector's id. */
  append(vectors: Float32Array): Promise<number>;
  /** Returns how many were there until now. */
  delete(ids: Uint32Array): number;
  search(queries: Float32Array, k: number, filter?: Uint32Array): Promise<Hit[][]>;
  saving(): Saving;
  free(): void;
}

/** A file's content, whose pieces are read from a device one by one. */
export class Saving {
  private constructor();
  /** Bytes of the whole file. */
  size(): number;
  /** The next bytes, or nothing at the end. */
  next(): Promise<Uint8Array | undefined>;
  free(): void;
}

export class Mol {
  private constructor();
  /** What is missing is `null`. */
  info(): Omit<MolInfo, "model"> & { model: string | null };
  /** Returns the first item's id. */
  append(vectors: Float32Array): Promise<number>;
  search(queries: Float32Array, k: number, method?: MolMethod, users?: Uint32Array): Promise<Hit[][]>;
  free(): void;
}

export class Sha256 {
  constructor();
  update(bytes: Uint8Array): void;
  hex(): string;
  free(): void;
}
