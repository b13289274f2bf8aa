/** What indices and mixtures of logits have in common: each is held by a worker, that of a model or one of its own. */

import type { CallOptions, Connection } from "./connection.js";
import type { KeptOptions } from "./load-options.js";
import { connectionFor, placeOf } from "./load.js";
import { closeWith } from "./loaded.js";
import type { CallName, Calls, MadeVectors, Where } from "./protocol.js";
import type { DeviceInfo } from "./types.js";

/** Something that a worker holds. */
export interface Parts<Info> extends MadeVectors<Info> {
  connection: Connection;
}

/** Has something made where the options say. */
export async function makeIn<Info>(
  { on, device, tier, subgroups, onNotice }: KeptOptions, make: (connection: Connection, where: Where) => Promise<MadeVectors<Info>>,
): Promise<Parts<Info>> {
  const place = placeOf({ on, device, tier, subgroups });
  const connection = await connectionFor(on);
  connection.onNotice = onNotice;
  try {
    return { connection, ...await make(connection, place.on ?? place.device) };
  } catch (error) {
    void connection.close("nothing was made");
    throw error;
  }
}

/** Vectors that a worker holds. They are freed by `free`, or some time after the last reference to them has gone. */
export abstract class Kept<Info extends { length: number }> {
  readonly #line: Connection;
  readonly #what: string;
  #info: Info;
  /** What searches. */
  readonly device: DeviceInfo;

  protected constructor({ connection, info, device }: Parts<Info>, what: string) {
    this.#line = connection;
    this.device = device;
    this.#info = info;
    this.#what = what;
    closeWith(this, connection);
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
    await this.call("destroyDevice", {});
  }

  /** Frees it, and its device and worker if nothing else is there. What is asked of it afterwards is rejected with `disposed`. */
  free(): void {
    void this.#line.close(`the ${this.#what} was freed`);
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** Asks the worker. It is not collected meanwhile. @internal */
  protected call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.#line.call(name, args, { ...options, keeps: this });
  }
}
