/** The engine's kernels on arrays and device tensors, all row-major, and their benchmark. They run in a worker. */

import type { BenchOptions, BenchReport } from "./bench-types.js";
import type { Connection } from "./connection.js";
import { ensure } from "./errors.js";
import { isArrayOf } from "./arguments.js";
import { callOnce, connectionFor, placeOf } from "./load.js";
import { WorkerObject } from "./loaded.js";
import { known } from "./options.js";
import { finalizer } from "./platform.js";
import type { KernelName, Operand } from "./protocol.js";
import type { AttentionOptions, AvailableDevice, KernelOptions, RopeOptions } from "./types.js";

/** An operand of a kernel: an array, or a tensor on the device. */
export type KernelOperand = Float32Array | DeviceTensor;

/** Whether the result stays on the device. */
interface Keep<K extends boolean> {
  keep?: K;
}

type Result<K extends boolean> = Promise<K extends true ? DeviceTensor : Float32Array>;

/** Numbers on a device, for its kernels. They stay there until the tensor is freed. */
export class DeviceTensor {
  readonly #kernels: Kernels;
  /** Its number in the worker, until it is freed. */
  #id: number | undefined;
  /** Dimensions, the last one contiguous. */
  readonly shape: readonly number[];

  /** @internal */
  constructor(kernels: Kernels, id: number, shape: readonly number[]) {
    this.#kernels = kernels;
    this.#id = id;
    this.shape = shape;
    const { connection } = kernels;
    collected.register(this, () => freeTensor(connection, id), this);
  }

  /** Its number on this device. Throws if it has none there. @internal */
  idOn(kernels: Kernels, kernel: string, operand: string): number {
    const found = this.#id === undefined ? "a tensor that was freed" : "a tensor of another device";
    ensureOperand(this.#id !== undefined && this.#kernels === kernels,
      kernel, operand, "a tensor of this device", found);
    return this.#id;
  }

  /** The numbers, as a new array. */
  async read(): Promise<Float32Array> {
    return this.#kernels.call("readTensor", { kept: this.idOn(this.#kernels, "read", "tensor") });
  }

