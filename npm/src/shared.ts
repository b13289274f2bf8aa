/**
 * One model for all tabs of a site. The tab with a lock leads: its worker has the model, and serves the other tabs
 * over a channel. When it is gone, the browser gives the lock to another tab, which loads the model and continues all
 * pending calls.
 */

import { Connection, type CallOptions } from "./connection.js";
import { fromWire, messageOf, TilewrightError, toWire, type WireError } from "./errors.js";
import type { Fetch } from "./fetching.js";
import { cancelling, orAborted, sha256Of } from "./helpers.js";
import type { CallName, Calls, GenerateEvent, GenerateRequest, LoadName, Report } from "./protocol.js";
import type { DeviceInfo, Piece } from "./types.js";
import { WorkerConnection } from "./worker-connection.js";

/** Whether tabs can share models here. */
export const canShare = typeof BroadcastChannel !== "undefined" && globalThis.navigator?.locks !== undefined && "document" in globalThis;

type Message =
  | { type: "hello"; from: string }
  | { type: "bye"; from: string }
  /** The leader has loaded. */
  | { type: "ready"; from: string; info: unknown; device: DeviceInfo }
  | { type: "report"; from: string; message: Report }
  | { type: "call"; from: string; id: number; name: CallName; args: Calls[CallName]["args"] }
  | { type: "abort" | "stop"; from: string; id: number }
  | { type: "event"; to: string; id: number; value: unknown }
  | { type: "reply"; to: string; id: number; value: unknown }
  | { type: "fail"; to: string; id: number; error: WireError };

const FIELDS: Readonly<Record<Message["type"], readonly string[]>> = {
  hello: ["from"], bye: ["from"], ready: ["from", "info", "device"], report: ["from", "message"], call: ["from", "id", "name", "args"],
  abort: ["from", "id"], stop: ["from", "id"], event: ["to", "id"], reply: ["to", "id"], fail: ["to", "id", "error"],
};

/** Types of fields that are no objects. */
const TYPES: Readonly<Record<string, string>> = { from: "string", to: "string", id: "number", name: "string" };

/** Validates a message: any page of the site can write to the channel, such as one of an older version. */
function isMessage(data: unknown): data is Message {
  if (typeof data !== "object" || data === null) {
    return false;
  }
  const message = data as Record<string, unknown>;
  const { type } = message;
  return typeof type === "string" && Object.hasOwn(FIELDS, type)
    && FIELDS[type as Message["type"]].every((field) => typeof message[field] === (TYPES[field] ?? "object") && message[field] !== null);
}

const CALLS: ReadonlySet<CallName> = new Set<CallName>([
  "generate", "saveSession", "timeline", "headWeights", "tokenize", "imageTokens", "detokenize", "embed", "embedImages", "encode", "rerank", "memory", "counters", "destroyDevice",
]);

/** A call that waits for its reply. */
interface Pending {
  name: CallName;
  args: Calls[CallName]["args"];
  sentTo: string | undefined;
  /** Stops it if it runs here. */
  readonly stop: AbortController;
  /** Aborted when the caller wants the result so far. */
  readonly stopSignal: AbortSignal | undefined;
  readonly pieces: Piece[];
  /** Pieces that will be repeated. */
  nRepeated: number;
  resolve(value: unknown): void;
  reject(error: unknown): void;
  onEvent(value: unknown): void;
  keeps: object | undefined;
}

/** A connection to an object that one of the site's tabs has loaded. */
export class SharedConnection extends Connection {
  readonly target = 0;
  readonly #id = crypto.randomUUID();
  #fetch: Fetch | undefined;
  #channel: BroadcastChannel | undefined;
  /** The leader, once it has loaded. */
  #leader: string | undefined;
  /** The worker's connection, if this tab leads. */
  #local: WorkerConnection | undefined;
  #info: unknown;
  #loaded: { resolve(info: unknown): void; reject(error: unknown): void } | undefined;
  readonly #pending = new Map<number, Pending>();
  #nextId = 0;
  /** Calls of other tabs, by tab. */
  readonly #clients = new Map<string, Map<number, Record<"abort" | "stop", AbortController>>>();
  #ended: TilewrightError | undefined;
  /** Releases all locks. */
  readonly #gone = new AbortController();
  readonly #left = new Promise<void>((resolve) => this.#gone.signal.addEventListener("abort", () => resolve()));

  sibling(): Connection {
    throw new TilewrightError("option", "`on` is shared with other tabs, expected something that is not");
  }

  useFetch(fetch: Fetch): void {
    this.#fetch = fetch;
  }

