/** Loaded encoders and rerankers. */

import { cancelling } from "../helpers.js";
import type { Embedder, Reranker } from "../tilewright.js";
import { LoadedModel } from "./loaded-model.js";

/** An encoder or a reranker. Its results depend on the texts alone, so a lost call is repeated. */
abstract class LoadedEncoder<T extends Embedder | Reranker> extends LoadedModel<T> {
  get encoder(): T {
    return this.loaded;
  }

  /** The result of `work`, which is `undefined` after a cancellation. */
  run<R>(signal: AbortSignal, work: (loaded: T) => Promise<R | undefined>): Promise<R> {
    return this.retrying(signal, async () => {
      const { loaded } = this;
      const result = await cancelling(signal, () => loaded.cancel(), () => work(loaded));
      if (result === undefined) {
        throw signal.reason;
      }
      return result;
    });
  }
}

export class LoadedEmbedder extends LoadedEncoder<Embedder> {}

export class LoadedReranker extends LoadedEncoder<Reranker> {}
