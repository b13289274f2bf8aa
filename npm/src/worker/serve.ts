/** A worker: owns an engine in WASM and its devices, and communicates by messages. */

import { ensure, toWire } from "../errors.js";
import { importHidden, isNode } from "../platform.js";
import type { CallName, Calls, ToWorker } from "../protocol.js";
import { engineModule } from "../wasm.js";
import { findHandle } from "./handles.js";
import { Caller, connect, post, type Handler, type Handlers, type Port } from "./port.js";
import { counted } from "./turns.js";

/** What a worker does. */
export interface Work {
  handlers: Partial<Handlers>;
  /** What it is, for calls that it does not have. */
  what: string;
  /** Uses the addresses of its other files. */
  useFiles?(files: Extract<ToWorker, { type: "files" }>): void;
}

/** Running calls: `abort` ends one, `stop` has it reply with its result so far. */
const running = new Map<number, Record<"abort" | "stop", AbortController>>();
const callers = new Map<number, Caller>();

function callerOf(target: number): Caller {
  const caller = callers.get(target) ?? new Caller(target);
  callers.set(target, caller);
  return caller;
}

function receive(work: Work, message: ToWorker): void {
  switch (message.type) {
    case "files":
      engineModule.url = message.wasm;
      work.useFiles?.(message);
      break;
    case "abort":
    case "stop":
      running.get(message.id)?.[message.type].abort();
      break;
    case "call":
      void counted(() => handle(work, message.id, message.target, message.name, message.args));
      break;
    default:
      callers.get(message.target)?.receive(message);
  }
}

async function handle<K extends CallName>(
  { handlers, what }: Work, id: number, target: number, name: K, args: Calls[K]["args"],
): Promise<void> {
  const [abort, stop] = [new AbortController(), new AbortController()];
  const caller = callerOf(target);
  running.set(id, { abort, stop });
  try {
    const emit = (value: Calls[K]["event"]): void => post({ type: "event", id, value });
    const handler = handlers[name] as Handler<K> | undefined;
    ensure(handler !== undefined, "option", `${what} cannot be what another object is loaded on`);
    const value = await handler(args, { target, caller, signal: abort.signal, stopSignal: stop.signal, emit });
    for (const notice of findHandle(target)?.place.device.takeNotices() ?? []) {
      caller.notify("shader_replaced", notice);
    }
    post({ type: "reply", id, value }, value instanceof Float32Array || value instanceof Uint8Array ? [value.buffer as ArrayBuffer] : []);
  } catch (error) {
    post({ type: "fail", id, error: toWire(error) });
  } finally {
    running.delete(id);
    if (name === "close") {
      callers.delete(target);
    }
  }
}

/** Reports an error outside all calls: a panic of the engine, after which no call would settle. */
function reportFatal(error: unknown): void {
  const wire = toWire(error);
  post({ type: "fatal", error: { ...wire, code: "worker_crashed", fatal: true } });
}

async function openPort(): Promise<Port> {
  if (!isNode) {
    const scope = self as unknown as DedicatedWorkerGlobalScope;
    scope.addEventListener("error", (event) => reportFatal(event.error));
    scope.addEventListener("unhandledrejection", (event) => reportFatal(event.reason));
    return {
      post: (message, transfer) => scope.postMessage(message, transfer),
      listen: (listener) => scope.addEventListener("message", (event) => listener(event.data as ToWorker)),
    };
  }
  const { parentPort } = await importHidden<typeof import("node:worker_threads")>("node:worker_threads");
  if (parentPort === null) {
    throw new Error("this is an engine's worker, which does nothing by itself; import the package instead");
  }
  process.on("uncaughtException", reportFatal);
  process.on("unhandledRejection", reportFatal);
  return {
    post: (message, transfer) => parentPort.postMessage(message, transfer as import("node:worker_threads").Transferable[]),
    listen: (listener) => parentPort.on("message", listener),
  };
}

/** Answers calls from now on. */
export async function serve(work: Work): Promise<void> {
  const port = await openPort();
  connect(port);
  port.listen((message) => receive(work, message));
  const lock = await holdLock();
  post(lock === undefined ? { type: "ready" } : { type: "ready", lock });
}

/** Takes a lock that the browser releases when the worker is gone. */
function holdLock(): Promise<string | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return Promise.resolve(undefined);
  }
  const name = `tilewright/worker/${crypto.randomUUID()}`;
  return new Promise((resolve) => {
    navigator.locks.request(name, () => {
      resolve(name);
      return new Promise(() => {});
    }).catch(() => resolve(undefined)); // Pages without locks rely on the worker's events.
  });
}
