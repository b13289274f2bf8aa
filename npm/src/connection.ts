/** A connection to what a worker holds: to that worker (`worker-connection.ts`), or through another tab (`shared.ts`). */

import type { Fetch } from "./fetching.js";
import type { CallName, Calls, LoadName, Report } from "./protocol.js";
import type { DeviceInfo, Notice, Progress } from "./types.js";

/** Options of a call. */
export interface CallOptions<K extends CallName> {
  signal?: AbortSignal | undefined;
  /** Asks the worker to reply soon with what it has. */
  ending?: AbortSignal | undefined;
  /** Memory in the arguments that is handed over instead of copied. */
  transfer?: ArrayBuffer[];
  onEvent?: (event: Calls[K]["event"]) => void;
  /** What must not be collected while the call runs. */
  keeps?: object;
}

/** A connection to one object of a worker, such as a model or an index. */
export interface Connection {
  /** Its number in the worker. */
  readonly target: number;
  onNotice: ((notice: Notice) => void) | undefined;
  onDevice: ((device: DeviceInfo) => void) | undefined;
  onProgress: ((progress: Progress) => void) | undefined;
  /** A connection to another object of the same worker, which can share its device. */
  sibling(): Connection;
  /** Has this function answer the requests for this target. */
  useFetch(fetch: Fetch): void;
  /** Has the worker load the object. */
  load<K extends LoadName>(name: K, args: Calls[K]["args"], options?: CallOptions<K>): Promise<Calls[K]["reply"]>;
  /** Asks the worker for something. An abort rejects at once with the signal's reason; the worker stops as soon as it can. */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options?: CallOptions<K>): Promise<Calls[K]["reply"]>;
  /** Frees the target, and ends the worker if it has no other. Everything that is still asked is rejected with `disposed`. */
  close(reason: string): Promise<void>;
}

/** Passes a report on a target to its callbacks. */
export function deliver(connection: Connection, message: Report): void {
  switch (message.type) {
    case "notice":
      connection.onNotice?.(message.notice);
      break;
    case "progress":
      connection.onProgress?.(message.progress);
      break;
    case "device":
      connection.onDevice?.(message.device);
      break;
  }
}
