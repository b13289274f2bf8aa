/** Engines in the worker: continuous batching of a model's sequences. */

import { Engine, type Pictures } from "../classes.js";
import { TilewrightError } from "../errors.js";
import { cancelling } from "../helpers.js";
import type { OutputParser } from "../output-parser.js";
import type { EngineOutcome, GenerationOptions, Model } from "../tilewright.js";
import type { EngineOptions, EngineStats } from "../types.js";
import { nextTask, type CallContext } from "./port.js";

/** Loads the model again after its device was lost. */
type Reload = (lost: unknown, signal: AbortSignal) => Promise<Model>;

export class LoadedEngine {
  readonly #make: () => Engine;
  #engine: Engine | undefined;
  readonly #freed = new AbortController();

  constructor(model: () => Model, settings: EngineOptions, private readonly reload: Reload) {
    this.#make = () => new Engine(model(), settings);
    this.#running();
  }

  async generate(
    ids: Uint32Array, pictures: Pictures, options: GenerationOptions, parser: OutputParser | undefined, { signal, stopSignal }: CallContext<"generateWith">,
    onBegin: (cachedTokens: number) => void, onPiece: (id: number, text: string, isLast: boolean, logprobs?: string) => void,
  ): Promise<EngineOutcome> {
    this.#freed.signal.throwIfAborted();
    const sequence = this.#running().submit(ids, pictures, options, parser?.guide);
    const anyEnd = AbortSignal.any([signal, stopSignal, this.#freed.signal]);
    const cancel = (): void => sequence.cancel();
    if (anyEnd.aborted) {
      cancel();
    }
    try {
      const outcome = await cancelling(anyEnd, cancel, () => sequence.pieces(onBegin, (...piece) => {
        onPiece(...piece);
        return !anyEnd.aborted;
      }));
      this.#freed.signal.throwIfAborted();
      return outcome;
    } finally {
      sequence.free();
    }
  }

  stats(): EngineStats {
    const { busyMicros, ...stats } = this.#running().stats();
    return { ...stats, busySeconds: busyMicros / 1e6 };
  }

  /** Bytes that it uses beside the model's weights. */
  bytes(): number {
    const { totalBytes = 0, weightsBytes = 0 } = this.#engine?.memory() ?? {};
    return totalBytes - weightsBytes;
  }

  /** Leaves the model. Running requests are finished; later ones use the model of that time. */
  leave(): void {
    this.#engine?.free();
    this.#engine = undefined;
  }

  free(): void {
    this.#freed.abort(new TilewrightError("disposed", "the engine was freed"));
    this.leave();
  }

  #running(): Engine {
    if (this.#engine === undefined) {
      this.#engine = this.#make();
      // It fails only if WASM itself has stopped, which the worker reports.
      void this.#run(this.#engine);
    }
    return this.#engine;
  }

  async #run(engine: Engine): Promise<void> {
    const freed = this.#freed.signal;
    for (let lost; (lost = await engine.run(nextTask)) !== undefined && engine === this.#engine;) {
      try {
        const model = await this.reload(lost, freed);
        freed.throwIfAborted();
        engine.resume(model);
      } catch {
        if (engine !== this.#engine) {
          return;
        }
        engine.fail();
      }
    }
  }
}
