/** What indices and mixtures have in common: each is a number in a worker, that of an encoder or one of its own. */

import type { Embedder } from "./embedder.js";
import type { Engine } from "./engine.js";
import { TilewrightError } from "./errors.js";
import { openDevice, type KernelOptions } from "./kernels.js";
import type { DeviceInfo } from "./types.js";

/** Where something is kept. */
export interface KeptOptions extends KernelOptions {
  /**
   * The encoder that makes the vectors: they are kept on its device and in its worker, as long as both last. Without one, a device is
   * opened in a worker of its own, and the other options are about that.
   */
  on?: Embedder | undefined;
}

/** A worker with a device. */
interface Place {
  engine: Engine;
  device: DeviceInfo;
  /** Whether it goes with what is kept there. */
  owned: boolean;
}

/** Something that a worker keeps, with the place. */
export interface Parts<Info> {
  place: Place;
  /** Its number in the worker. */
  kept: number;
  info: Info;
}

/** Has something made where the options say. */
export async function makeIn<Info>(
  { on, ...options }: KeptOptions,
  make: (engine: Engine) => Promise<{ kept: number; info: Info }>,
): Promise<Parts<Info>> {
  const place = on === undefined ? { ...await openDevice(options), owned: true } : { engine: on.engine, device: on.device, owned: false };
  try {
    return { place, ...await make(place.engine) };
  } catch (error) {
    if (place.owned) {
      void place.engine.close("nothing was made");
    }
    throw error;
  }
}

/** How a worker is told to free what it keeps. */
const FREE_CALLS = { index: "freeIndex", mixture: "freeMol" } as const;

/** Vectors that a worker keeps. */
export abstract class Kept<Info extends { length: number }> {
  /** @internal */
  protected readonly engine: Engine;
  readonly #kept: number;
  readonly #ownsEngine: boolean;
  readonly #what: keyof typeof FREE_CALLS;
  #info: Info;
  #isFree = false;
  /** What searches. */
  readonly device: DeviceInfo;

  protected constructor({ place, kept, info }: Parts<Info>, what: keyof typeof FREE_CALLS) {
    this.engine = place.engine;
    this.#ownsEngine = place.owned;
    this.device = place.device;
    this.#kept = kept;
    this.#info = info;
    this.#what = what;
  }

  /** Its number in the worker. */
  protected get kept(): number {
    if (this.#isFree) {
      throw new TilewrightError("disposed", `the ${this.#what} was freed`);
    }
    return this.#kept;
  }

  /** What it is, and what it held when the last call that changes it was done. */
  get info(): Info {
    return this.#info;
  }

  protected set info(info: Info) {
    this.#info = info;
  }

  /** Vectors that can be found. */
  get length(): number {
    return this.#info.length;
  }

  /** Destroys the GPU device, as a driver's reset would. For tests of what happens then. Does nothing on the CPU. */
  async destroyDevice(): Promise<void> {
    await this.engine.call("destroyDevice", {});
  }

  /** Frees it, and its device and worker if they are its own. What is asked of it afterwards is rejected with `disposed`. */
  free(): void {
    if (this.#isFree) {
      return;
    }
    this.#isFree = true;
    if (this.#ownsEngine) {
      void this.engine.close(`the ${this.#what} was freed`);
    } else {
      // With a worker that is gone, its memory is too.
      this.engine.call(FREE_CALLS[this.#what], { kept: this.#kept }).catch(() => {});
    }
  }

  [Symbol.dispose](): void {
    this.free();
  }
}
