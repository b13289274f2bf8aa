/** Objects of a worker, as callers hold them. */

import type { CallOptions, Connection } from "./connection.js";
import { ensure } from "./errors.js";
import { finalizer } from "./platform.js";
import type { CallName, Calls } from "./protocol.js";
import type { Counters, DeviceInfo, MemoryInfo, TextsOptions } from "./types.js";

/** Frees objects that were collected. */
const collected = finalizer<Connection>((connection) => void connection.close("nobody refers to it any more"));

/** An object of a worker. It is freed by `free`, or some time after the last reference to it is gone. */
export abstract class WorkerObject {
  /** @internal */
  readonly connection: Connection;
  readonly #freed: string;

  protected constructor(connection: Connection, freed: string) {
    // The connection outlives this object, so it must not refer to it.
    this.connection = connection;
    this.#freed = freed;
    collected.register(this, connection);
  }

  /** Its device, which changes if that is lost and a model is loaded onto another. */
  get device(): DeviceInfo {
    const { device } = this.connection;
    ensure(device !== undefined, "internal", "the engine did not say which device it runs on");
    return device;
  }

  /** Counters of the device. */
  counters(): Promise<Counters> {
    return this.call("counters", {});
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next work of a model opens
   * another device and loads the model again. Does nothing on the CPU.
   */
  destroyDevice(): Promise<void> {
    return this.call("destroyDevice", {});
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
}

/** A loaded model, encoder, reranker or transcriber. */
export abstract class Loaded<Info> extends WorkerObject {
  /** Facts from the model's files. */
  readonly info: Info;

  protected constructor({ connection, info }: Parts<Info>) {
    super(connection, "the model was freed");
    this.info = info;
  }

  /** Memory of the model. */
  memory(): Promise<MemoryInfo> {
    return this.call("memory", {});
  }
}

/** A callback for the number of finished texts or images. */
export function progressOf(texts: readonly unknown[], onProgress: TextsOptions["onProgress"]): ((done: number) => void) | undefined {
  return onProgress && ((done) => onProgress({ done, total: texts.length }));
}

