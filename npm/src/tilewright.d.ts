/** The exports of the engine's WASM module that this package uses. */

import type {
  EmbedderRequest, ExpectedModel, GenerateRequest, IndexSettings, ModelSettings, RerankerRequest,
} from "./protocol.js";
import type {
  AvailableDevice, Counters, DeviceChoice, DeviceInfo, EmbedderInfo, EngineOptions, EngineStats, GenerateResult, Hit, IndexInfo, KvType,
  MemoryInfo, ModelInfo, ModelReport, MolInfo, MolMethod, Ranked, RerankerInfo, Tier, Timeline, VectorStorage,
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
  /** Memory for a model, if known. */
  availableBytes(): number | undefined;
  /** Notices of the self-test since the last call. */
  takeNotices(): string[];
  destroy(): void;
  free(): void;
  /** `half` is the same adapter in the tier `f16`, which the call frees. Rows and result are JSON. */
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
  /** `read` reads weights that do not fit in memory, after all files were pushed. */
  static model(device: Device, files: FileInfo[], options: ModelSettings, read: ReadFile | undefined): Loader<Model>;
  static embedder(device: Device, files: FileInfo[], options: EmbedderRequest["settings"]): Loader<Embedder>;
  static reranker(device: Device, files: FileInfo[], options: RerankerRequest["settings"]): Loader<Reranker>;
  static vision(device: Device, files: FileInfo[], options: { maxTokens?: number }): Loader<VisionEncoder>;
  static index(device: Device, size: number | undefined): Loader<Index>;
  static mol(device: Device, size: number | undefined, storage: VectorStorage | undefined): Loader<Mol>;
  setFolder(name: string): void;
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): Promise<void>;
  end(): void;
  /** Applies a result of `tune`, or returns why it cannot. */
  useTuning(text: string): string | undefined;
  tune(): Promise<string>;
  finish(): Promise<Loaded>;
  free(): void;
}

/** Facts from the headers; `null` if unknown. */
export type HeaderFacts = Pick<ModelReport, "kind" | "weights"> & { chatTemplate: boolean } & {
  [K in "name" | "architecture" | "licence" | "maxContextLength" | "problem"]: NonNullable<ModelReport[K]> | null;
};

/** The headers of a model's files; bytes are pushed as to a {@link Loader}. */
export class Header {
  constructor(files: FileInfo[]);
  setFolder(name: string): void;
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): void;
  end(): void;
  facts(): HeaderFacts;
  /** Memory of the model, without limits. */
  plan(device: Device, options: PlanOptions): Omit<MemoryInfo, "wasmHeapBytes">;
  /** Throws as loading would, as far as headers show. */
  check(device: Device, options: PlanOptions & { readsAgain?: boolean }): void;
  free(): void;
}

export type PlanOptions = { contextLength?: number; kvType?: KvType; memoryLimit?: number };

export class Model {
  private constructor();
  info(): Omit<ModelInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** Bytes of layers that each pass reads from the files, besides rows of tables; `undefined` if all is in memory. */
  streamedBytes(): number | undefined;
  tokenize(text: string, addSpecial: boolean): Uint32Array;
  detokenize(ids: Uint32Array): string;
  chatTokens(messages: readonly object[], options: { now?: number }, pictures: Pictures): Uint32Array;
  /** Further ends of the assistant's turn. */
  chatStops(): { ids: number[]; texts: string[] };
  templates(): string;
  /** The vocabulary, for the other module. */
  tokens(): Uint32Array;
  tokenBytes(): Uint8Array;
  endIds(): Uint32Array;
  /** The text of each token. */
  pieces(ids: Uint32Array): string[];
  encodeWithin(text: string): Uint32Array | undefined;
  /** Digest of the weights, the adapter and the KV type. */
  digest(): string | undefined;
  mostBack(): number | undefined;
  /** Applies a LoRA adapter to new sessions: a GGUF file, or PEFT's weights and configuration. */
  useAdapter(weights: Uint8Array, config: Uint8Array | undefined, scale: number): void;
  useVision(encoder: VisionEncoder): void;
  imageTokens(width: number, height: number): number;
  session(): Session;
  free(): void;
}

export class VisionEncoder {
  private constructor();
  free(): void;
}

/** The pictures of a prompt, in order. */
export class Pictures {
  constructor();
  /** Pixels of 3 or 4 bytes. Resolves to the number of tokens. */
  add(model: Model, width: number, height: number, pixels: Uint8Array): Promise<number>;
  free(): void;
}

