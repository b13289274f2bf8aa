/** Encoders and cross-encoders that are loaded. */

import { codeOf } from "../errors.js";
import type { Calls } from "../protocol.js";
import type { Embedder, Reranker } from "../tilewright.js";
import { LoadedModel } from "./loaded-model.js";

/** What a call computes from its texts alone: when a device is lost, another one computes it anew. */
export abstract class LoadedEncoder<T extends Embedder | Reranker> extends LoadedModel<T> {
  /** What `work` gives, which is nothing once it is cancelled. */
  async run<R>(signal: AbortSignal, work: (loaded: T) => Promise<R | undefined>): Promise<R> {
    try {
      return await this.#once(signal, work);
    } catch (error) {
      if (codeOf(error) !== "device_lost") {
        throw error;
      }
      const loaded = await this.rebuild(error, signal);
      this.lost.push(this.loaded);
      this.loaded = loaded;
      return await this.#once(signal, work);
    } finally {
      this.freeLost();
    }
  }

  async #once<R>(signal: AbortSignal, work: (loaded: T) => Promise<R | undefined>): Promise<R> {
    const { loaded } = this;
    const cancel = (): void => loaded.cancel();
    signal.addEventListener("abort", cancel, { once: true });
    try {
      const result = await work(loaded);
      if (result === undefined) {
        throw signal.reason;
      }
      return result;
    } finally {
      signal.removeEventListener("abort", cancel);
    }
  }
}

/** An encoder. */
export class LoadedEmbedder extends LoadedEncoder<Embedder> {
  encode({ text, prompt }: Calls["encode"]["args"]): Uint32Array {
    return this.loaded.encode(text, prompt);
  }
}

/** A cross-encoder. */
export class LoadedReranker extends LoadedEncoder<Reranker> {}
