/** Retrieval by a learned similarity, a mixture of logits. */

import type { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";
import { idsOf, isId, vectorsOf } from "./given.js";
import { defined } from "./helpers.js";
import type { MolOptions } from "./load-options.js";
import { known } from "./options.js";
import { specOf } from "./spec.js";
import type { FileSource, Hit, MolInfo, MolSearchOptions } from "./types.js";
import { VectorCollection, makeIn } from "./vector-collection.js";

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
