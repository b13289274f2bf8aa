/** What is loaded and runs: it is loaded again when its device is lost. */

import { codeOf, isTrap, messageOf, TilewrightError, toWire } from "../errors.js";
import type { LoadRequest } from "../protocol.js";
import type { KeptCopy } from "../source.js";
import * as output from "../output-parser.js";
import type { MemoryInfo } from "../types.js";
import { start } from "../wasm.js";
import { deleteDamaged } from "./files.js";
import { Handle, register } from "./handles.js";
import { loadAt, loadOnto, type Loadable, type Loaded, type Recipe } from "./load.js";
import { GPU_FAILURES, openCpu } from "./place.js";
import type { Caller } from "./port.js";
import { idle, inTurn, loading } from "./turns.js";

/** Something that was loaded, on its device. */
export abstract class LoadedModel<T extends Loadable> extends Handle {
  readonly #recipe: Recipe<T>;
  protected readonly caller: Caller;
  readonly fileBytes: number;
  protected loaded: T;
  /** What its passes may read weights from. */
  #again: Loaded<T>["again"];
  /** What was lost with a device, while it may still be in use. */
  protected lost: { free(): void }[] = [];
  /** Settled, unless it is being loaded again. */
  #reloading: Promise<void> = Promise.resolve();
  /** Whether it is loaded: not while it is loaded again, and not after that has failed. */
  #isThere = true;
  readonly #freed = new AbortController();

  constructor(recipe: Recipe<T>, caller: Caller, { place, loaded, fileBytes, again }: Loaded<T>) {
    super(place);
    this.#recipe = recipe;
    this.caller = caller;
    this.loaded = loaded;
    this.fileBytes = fileBytes;
    this.#again = again;
    caller.send({ type: "device", device: place.info() });
  }

  /** What was asked for. */
  protected get request(): LoadRequest {
    return this.#recipe.request;
  }

  override ready(): Promise<void> {
    return this.#reloading;
  }

  /** What the model's files say. */
  info(): ReturnType<T["info"]> & { fileBytes: number } {
    const info = this.loaded.info() as ReturnType<T["info"]>;
    return { ...info, fileBytes: this.fileBytes };
  }

  async memory(): Promise<MemoryInfo> {
    return { ...this.loaded.memory(), wasmHeapBytes: (await start()).buffer.byteLength + await output.memoryBytes() };
  }

  override bytes(): number {
    return this.#isThere ? this.loaded.memory().totalBytes : 0;
  }

  /** Compares the copies that it was loaded from with their digests. If one is damaged, all is loaded again. */
  async verify(copies: KeptCopy[]): Promise<void> {
    const { signal } = this.#freed;
    const asked = { caller: this.caller, signal };
    const turn = async (): Promise<void> => {
      await idle();
      signal.throwIfAborted();
    };
    try {
      if (await deleteDamaged(copies, asked, turn, false)) {
        await inTurn(this.caller.target, asked.signal, () => {
          this.#reloading = this.#reload(asked.signal);
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

  /** Frees what is loaded. */
  protected freeLoaded(): void {
    this.loaded.free();
  }

  protected freeLost(): void {
    for (const object of this.lost.splice(0)) {
      object.free();
    }
  }

  /** Opens a device in the place of the lost one, unless another model has done so, and loads the model again. */
  protected async rebuild(lost: unknown, signal: AbortSignal): Promise<T> {
    const old = this.place;
    const asked = { caller: this.caller, signal };
    let again: Loaded<T>;
    try {
      again = await loadAt(this.#recipe, await old.next(this.caller), asked);
    } catch (error) {
      if (old.request.choice !== "gpu" || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      const why = `the GPU was lost and could not be opened again (${messageOf(error)})`;
      again = await loadAt(this.#recipe, await openCpu(old.request, why, this.caller), asked);
    }
    this.lost.push({ free: () => old.release() });
    this.place = again.place;
    this.#goOnWith(again);
    const device = again.place.info();
    this.caller.send({ type: "device", device });
    this.caller.notify("device_rebuilt", `the device was lost (${messageOf(lost)}); the model was loaded again onto ${device.name}`);
    return again.loaded;
  }

  /** Loads the model again, onto the same device. If that fails there is none any more. */
  async #reload(signal: AbortSignal): Promise<void> {
    this.freeLoaded();
    this.#isThere = false;
    const again = await loadOnto(this.place.device, this.#recipe, { caller: this.caller, signal });
    this.#goOnWith(again);
    this.loaded = again.loaded;
    this.#isThere = true;
  }

  /** Has passes read from the files that it was loaded from now. */
  #goOnWith({ again }: Pick<Loaded<T>, "again">): void {
    this.#again?.close();
    this.#again = again;
  }
}

/** Opens a device or takes the one that is named, loads onto it, and says what was loaded. */
export function load<T extends Loadable, R extends LoadedModel<T>>(
  kind: new (recipe: Recipe<T>, caller: Caller, loaded: Loaded<T>) => R,
  recipe: Recipe<T>,
  asked: { caller: Caller; signal: AbortSignal },
): Promise<ReturnType<R["info"]>> {
  const { caller, signal } = asked;
  return inTurn(caller.target, signal, () => loading(signal, async () => {
    const parts = await loadAt(recipe, recipe.request.on ?? recipe.request.device, asked);
    const model = register(caller.target, new kind(recipe, caller, parts));
    if (recipe.request.verify) {
      void model.verify(parts.copies);
    }
    return model.info() as ReturnType<R["info"]>;
  }));
}
