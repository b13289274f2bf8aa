/** The engine's kernels on typed arrays, all row-major. They run in a worker; results are new arrays. */

import { Engine } from "./engine.js";
import type { AvailableDevice, Counters, DeviceChoice, DeviceInfo, Notice, Tier } from "./types.js";

/** Options of {@link Kernels.open}. */
export interface KernelOptions {
  /** What should run the kernels. Default `auto`. */
  device?: DeviceChoice;
  /** Kernels to use. Default: the fastest that the adapter offers. */
  tier?: Tier;
  /** Whether to use subgroup operations where the browser has them. Default `true`. */
  subgroups?: boolean;
  /** Called when the CPU was taken instead of a GPU. */
  onNotice?: (notice: Notice) => void;
}

/** Position encoding of a {@link rope}. */
export interface RopeOptions {
  nHeads: number;
  /** Numbers in a head. */
  headDim: number;
  /** Position of the first row. Default 0. */
  firstPos?: number;
  /** Base of the angles. Default 10000. */
  theta?: number;
  /** Which numbers of a head are rotated together: neighbours, as in Llama files of GGUF, or its two halves. Default `interleaved`. */
  style?: "interleaved" | "halves";
}

/** Heads of an {@link attention}. */
export interface AttentionOptions {
  nHeads: number;
  /** Heads of keys and values, a divisor of `nHeads`. Default `nHeads`. */
  nKvHeads?: number;
  /** Numbers in a head. */
  headDim: number;
}

/** A device that runs kernels. For a device of its own choice; the functions beside it share one that is opened on first use. */
export class Kernels {
  readonly #engine: Engine;
  /** What runs the kernels. */
  readonly device: DeviceInfo;

  private constructor(engine: Engine, device: DeviceInfo) {
    this.#engine = engine;
    this.device = device;
  }

  /** Opens a device in a worker of its own. */
  static async open({ device = "auto", tier, subgroups = true, onNotice }: KernelOptions = {}): Promise<Kernels> {
    const engine = await Engine.start();
    engine.onNotice = onNotice;
    try {
      const info = await engine.call("openDevice", { choice: device, subgroups, ...(tier === undefined ? {} : { tier }) });
      return new Kernels(engine, info);
    } catch (error) {
      void engine.close("the device was not opened");
      throw error;
    }
  }

  /** `a` `[m, k]` times `b` `[k, n]`: `[m, n]`. */
  matmul(a: Float32Array, b: Float32Array, m: number, n: number, k: number): Promise<Float32Array> {
    return this.#engine.call("matmul", { a, b, m, n, k });
  }

  /** `weight * x / sqrt(mean(x²) + eps)`, row by row; `x` is `[rows, weight.length]`. */
  rmsNorm(x: Float32Array, weight: Float32Array, eps = 1e-5): Promise<Float32Array> {
    return this.#engine.call("rmsNorm", { x, weight, eps });
  }

  /** Softmax of each row; `x` is `[rows, columns]`. */
  softmax(x: Float32Array, columns: number): Promise<Float32Array> {
    return this.#engine.call("softmax", { x, columns });
  }

  /** Rotates each head by angles of its position; `x` is `[tokens, nHeads * headDim]`. */
  rope(x: Float32Array, { nHeads, headDim, firstPos = 0, theta = 10000, style = "interleaved" }: RopeOptions): Promise<Float32Array> {
    return this.#engine.call("rope", { x, nHeads, headDim, firstPos, theta, style });
  }

  /**
   * Causal attention. `q` is `[T, nHeads * headDim]`, `k` and `v` are `[S, nKvHeads * headDim]`; the last of the `T` queries sees all `S`
   * keys, each query before it one key less.
   */
  attention(q: Float32Array, k: Float32Array, v: Float32Array, { nHeads, nKvHeads = nHeads, headDim }: AttentionOptions): Promise<Float32Array> {
    return this.#engine.call("attention", { q, k, v, nHeads, nKvHeads, headDim });
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.#engine.call("counters", {});
  }

  /** Frees the device and its worker. */
  free(): void {
    void this.#engine.close("the kernels were freed");
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

let shared: Promise<Kernels> | undefined;

/** The device of the functions below. One that failed to open or was lost is forgotten, so that the next call opens another. */
async function withShared(run: (kernels: Kernels) => Promise<Float32Array>): Promise<Float32Array> {
  const opened = shared ??= Kernels.open();
  try {
    return await run(await opened);
  } catch (error) {
    const code = (error as { code?: unknown }).code;
    if (shared === opened && code !== "shape" && code !== "operand") {
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
  const engine = await Engine.start();
  try {
    return await engine.call("devices", {});
  } finally {
    void engine.close("the devices are listed");
  }
}
