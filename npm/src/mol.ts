/** Retrieval by a learned similarity: items that suit a query best under a mixture of logits. */

import type { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";
import { idsOf, isId, vectorsOf } from "./given.js";
import { VectorCollection, makeIn } from "./vector-collection.js";
import type { MolOptions } from "./load-options.js";
import { defined } from "./helpers.js";
import { known } from "./options.js";
import { specOf } from "./spec.js";
import type { FileSource, Hit, MolInfo, MolSearchOptions } from "./types.js";

/**
 * Items on a device, and the search for the best of them by a mixture of logits (MoL), a similarity that is learned: Ding & Zhai 2024,
 * "Retrieval with Learned Similarities", arXiv:2407.15462.
 *
 * ```ts
 * const mol = await Mol.load("https://example.org/mol.safetensors", { on: embedder });
 * await mol.append(await embedder.embed(texts));
 * const [hits] = await mol.search(await embedder.embed("Where is the cat?"), 5);
 * console.log(hits.map(({ id, score }) => [texts[id], score]));
 * ```
 *
 * Ids count the items as they are appended; many at once are searched faster than a few at a time. Calls queue up in the order in which
 * they are made. A device that is lost takes its items along: calls are rejected with `device_lost` from then on.
 */
export class Mol extends VectorCollection<MolInfo> {
  /**
   * A mixture without items, from the content (or the `Response` that brings it) or the address of a safetensors file with the names of RAILS; in Node and Deno also a path. `hf:owner/repo/path` is a file of a hub, `hf:owner/repo` the one that is there.
   * Whether it was trained on the vectors of the encoder that it is `on`, `info.model` tells, where the file does.
   *
   * @throws {@link TilewrightError}: `format` or `config` for a file that is no mixture, or has one in a form that is not known; those of
   * downloads; or the reason of `options.signal`.
   */
  static async load(source: FileSource, options: MolOptions = {}): Promise<Mol> {
    const { storage, cache = true, signal, revision, token, headers, endpoint, sha256, ...place } = known("Mol.load", options);
    signal?.throwIfAborted();
    const hub = defined({ revision, token, headers, endpoint, sha256 });
    const args = { source: await specOf(source, signal, hub, "file"), cache, ...defined({ storage }) };
    return new Mol(await makeIn(place, (connection, where) => connection.call("loadMol", { where, ...args }, { signal })), "mixture");
  }

  /**
   * The best `k` items for each query, one behind the other in `queries`: higher scores first, among equals the lower id. There are fewer
   * where there are not as many.
   */
  async search(queries: Float32Array | Embeddings, k: number, options: MolSearchOptions = {}): Promise<Hit[][]> {
    const { method, users, signal } = known("Mol.search", options);
    ensure(isId(k), "option", `k is ${k}, expected a whole number from 1 on`);
    const mine = vectorsOf("queries", queries);
    const args = { queries: mine, k, ...defined({ method }), ...(users === undefined ? {} : { users: idsOf("users", users) }) };
    return this.call("searchItems", args, { transfer: [mine.buffer], signal });
  }
}
