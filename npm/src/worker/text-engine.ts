/** Many texts of a model at once, in the worker. */

import { TilewrightError } from "../errors.js";
import type { EngineSettings } from "../protocol.js";
import type { Answer } from "../text.js";
import { Engine, type EngineOutcome, type GenerationOptions, type Model } from "../tilewright.js";
import type { EngineStats } from "../types.js";
import { nextTask, type CallContext } from "./port.js";

/** An engine, and who computes for it. */
export class TextEngine {
  readonly #engine: Engine;
  readonly #freed = new AbortController();

  /** `reload` loads the model again after its device was lost, and says what to go on with. */
  constructor(model: Model, settings: EngineSettings, reload: (lost: unknown, signal: AbortSignal) => Promise<Model>) {
    this.#engine = new Engine(model, settings);
    // It fails only if WASM itself has stopped, which the worker reports.
    void this.#run(reload);
  }

  /** The text that comes after `ids`. */
  async generate(
    ids: Uint32Array, options: GenerationOptions, answer: Answer | undefined, { signal, ending }: CallContext<"generateWith">,
    onBegin: (cachedTokens: number) => void, onPiece: (id: number, text: string, isLast: boolean, logprobs?: string) => void,
  ): Promise<EngineOutcome> {
    this.#freed.signal.throwIfAborted();
    const text = this.#engine.submit(ids, options, answer?.guide);
    const anyEnd = AbortSignal.any([signal, ending, this.#freed.signal]);
    const cancel = (): void => text.cancel();
    anyEnd.addEventListener("abort", cancel, { once: true });
    if (anyEnd.aborted) {
      cancel();
    }
    try {
      const outcome = await text.pieces(onBegin, (...piece) => {
        onPiece(...piece);
        return !anyEnd.aborted;
      });
      this.#freed.signal.throwIfAborted();
      return outcome;
    } finally {
      anyEnd.removeEventListener("abort", cancel);
      text.free();
    }
  }

  stats(): EngineStats {
    const { busyMicros, ...stats } = this.#engine.stats();
    return { ...stats, busySeconds: busyMicros / 1e6 };
  }

  /** Bytes that it takes beside the model's weights. */
  bytes(): number {
    const { totalBytes, weightsBytes } = this.#engine.memory();
    return totalBytes - weightsBytes;
  }

  free(): void {
    this.#freed.abort(new TilewrightError("disposed", "the engine was freed"));
    this.#engine.free();
  }

  async #run(reload: (lost: unknown, signal: AbortSignal) => Promise<Model>): Promise<void> {
    const freed = this.#freed.signal;
    for (let lost; (lost = await this.#engine.run(nextTask)) !== undefined && !freed.aborted;) {
      try {
        const model = await reload(lost, freed);
        freed.throwIfAborted();
        this.#engine.resume(model);
      } catch {
        if (freed.aborted) {
          return;
        }
        this.#engine.fail();
      }
    }
  }
}
