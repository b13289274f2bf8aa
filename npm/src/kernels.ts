/** The engine's kernels on typed arrays and on tensors that stay on the device, all row-major. They run in a worker. */

import { WorkerConnection } from "./worker-connection.js";
import { TilewrightError } from "./errors.js";
import type { Connection } from "./connection.js";
import { defined } from "./helpers.js";
import { WorkerObject } from "./loaded.js";
import { known } from "./options.js";
import { finalizer } from "./platform.js";
import type { KernelCalls, Operand } from "./protocol.js";
import type { AttentionOptions, AvailableDevice, Counters, DeviceInfo, KernelOptions, RopeOptions } from "./types.js";

/** What a kernel computes on: numbers that are sent along, or a tensor that is on the device already. */
export type KernelOperand = Float32Array | DeviceTensor;

/** Numbers that stay on a device, for the kernels of that device. It stays until it is freed. */
export interface DeviceTensor {
  /** Dimensions, the last one contiguous. */
  readonly shape: readonly number[];
  /** The numbers, as a new array. */
  read(): Promise<Float32Array>;
  /** Gives the memory back. Calls that were made before still have it. */
  free(): void;
  [Symbol.dispose](): void;
}

/** A device in a worker. Its kernels and tensors refer to it. */
class OpenDevice extends WorkerObject<undefined> {
  constructor(connection: Connection, device: DeviceInfo) {
    super({ connection, info: undefined, device }, "device");
  }

  freeTensor(kept: number): void {
    freeTensor(this.connection, kept);
  }
}

/** A tensor in a worker. */
class WorkerTensor implements DeviceTensor {
  readonly shape: readonly number[];
  readonly #device: OpenDevice;
  /** Its number in the worker, until it is freed. */
  #id: number | undefined;

  constructor(device: OpenDevice, id: number, shape: readonly number[]) {
    this.#device = device;
    this.#id = id;
    this.shape = shape;
    const { connection } = device;
    forgotten.register(this, () => freeTensor(connection, id), this);
  }

