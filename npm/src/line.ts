/** The way to what a worker holds: through that worker (`engine.ts`), or through another tab (`shared.ts`). */

import type { Fetch } from "./fetching.js";
import type { CallName, Calls, LoadName, Told } from "./protocol.js";
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

/** The way to one thing that a worker holds, such as a model or an index. */
export interface Line {
  /** Its number in the worker. */
  readonly target: number;
  onNotice: ((notice: Notice) => void) | undefined;
  onDevice: ((device: DeviceInfo) => void) | undefined;
  onProgress: ((progress: Progress) => void) | undefined;
  /** A line to something else in the same worker, which can share the device of this. */
  sibling(): Line;
  /** Has this function answer the requests for this target. */
  useFetch(fetch: Fetch): void;
  /** Has the worker load what this is the line to. */
  load<K extends LoadName>(name: K, args: Calls[K]["args"], options?: CallOptions<K>): Promise<Calls[K]["reply"]>;
  /** Asks the worker for something. An abort rejects at once with the signal's reason; the worker stops as soon as it can. */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options?: CallOptions<K>): Promise<Calls[K]["reply"]>;
  /** Frees the target, and ends the worker if it has no other. Everything that is still asked is rejected with `disposed`. */
  close(reason: string): Promise<void>;
}

/** Hands on what is told of a target. */
export function hear(line: Line, message: Told): void {
  switch (message.type) {
    case "notice":
      line.onNotice?.(message.notice);
      break;
    case "progress":
      line.onProgress?.(message.progress);
      break;
    case "device":
      line.onDevice?.(message.device);
      break;
  }
}
