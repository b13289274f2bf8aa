/** Vectors on a device: indices, and mixtures of logits. */

import type { Connection } from "./connection.js";
import type { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";
import { idsOf, isId, vectorsOf } from "./arguments.js";
import { defined } from "./helpers.js";
import type { IndexOptions, KeptOptions, LoadIndexOptions, MolOptions } from "./load-options.js";
import { connectionFor, placeOf } from "./load.js";
import { WorkerObject, type Parts } from "./loaded.js";
import { known } from "./options.js";
import type { ExpectedModel, MadeVectors, Where } from "./protocol.js";
import { specOf } from "./spec.js";
import type { EmbedderInfo, FileSource, Hit, IndexInfo, MolInfo, MolSearchOptions, SearchOptions } from "./types.js";

/** Makes an object where the options say. */
async function makeIn<Info>(
  options: KeptOptions, make: (connection: Connection, where: Where) => Promise<MadeVectors<Info>>,
): Promise<Parts<Info>> {
  const place = placeOf(options);
  const connection = await connectionFor(options);
  return connection.orClose("nothing was made", async () => {
    const { info, device } = await make(connection, place.on ?? place.device);
    connection.device = device;
    return { connection, info };
  });
}

export abstract class VectorCollection<Info extends { length: number }> extends WorkerObject {
  #info: Info;

  protected constructor(parts: Parts<Info>, freed: string) {
    super(parts.connection, freed);
    this.#info = parts.info;
  }

  /** Its facts after the last call that changed it. */
  get info(): Info {
    return this.#info;
  }

  /** Vectors that can be found. */
  get length(): number {
    return this.#info.length;
  }

  /**
   * Appends vectors, one after another, and resolves to the id of the first; the others' ids follow.
   *
   * @throws {@link TilewrightError} if a number is not finite or the last vector is not whole, and of an {@link Index}
   * for a zero vector where cosines are searched; nothing is appended then.
   */
  async append(vectors: Float32Array | Embeddings): Promise<number> {
    const mine = vectorsOf("vectors", vectors);
    const { first, info } = await this.call("appendVectors", { vectors: mine }, { transfer: [mine.buffer] });
    this.update(info as unknown as Info);
    return first;
  }

  /** @internal */
  protected update(info: Info): void {
    this.#info = info;
  }
}

/**
 * Vectors on a device, and their exact search.
 *
 * ```ts
 * const index = await Index.create({ on: embedder });
 * await index.append(await embedder.embed(texts));
 * const [hits] = await index.search(await embedder.embed("Where is the cat?"), 5);
 * console.log(hits.map(({ id, score }) => [texts[id], score]));
 * ```
 *
 * Ids count the vectors as they are appended. Calls run in turn. After its device is lost, calls are rejected with
 * `device_lost`; `load` reads saved indices.
 */
export class Index extends VectorCollection<IndexInfo> {
  private constructor(parts: Parts<IndexInfo>) {
    super(parts, "the index was freed");
  }

  /** An empty index. */
  static async create(options: IndexOptions): Promise<Index> {
    const { dims, metric, storage, model, ...place } = known("Index.create", options);
    const encoder = encoderOf(place);
    const settings = { ...defined({ metric, storage, model: model ?? encoder?.name, pooling: encoder?.pooling }), dims: dims ?? encoder?.dims };
    ensure(settings.dims !== undefined,
      "option", "dims is missing, expected the numbers in a vector, or an encoder as `on`");
    const args = { settings: { ...settings, dims: settings.dims } };
    return new Index(await makeIn(place, (connection, where) => connection.call("createIndex", { where, ...args })));
  }

  /**
   * Loads a saved index from any device. `hf:owner/repo/path` is a file on a hub. Its bytes are streamed to the
   * device.
   *
   * @throws {@link TilewrightError}: `format` or `unsupported` for another kind of file, `index` for another model,
   * length or pooling of vectors; those of downloads; or the reason of `options.signal`.
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
    return new Index(await makeIn(place, (connection, where) => connection.call("loadIndex", { where, ...args }, { signal })));
  }

  /** Deletes vectors. Resolves to the number of those that existed. */
  async delete(ids: Iterable<number>): Promise<number> {
    const { deleted, info } = await this.call("deleteVectors", { ids: idsOf("ids", ids) });
    this.update(info);
    return deleted;
  }

  /** At most `k` vectors (1 to 1024) for each query in `queries`: higher scores first, of equal ones the lower id. */
  async search(queries: Float32Array | Embeddings, k: number, options: SearchOptions = {}): Promise<Hit[][]> {
    const { filter, signal } = known("Index.search", options);
    ensure(isId(k), "option", `k is ${k}, expected a whole number from 1 to 1024`);
    const mine = vectorsOf("queries", queries);
    const args = { queries: mine, k, ...(filter === undefined ? {} : { filter: idsOf("filter", filter) }) };
    return this.call("searchVectors", args, { transfer: [mine.buffer], signal });
  }

  /** The current index as a safetensors file. */
  async save(): Promise<Blob> {
    const pieces: Blob[] = [];
    await this.#write(async (piece) => void pieces.push(new Blob([piece])));
    return new Blob(pieces);
  }

  /** Writes the same to a stream, such as that of a picked file, and closes it, or aborts it after an error. */
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

  async #write(take: (piece: Uint8Array<ArrayBuffer>) => Promise<void>): Promise<void> {
    const save = await this.call("beginSave", {});
    try {
      for (let piece; (piece = await this.call("savedPiece", { save })) !== undefined;) {
        await take(piece as Uint8Array<ArrayBuffer>);
      }
    } finally {
      // The index may have been freed meanwhile.
      await this.call("endSave", { save }).catch(() => {});
    }
  }
}