  /** Its number on this device. Throws if it has none there. */
  idOn(device: OpenDevice, kernel: string, operand: string): number {
    if (this.#id === undefined || this.#device !== device) {
      throw refused(kernel, operand, "a tensor of this device", this.#id === undefined ? "a tensor that was freed" : "a tensor of another device");
    }
    return this.#id;
  }

  async read(): Promise<Float32Array> {
    return this.#device.call("readTensor", { kept: this.idOn(this.#device, "read", "tensor") });
  }

  free(): void {
    if (this.#id !== undefined) {
      this.#device.freeTensor(this.#id);
      this.#id = undefined;
      forgotten.unregister(this);
    }
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

/** Frees tensors that nobody can reach any more. */
const forgotten = finalizer<() => void>((free) => free());

function freeTensor(connection: Connection, kept: number): void {
  // With a worker that is gone, its memory is too.
  connection.call("freeTensor", { kept }).catch(() => {});
}

function refused(kernel: string, operand: string, expected: string, found: string): TilewrightError {
  return new TilewrightError("operand", `${kernel}: \`${operand}\` is ${found}, expected ${expected}`);
}

/** A copy that a worker can be given: of a part of a large array only that part, and the caller keeps what is theirs. */
function copied(kernel: string, operand: string, data: unknown): Float32Array<ArrayBuffer> {
  // Arrays of other realms, such as frames, have other constructors.
  if (!ArrayBuffer.isView(data) || (data as Float32Array)[Symbol.toStringTag] !== "Float32Array") {
    throw refused(kernel, operand, "a Float32Array or a tensor of this device", Object.prototype.toString.call(data).slice(8, -1));
  }
  if (data.byteLength === 0) {
    throw refused(kernel, operand, "at least one number", "empty");
  }
  return new Float32Array(data as Float32Array);
}

/**
 * A device that runs kernels. For a device of its own choice; the functions beside it share one that is opened on first use.
 *
 * With `keep: true` a kernel's result stays on the device as a {@link DeviceTensor}, and the call resolves as soon as the device knows what
 * to do. What goes wrong there shows when a result is read.
 */
export class Kernels {
  readonly #device: OpenDevice;

  private constructor(device: OpenDevice) {
    this.#device = device;
  }

  /** What runs the kernels. */
  get device(): DeviceInfo {
    return this.#device.device;
  }

  /** Opens a device in a worker of its own. */
  static async open(options: KernelOptions = {}): Promise<Kernels> {
    const { connection, device } = await openDevice(known("Kernels.open", options));
    return new Kernels(new OpenDevice(connection, device));
  }

  /** Puts numbers on the device, to stay there. They are copied; `shape` is theirs in row-major order. */
  async tensor(data: Float32Array, shape: readonly number[]): Promise<DeviceTensor> {
    const mine = copied("tensor", "data", data);
    const isWhole = shape.length > 0 && shape.every((n) => Number.isInteger(n) && n > 0);
    if (!isWhole || shape.reduce((product, n) => product * n, 1) !== mine.length) {
      throw refused("tensor", "shape", `positive whole numbers whose product is ${mine.length}, the length of \`data\``, `[${shape.join(", ")}]`);
    }
    const args = { data: mine, shape: [...shape] };
    const { kept } = await this.#device.call("keepTensor", args, { transfer: [mine.buffer] });
    return new WorkerTensor(this.#device, kept, args.shape);
  }

  /** `a` `[m, k]` times `b` `[k, n]`: `[m, n]`. */
  matmul(a: KernelOperand, b: KernelOperand, m: number, n: number, k: number, options: { keep: true }): Promise<DeviceTensor>;
  matmul(a: KernelOperand, b: KernelOperand, m: number, n: number, k: number, options?: { keep?: false }): Promise<Float32Array>;
  matmul(a: KernelOperand, b: KernelOperand, m: number, n: number, k: number, options: { keep?: boolean } = {}): Promise<KernelOperand> {
    return this.#run("matmul", { a, b }, { m, n, k }, options);
  }

  /** `weight * x / sqrt(mean(x²) + eps)`, row by row; `x` is `[rows, weight.length]`. */
  rmsNorm(x: KernelOperand, weight: KernelOperand, eps: number | undefined, options: { keep: true }): Promise<DeviceTensor>;
  rmsNorm(x: KernelOperand, weight: KernelOperand, eps?: number, options?: { keep?: false }): Promise<Float32Array>;
  rmsNorm(x: KernelOperand, weight: KernelOperand, eps = 1e-5, options: { keep?: boolean } = {}): Promise<KernelOperand> {
    return this.#run("rmsNorm", { x, weight }, { eps }, options);
  }

  /** `weight * (x - mean(x)) / sqrt(variance(x) + eps) + bias`, row by row; `x` is `[rows, weight.length]`. */
  layerNorm(x: KernelOperand, weight: KernelOperand, bias: KernelOperand, eps: number | undefined, options: { keep: true }): Promise<DeviceTensor>;
  layerNorm(x: KernelOperand, weight: KernelOperand, bias: KernelOperand, eps?: number, options?: { keep?: false }): Promise<Float32Array>;
  layerNorm(
    x: KernelOperand, weight: KernelOperand, bias: KernelOperand, eps = 1e-5, options: { keep?: boolean } = {},
  ): Promise<KernelOperand> {
    return this.#run("layerNorm", { x, weight, bias }, { eps }, options);
  }

  /** Softmax of each row; `x` is `[rows, columns]`. */
  softmax(x: KernelOperand, columns: number, options: { keep: true }): Promise<DeviceTensor>;
  softmax(x: KernelOperand, columns: number, options?: { keep?: false }): Promise<Float32Array>;
  softmax(x: KernelOperand, columns: number, options: { keep?: boolean } = {}): Promise<KernelOperand> {
    return this.#run("softmax", { x }, { columns }, options);
  }

  /** Rotates each head by angles of its position; `x` is `[tokens, nHeads * headDim]`. */
  rope(x: KernelOperand, options: RopeOptions & { keep: true }): Promise<DeviceTensor>;
  rope(x: KernelOperand, options: RopeOptions & { keep?: false }): Promise<Float32Array>;
  rope(x: KernelOperand, options: RopeOptions & { keep?: boolean }): Promise<KernelOperand> {
    const { nHeads, headDim, firstPos = 0, theta = 10000, style = "interleaved" } = options;
    return this.#run("rope", { x }, { nHeads, headDim, firstPos, theta, style }, options);
  }

  /**
   * Causal attention. `q` is `[T, nHeads * headDim]`, `k` and `v` are `[S, nKvHeads * headDim]`; the last of the `T` queries sees all `S`
   * keys, each query before it one key less.
   */
  attention(q: KernelOperand, k: KernelOperand, v: KernelOperand, options: AttentionOptions & { keep: true }): Promise<DeviceTensor>;
  attention(q: KernelOperand, k: KernelOperand, v: KernelOperand, options: AttentionOptions & { keep?: false }): Promise<Float32Array>;
  attention(
    q: KernelOperand, k: KernelOperand, v: KernelOperand, options: AttentionOptions & { keep?: boolean },
  ): Promise<KernelOperand> {
    const { nHeads, nKvHeads = nHeads, headDim } = options;
    return this.#run("attention", { q, k, v }, { nHeads, nKvHeads, headDim }, options);
  }

  async #run<K extends keyof KernelCalls>(
    kernel: K,
    operands: Record<keyof KernelCalls[K]["args"]["operands"], KernelOperand>,
    settings: KernelCalls[K]["args"]["options"],
    given: { keep?: boolean },
  ): Promise<KernelOperand> {
    const { keep = false } = known(kernel, given);
    const transfer: ArrayBuffer[] = [];
    const send = ([name, operand]: [string, KernelOperand]): [string, Operand] => {
      if (operand instanceof WorkerTensor) {
        return [name, operand.idOn(this.#device, kernel, name)];
      }
      const mine = copied(kernel, name, operand);
      transfer.push(mine.buffer);
      return [name, mine];
    };
    const sent = Object.fromEntries(Object.entries<KernelOperand>(operands).map(send));
    const args = { operands: sent, options: settings, keep } as KernelCalls[K]["args"];
    const result = await this.#device.call(kernel, args, { transfer });
    return "kept" in result ? new WorkerTensor(this.#device, result.kept, result.shape) : result;
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.#device.call("counters", {});
  }

  /** Frees the device and its worker. */
  free(): void {
    this.#device.free();
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

/**
 * Opens a device in a worker of its own.
 *
 * @internal
 */
export async function openDevice(
  { device = "auto", tier, subgroups = true, onNotice }: KernelOptions,
): Promise<{ connection: Connection; device: DeviceInfo }> {
  const connection = await WorkerConnection.open();
  connection.onNotice = onNotice;
  return connection.orClose("the device was not opened", async () =>
    ({ connection, device: await connection.call("openDevice", { choice: device, subgroups, ...defined({ tier }) }) }));
}

let shared: Promise<Kernels> | undefined;

/** The device of the functions below. One that failed to open or was lost is forgotten, so that the next call opens another. */
async function withShared(run: (kernels: Kernels) => Promise<Float32Array>): Promise<Float32Array> {
  const opened = shared ??= Kernels.open();
  try {
    return await run(await opened);
  } catch (error) {
    const code = (error as { code?: unknown }).code;
    const isTheCallers = error instanceof TypeError || code === "shape" || code === "operand";
    if (shared === opened && !isTheCallers) {
      shared = undefined;
      // If it did not open there is nothing to free.
      opened.then((kernels) => kernels.free(), () => {});
    }
    throw error;
  }
}

/** {@link Kernels.matmul} on a shared device. */
export function matmul(a: Float32Array, b: Float32Array, m: number, n: number, k: number): Promise<Float32Array> {
  return withShared((kernels) => kernels.matmul(a, b, m, n, k));
}

/** {@link Kernels.rmsNorm} on a shared device. */
export function rmsNorm(x: Float32Array, weight: Float32Array, eps = 1e-5): Promise<Float32Array> {
  return withShared((kernels) => kernels.rmsNorm(x, weight, eps));
}

/** {@link Kernels.layerNorm} on a shared device. */
export function layerNorm(x: Float32Array, weight: Float32Array, bias: Float32Array, eps = 1e-5): Promise<Float32Array> {
  return withShared((kernels) => kernels.layerNorm(x, weight, bias, eps));
}

/** {@link Kernels.softmax} on a shared device. */
export function softmax(x: Float32Array, columns: number): Promise<Float32Array> {
  return withShared((kernels) => kernels.softmax(x, columns));
}

/** {@link Kernels.rope} on a shared device. */
export function rope(x: Float32Array, options: RopeOptions): Promise<Float32Array> {
  return withShared((kernels) => kernels.rope(x, options));
}

/** {@link Kernels.attention} on a shared device. */
export function attention(q: Float32Array, k: Float32Array, v: Float32Array, options: AttentionOptions): Promise<Float32Array> {
  return withShared((kernels) => kernels.attention(q, k, v, options));
}

/** Devices that could run a model here. The CPU is always among them, last. */
export async function devices(): Promise<AvailableDevice[]> {
  const connection = await WorkerConnection.open();
  try {
    return await connection.call("devices", {});
  } finally {
    void connection.close("the devices are listed");
  }
}
