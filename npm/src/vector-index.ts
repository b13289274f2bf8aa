/** Indices of vectors: which of them suit a query best. */

import type { Embeddings } from "./embeddings.js";
import { TilewrightError } from "./errors.js";
import { bytesOf, idsOf, isId, vectorsOf } from "./given.js";
import { Kept, makeIn, type KeptOptions } from "./kept.js";
import { defined } from "./loaded.js";
import { known } from "./options.js";
import type { ExpectedModel } from "./protocol.js";
import type { EmbedderInfo, Hit, IndexInfo, Metric, VectorStorage } from "./types.js";

/** Where an index lives, and whose vectors it holds. */
export interface LoadIndexOptions extends KeptOptions {
  /** Name of the model that makes the vectors. Default: that of the encoder. */
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
export class Index extends Kept<IndexInfo> {
  /** An empty index. */
  static async create(options: IndexOptions): Promise<Index> {
    const { dims, metric, storage, model, ...place } = known("Index.create", options);
    const encoder = encoderOf(place);
    const settings = { ...defined({ metric, storage, model: model ?? encoder?.name, pooling: encoder?.pooling }), dims: dims ?? encoder?.dims };
    if (settings.dims === undefined) {
      throw new TilewrightError("option", "dims is missing, expected the numbers in a vector, or an encoder as `on`");
    }
    const args = { settings: { ...settings, dims: settings.dims } };
    return new Index(await makeIn(place, (line, where) => line.call("createIndex", { where, ...args })), "index");
  }

  /**
   * An index from what `save` gave, on this device or another.
   *
   * @throws {@link TilewrightError}: `format` or `unsupported` for bytes that are none, `index` if it is for another model
   * than `options` name, for vectors of another length, or for ones that were pooled in another way.
   */
  static async load(bytes: Uint8Array, options: LoadIndexOptions = {}): Promise<Index> {
    const { model, ...place } = known("Index.load", options);
    const mine = bytesOf("bytes", bytes);
    const encoder = encoderOf(place);
    const name = model ?? encoder?.name;
    const expected: ExpectedModel | undefined =
      name === undefined ? undefined : { model: name, ...defined({ dims: encoder?.dims, pooling: encoder?.pooling }) };
    const args = { bytes: mine, ...defined({ expected }) };
    return new Index(await makeIn(place, (line, where) => line.call("loadIndex", { where, ...args }, { transfer: [mine.buffer] })), "index");
  }

  /**
   * Appends vectors, one behind the other, and resolves to the id of the first; those of the others follow.
   *
   * @throws {@link TilewrightError}, `index`, that names the vector if one is not finite, is zero where cosines are looked for, or has not
   * as many numbers; nothing is appended then.
   */
  async append(vectors: Float32Array | Embeddings): Promise<number> {
    const mine = vectorsOf("vectors", vectors);
    const { first, info } = await this.call("appendVectors", { vectors: mine }, { transfer: [mine.buffer] });
    this.info = info;
    return first;
  }

  /** Deletes vectors: they are not found any more. Resolves to how many were there until now. */
  async delete(ids: Iterable<number>): Promise<number> {
    const { deleted, info } = await this.call("deleteVectors", { ids: idsOf("ids", ids) });
    this.info = info;
    return deleted;
  }

  /**
   * The best `k` vectors (1 to 1024) for each query, one behind the other in `queries`: higher scores first, among equals the lower id.
   * There are fewer where there are not as many.
   */
  async search(queries: Float32Array | Embeddings, k: number, options: SearchOptions = {}): Promise<Hit[][]> {
    const { filter, signal } = known("Index.search", options);
    if (!isId(k)) {
      throw new TilewrightError("option", `k is ${k}, expected a whole number from 1 to 1024`);
    }
    const mine = vectorsOf("queries", queries);
    const args = { queries: mine, k, ...(filter === undefined ? {} : { filter: idsOf("filter", filter) }) };
    return this.call("searchVectors", args, { transfer: [mine.buffer], signal });
  }

  /** The index as the content of a safetensors file. */
  async save(): Promise<Uint8Array> {
    return this.call("saveIndex", {});
  }
}

/** What the encoder that an index is for says of its vectors, if it is on one. */
function encoderOf({ on }: KeptOptions): EmbedderInfo | undefined {
  return on !== undefined && "dims" in on.info ? on.info : undefined;
}
