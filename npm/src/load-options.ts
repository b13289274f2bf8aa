/** Options of loads, and of objects that can share the device of a loaded one. */

import type { Loaded } from "./loaded.js";
import type {
  DeviceChoice, EmbedderInfo, EmbedderSettings, HubOptions, KernelOptions, KvType, Metric, ModelInfo, ModelSource, Progress, RequestOptions,
  RerankerInfo, RerankerSettings, SourceOptions, TranscriberSettings, VectorStorage,
} from "./types.js";

/** A {@link Model}, an {@link Embedder} or a {@link Reranker}. */
type AnyLoaded = Loaded<ModelInfo | EmbedderInfo | RerankerInfo>;

/** Options of everything that is loaded. */
export interface CommonLoadOptions extends SourceOptions, KernelOptions {
  /** Replaces `fetch` for all requests of the load. It runs in the caller's thread, which also reads the responses. */
  fetch?: (url: string, init?: RequestInit) => Promise<Response>;
  /**
   * Called about ten times a second while bytes arrive, and at the end of each phase; also when the model is loaded
   * again because of a lost device or a damaged cached copy.
   */
  onProgress?: (progress: Progress) => void;
  /** Aborts the load and frees its memory. Downloaded bytes stay for the next load if `cache` is on. */
  signal?: AbortSignal | undefined;
  /**
   * A loaded object whose worker and device this one shares, with its memory and limits. Default: a worker and a
   * device of its own, as `device`, `tier` and `subgroups` say.
   */
  on?: AnyLoaded | undefined;
  /**
   * Whether all tabs of the site that load this address with the same options share one model. When the tab that has
   * it is closed, another one loads it, and generations continue with the same tokens. Ignored in Node and Deno.
   * Default `false`.
   */
  shared?: boolean;
  /** Whether downloads are stored in the browser and read from there. Ignored in Node and Deno. Default `true`. */
  cache?: boolean;
  /**
   * Whether stored downloads are compared with their SHA-256, after the load, while the model is idle. A damaged copy
   * is deleted and downloaded again, and the model loaded from it, with the notice `cache_damaged`. Default `true`.
   */
  verify?: boolean;
  /**
   * Most bytes of weights, cache and activations. Default: the device's limit. A {@link Model} that exceeds it reads
   * some weights from its files in each pass, if these are local or stored.
   */
  memoryLimit?: number;
}

/** Options of {@link Model.load}. */
export interface LoadOptions extends CommonLoadOptions {
  /**
   * Whether to measure the fastest kernels for this model on the GPU: about two seconds, more on slow GPUs or
   * compilers. Results do not change. The choices are stored in the browser and used by later loads. Default `false`.
   */
  tune?: boolean;
  /**
   * Context length in tokens, or `"auto"`: whatever `memoryLimit` or the machine's memory allows, where that is known.
   * Default: the trained context length, at most 4096.
   */
  contextLength?: number | "auto";
  /** Type of cached keys and values. Default `"f16"`. */
  kvType?: KvType;
  /**
   * Whether activations are never rounded. By default the CPU rounds them to 8 bits where they meet quantised weights,
   * which is faster. Default `false`.
   */
  exact?: boolean;
  /** A LoRA adapter. Default: none. */
  adapter?: AdapterOptions;
  /**
   * A vision encoder, so that messages can have images. `true`: the model's own, in the files of its Hugging Face folder
   * or, for `hf:` addresses of GGUF models, in the `mmproj` file beside it. Default: none.
   */
  vision?: true | VisionOptions;
}

/** A vision encoder. Options of addresses and digests are those of its source; without one, the model's apply. */
export interface VisionOptions extends SourceOptions {
  /** A GGUF file (`mmproj`) or a Hugging Face folder, as of {@link ModelSource}. Default: the model's own. */
  source?: ModelSource;
  /** Most tokens of an image; larger images are made smaller. Default 4096. */
  maxTokens?: number;
}

/** A LoRA adapter. Options of addresses and digests are those of its source; the model's do not apply to it. */
export interface AdapterOptions extends SourceOptions {
  /**
   * A GGUF file as of {@link ModelSource}; or the files of PEFT: an address or a path that ends in `/`, or a list of
   * `adapter_config.json` and `adapter_model.safetensors`.
   */
  source: ModelSource;
  /** Strength, multiplied with the file's own. Default 1. */
  scale?: number;
}

/** Options of {@link Model.prefetch}. After an abort, the next download continues it. */
export interface PrefetchOptions extends SourceOptions, RequestOptions, Pick<CommonLoadOptions, "fetch" | "onProgress" | "onNotice"> {}

/** Options of {@link Model.inspect}. */
export interface InspectOptions extends HubOptions, RequestOptions, Pick<LoadOptions, "fetch" | "memoryLimit" | "cache" | "kvType"> {
  /** A loaded object: its worker reads the headers, and on the CPU the model must fit beside it. */
  on?: AnyLoaded | undefined;
  /** The device to plan memory for. Default `auto`: the GPU, if there is one, and the CPU. */
  device?: DeviceChoice;
  /** Context lengths to plan memory for. Default: 512, 2048, 4096 and 8192 up to the trained length, and that. */
  contextLengths?: readonly number[];
  /** Context length that must fit. Default: as of {@link LoadOptions}. */
  contextLength?: number;
}

/** Options of {@link Embedder.load}. */
export interface EmbedderOptions extends CommonLoadOptions, EmbedderSettings {}

/** Options of {@link Reranker.load}. */
export interface RerankerOptions extends CommonLoadOptions, RerankerSettings {}

/** Options of {@link Transcriber.load}. A transcriber has a worker and a device of its own. */
export interface TranscriberOptions extends Omit<CommonLoadOptions, "on" | "shared">, TranscriberSettings {}

/** The device of vectors. */
export interface KeptOptions extends KernelOptions {
  /** A loaded object, such as the vectors' encoder, whose worker and device to share. Default: its own ones. */
  on?: AnyLoaded | undefined;
}

/** Options of {@link Index.create}. */
export interface IndexOptions extends KeptOptions {
  /** Name of the vectors' model. Default: the encoder's. */
  model?: string;
  /** Length of a vector. Default: the encoder's. */
  dims?: number;
  /** Default `cosine`: vectors are stored with length 1, and none may be zero. */
  metric?: Metric;
  /** Default `f32`. The others take a half and little more than a quarter of the memory, and round. */
  storage?: VectorStorage;
}

/** Options of {@link Index.load}. */
export interface LoadIndexOptions extends KeptOptions, HubOptions, Pick<CommonLoadOptions, "cache" | "signal"> {
  /** Required name of the vectors' model. Default: the encoder's. */
  model?: string;
}

/** Options of {@link Mol.load}. */
export interface MolOptions extends KeptOptions, SourceOptions, Pick<CommonLoadOptions, "cache" | "signal"> {
  /** Storage of items' components. Default `f32`; see {@link IndexOptions}. */
  storage?: VectorStorage;
}
