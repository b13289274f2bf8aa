/** The caller's end of the connection to the worker: starts it, sends calls, and notices when it is gone. */

import { fileUrls } from "./configure.js";
import { Connection, type CallOptions } from "./connection.js";
import { ensure, fromWire, messageOf, TilewrightError } from "./errors.js";
import { FetchServer, type Fetch } from "./fetching.js";
import { cancelling } from "./helpers.js";
import { besidePackage, importHidden, isForeign, isNode, startable } from "./platform.js";
import type { CallName, Calls, FromWorker, ToTarget, ToWorker } from "./protocol.js";

interface Thread {
  post(message: ToWorker, transfer?: ArrayBuffer[]): void;
  terminate(): void;
  /** Whether the process should wait for the worker; browsers do not care. */
  keepAlive(wanted: boolean): void;
}

interface ThreadEvents {
  onMessage(message: FromWorker): void;
  onFailure(reason: string): void;
}

/** A call that waits for its reply. */
interface Pending {
  target: number;
  resolve(value: unknown): void;
  reject(error: unknown): void;
  onEvent: ((value: unknown) => void) | undefined;
  keeps?: object | undefined;
}

/** Milliseconds that a worker has to clean up before it is ended. */
const GRACE_MS = 2000;

/** Bytes of storage beyond which the browser is asked to keep them. */
const LARGE_BYTES = 50e6;

/** A worker's engine: one for speech alone, or that of all else. */
export type WorkerKind = "engine" | "speech";

/** A connection to an object in a worker of this page. */
export class WorkerConnection extends Connection {
  /** Called once when the worker or the target is gone. */
  onEnd: ((error: TilewrightError) => void) | undefined;
  #fetching: FetchServer | undefined;
  #ended: TilewrightError | undefined;

  /** @internal */
  constructor(private readonly host: WorkerHost, readonly target: number) {
    super();
  }

  static async open(kind: WorkerKind = "engine"): Promise<WorkerConnection> {
    return (await WorkerHost.start(kind)).connect();
  }

  sibling(): Connection {
    return this.host.connect();
  }

  useFetch(fetch: Fetch): void {
    this.#fetching = new FetchServer(fetch, (message) => this.host.post({ ...message, target: this.target }));
  }

  async call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    if (this.#ended !== undefined) {
      throw this.#ended;
    }
    return this.host.call(this.target, name, args, options);
  }

  async close(reason: string): Promise<void> {
    if (this.#ended === undefined) {
      const error = new TilewrightError("disposed", reason);
      this.end(error);
      await this.host.release(this.target, error);
    }
  }

  /** @internal */
  receive(message: ToTarget): void {
    switch (message.type) {
      case "notice":
      case "progress":
      case "device":
        this.deliver(message);
        break;
      case "stored":
        this.host.keepStored(message.bytes);
        break;
      case "ended": {
        const error = fromWire(message.error);
        this.end(error);
        void this.host.release(this.target, error);
        break;
      }
      default:
        this.#fetching?.receive(message);
    }
  }

  /** @internal */
  end(error: TilewrightError): void {
    if (this.#ended === undefined) {
      this.#ended = error;
      this.#fetching?.close();
      this.onEnd?.(error);
    }
  }
}

/** A worker, and the connections to its objects. It ends with the last of them. */
class WorkerHost {
  #thread: Thread | undefined;
  readonly #connections = new Map<number, WorkerConnection>();
  #nextTarget = 0;
  readonly #pending = new Map<number, Pending>();
  #nextId = 0;
  #ended: TilewrightError | undefined;
  readonly #watch = new AbortController();
  #storedBytes = 0;

  private constructor() {}

