/** Connections to objects of a worker: directly (`worker-connection.ts`), or through another tab (`shared.ts`). */

import type { Fetch } from "./fetching.js";
import type { CallName, Calls, LoadName, Report } from "./protocol.js";
import type { DeviceInfo, Notice, Progress } from "./types.js";

export interface CallOptions<K extends CallName> {
  signal?: AbortSignal | undefined;
  /** Asks the worker to reply soon with its result so far. */
  stopSignal?: AbortSignal | undefined;
  /** Memory of the arguments that is moved instead of copied. */
  transfer?: ArrayBuffer[];
  onEvent?: ((event: Calls[K]["event"]) => void) | undefined;
  /** An object that must not be collected during the call. */
  keeps?: object;
}

/** A connection to one object of a worker, such as a model or an index. */
export abstract class Connection {
  /** The object's number in the worker. */
  abstract readonly target: number;
  onNotice: ((notice: Notice) => void) | undefined;
  onDevice: ((device: DeviceInfo) => void) | undefined;
  /** The object's device, once it is known. */
  device: DeviceInfo | undefined;
  onProgress: ((progress: Progress) => void) | undefined;

  /** A connection to another object of the same worker, which can share its device. */
  abstract sibling(): Connection;
  /** Uses this function for the target's requests. */
  abstract useFetch(fetch: Fetch): void;
  /** Has the worker load the object. */
  load<K extends LoadName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.call(name, args, options);
  }

  /** Calls the worker. An abort rejects at once with the signal's reason; the worker stops as soon as it can. */
  abstract call<K extends CallName>(name: K, args: Calls[K]["args"], options?: CallOptions<K>): Promise<Calls[K]["reply"]>;
  /** Frees the target, and ends the worker if it has no other. Pending calls are rejected with `disposed`. */
  abstract close(reason: string): Promise<void>;

  deliver(message: Report): void {
    switch (message.type) {
      case "notice":
        this.onNotice?.(message.notice);
        break;
      case "progress":
        this.onProgress?.(message.progress);
        break;
      case "device":
        this.device = message.device;
        this.onDevice?.(message.device);
        break;
    }
  }

  async orClose<T>(reason: string, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      this.onProgress = undefined;
      // The worker cleans up; nobody needs to wait for that.
      void this.close(reason);
      throw error;
    }
  }
}
