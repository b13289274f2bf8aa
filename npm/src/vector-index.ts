/** Indices of vectors: which of them suit a query best. */

import { Embeddings, type Embedder } from "./embedder.js";
import type { Engine } from "./engine.js";
import { TilewrightError } from "./errors.js";
import { openDevice, type KernelOptions } from "./kernels.js";
import { defined } from "./loaded.js";
import type { ExpectedModel, KeptIndex } from "./protocol.js";
import type { DeviceInfo, Hit, IndexInfo, Metric, VectorStorage } from "./types.js";

/** Where an index lives, and whose vectors it holds. */
export interface LoadIndexOptions extends KernelOptions {
  /**
   * The encoder that makes the vectors: the index lives on its device and in its worker, as long as both do. Without one, a device is
   * opened in a worker of its own, and the other options are about that.
   */
  on?: Embedder;
  /** Name of the model that makes the vectors. Default: that of the encoder; those of Hugging Face folders are all called `model`. */
  model?: string;
}

/** Options of {@link Index.create}. */
export interface IndexOptions extends LoadIndexOptions {
  /** Numbers in a vector. Default: those of the encoder. */
  dims?: number;
  /** Default `cosine`: vectors are stored with length 1, and none may be zero. */
  metric?: Metric;
  /** Default `f32`. The others take a half and little more than a quarter of the memory, and round. */
  storage?: VectorStorage;
}

/** Options of {@link Index.search}. */
export interface SearchOptions {
  /** Ids that may be found. Default: all. */
  filter?: Iterable<number>;
  /** Rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
}

/**
 * Vectors on a device, and an exact search for the best of them.
 *
 * ```ts
 * const index = await Index.create({ on: embedder });
 * await index.append(await embedder.embed(texts));
 * const [hits] = await index.search(await embedder.embed("Where is the cat?"), 5);
 * console.log(hits.map(({ id, score }) => [texts[id], score]));
 * ```
 *
 * Ids count the vectors as they are appended. Calls queue up in the order in which they are made. A device that is lost takes its indices
 * along: their calls are rejected with `device_lost` from then on; `load` makes new ones of what `save` gave.
 */
export class Index {
  readonly #engine: Engine;
  /** Its number in the worker. */
  readonly #id: number;
  readonly #ownsEngine: boolean;
  #info: IndexInfo;
  #isFree = false;
  /** What searches. */
  readonly device: DeviceInfo;

  private constructor({ engine, device, owned }: Place, { kept, info }: KeptIndex) {
    this.#engine = engine;
    this.#ownsEngine = owned;
    this.#id = kept;
    this.#info = info;
    this.device = device;
  }

  /** An empty index. */
  static async create({ dims, metric, storage, model, on, ...place }: IndexOptions): Promise<Index> {
    const settings = { ...defined({ metric, storage, model: model ?? on?.info.name, pooling: on?.info.pooling }), dims: dims ?? on?.info.dims };
    if (settings.dims === undefined) {
      throw new TilewrightError("option", "dims is missing, expected the numbers in a vector, or an encoder as `on`");
    }
    const args = { settings: { ...settings, dims: settings.dims } };
    return Index.#make(place, on, (engine) => engine.call("createIndex", args));
  }

  /**
   * An index from what `save` gave, on this device or another.
   *
   * @throws {@link TilewrightError}: `format` or `unsupported` for bytes that are none, `index` if it is for another model
   * than `options` name, for vectors of another length, or for ones that were pooled in another way.
   */
  static async load(bytes: Uint8Array, { model, on, ...place }: LoadIndexOptions = {}): Promise<Index> {
    if (!(ArrayBuffer.isView(bytes) && (bytes as Uint8Array)[Symbol.toStringTag] === "Uint8Array")) {
      throw new TilewrightError("option", `bytes is ${kindOf(bytes)}, expected a Uint8Array`);
    }
    const mine = new Uint8Array(bytes);
    const name = model ?? on?.info.name;
    const expected: ExpectedModel | undefined =
      name === undefined ? undefined : { model: name, ...defined({ dims: on?.info.dims, pooling: on?.info.pooling }) };
    const args = { bytes: mine, ...defined({ expected }) };
    return Index.#make(place, on, (engine) => engine.call("loadIndex", args, { transfer: [mine.buffer] }));
  }