/** A constraint: a bit for each allowed token. */
export interface TokenConstraint {
  allowed(): Uint32Array;
  /** Returns the tokens that must follow, or `undefined` if the text is complete. */
  accept(id: number): Uint32Array | undefined;
}

/** Called first, with the number of cached ids. */
export type OnBegin = (nCached: number) => void;
/** Called for each token. `logprobs`: JSON of log-probabilities, if requested. Generation ends if it returns `false`. */
export type OnPiece = (id: number, text: string, isLast: boolean, logprobs: string | undefined) => boolean | Promise<boolean>;

export type EngineOutcome = Omit<GenerateResult, "thinking" | "toolCalls">;

export class Engine {
  constructor(model: Model, options: EngineOptions);
  /** Resolves to the error of a lost device, or to `undefined` when idle. */
  run(onTurn: () => Promise<void>): Promise<unknown>;
  resume(model: Model): void;
  fail(): void;
  submit(ids: Uint32Array, pictures: Pictures, options: GenerationOptions, guide: TokenConstraint | undefined): Text;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  stats(): Omit<EngineStats, "busySeconds"> & { busyMicros: number };
  free(): void;
}

export class Text {
  private constructor();
  pieces(onBegin: OnBegin, onPiece: OnPiece): Promise<EngineOutcome>;
  cancel(): void;
  free(): void;
}

export class Session {
  private constructor();
  generate(
    ids: Uint32Array, pictures: Pictures, options: GenerationOptions, guide: TokenConstraint | undefined, onBegin: OnBegin, onPiece: OnPiece,
    onLost: (error: Error) => Promise<Model>,
  ): Promise<EngineOutcome>;
  timeline(): Promise<Timeline>;
  headWeights(layer: number, head: number, lastQueries: number): Promise<Float32Array>;
  cancel(): void;
  tokens(): Uint32Array;
  nCached(): number;
  saving(): Saving;
  /** Restores a saved session; `read` resolves to some bytes from an offset, to none at the end. */
  restore(size: number, read: (offset: number) => Promise<Uint8Array>): Promise<void>;
  free(): void;
}

export class Embedder {
  private constructor();
  info(): Omit<EmbedderInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  encode(text: string, prompt?: string | null): Uint32Array;
  /** All vectors in one array, or `undefined` if cancelled. */
  embed(
    texts: string[], prompt: string | null | undefined, dimensions: number | undefined, onProgress: (done: number) => void,
  ): Promise<Float32Array | undefined>;
  /** All vectors in one array. */
  embedImages(pictures: PreparedPictures, dimensions: number | undefined): Promise<Float32Array>;
  /** Pictures that fill a batch. */
  nImages(): number;
  cancel(): void;
  free(): void;
}

/** Pictures for {@link Embedder.embedImages}, as patches. */
export class PreparedPictures {
  /** `first`: the number of the first one, for errors. */
  constructor(first: number);
  /** Pixels of 3 or 4 bytes. */
  add(embedder: Embedder, width: number, height: number, pixels: Uint8Array): void;
  free(): void;
}

export class Reranker {
  private constructor();
  info(): Omit<RerankerInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** `undefined` if cancelled. */
  rerank(
    query: string, documents: string[], topK: number | undefined, instruction: string | undefined, onProgress: (done: number) => void,
  ): Promise<Ranked[] | undefined>;
  cancel(): void;
  free(): void;
}

export class Index {
  private constructor();
  static create(device: Device, options: IndexSettings): Index;
  /** Throws for another model. */
  expect(wanted: ExpectedModel): void;
  info(): Omit<IndexInfo, "model" | "pooling"> & { model: string | null; pooling: string | null };
  /** Returns the first vector's id. */
  append(vectors: Float32Array): Promise<number>;
  /** Returns the number of existing ones. */
  delete(ids: Uint32Array): number;
  search(queries: Float32Array, k: number, filter?: Uint32Array): Promise<Hit[][]>;
  saving(): Saving;
  free(): void;
}

/** A file's content, read from a device piece by piece. */
export class Saving {
  private constructor();
  size(): number;
  /** The next bytes, or `undefined` at the end. */
  next(): Promise<Uint8Array | undefined>;
  free(): void;
}

export class Mol {
  private constructor();
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
