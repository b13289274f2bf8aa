/** Objects of a worker, as callers hold them. */

import type { CallOptions, Connection } from "./connection.js";
import { finalizer } from "./platform.js";
import type { CallName, Calls } from "./protocol.js";
import type { Counters, DeviceInfo, MemoryInfo, TextsProgress } from "./types.js";

/** Frees objects that were collected. */
const collected = finalizer<Connection>((connection) => void connection.close("nobody refers to it any more"));

/** An object of a worker. It is freed by `free`, or some time after the last reference to it is gone. */
export abstract class WorkerObject {
  /** @internal */
  readonly connection: Connection;
  readonly #state: { device: DeviceInfo };
  readonly #freed: string;

  protected constructor({ connection, device }: { connection: Connection; device: DeviceInfo }, freed: string) {
    this.connection = connection;
    this.#freed = freed;
    const state = { device };
    this.#state = state;
    // The connection outlives this object, so it must not refer to it.
    connection.onDevice = (current) => {
      state.device = current;
    };
    collected.register(this, connection);
  }

  /** Its device, which changes if that is lost and a model is loaded onto another. */
  get device(): DeviceInfo {
    return this.#state.device;
  }

  /** Counters of the device. */
  counters(): Promise<Counters> {
    return this.call("counters", {});
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next work of a model opens
   * another device and loads the model again. Does nothing on the CPU.
   */
  async destroyDevice(): Promise<void> {
    await this.call("destroyDevice", {});
  }

  /** Frees it, and its device and worker after their last use. Pending and later calls reject with `disposed`. */
  free(): void {
    void this[Symbol.asyncDispose]();
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** As `free`; resolves when it is done. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.connection.close(this.#freed);
  }

  /** Calls the worker. The object is not collected meanwhile. @internal */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.connection.call(name, args, { ...options, keeps: this });
  }
}

/** The parts of a loaded object. */
export interface Parts<Info> {
  connection: Connection;
  info: Info;
  device: DeviceInfo;
}

/** A loaded model, encoder or reranker. */
export abstract class Loaded<Info> extends WorkerObject {
  /** Facts from the model's files. */
  readonly info: Info;

  protected constructor(parts: Parts<Info>) {
    super(parts, "the model was freed");
    this.info = parts.info;
  }

  /** Memory of the model. */
  memory(): Promise<MemoryInfo> {
    return this.call("memory", {});
  }
}

/** Options of a call that reports how many texts are finished. */
export function progressOf(
  texts: readonly string[], onProgress: ((progress: TextsProgress) => void) | undefined,
): { onEvent?: (done: number) => void } {
  return onProgress === undefined ? {} : { onEvent: (done) => onProgress({ done, total: texts.length }) };
}