  static async start(kind: WorkerKind): Promise<WorkerHost> {
    const host = new WorkerHost();
    const ready = new Promise<unknown>((resolve, reject) => {
      host.#pending.set(-1, { target: -1, resolve, reject, onEvent: undefined });
    });
    host.#thread = await (isNode ? startNodeThread : startWorker)(kind, {
      onMessage: (message) => host.#receive(message),
      onFailure: (reason) => host.#end(new TilewrightError("worker_crashed", reason)),
    });
    await ready;
    const { wasmUrl, textWasmUrl, speechWasmUrl, cpuUrl, cpuWasmUrl } = fileUrls();
    host.#thread.post({
      type: "files", wasm: kind === "speech" ? speechWasmUrl : wasmUrl, textWasm: textWasmUrl, cpu: cpuUrl, cpuWasm: cpuWasmUrl,
    });
    host.#thread.keepAlive(false);
    return host;
  }

  connect(): WorkerConnection {
    const connection = new WorkerConnection(this, this.#nextTarget);
    this.#nextTarget += 1;
    this.#connections.set(connection.target, connection);
    return connection;
  }

  post(message: ToWorker): void {
    this.#thread?.post(message);
  }

  async call<K extends CallName>(
    target: number, name: K, args: Calls[K]["args"], { signal, stopSignal, transfer, onEvent, keeps }: CallOptions<K>,
  ): Promise<Calls[K]["reply"]> {
    signal?.throwIfAborted();
    if (this.#ended !== undefined) {
      throw this.#ended;
    }
    const id = this.#nextId;
    this.#nextId += 1;
    this.#thread?.post({ type: "call", id, target, name, args }, transfer);
    const reply = new Promise<unknown>((resolve, reject) => {
      this.#pending.set(id, { target, resolve, reject, onEvent: onEvent as Pending["onEvent"], keeps });
    });
    this.#thread?.keepAlive(true);
    const abort = (): void => {
      this.post({ type: "abort", id });
      const pending = this.#pending.get(id);
      if (pending !== undefined) {
        pending.onEvent = undefined;
        pending.reject(signal?.reason);
      }
    };
    const stop = (): void => this.post({ type: "stop", id });
    if (stopSignal?.aborted === true) {
      stop();
    }
    return await cancelling(signal, abort, () => cancelling(stopSignal, stop, () => reply)) as Calls[K]["reply"];
  }

  /** Frees a target, and ends the worker if it has no other. */
  async release(target: number, reason: TilewrightError): Promise<void> {
    this.#connections.delete(target);
    if (this.#ended !== undefined) {
      return;
    }
    for (const [id, pending] of this.#pending) {
      if (pending.target === target) {
        this.post({ type: "abort", id });
        pending.reject(reason);
        pending.onEvent = undefined;
      }
    }
    let timer: ReturnType<typeof setTimeout> | undefined;
    const patience = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, GRACE_MS);
    });
    // Ending the worker frees its memory in any case.
    await Promise.race([this.call(target, "close", {}, {}).then(() => {}, () => {}), patience]);
    clearTimeout(timer);
    if (this.#connections.size === 0) {
      this.#end(reason);
    }
  }

  #receive(message: FromWorker): void {
    switch (message.type) {
      case "ready":
        if (message.lock !== undefined) {
          this.#watchLock(message.lock);
        }
        this.#settle(-1)?.resolve(undefined);
        break;
      case "event":
        this.#pending.get(message.id)?.onEvent?.(message.value);
        break;
      case "reply":
        this.#settle(message.id)?.resolve(message.value);
        break;
      case "fail":
        this.#settle(message.id)?.reject(fromWire(message.error));
        if (message.error.fatal) {
          this.#end(fromWire(message.error));
        }
        break;
      case "fatal":
        this.#end(fromWire(message.error));
        break;
      default:
        this.#connections.get(message.target)?.receive(message);
    }
  }

  /** Asks the browser once not to evict stored files. Only pages can ask, not their workers. */
  keepStored(bytes: number): void {
    const before = this.#storedBytes;
    this.#storedBytes += bytes;
    if (before < LARGE_BYTES && this.#storedBytes >= LARGE_BYTES) {
      const storage = globalThis.navigator?.storage as { persist?(): Promise<boolean> } | undefined;
      storage?.persist?.().catch(() => {});
    }
  }

  #settle(id: number): Pending | undefined {
    const pending = this.#pending.get(id);
    this.#pending.delete(id);
    if (this.#pending.size === 0) {
      this.#thread?.keepAlive(false);
    }
    return pending;
  }

  /** Waits for the worker's lock, which is released when the worker is gone. */
  #watchLock(name: string): void {
    navigator.locks.request(name, { signal: this.#watch.signal }, () => {
      this.#end(new TilewrightError("worker_crashed", "the worker with the engine is gone; the browser or someone else ended it"));
    }).catch(() => {
      // The worker has ended otherwise.
    });
  }

  #end(error: TilewrightError): void {
    this.#ended ??= error;
    this.#watch.abort();
    this.#connections.forEach((connection) => connection.end(error));
    this.#thread?.terminate();
    this.#pending.forEach(({ reject }) => reject(this.#ended));
    this.#pending.clear();
  }
}

