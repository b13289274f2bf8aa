/** Loaded models, encoders, rerankers and transcribers. Each is loaded again when its device is lost. */

import { codeOf, isTrap, messageOf, TilewrightError, toWire } from "../errors.js";
import { cancelling } from "../helpers.js";
import type { StoredCopy } from "../source.js";
import type { Embedder, Reranker } from "../tilewright.js";
import type { Transcriber } from "../tilewright_speech.js";
import type { MemoryInfo } from "../types.js";
import { heapBytes } from "../wasm.js";
import { deleteDamaged } from "./files.js";
import { Handle, register } from "./handles.js";
import { loadAt, loadOnto, type Loadable, type Loaded, type Recipe } from "./load.js";
import { GPU_FAILURES, openCpu } from "./place.js";
import type { Caller } from "./port.js";
import { idle, inTurn } from "./turns.js";

export abstract class LoadedModel<T extends Loadable> extends Handle {
  readonly #fileBytes: number;
  loaded: T;
  #again: Loaded<T>["again"];
  /** Objects of lost devices that may still be in use. */
  protected lost: { free(): void }[] = [];
  #reloading: Promise<void> = Promise.resolve();
  /** False during a reload, and after one that failed. */
  #isThere = true;
  readonly #freed = new AbortController();

  constructor(
    protected readonly recipe: Recipe<T>, protected readonly caller: Caller, { place, loaded, fileBytes, again }: Loaded<T>,
  ) {
    super(place);
    this.loaded = loaded;
    this.#fileBytes = fileBytes;
    this.#again = again;
    caller.send({ type: "device", device: place.info() });
  }

  override ready(): Promise<void> {
    return this.#reloading;
  }

  info(): ReturnType<T["info"]> & { fileBytes: number } {
    return { ...this.loaded.info() as ReturnType<T["info"]>, fileBytes: this.#fileBytes };
  }

  async memory(): Promise<MemoryInfo> {
    return { ...this.loaded.memory(), wasmHeapBytes: await heapBytes() };
  }

  override bytes(): number {
    return this.#isThere ? this.loaded.memory().totalBytes : 0;
  }

  /** Compares the copies that it was loaded from with their digests. Loads it again if one is damaged. */
  async verify(copies: StoredCopy[]): Promise<void> {
    const { signal } = this.#freed;
    const turn = async (): Promise<void> => {
      await idle();
      signal.throwIfAborted();
    };
    try {
      if (await deleteDamaged(copies, { caller: this.caller, signal }, turn, false)) {
        await inTurn(this.caller.target, signal, () => {
          this.#reloading = this.#reload(signal);
          return this.#reloading;
        });
      }
    } catch (error) {
      if (signal.aborted) {
        return;
      }
      const why = new TilewrightError(codeOf(error), `the model was loaded from a damaged copy and could not be loaded again: ${messageOf(error)}`);
      if (isTrap(error)) {
        throw error;
      }
      this.caller.send({ type: "ended", error: toWire(why) });
    }
  }

  protected override release(): void {
    this.#freed.abort();
    this.#again?.close();
    this.freeLost();
    if (this.#isThere) {
      this.freeLoaded();
    }
  }

  protected freeLoaded(): void {
    this.loaded.free();
  }

  protected freeLost(): void {
    this.lost.splice(0).forEach((object) => object.free());
  }

  /** Does `work`. If it loses the device, loads the model onto another and does it once more. */
  protected async retrying<R>(signal: AbortSignal, work: () => Promise<R>): Promise<R> {
    try {
      return await work();
    } catch (error) {
      if (codeOf(error) !== "device_lost") {
        throw error;
      }
      this.replace(await this.rebuild(error, signal));
      return await work();
    } finally {
      this.freeLost();
    }
  }

  /** Replaces the lost model, which may still be in use. */
  protected replace(model: T): void {
    this.lost.push(this.loaded);
    this.loaded = model;
  }

  /** Loads the model onto the successor of its lost device, which all its models share. */
  protected async rebuild(lost: unknown, signal: AbortSignal): Promise<T> {
    const old = this.place;
    const requester = { caller: this.caller, signal };
    const recipe = this.recipe.exact?.() ?? this.recipe;
    let again: Loaded<T>;
    try {
      again = await loadAt(recipe, await old.next(this.caller), requester);
    } catch (error) {
      if (old.request.choice !== "gpu" || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      const why = `the GPU was lost and could not be opened again (${messageOf(error)})`;
      again = await loadAt(recipe, await openCpu(old.request, why, this.caller), requester);
    }
    this.lost.push(old);
    this.place = again.place;
    this.#readFrom(again);
    const device = again.place.info();
    this.caller.send({ type: "device", device });
    this.caller.notify("device_rebuilt", `the device was lost (${messageOf(lost)}); the model was loaded again onto ${device.name}`);
    return again.loaded;
  }

  /** Loads the model again onto the same device. If that fails, there is none. */
  async #reload(signal: AbortSignal): Promise<void> {
    this.freeLoaded();
    this.#isThere = false;
    const again = await loadOnto(this.place.device, this.recipe, { caller: this.caller, signal });
    this.#readFrom(again);
    this.loaded = again.loaded;
    this.#isThere = true;
  }

  /** Has passes read weights from the files of the latest load. */
  #readFrom({ again }: Pick<Loaded<T>, "again">): void {
    this.#again?.close();
    this.#again = again;
  }
}

/** A model without state: results depend on the arguments alone, so a lost call is repeated. */
export abstract class LoadedFunction<T extends Embedder | Reranker | Transcriber> extends LoadedModel<T> {
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

export class LoadedReranker extends LoadedFunction<Reranker> {}

/**
 * Loads onto a new device or the one that the request names, after earlier loads, whose memory is then known. Resolves
 * to the facts of what was loaded.
 */
export function load<T extends Loadable, R extends LoadedModel<T>>(
  kind: new (recipe: Recipe<T>, caller: Caller, loaded: Loaded<T>) => R,
  recipe: Recipe<T>,
  requester: { caller: Caller; signal: AbortSignal },
): Promise<ReturnType<R["info"]>> {
  const { caller, signal } = requester;
  return inTurn(caller.target, signal, () => inTurn("loads", signal, async () => {
    const parts = await loadAt(recipe, recipe.request.on ?? recipe.request.device, requester);
    const model = register(caller.target, new kind(recipe, caller, parts));
    if (recipe.request.verify) {
      void model.verify(parts.copies);
    }
    return model.info() as ReturnType<R["info"]>;
  }));
}