  override async load<K extends LoadName>(name: K, args: Calls[K]["args"], { signal }: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    const topic = `tilewright/shared/${await sha256Of(JSON.stringify([name, args]))}`;
    signal?.throwIfAborted();
    await this.#holdLock(tabLock(this.#id));
    signal?.throwIfAborted();
    const channel = new BroadcastChannel(topic);
    this.#channel = channel;
    channel.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (isMessage(data) && (!("to" in data) || data.to === this.#id)) {
        this.#receive(data);
      }
    };
    const loaded = new Promise<unknown>((resolve, reject) => {
      this.#loaded = { resolve, reject };
    });
    this.#post({ type: "hello", from: this.#id });
    // The holder of the lock leads. The others wait for it as long as they live.
    navigator.locks.request(topic, { signal: this.#gone.signal }, () => this.#lead(name, args)).catch((error: unknown) => {
      if (!this.#gone.signal.aborted) {
        this.#end(refused(error));
      }
    });
    return orAborted(loaded, signal) as Promise<Calls[K]["reply"]>;
  }

  async call<K extends CallName>(
    name: K, args: Calls[K]["args"], { signal, stopSignal, onEvent, keeps }: CallOptions<K> = {},
  ): Promise<Calls[K]["reply"]> {
    signal?.throwIfAborted();
    if (this.#ended !== undefined) {
      throw this.#ended;
    }
    const id = this.#nextId;
    this.#nextId += 1;
    const reply = new Promise<unknown>((resolve, reject) => {
      this.#pending.set(id, {
        name, args, sentTo: undefined, stop: new AbortController(), stopSignal, pieces: [], nRepeated: 0, keeps, resolve, reject,
        onEvent: (event) => onEvent?.(event as Calls[K]["event"]),
      });
    });
    const abort = (): void => {
      const pending = this.#settle(id);
      pending?.stop.abort();
      pending?.reject(signal?.reason);
      this.#post({ type: "abort", from: this.#id, id });
    };
    const stop = (): void => this.#post({ type: "stop", from: this.#id, id });
    try {
      this.#send(id);
    } catch (error) {
      // The arguments cannot be cloned.
      this.#settle(id)?.reject(error);
    }
    return await cancelling(signal, abort, () => cancelling(stopSignal, stop, () => reply)) as Calls[K]["reply"];
  }

  async close(reason: string): Promise<void> {
    this.#end(new TilewrightError("disposed", reason));
    // The leader stays while other tabs need it.
    if (this.#local === undefined || this.#clients.size === 0) {
      await this.#leave();
    }
  }

  #end(error: TilewrightError): void {
    this.#ended ??= error;
    this.#loaded?.reject(error);
    for (const { reject, stop } of this.#pending.values()) {
      stop.abort();
      reject(error);
    }
    this.#pending.clear();
  }

  async #leave(): Promise<void> {
    if (this.#gone.signal.aborted) {
      return;
    }
    this.#post({ type: "bye", from: this.#id });
    this.#channel?.close();
    this.#channel = undefined;
    if (this.#local !== undefined) {
      // The next leader should find the memory free.
      this.#local.onEnd = undefined;
      await this.#local.close("nobody needs it any more");
    }
    this.#gone.abort();
  }

  async #lead<K extends LoadName>(name: K, args: Calls[K]["args"]): Promise<void> {
    try {
      await this.#serve(name, args);
    } catch (error) {
      this.#end(fromWire(toWire(error)));
    }
    await this.#leave();
  }

  async #serve<K extends LoadName>(name: K, args: Calls[K]["args"]): Promise<void> {
    const isNext = this.#info !== undefined;
    const connection = await WorkerConnection.open();
    const report = (message: Report): void => {
      this.deliver(message);
      this.#post({ type: "report", from: this.#id, message });
    };
    connection.onNotice = (notice) => report({ type: "notice", notice });
    connection.onProgress = (progress) => report({ type: "progress", progress });
    connection.onDevice = (device) => report({ type: "device", device });
    if (this.#fetch !== undefined) {
      connection.useFetch(this.#fetch);
    }
    const ended = new Promise<void>((resolve) => {
      connection.onEnd = (error) => {
        this.#end(error);
        resolve();
      };
    });
    try {
      const info = await connection.load(name, args, { signal: this.#gone.signal });
      this.#local = connection;
      if (isNext) {
        report({ type: "notice", notice: { code: "taken_over", message: "the tab that had the model was closed; another tab has loaded it again" } });
      }
      this.#ready(this.#id, info);
      this.#announce();
    } catch (error) {
      connection.onEnd = undefined;
      await connection.close("the model was not loaded");
      throw error;
    }
    await Promise.race([this.#left, ended]);
  }

  #ready(leader: string, info: unknown): void {
    this.#leader = leader;
    this.#info = info;
    this.#loaded?.resolve(info);
    for (const [id, { sentTo }] of this.#pending) {
      if (sentTo !== leader) {
        this.#send(id);
      }
    }
  }

  /** Sends a call to the leader. A generation continues after its known pieces. */
  #send(id: number): void {
    const pending = this.#pending.get(id);
    if (this.#leader === undefined || pending === undefined) {
      return;
    }
    const { name, pieces } = pending;
    pending.sentTo = this.#leader;
    pending.nRepeated = pieces.length;
    const args = name === "generate" && pieces.length > 0 ? continued(pending.args as GenerateRequest, pieces) : pending.args;
    if (this.#local === undefined) {
      this.#post({ type: "call", from: this.#id, id, name, args });
      if (pending.stopSignal?.aborted === true) {
        this.#post({ type: "stop", from: this.#id, id });
      }
      return;
    }
    this.#local.call(name, args, { signal: pending.stop.signal, stopSignal: pending.stopSignal, onEvent: (value) => this.#event(id, value) }).then(
      (value) => this.#settle(id)?.resolve(value),
      (error: unknown) => this.#settle(id)?.reject(error),
    );
  }

  #event(id: number, value: unknown): void {
    const pending = this.#pending.get(id);
    if (pending === undefined) {
      return;
    }
    if (pending.name === "generate" && "id" in (value as GenerateEvent)) {
      if (pending.nRepeated > 0) {
        pending.nRepeated -= 1;
        return;
      }
      pending.pieces.push(value as Piece);
    }
    pending.onEvent(value);
  }

  #settle(id: number): Pending | undefined {
    const pending = this.#pending.get(id);
    this.#pending.delete(id);
    return pending;
  }

  #receive(message: Message): void {
    switch (message.type) {
      case "hello":
        this.#watch(message.from);
        this.#announce();
        break;
      case "bye":
        this.#forget(message.from);
        break;
      case "ready":
        this.deliver({ type: "device", device: message.device });
        if (message.from !== this.#leader) {
          // A new leader needs to know its clients.
          this.#post({ type: "hello", from: this.#id });
        }
        this.#ready(message.from, message.info);
        break;
      case "report":
        this.deliver(message.message);
        break;
      case "call":
        void this.#run(message);
        break;
      case "abort":
      case "stop":
        this.#clients.get(message.from)?.get(message.id)?.[message.type].abort();
        break;
      case "event":
        this.#event(message.id, message.value);
        break;
      case "reply":
        this.#settle(message.id)?.resolve(message.value);
        break;
      case "fail":
        this.#settle(message.id)?.reject(fromWire(message.error));
        break;
    }
  }

  #announce(): void {
    if (this.#local !== undefined && this.device !== undefined) {
      this.#post({ type: "ready", from: this.#id, info: this.#info, device: this.device });
    }
  }

  async #run({ from, id, name, args }: Message & { type: "call" }): Promise<void> {
    if (this.#local === undefined || !CALLS.has(name)) {
      return;
    }
    this.#watch(from);
    const [abort, stop] = [new AbortController(), new AbortController()];
    this.#clients.get(from)?.set(id, { abort, stop });
    try {
      const value = await this.#local.call(name, args, {
        signal: abort.signal, stopSignal: stop.signal, onEvent: (value) => this.#post({ type: "event", to: from, id, value }),
      });
      this.#post({ type: "reply", to: from, id, value });
    } catch (error) {
      this.#post({ type: "fail", to: from, id, error: toWire(error) });
    } finally {
      this.#clients.get(from)?.delete(id);
    }
  }

  /** Keeps track of a tab until it is gone. All tabs do, because any can be the next leader. */
  #watch(tab: string): void {
    if (this.#clients.has(tab)) {
      return;
    }
    this.#clients.set(tab, new Map());
    navigator.locks.request(tabLock(tab), { signal: this.#gone.signal }, () => this.#forget(tab)).catch(() => {
      // This tab has left first.
    });
  }

  #forget(tab: string): void {
    this.#clients.get(tab)?.forEach(({ abort }) => abort.abort());
    this.#clients.delete(tab);
    if (this.#ended !== undefined && this.#clients.size === 0) {
      void this.#leave();
    }
  }

  #post(message: Message): void {
    this.#channel?.postMessage(message);
  }

  /** Holds a lock until this tab leaves. */
  #holdLock(name: string): Promise<void> {
    return new Promise((resolve, reject) => {
      navigator.locks.request(name, () => {
        resolve();
        return this.#left;
      }).catch((error: unknown) => reject(refused(error)));
    });
  }
}

function refused(error: unknown): TilewrightError {
  return new TilewrightError("unsupported_platform", `this page may not share models with other tabs: ${messageOf(error)}`, { cause: error });
}

const tabLock = (tab: string): string => `tilewright/tab/${tab}`;

/** A generation with known pieces, which are not computed again unless the context slides. */
function continued(request: GenerateRequest, pieces: readonly Piece[]): GenerateRequest {
  return request.options.slide === true ? request : { ...request, options: { ...request.options, replay: pieces.map(({ id }) => id) } };
}
