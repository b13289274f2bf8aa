/** What models, encoders and cross-encoders have in common: each is loaded into a worker of its own, runs on a device, and is freed. */

import { Engine } from "./engine.js";
import { TilewrightError } from "./errors.js";
import type { Calls, LoadRequest, SourceSpec } from "./protocol.js";
import type { CommonLoadOptions, Counters, DeviceInfo, MemoryInfo, TextsProgress } from "./types.js";

/** What a worker has loaded. */
interface Parts<Info> {
  engine: Engine;
  info: Info;
  device: DeviceInfo;
}

/** Starts a worker and loads into it. `own` is what the call takes besides what every load does. */
export async function loadInto<K extends "loadModel" | "loadEmbedder" | "loadReranker">(
  call: K,
  source: SourceSpec,
  own: Omit<Calls[K]["args"], keyof LoadRequest>,
  { signal, onProgress, onNotice, device = "auto", tier, cache = true, verify = true, subgroups = true, fetch }: CommonLoadOptions,
): Promise<Parts<Calls[K]["reply"]>> {
  signal?.throwIfAborted();
  const common: LoadRequest = { source, device: { choice: device, subgroups, ...defined({ tier }) }, cache, verify, ownFetch: fetch !== undefined };
  const engine = await Engine.start();
  if (fetch !== undefined) {
    engine.useFetch(fetch);
  }
  let current: DeviceInfo | undefined;
  engine.onNotice = onNotice;
  engine.onProgress = onProgress;
  engine.onDevice = (info) => {
    current = info;
  };
  try {
    const info = await engine.call(call, { ...common, ...own } as Calls[K]["args"], { signal });
    if (current === undefined) {
      throw new TilewrightError("internal", "the engine did not say which device it runs on");
    }
    return { engine, info, device: current };
  } catch (error) {
    engine.onProgress = undefined;
    // The worker puts its files in order; nobody needs to wait for that.
    void engine.close("the model was not loaded");
    throw error;
  }
}

/** Something that is loaded, with its worker. */
export abstract class Loaded<Info> {
  /** @internal */
  readonly engine: Engine;
  #device: DeviceInfo;
  /** What the model's files say. */
  readonly info: Info;

  protected constructor({ engine, info, device }: Parts<Info>) {
    this.engine = engine;
    this.info = info;
    this.#device = device;
    engine.onDevice = (current) => {
      this.#device = current;
    };
  }

  /** What runs the model. Another one than at first after a device was lost. */
  get device(): DeviceInfo {
    return this.#device;
  }

  /** Memory that the model takes now, in bytes. */
  memory(): Promise<MemoryInfo> {
    return this.engine.call("memory", {});
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.engine.call("counters", {});
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next work opens another one and loads the
   * model again. Does nothing on the CPU.
   */
  async destroyDevice(): Promise<void> {
    await this.engine.call("destroyDevice", {});
  }

  /** Frees the model, its device and its worker. What is still asked of it is rejected with `disposed`. */
  free(): void {
    void this.engine.close("the model was freed");
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** As `free`; resolves when the worker is gone. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.engine.close("the model was freed");
  }
}

/** Options of a call that tells how many of these texts are done. */
export function progressOf(
  texts: readonly string[],
  onProgress: ((progress: TextsProgress) => void) | undefined,
): { onEvent?: (done: number) => void } {
  return onProgress === undefined ? {} : { onEvent: (done) => onProgress({ done, total: texts.length }) };
}

/** Without the properties that are `undefined`. */
export function defined<T extends object>(options: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as T;
}
