/** Options of loads, and of all else that can be on the device of what is loaded already. */

import type { Loaded } from "./loaded.js";
import type {
  DeviceChoice, EmbedderInfo, HubOptions, KernelOptions, KvType, Metric, ModelInfo, ModelSource, Notice, Pooling, Progress, RerankerInfo,
  SourceOptions, Tier, VectorStorage,
} from "./types.js";

/** A {@link Model}, an {@link Embedder} or a {@link Reranker}. */
type AnyLoaded = Loaded<ModelInfo | EmbedderInfo | RerankerInfo>;

/** Options of everything that is loaded. */
export interface CommonLoadOptions extends SourceOptions {
  /**
   * What sends all requests for the model instead of `fetch`, for servers that want more than it does by itself. It runs in the caller's
   * thread; its answers are read there piece by piece.
   */
  fetch?: (url: string, init?: RequestInit) => Promise<Response>;
  /**
   * Called about ten times a second while bytes arrive, and once at the end of each phase; also when the model is loaded again
   * because its device was lost or its kept copy is damaged.
   */
  onProgress?: (progress: Progress) => void;
  /** Called when something was decided that a user may want to know: no GPU, no room for the cache, a device that was rebuilt. */
  onNotice?: (notice: Notice) => void;
  /** Ends the load. Everything that was allocated is freed; what was downloaded stays for the next time if `cache` is on. */
  signal?: AbortSignal;
  /**
   * What is loaded already: this is loaded into the same worker and onto the same device, so that they share memory and its limits. Without
   * it, a worker and a device of its own, which `device`, `tier` and `subgroups` are about.
   */
  on?: AnyLoaded | undefined;
  /**
   * Whether all tabs of the site that load this from the same address with the same options share one: one of them has it, and the others
   * ask that one. When it is closed, another one loads it, and texts that are being generated go on with the same tokens. Node and Deno have
   * no tabs, and load it each time. Default `false`.
   */
  shared?: boolean;
  /** What should run the model. Default `auto`. */
  device?: DeviceChoice;
  /** Kernels to use, for tests and comparisons. Default: the fastest that the adapter offers. */
  tier?: Tier;
  /**
   * Whether downloads are kept in the browser's storage and taken from there. Default `true`. Node and Deno have no such storage:
   * there nothing is kept, and paths are read from the disk.
   */
  cache?: boolean;
  /**
   * Whether a kept download is compared with the SHA-256 that it had when it was new. That happens after the load, while nothing is
   * asked of the model. A damaged copy is deleted, downloaded again, and the model loaded from it, with the notice `cache_damaged`.
   * Default `true`.
   */
  verify?: boolean;
  /**
   * Bytes that weights, cache and activations may take together. Default: what the device allows. Of a {@link Model} that takes more, some
   * weights are read from its files in each pass, if those are on this machine or kept.
   */
  memoryLimit?: number;
  /** Whether to use subgroup operations where the browser has them. Default `true`. */
  subgroups?: boolean;
}

/** Options of {@link Model.load}. */
export interface LoadOptions extends CommonLoadOptions {
  /**
   * Whether to measure how the GPU takes this model's matrices best: for about two seconds, longer where the GPU or its compiler is
   * slow. What is found changes no result and is kept in the browser; later loads follow it without measuring. Default `false`.
   */
  tune?: boolean;
  /**
   * Tokens that the context holds, or `"auto"`: as many as `memoryLimit` or the machine's memory allows, where that is known. Default:
   * what the model was trained for, at most 4096.
   */
  contextLength?: number | "auto";
  /** What keys and values are cached as. Default `"f16"`. */
  kvType?: KvType;
  /** A LoRA adapter that the model is used with. Default: none. */
  adapter?: AdapterOptions;
}

/** A LoRA adapter. The options of addresses and digests are those of its source; what is given for the model does not go to it. */
export interface AdapterOptions extends SourceOptions {
  /**
   * A GGUF file as of {@link ModelSource}; or as PEFT saves an adapter, an address or a path that ends in `/`, or the files
   * `adapter_config.json` and `adapter_model.safetensors` in a list.
   */
  source: ModelSource;
  /** How strong it is, beside what its file says. Default 1. */
  scale?: number;
}