  static async #make(options: KernelOptions, on: Embedder | undefined, make: (engine: Engine) => Promise<KeptIndex>): Promise<Index> {
    const place = on === undefined ? { ...await openDevice(options), owned: true } : { engine: on.engine, device: on.device, owned: false };
    try {
      return new Index(place, await make(place.engine));
    } catch (error) {
      if (place.owned) {
        void place.engine.close("the index was not made");
      }
      throw error;
    }
  }

  /** What it is for, and what it held after the last `append` or `delete` that is done. */
  get info(): IndexInfo {
    return this.#info;
  }

  /** Vectors that can be found. */
  get length(): number {
    return this.#info.length;
  }

  /**
   * Appends vectors, one behind the other, and resolves to the id of the first; those of the others follow.
   *
   * @throws {@link TilewrightError}, `index`, that names the vector if one is not finite, is zero where cosines are looked for, or has not
   * as many numbers; nothing is appended then.
   */
  async append(vectors: Float32Array | Embeddings): Promise<number> {
    const mine = vectorsOf("vectors", vectors);
    const { first, info } = await this.#engine.call("appendVectors", { kept: this.#kept(), vectors: mine }, { transfer: [mine.buffer] });
    this.#info = info;
    return first;
  }

  /** Deletes vectors: they are not found any more. Resolves to how many were there until now. */
  async delete(ids: Iterable<number>): Promise<number> {
    const { deleted, info } = await this.#engine.call("deleteVectors", { kept: this.#kept(), ids: idsOf("ids", ids) });
    this.#info = info;
    return deleted;
  }

  /**
   * The best `k` vectors (1 to 1024) for each query, one behind the other in `queries`: higher scores first, among equals the lower id.
   * There are fewer where there are not as many.
   */
  async search(queries: Float32Array | Embeddings, k: number, { filter, signal }: SearchOptions = {}): Promise<Hit[][]> {
    if (!isId(k)) {
      throw new TilewrightError("option", `k is ${k}, expected a whole number from 1 to 1024`);
    }
    const mine = vectorsOf("queries", queries);
    const args = { kept: this.#kept(), queries: mine, k, ...(filter === undefined ? {} : { filter: idsOf("filter", filter) }) };
    return this.#engine.call("searchVectors", args, { transfer: [mine.buffer], signal });
  }

  /** The index as the content of a safetensors file. */
  async save(): Promise<Uint8Array> {
    return this.#engine.call("saveIndex", { kept: this.#kept() });
  }

  /** Destroys the GPU device, as a driver's reset would. For tests of what happens then. Does nothing on the CPU. */
  async destroyDevice(): Promise<void> {
    await this.#engine.call("destroyDevice", {});
  }

  /** Frees the index, and its device and worker if they are its own. What is asked of it afterwards is rejected with `disposed`. */
  free(): void {
    if (this.#isFree) {
      return;
    }
    this.#isFree = true;
    if (this.#ownsEngine) {
      void this.#engine.close("the index was freed");
    } else {
      // With a worker that is gone, its memory is too.
      this.#engine.call("freeIndex", { kept: this.#id }).catch(() => {});
    }
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** Its number in the worker. Throws once it is freed. */
  #kept(): number {
    if (this.#isFree) {
      throw new TilewrightError("disposed", "the index was freed");
    }
    return this.#id;
  }
}

/** A worker with a device. */
interface Place {
  engine: Engine;
  device: DeviceInfo;
  /** Whether it goes with the index. */
  owned: boolean;
}

/** A copy that a worker can be given: the caller keeps what is theirs. */
function vectorsOf(name: string, given: unknown): Float32Array<ArrayBuffer> {
  const vectors = given instanceof Embeddings ? given.vectors : given;
  // Arrays of other realms, such as frames, have other constructors.
  if (!ArrayBuffer.isView(vectors) || (vectors as Float32Array)[Symbol.toStringTag] !== "Float32Array") {
    throw new TilewrightError("option", `${name} is ${kindOf(given)}, expected a Float32Array or what \`embed\` gave`);
  }
  return new Float32Array(vectors as Float32Array);
}

function kindOf(value: unknown): string {
  return Object.prototype.toString.call(value).slice(8, -1);
}

function isId(id: unknown): id is number {
  return Number.isInteger(id) && id as number >= 0 && id as number < 2 ** 32;
}

function idsOf(name: string, ids: Iterable<number>): Uint32Array {
  const list = [...ids];
  const wrong = list.findIndex((id) => !isId(id));
  if (wrong >= 0) {
    throw new TilewrightError("option", `${name}[${wrong}] is ${list[wrong]}, expected an id`);
  }
  return Uint32Array.from(list);
}