/** A worker's file, and the address that `configure` gave it. */
function workerFile(kind: WorkerKind): { file: string; given: string | undefined } {
  const { workerUrl, speechWorkerUrl } = fileUrls();
  return kind === "speech" ? { file: "speech-worker.js", given: speechWorkerUrl } : { file: "worker.js", given: workerUrl };
}

function startWorker(kind: WorkerKind, { onMessage, onFailure }: ThreadEvents): Thread {
  ensure(typeof Worker !== "undefined",
    "unsupported_platform", "the engine needs Web Workers, and there are none here");
  // In a bundle, the bundler places the worker.
  const { file, given } = workerFile(kind);
  const beside = besidePackage(file).href;
  const other = given ?? (isForeign(beside) ? beside : undefined);
  const { url, isBlob, revoke } = other === undefined ? { isBlob: false, revoke: () => {} } : startable(other);
  let worker: Worker;
  try {
    // Bundlers look for exactly these expressions.
    worker = url !== undefined ? new Worker(url, { type: "module" })
      : kind === "speech" ? new Worker(new URL("./speech-worker.js", import.meta.url), { type: "module" })
      : new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  } catch (error) {
    revoke();
    throw new TilewrightError("unsupported_platform", `the engine's worker cannot be started: ${messageOf(error)}`, { cause: error });
  }
  worker.addEventListener("message", revoke, { once: true });
  worker.addEventListener("message", (event) => onMessage(event.data as FromWorker));
  worker.addEventListener("messageerror", () => onFailure("a message from the engine could not be read"));
  worker.addEventListener("error", (event) => {
    event.preventDefault();
    revoke();
    onFailure(event.message ? `the worker with the engine failed: ${event.message}` : unloadable(file, other, isBlob));
  });
  return { post: (message, transfer = []) => worker.postMessage(message, transfer), terminate: () => worker.terminate(), keepAlive: () => {} };
}

function unloadable(file: string, url: string | undefined, isBlob: boolean): string {
  const what = "the worker with the engine could not be loaded";
  if (url === undefined && besidePackage("").pathname.includes("/.vite/")) {
    return `${what}; before version 8, Vite needs \`optimizeDeps: { exclude: ["tilewright"] }\` in its configuration`;
  }
  if (url === undefined) {
    return `${what}; check that ${file} is served beside the package, or say where it is with configure({ ${file === "worker.js" ? "workerUrl" : "speechWorkerUrl"} })`;
  }
  return !isBlob
    ? `${what} from ${url}`
    : `${what} from ${url}; its server must allow that (CORS), and a Content Security Policy needs \`worker-src blob: ${new URL(url).origin}\``;
}

async function startNodeThread(kind: WorkerKind, { onMessage, onFailure }: ThreadEvents): Promise<Thread> {
  const { Worker: NodeWorker } = await importHidden<typeof import("node:worker_threads")>("node:worker_threads");
  const { file, given } = workerFile(kind);
  const url = new URL(given ?? besidePackage(file));
  let thread: import("node:worker_threads").Worker;
  try {
    thread = new NodeWorker(url);
  } catch (error) {
    throw new TilewrightError("unsupported_platform", `the engine's thread cannot be started from ${url}: ${messageOf(error)}`, { cause: error });
  }
  thread.on("message", onMessage);
  thread.on("messageerror", () => onFailure("a message from the engine could not be read"));
  thread.on("error", (error) => onFailure(`the thread with the engine failed: ${messageOf(error)}`));
  thread.on("exit", () => onFailure("the thread with the engine is gone"));
  return {
    post: (message, transfer) => thread.postMessage(message, transfer),
    terminate: () => void thread.terminate(),
    keepAlive: (wanted) => wanted ? thread.ref() : thread.unref(),
  };
}
