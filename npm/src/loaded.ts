/** Objects of a worker, as callers hold them. */

import type { CallOptions, Connection } from "./connection.js";
import { finalizer } from "./platform.js";
import type { CallName, Calls } from "./protocol.js";
import type { Counters, DeviceInfo, MemoryInfo, TextsProgress } from "./types.js";

/** The parts of such an object. */
export interface Parts<Info> {
  connection: Connection;
  info: Info;
  device: DeviceInfo;
}

/** Frees objects that were collected. */
const forgotten = finalizer<Connection>((connection) => void connection.close("nobody refers to it any more"));

/** An object of a worker. It is freed by `free`, or some time after the last reference to it is gone. */
export abstract class WorkerObject<Info> {
  /** @internal */
  readonly connection: Connection;
  readonly #kind: string;
  readonly #state: { device: DeviceInfo };
  #info: Info;

  protected constructor({ connection, info, device }: Parts<Info>, kind = "model") {
    this.connection = connection;
    this.#kind = kind;
    this.#info = info;
    const state = { device };
    this.#state = state;
    // The connection outlives this object, so it must not refer to it.
    connection.onDevice = (current) => {
      state.device = current;
    };
    forgotten.register(this, connection);
  }

  /** What the files say; of vectors, what they were after the last call that changes them. */
  get info(): Info {
    return this.#info;
  }

  protected set info(info: Info) {
    this.#info = info;
  }

  /** What runs it. Changes if a device is lost and the model is loaded onto another. */
  get device(): DeviceInfo {
    return this.#state.device;
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next work of a model opens another device and
   * loads the model again. Does nothing on the CPU.
   */
  async destroyDevice(): Promise<void> {
    await this.call("destroyDevice", {});
  }

  /** Frees it, and its device and worker if nothing else uses them. Pending and later calls are rejected with `disposed`. */
  free(): void {
    void this[Symbol.asyncDispose]();
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** As `free`; resolves when it is done. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.connection.close(`the ${this.#kind} was freed`);
  }

  /** Calls the worker. The object is not collected meanwhile. @internal */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.connection.call(name, args, { ...options, keeps: this });
  }
}

/** A loaded model, encoder or reranker. */
export abstract class Loaded<Info> extends WorkerObject<Info> {
  /** Memory that the model takes now, in bytes. */
  memory(): Promise<MemoryInfo> {
    return this.call("memory", {});
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.call("counters", {});
  }
}

/** Options of a call that tells how many of these texts are done. */
export function progressOf(
  texts: readonly string[],
  onProgress: ((progress: TextsProgress) => void) | undefined,
): { onEvent?: (done: number) => void } {
  return onProgress === undefined ? {} : { onEvent: (done) => onProgress({ done, total: texts.length }) };
}

