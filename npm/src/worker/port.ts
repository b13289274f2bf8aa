/** The worker's end of its connections. */

import { FetchClient } from "../fetching.js";
import { isNode } from "../platform.js";
import type { CallName, Calls, FromWorker, ToTarget, ToWorker } from "../protocol.js";
import type { NoticeCode } from "../types.js";

/** `self` in a browser, the parent port in Node. */
export interface Port {
  post(message: FromWorker, transfer: Transferable[]): void;
  listen(receive: (message: ToWorker) => void): void;
}

let port: Port | undefined;

export function connect(given: Port): void {
  port = given;
}

export function post(message: FromWorker, transfer: Transferable[] = []): void {
  port?.post(message, transfer);
}

/** The owner of a target: receives reports, and may have its own `fetch` for files. */
export class Caller extends FetchClient {
  constructor(readonly target: number) {
    super((message) => post({ ...message, target }));
  }

  send(message: ToTarget): void {
    post({ ...message, target: this.target });
  }

  notify(code: NoticeCode, message: string): void {
    this.send({ type: "notice", notice: { code, message } });
  }
}

export interface CallContext<K extends CallName> {
  target: number;
  caller: Caller;
  signal: AbortSignal;
  /** Aborted when the caller wants the result so far. */
  stopSignal: AbortSignal;
  emit(value: Calls[K]["event"]): void;
}

export type Handler<K extends CallName> = (args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]>;
export type Handlers = { [K in CallName]: Handler<K> };

/** Lets messages in, such as an abort; cheaper than a timer. */
const tasks = new MessageChannel();
const waiting: (() => void)[] = [];
tasks.port1.onmessage = () => waiting.shift()?.();
export function nextTask(): Promise<void> {
  return new Promise((resolve) => {
    if (isNode) {
      // In Node a channel delivers up to 1000 messages before other tasks run.
      setImmediate(resolve);
      return;
    }
    waiting.push(resolve);
    tasks.port2.postMessage(undefined);
  });
}
