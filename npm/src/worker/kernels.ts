/** Devices for kernels alone: their tensors and their benchmark. */

import type { BenchKernel, BenchProbe, BenchProgress, BenchReport } from "../bench-types.js";
import { Device } from "../classes.js";
import { isTrap } from "../errors.js";
import { inspectGpu } from "../gpu.js";
import type { Calls, KeptTensor } from "../protocol.js";
import type { DeviceTensor } from "../tilewright.js";
import { Handle } from "./handles.js";
import { Registry } from "./registry.js";

export class DeviceHandle extends Handle {
  readonly tensors = new Registry<DeviceTensor>("tensor");

  async keep({ data, shape }: Calls["keepTensor"]["args"]): Promise<KeptTensor> {
    return this.#put(await this.place.device.upload(data, Uint32Array.from(shape)));
  }

  /** Runs a kernel on tensors and numbers, and keeps or reads its result. */
  async compute({ kernel, operands, settings, keep }: Calls["runKernel"]["args"]): Promise<Float32Array | KeptTensor> {
    const { device } = this.place;
    let ours: DeviceTensor[] = [];
    try {
      const tensors: DeviceTensor[] = [];
      for (const operand of operands) {
        if (typeof operand === "number") {
          tensors.push(this.tensors.get(operand));
        } else {
          const tensor = await device.upload(operand);
          ours.push(tensor);
          tensors.push(tensor);
        }
      }
      const run = device[kernel] as (...operands: (DeviceTensor | number | string)[]) => DeviceTensor;
      const result = run.call(device, ...tensors, ...settings);
      ours.push(result);
      if (!keep) {
        return await result.read();
      }
      result.compute();
      // The caller owns it now.
      ours.pop();
      return this.#put(result);
    } catch (error) {
      if (isTrap(error)) {
        ours = [];
      }
      throw error;
    } finally {
      ours.forEach((tensor) => tensor.free());
    }
  }

  protected override release(): void {
    this.tensors.clear();
  }

  #put(tensor: DeviceTensor): KeptTensor {
    return { kept: this.tensors.put(tensor), shape: [...tensor.shape()] };
  }
}

/** Measures a device, and completes the engine's results to a report. */
export async function measure(
  { place: { device } }: DeviceHandle, { quick }: Calls["bench"]["args"], emit: (progress: BenchProgress) => void,
): Promise<BenchReport> {
  const report = device.isGpu() ? await inspectGpu() : undefined;
  const adapter = report?.adapter === undefined ? undefined : report;
  // The f16 probe needs its own device, and is left out without one.
  const half = adapter?.adapter.hasF16 ? await Device.open("gpu", adapter.adapter, "f16").catch(() => undefined) : undefined;
  const probes: BenchProbe[] = [];
  const rows: BenchKernel[] = [];
  const onRow = (json: string, done: number, total: number): void => {
    const row = JSON.parse(json) as Pick<BenchProgress, "probe" | "kernel">;
    probes.push(...row.probe === undefined ? [] : [row.probe]);
    rows.push(...row.kernel === undefined ? [] : [row.kernel]);
    emit({ ...row, done, total });
  };
  const head = JSON.parse(await device.bench(half, quick, onRow)) as Pick<BenchReport, "schema" | "tilewright" | "device" | "settings">;
  const host = { os: null, arch: null, browser: globalThis.navigator?.userAgent ?? null };
  return { ...head, source: "web", unix_time: Math.floor(Date.now() / 1000), host, adapter: adapter?.described ?? null, probes, kernels: rows, models: [] };
}
