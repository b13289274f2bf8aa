/** The worker's end of the connection: what it tells, and whom. */

import { FetchClient } from "../fetching.js";
import { isNode } from "../platform.js";
import type { CallName, Calls, FetchToWorker, FromWorker, ToTarget, ToWorker } from "../protocol.js";
import type { NoticeCode } from "../types.js";

/** The other end of the connection: `self` in a browser, the parent port in Node. */
export interface Port {
  post(message: FromWorker, transfer: Transferable[]): void;
  listen(receive: (message: ToWorker) => void): void;
}

let port: Port | undefined;

/** Speaks through this port from now on. */
export function connect(given: Port): void {
  port = given;
}

export function post(message: FromWorker, transfer: Transferable[] = []): void {
  port?.post(message, transfer);
}

/** Whoever asked for a target: hears what becomes of it, and sends requests for its files if it has a `fetch` of its own. */
export class Caller {
  readonly target: number;
  readonly #fetching: FetchClient;

  constructor(target: number) {
    this.target = target;
    this.#fetching = new FetchClient((message) => post({ ...message, target }));
  }

  send(message: ToTarget): void {
    post({ ...message, target: this.target });
  }

  notify(code: NoticeCode, message: string): void {
    this.send({ type: "notice", notice: { code, message } });
  }

  /** As `fetch`, by the caller's own. */
  get fetch(): FetchClient["fetch"] {
    return this.#fetching.fetch;
  }

  receive(message: FetchToWorker): void {
    this.#fetching.receive(message);
  }
}

/** What a call may use while it runs. */
export interface CallContext<K extends CallName> {
  /** What the call is about. */
  target: number;
  caller: Caller;
  signal: AbortSignal;
  /** Aborted when the caller wants what there is so far. */
  ending: AbortSignal;
  emit(value: Calls[K]["event"]): void;
}

export type Handler<K extends CallName> = (args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]>;
export type Handlers = { [K in CallName]: Handler<K> };

/** Lets messages in, such as one that aborts; cheaper than a timer. */
const tasks = new MessageChannel();
const waiting: (() => void)[] = [];
tasks.port1.onmessage = () => waiting.shift()?.();
export function nextTask(): Promise<void> {
  return new Promise((resolve) => {
    if (isNode) {
      // There a channel hands out up to 1000 messages before another one has its turn.
      setImmediate(resolve);
      return;
    }
    waiting.push(resolve);
    tasks.port2.postMessage(undefined);
  });
}