  /** Frees the memory, after earlier calls. */
  free(): void {
    if (this.#id !== undefined) {
      freeTensor(this.#kernels.connection, this.#id);
      this.#id = undefined;
      collected.unregister(this);
    }
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

const collected = finalizer<() => void>((free) => free());

function freeTensor(connection: Connection, kept: number): void {
  // The worker may be gone, and its memory with it.
  connection.call("freeTensor", { kept }).catch(() => {});
}

function ensureOperand(
  condition: unknown, kernel: string, operand: string, expected: string, found: string,
): asserts condition {
  ensure(condition, "operand", `${kernel}: \`${operand}\` is ${found}, expected ${expected}`);
}

/** A copy to transfer to the worker. */
function copied(kernel: string, operand: string, data: unknown): Float32Array<ArrayBuffer> {
  const kind = Object.prototype.toString.call(data).slice(8, -1);
  ensureOperand(isArrayOf("Float32Array", data), kernel, operand, "a Float32Array or a tensor of this device", kind);
  ensureOperand((data as Float32Array).length !== 0, kernel, operand, "at least one number", "empty");
  return new Float32Array(data as Float32Array);
}

/**
 * A device that runs kernels. The functions beside it share a device that is opened on first use.
 *
 * With `keep: true` a kernel's result stays on the device as a {@link DeviceTensor}, and the call resolves once the
 * kernel is submitted. Its errors appear when a result is read.
 */
export class Kernels extends WorkerObject {
  /** @internal */
  constructor({ connection }: { connection: Connection }) {
    super(connection, "the kernels were freed");
  }

  /** Opens a device in a worker of its own. */
  static async open(options: KernelOptions = {}): Promise<Kernels> {
    known("Kernels.open", options);
    const connection = await connectionFor(options);
    return connection.orClose("the device was not opened", async () => {
      connection.device = await connection.call("openDevice", placeOf(options).device);
      return new Kernels({ connection });
    });
  }

  /** Copies numbers to the device, where they stay; `shape` is in row-major order. */
  async tensor(data: Float32Array, shape: readonly number[]): Promise<DeviceTensor> {
    const mine = copied("tensor", "data", data);
    const isWhole = shape.length > 0 && shape.every((n) => Number.isInteger(n) && n > 0);
    ensureOperand(isWhole && shape.reduce((product, n) => product * n, 1) === mine.length,
      "tensor", "shape", `positive whole numbers whose product is ${mine.length}, the length of \`data\``,
      `[${shape.join(", ")}]`);
    const args = { data: mine, shape: [...shape] };
    const { kept } = await this.call("keepTensor", args, { transfer: [mine.buffer] });
    return new DeviceTensor(this, kept, args.shape);
  }

  /** `a` `[m, k]` times `b` `[k, n]`: `[m, n]`. */
  matmul<K extends boolean = false>(
    a: KernelOperand, b: KernelOperand, m: number, n: number, k: number, options?: Keep<K>,
  ): Result<K> {
    return this.#run("matmul", { a, b }, [m, n, k], options);
  }

  /** `weight * x / sqrt(mean(x²) + eps)`, row by row; `x` is `[rows, weight.length]`. */
  rmsNorm<K extends boolean = false>(x: KernelOperand, weight: KernelOperand, eps = 1e-5, options?: Keep<K>): Result<K> {
    return this.#run("rmsNorm", { x, weight }, [eps], options);
  }

  /** `weight * (x - mean(x)) / sqrt(variance(x) + eps) + bias`, row by row; `x` is `[rows, weight.length]`. */
  layerNorm<K extends boolean = false>(
    x: KernelOperand, weight: KernelOperand, bias: KernelOperand, eps = 1e-5, options?: Keep<K>,
  ): Result<K> {
    return this.#run("layerNorm", { x, weight, bias }, [eps], options);
  }

  /** Softmax of each row; `x` is `[rows, columns]`. */
  softmax<K extends boolean = false>(x: KernelOperand, columns: number, options?: Keep<K>): Result<K> {
    return this.#run("softmax", { x }, [columns], options);
  }

  /** Rotates each head by angles of its position; `x` is `[tokens, nHeads * headDim]`. */
  rope<K extends boolean = false>(x: KernelOperand, options: RopeOptions & Keep<K>): Result<K> {
    const { nHeads, headDim, firstPos = 0, theta = 10000, style = "interleaved" } = options;
    return this.#run("rope", { x }, [nHeads, headDim, firstPos, theta, style], options);
  }

  /**
   * Causal attention. `q` is `[T, nHeads * headDim]`, `k` and `v` are `[S, nKvHeads * headDim]`; the last of the `T`
   * queries attends to all `S` keys, each query before it to one key less.
   */
  attention<K extends boolean = false>(
    q: KernelOperand, k: KernelOperand, v: KernelOperand, options: AttentionOptions & Keep<K>,
  ): Result<K> {
    const { nHeads, nKvHeads = nHeads, headDim } = options;
    return this.#run("attention", { q, k, v }, [nHeads, nKvHeads, headDim], options);
  }

  async #run<K extends boolean>(
    kernel: KernelName, operands: Record<string, KernelOperand>, settings: (number | string)[], given: Keep<K> = {},
  ): Result<K> {
    const { keep = false } = known<Keep<K>>(kernel, given);
    const transfer: ArrayBuffer[] = [];
    const sent = Object.entries(operands).map(([name, operand]): Operand => {
      if (operand instanceof DeviceTensor) {
        return operand.idOn(this, kernel, name);
      }
      const mine = copied(kernel, name, operand);
      transfer.push(mine.buffer);
      return mine;
    });
    const result = await this.call("runKernel", { kernel, operands: sent, settings, keep }, { transfer });
    return ("kept" in result ? new DeviceTensor(this, result.kept, result.shape) : result) as Awaited<Result<K>>;
  }
}

let shared: Promise<Kernels> | undefined;

/** The device of the functions below. After a failure the next call opens another. */
async function withShared(run: (kernels: Kernels) => Promise<Float32Array>): Promise<Float32Array> {
  const opened = shared ??= Kernels.open();
  try {
    return await run(await opened);
  } catch (error) {
    const code = (error as { code?: unknown }).code;
    const isTheCallers = error instanceof TypeError || code === "shape" || code === "operand";
    if (shared === opened && !isTheCallers) {
      shared = undefined;
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

/** Devices that could run a model here. The CPU is always the last one. */
export function devices(): Promise<AvailableDevice[]> {
  return callOnce("devices", {});
}

/**
 * Measures a device in a worker of its own: some seconds on a GPU, up to a minute on a software adapter. Sizes adapt
 * to the device, so that no dispatch takes over 100 ms.
 *
 * @throws {@link TilewrightError}, or the reason of `options.signal`; TypeError for an unknown option.
 */
export async function bench(options: BenchOptions = {}): Promise<BenchReport> {
  const { quick = false, signal, onProgress, ...device } = known("bench", options);
  signal?.throwIfAborted();
  const kernels = await Kernels.open(device);
  try {
    return await kernels.call("bench", { quick }, { signal, onEvent: onProgress });
  } finally {
    kernels.free();
  }
}
