/** The GPU's adapter, and the `subgroups` feature. */

import type { BenchAdapter } from "./bench-types.js";
import { messageOf } from "./errors.js";
import { importHidden, isNode } from "./platform.js";
import type { Adapter } from "./tilewright.js";

/** Names of adapters that compute on the CPU. */
const SOFTWARE = /swiftshader|llvmpipe|lavapipe|softpipe|basic render|\bwarp\b/i;

/** The adapter, or why there is none. */
export type GpuReport = { adapter: Adapter; described: BenchAdapter } | { adapter?: undefined; reason: string };

/** Requests an adapter. Never throws: errors are reasons. */
export async function inspectGpu(): Promise<GpuReport> {
  const missing = isNode ? await installDawn() : undefined;
  const gpu = (globalThis.navigator as Partial<WorkerNavigator> | undefined)?.gpu;
  if (gpu === undefined || gpu === null) {
    return { reason: missing ?? "this browser has no WebGPU, or the page is not served over https" };
  }
  let adapter: GPUAdapter | null;
  try {
    adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  } catch (error) {
    return { reason: `asking for a GPU failed: ${messageOf(error)}` };
  }
  if (adapter === null) {
    return { reason: "WebGPU is there but found no adapter; the GPU or its driver may be blocked" };
  }
  const { vendor = "", architecture = "", device = "", description = "", isFallbackAdapter } = (adapter.info ?? {}) as Partial<GPUAdapterInfo>;
  const words = [vendor, architecture, device, description];
  const isSoftware = Boolean(isFallbackAdapter ?? (adapter as { isFallbackAdapter?: boolean }).isFallbackAdapter) || words.some((word) => SOFTWARE.test(word));
  return {
    adapter: {
      name: description || [vendor, architecture || device].filter((word) => word !== "").join(" ") || "unnamed adapter",
      isSoftware,
      hasSubgroups: adapter.features.has("subgroups"),
      hasF16: adapter.features.has("shader-f16"),
    },
    described: {
      vendor, architecture, description,
      kind: isSoftware ? "software" : "other",
      features: [...adapter.features].sort(),
      limits: limitsOf(adapter),
    },
  };
}

/** An adapter's limits, which are getters of its prototype. */
function limitsOf({ limits }: GPUAdapter): Record<string, number> {
  const found: Record<string, number> = {};
  for (const name in limits) {
    const value: unknown = limits[name as keyof GPUSupportedLimits];
    if (typeof value === "number") {
      found[name] = value;
    }
  }
  return found;
}

let wrapped: GPUAdapter["requestDevice"] | undefined;

/**
 * Gives every opened device the feature `subgroups` if its adapter has it. wgpu 30 cannot request it
 * (gfx-rs/wgpu#10146); remove this when it can.
 */
export function requestSubgroups(wanted: boolean): void {
  const prototype = (globalThis as Partial<typeof globalThis>).GPUAdapter?.prototype;
  if (prototype === undefined) {
    return;
  }
  if (wanted && wrapped === undefined) {
    const original = prototype.requestDevice;
    wrapped = original;
    prototype.requestDevice = function (descriptor) {
      const features = new Set(descriptor?.requiredFeatures);
      if (this.features.has("subgroups")) {
        features.add("subgroups");
      }
      return original.call(this, { ...descriptor, requiredFeatures: [...features] });
    };
  } else if (!wanted && wrapped !== undefined) {
    prototype.requestDevice = wrapped;
    wrapped = undefined;
  }
}

/**
 * Gives Node the globals that wgpu needs, with Dawn behind `navigator.gpu`. Returns why that is not possible, if so.
 */
async function installDawn(): Promise<string | undefined> {
  if ((globalThis.navigator as Partial<WorkerNavigator> | undefined)?.gpu !== undefined) {
    return undefined;
  }
  let dawn: { create(options: string[]): GPU; globals: object };
  try {
    dawn = await importHidden("webgpu");
  } catch (error) {
    return (error as { code?: string }).code === "ERR_MODULE_NOT_FOUND"
      ? "the npm package `webgpu` is not installed"
      : `the npm package \`webgpu\` cannot be loaded: ${messageOf(error)}`;
  }
  Object.assign(globalThis, dawn.globals);
  const gpu = dawn.create([]);
  if (globalThis.navigator === undefined) {
    Object.defineProperty(globalThis, "navigator", { value: { gpu }, configurable: true });
  } else {
    Object.defineProperty(globalThis.navigator, "gpu", { value: gpu, configurable: true });
  }
  // wgpu takes a global object for a browser's worker when it has this name.
  (globalThis as { WorkerGlobalScope?: unknown }).WorkerGlobalScope ??= class WorkerGlobalScope {};
  return undefined;
}
