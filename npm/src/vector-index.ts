/** Indices of vectors: which of them suit a query best. */

import type { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";
import { idsOf, isId, vectorsOf } from "./given.js";
import { VectorCollection, makeIn } from "./vector-collection.js";
import type { IndexOptions, KeptOptions, LoadIndexOptions } from "./load-options.js";
import { defined } from "./helpers.js";
import { known } from "./options.js";
import type { ExpectedModel } from "./protocol.js";
import { specOf } from "./spec.js";
import type { EmbedderInfo, FileSource, Hit, IndexInfo, SearchOptions } from "./types.js";

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
export class Index extends VectorCollection<IndexInfo> {
  /** An empty index. */
  static async create(options: IndexOptions): Promise<Index> {
    const { dims, metric, storage, model, ...place } = known("Index.create", options);
    const encoder = encoderOf(place);
    const settings = { ...defined({ metric, storage, model: model ?? encoder?.name, pooling: encoder?.pooling }), dims: dims ?? encoder?.dims };
    ensure(settings.dims !== undefined, "option", "dims is missing, expected the numbers in a vector, or an encoder as `on`");
    const args = { settings: { ...settings, dims: settings.dims } };
    return new Index(await makeIn(place, (connection, where) => connection.call("createIndex", { where, ...args })), "index");
  }

  /**
   * An index from what `save` gave, on this device or another: a file, its address, bytes or the `Response` that brings them; in Node and
   * Deno also a path. `hf:owner/repo/path` is a file of a hub. It is streamed: its bytes never lie in the engine's memory as a whole.
   *
   * @throws {@link TilewrightError}: `format` or `unsupported` for a file that is none, `index` if it is for another model
   * than `options` name, for vectors of another length, or for ones that were pooled in another way; those of downloads; or the reason of
   * `options.signal`.
   */
  static async load(source: FileSource, options: LoadIndexOptions = {}): Promise<Index> {
    const { model, cache = true, signal, revision, token, headers, endpoint, ...place } = known("Index.load", options);
    signal?.throwIfAborted();
    const encoder = encoderOf(place);
    const name = model ?? encoder?.name;
    const expected: ExpectedModel | undefined =
      name === undefined ? undefined : { model: name, ...defined({ dims: encoder?.dims, pooling: encoder?.pooling }) };
    const spec = await specOf(source, signal, defined({ revision, token, headers, endpoint }), "file");
    const args = { source: spec, cache, ...defined({ expected }) };
    return new Index(await makeIn(place, (connection, where) => connection.call("loadIndex", { where, ...args }, { signal })), "index");
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
    ensure(isId(k), "option", `k is ${k}, expected a whole number from 1 to 1024`);
    const mine = vectorsOf("queries", queries);
    const args = { queries: mine, k, ...(filter === undefined ? {} : { filter: idsOf("filter", filter) }) };
    return this.call("searchVectors", args, { transfer: [mine.buffer], signal });
  }

  /** The index as a safetensors file, as it is now. Its pieces leave the engine's memory one by one. */
  async save(): Promise<Blob> {
    const pieces: Blob[] = [];
    await this.#write(async (piece) => void pieces.push(new Blob([piece])));
    return new Blob(pieces);
  }

  /**
   * Writes the same to a stream, such as that of a file that the user has picked, piece by piece as it takes them, and closes it; after an
   * error it is aborted.
   */
  async saveTo(stream: WritableStream<Uint8Array>): Promise<void> {
    ensure(typeof (stream as Partial<WritableStream> | null | undefined)?.getWriter === "function",
      "option", `stream is ${Object.prototype.toString.call(stream).slice(8, -1)}, expected a WritableStream`);
    const writer = stream.getWriter();
    try {
      await this.#write((piece) => writer.write(piece));
      await writer.close();
    } catch (error) {
      await writer.abort(error).catch(() => {});
      throw error;
    } finally {
      writer.releaseLock();
    }
  }

  /** Hands out the pieces of a file, each when the one before it was taken. */
  async #write(take: (piece: Uint8Array<ArrayBuffer>) => Promise<void>): Promise<void> {
    const save = await this.call("beginSave", {});
    try {
      for (let piece; (piece = await this.call("savedPiece", { save })) !== undefined;) {
        await take(piece as Uint8Array<ArrayBuffer>);
      }
    } finally {
      // An index that was freed meanwhile has ended it.
      await this.call("endSave", { save }).catch(() => {});
    }
  }
}

/** What the encoder that an index is for says of its vectors, if it is on one. */
function encoderOf({ on }: KeptOptions): EmbedderInfo | undefined {
  return on !== undefined && "dims" in on.info ? on.info : undefined;
}
