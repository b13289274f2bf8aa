/** Rerankers. */

import { ensure } from "./errors.js";
import { isId, textOf, textsOf } from "./arguments.js";
import { defined } from "./helpers.js";
import type { RerankerOptions } from "./load-options.js";
import { loadInto } from "./load.js";
import { Loaded, progressOf } from "./loaded.js";
import { known } from "./options.js";
import { specOf } from "./spec.js";
import type { ModelSource, Ranked, RerankerInfo, RerankOptions } from "./types.js";

/**
 * A reranker (cross-encoder), loaded onto a device in a worker of its own: it reads a query together with each
 * document.
 *
 * ```ts
 * const reranker = await Reranker.load("https://example.org/ms-marco-MiniLM-L6-v2/");
 * const [best] = await reranker.rerank("what is tax law", documents, { topK: 5 });
 * console.log(documents[best.index], best.score);
 * reranker.free();
 * ```
 *
 * On one device, a score does not depend on the other documents. Calls run in turn.
 */
export class Reranker extends Loaded<RerankerInfo> {
  /**
   * Loads a reranker, a cross-encoder with one label or Qwen3-Reranker, from any source of a model.
   *
   * @throws {@link TilewrightError}, `unsupported` for another kind of model; or the reason of `options.signal`.
   */
  static async load(source: ModelSource, options: RerankerOptions = {}): Promise<Reranker> {
    const { maxTokens, sigmoid, maxBatchTokens, memoryLimit, ...common } = known("Reranker.load", options);
    const settings = defined({ maxTokens, sigmoid, maxBatchTokens, memoryLimit });
    return new Reranker(await loadInto("loadReranker", await specOf(source, common.signal, common), { settings }, common));
  }

  /** The documents by relevance, the best first; equal ones in the given order. */
  async rerank(query: string, documents: readonly string[], options: RerankOptions = {}): Promise<Ranked[]> {
    const { topK, instruction, signal, onProgress } = known("rerank", options);
    ensure(topK === undefined || isId(topK), "option", `topK is ${topK}, expected a whole number`);
    const given = instruction === undefined ? undefined : textOf("instruction", instruction);
    const args = { query: textOf("query", query), documents: textsOf("documents", documents), ...defined({ topK, instruction: given }) };
    return this.call("rerank", args, { signal, onEvent: progressOf(args.documents, onProgress) });
  }
}
