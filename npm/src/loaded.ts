/** What models, encoders and cross-encoders have in common: each is loaded by a worker, runs on a device, and is freed. */

import { WorkerLine, type CallOptions, type Line } from "./engine.js";
import { TilewrightError } from "./errors.js";
import { registry } from "./platform.js";
import type { CallName, Calls, CommonRequest, LoadName, SourceSpec } from "./protocol.js";
import { canShare, SharedLine } from "./shared.js";
import type { CommonLoadOptions, Counters, DeviceInfo, MemoryInfo, TextsProgress } from "./types.js";

/** What a worker has loaded. */
interface Parts<Info> {
  line: Line;
  info: Info;
  device: DeviceInfo;
}

/** Loads, in the worker of what the options are `on`, or in a new one. `own` is what the call takes besides what every load does. */
export async function loadInto<K extends LoadName>(
  call: K,
  source: SourceSpec,
  own: Omit<Calls[K]["args"], keyof CommonRequest>,
  { signal, onProgress, onNotice, on, shared = false, device, tier, cache = true, verify = true, subgroups, fetch }: CommonLoadOptions,
): Promise<Parts<Calls[K]["reply"]>> {
  signal?.throwIfAborted();
  const where = placeOf({ on, device, tier, subgroups });
  const common: CommonRequest = { source, ...where, cache, verify, ownFetch: fetch !== undefined };
  const line = shared && canShare ? shareable(source, on) : await lineFor(on);
  if (shared && !canShare && "document" in globalThis) {
    onNotice?.({ code: "not_shared", message: "this page cannot share a model with other tabs, which needs https; it has one of its own" });
  }
  if (fetch !== undefined) {
    line.useFetch(fetch);
  }
  let current: DeviceInfo | undefined;
  line.onNotice = onNotice;
  line.onProgress = onProgress;
  line.onDevice = (info) => {
    current = info;
  };
  try {
    const info = await line.load(call, { ...common, ...own } as Calls[K]["args"], { signal });
    if (current === undefined) {
      throw new TilewrightError("internal", "the engine did not say which device it runs on");
    }
    return { line, info, device: current };
  } catch (error) {
    line.onProgress = undefined;
    // The worker puts its files in order; nobody needs to wait for that.
    void line.close("the model was not loaded");
    throw error;
  }
}

/** Asks a worker, that of what the options are `on` or a new one, for something that it does not hold. */
export async function callOnce<K extends "inspect" | "prefetch">(
  name: K,
  args: Calls[K]["args"],
  { signal, on, fetch, onProgress, onNotice }: Pick<CommonLoadOptions, "on" | "fetch" | "onProgress" | "onNotice"> & { signal?: AbortSignal | undefined },
): Promise<Calls[K]["reply"]> {
  signal?.throwIfAborted();
  const line = await lineFor(on);
  if (fetch !== undefined) {
    line.useFetch(fetch);
  }
  line.onNotice = onNotice;
  line.onProgress = onProgress;
  try {
    return await line.call(name, args, { signal });
  } finally {
    line.onProgress = undefined;
    // The worker puts its files in order; nobody needs to wait for that.
    void line.close("it was done");
  }
}

/** Something that a worker holds. */
export interface Holding {
  /** @internal */
  readonly line: Line;
}

/** What options say of a device: to open one, or to share one. */
interface DeviceOptions extends Pick<CommonLoadOptions, "device" | "tier" | "subgroups"> {
  on?: Holding | undefined;
}

/**
 * The device that is asked for.
 *
 * @throws {@link TilewrightError} `option` if one is to be shared and opened.
 */
export function placeOf({ on, device, tier, subgroups }: DeviceOptions): Pick<CommonRequest, "device" | "on"> {
  const [given] = Object.entries({ device, tier, subgroups }).find(([, value]) => value !== undefined) ?? [];
  if (on !== undefined && given !== undefined) {
    throw new TilewrightError("option", `${given} is given besides \`on\`, whose device is taken, expected one of them`);
  }
  return { device: { choice: device ?? "auto", subgroups: subgroups ?? true, ...defined({ tier }) }, ...defined({ on: on?.line.target }) };
}

/** A line to something new: in the worker of `on`, or in one of its own. */
export async function lineFor(on: Holding | undefined): Promise<Line> {
  return on === undefined ? WorkerLine.open() : on.line.sibling();
}

/** A line to what other tabs of the site may have loaded from the same addresses. */
function shareable(source: SourceSpec, on: Holding | undefined): Line {
  const isNamed = source.kind === "builtin" || source.kind === "folder" || (source.kind === "files" && source.files.every(({ kind }) => kind === "url"));
  if (!isNamed) {
    throw new TilewrightError("option", "shared is for what other tabs can load too, expected an address as the source");
  }
  if (on !== undefined) {
    throw new TilewrightError("option", "shared is given besides `on`, expected one of them");
  }
  return new SharedLine();
}

/** Frees what nobody refers to any more. */
const forgotten = registry<Line>((line) => void line.close("nobody refers to it any more"));

/** Has a line closed when `it`, whose line it is, has been collected. */
export function closeWith(it: object, line: Line): void {
  forgotten.register(it, line);
}

/** Something that is loaded. It is freed by `free`, or some time after the last reference to it has gone. */
export abstract class Loaded<Info> implements Holding {
  /** @internal */
  readonly line: Line;
  readonly #state: { device: DeviceInfo };
  /** What the model's files say. */
  readonly info: Info;

  protected constructor({ line, info, device }: Parts<Info>) {
    this.line = line;
    this.info = info;
    const state = { device };
    this.#state = state;
    // Lines outlive what nobody refers to any more.
    line.onDevice = (current) => {
      state.device = current;
    };
    closeWith(this, line);
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
    await this.line.close("the model was freed");
  }

  /** Asks the worker. It is not collected meanwhile. @internal */
  call<K extends CallName>(name: K, args: Calls[K]["args"], options: CallOptions<K> = {}): Promise<Calls[K]["reply"]> {
    return this.line.call(name, args, { ...options, keeps: this });
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