/** Options of {@link Model.inspect}. */
export interface InspectOptions extends HubOptions {
  /** As of {@link CommonLoadOptions}. */
  fetch?: (url: string, init?: RequestInit) => Promise<Response>;
  /** Rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
  /** What is loaded already: its worker reads the headers, and on the CPU the model has to fit beside it. */
  on?: AnyLoaded | undefined;
  /** What the memory is planned for. Default `auto`: the GPU, if there is one, and the CPU. */
  device?: DeviceChoice;
  /** Whether headers are taken from a copy that is kept. Default `true`. */
  cache?: boolean;
  /** Contexts whose memory is told. Default: 512, 2048, 4096 and 8192 tokens as far as the model has them, and the longest. */
  contextLengths?: readonly number[];
  /** Tokens of the context that has to fit. Default, as that of a load: what the model was trained for, at most 4096. */
  contextLength?: number;
  /** What keys and values are cached as. Default `"f16"`. */
  kvType?: KvType;
  /** Bytes that the model may take. Default: what the device allows. */
  memoryLimit?: number;
}

/** Options of {@link Embedder.load}. What the model's files say of its use holds where an option is left out. */
export interface EmbedderOptions extends CommonLoadOptions {
  /** Tokens to which a text is cut, those around it included. */
  maxTokens?: number;
  pooling?: Pooling;
  /** Whether vectors are divided by their Euclidean norm, so that a dot product is the cosine. */
  normalize?: boolean;
  /** Tokens that are computed together; a longer text is a batch by itself. Default: 8192 on a GPU, 1024 on the CPU. */
  maxBatchTokens?: number;
  /** Texts whose vectors are remembered. Default 0. */
  cachedVectors?: number;
}

/** Options of {@link Reranker.load}. What the model's files say of its use holds where an option is left out. */
export interface RerankerOptions extends CommonLoadOptions {
  /** Tokens to which a query with a document is cut, those around them included: the longer text first. */
  maxTokens?: number;
  /** Whether a score is the sigmoid of the model's logit, 0 to 1, rather than the logit itself. */
  sigmoid?: boolean;
  /** As of {@link EmbedderOptions}. */
  maxBatchTokens?: number;
}

/** Where something is kept. */
export interface KeptOptions extends KernelOptions {
  /**
   * What is loaded already, such as the encoder that makes the vectors: they are kept on its device and in its worker. Without it, a device
   * is opened in a worker of its own, and the other options are about that.
   */
  on?: AnyLoaded | undefined;
}

/** Options of {@link Index.create}. */
export interface IndexOptions extends KeptOptions {
  /** Name of the model that makes the vectors. Default: that of the encoder. */
  model?: string;
  /** Numbers in a vector. Default: those of the encoder. */
  dims?: number;
  /** Default `cosine`: vectors are stored with length 1, and none may be zero. */
  metric?: Metric;
  /** Default `f32`. The others take a half and little more than a quarter of the memory, and round. */
  storage?: VectorStorage;
}

/** Options of {@link Index.load}. */
export interface LoadIndexOptions extends KeptOptions, HubOptions {
  /** Name of the model that the vectors should be of. Default: that of the encoder. */
  model?: string;
  /** Whether a download is kept in the browser's storage and taken from there. Default `true`. */
  cache?: boolean;
  /** Ends the load with the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** Options of {@link Mol.load}. */
export interface MolOptions extends KeptOptions, SourceOptions {
  /** How components of items are stored. Default `f32`. The others take a half and little more than a quarter of the memory, and round. */
  storage?: VectorStorage;
  /** Whether a download is kept in the browser's storage and taken from there. Default `true`. */
  cache?: boolean;
  /** Ends the load with the signal's reason. */
  signal?: AbortSignal | undefined;
}
