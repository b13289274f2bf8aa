/** What models, encoders and cross-encoders have in common: each is loaded by a worker, runs on a device, and is freed. */

import type { CallOptions, Connection } from "./connection.js";
import { finalizer } from "./platform.js";
import type { CallName, Calls } from "./protocol.js";
import type { Counters, DeviceInfo, MemoryInfo, TextsProgress } from "./types.js";

/** What a worker has loaded. */
export interface Parts<Info> {
  connection: Connection;
  info: Info;
  device: DeviceInfo;
}

/** Frees what nobody refers to any more. */
const forgotten = finalizer<Connection>((connection) => void connection.close("nobody refers to it any more"));

/** Has a connection closed when `it`, whose connection it is, has been collected. */
export function closeWith(it: object, connection: Connection): void {
  forgotten.register(it, connection);
}

/** Something that is loaded. It is freed by `free`, or some time after the last reference to it has gone. */
export abstract class Loaded<Info> {
  /** @internal */
  readonly connection: Connection;
  readonly #state: { device: DeviceInfo };
  /** What the model's files say. */
  readonly info: Info;

  protected constructor({ connection, info, device }: Parts<Info>) {
    this.connection = connection;
    this.info = info;
    const state = { device };
    this.#state = state;
    // Connections outlive what nobody refers to any more.
    connection.onDevice = (current) => {
      state.device = current;
    };
    closeWith(this, connection);
  }

  /** What runs the model. Another one than at first after a device was lost. */
  get device(): DeviceInfo {
    return this.#state.device;
  }

  /** Memory that the model takes now, in bytes. */
  memory(): Promise<MemoryInfo> {
    return this.call("memory", {});
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.call("counters", {});
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next work opens another one and loads the
   * model again. Does nothing on the CPU.
   */
  async destroyDevice(): Promise<void> {
    await this.call("destroyDevice", {});
  }

  /** Frees the model, and its device and worker if nothing else is there. What is still asked of it is rejected with `disposed`. */
  free(): void {
    void this[Symbol.asyncDispose]();
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** As `free`; resolves when it is done. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.connection.close("the model was freed");
  }

  /** Asks the worker. It is not collected meanwhile. @internal */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.connection.call(name, args, { ...options, keeps: this });
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