/** The facts of the encoder that an index is on, if it is. */
function encoderOf({ on }: KeptOptions): EmbedderInfo | undefined {
  return on !== undefined && "dims" in on.info ? on.info : undefined;
}

/**
 * Items on a device, and their search by a mixture of logits (MoL), a learned similarity: Ding & Zhai 2024, "Retrieval
 * with Learned Similarities", arXiv:2407.15462.
 *
 * ```ts
 * const mol = await Mol.load("https://example.org/mol.safetensors", { on: embedder });
 * await mol.append(await embedder.embed(texts));
 * const [hits] = await mol.search(await embedder.embed("Where is the cat?"), 5);
 * console.log(hits.map(({ id, score }) => [texts[id], score]));
 * ```
 *
 * Ids count the items as they are appended; items that were appended together are searched faster. Calls run in turn.
 * After its device is lost, calls are rejected with `device_lost`.
 */
export class Mol extends VectorCollection<MolInfo> {
  /**
   * Loads a mixture without items from a safetensors file with the names of RAILS. `hf:owner/repo/path` is a file on a
   * hub, `hf:owner/repo` the only one there. `info.model` is the encoder that it was trained on, if the file names it.
   *
   * @throws {@link TilewrightError}: `format` or `config` for another kind of file; those of downloads; or the reason
   * of `options.signal`.
   */
  static async load(source: FileSource, options: MolOptions = {}): Promise<Mol> {
    const { storage, cache = true, signal, revision, token, headers, endpoint, sha256, ...place } = known("Mol.load", options);
    signal?.throwIfAborted();
    const hub = defined({ revision, token, headers, endpoint, sha256 });
    const args = { source: await specOf(source, signal, hub, "file"), cache, ...defined({ storage }) };
    const parts = await makeIn(place, (connection, where) => connection.call("loadMol", { where, ...args }, { signal }));
    return new Mol(parts, "the mixture was freed");
  }

  /** At most `k` items for each query in `queries`: higher scores first, of equal ones the lower id. */
  async search(queries: Float32Array | Embeddings, k: number, options: MolSearchOptions = {}): Promise<Hit[][]> {
    const { method, users, signal } = known("Mol.search", options);
    ensure(isId(k), "option", `k is ${k}, expected a whole number from 1 on`);
    const mine = vectorsOf("queries", queries);
    const args = { queries: mine, k, ...defined({ method }), ...(users === undefined ? {} : { users: idsOf("users", users) }) };
    return this.call("searchItems", args, { transfer: [mine.buffer], signal });
  }
}
