/** Devices for kernels alone: their tensors and their benchmark. */

import type { BenchKernel, BenchProbe, BenchProgress, BenchReport } from "../bench-types.js";
import { isTrap } from "../errors.js";
import { inspectGpu } from "../gpu.js";
import type { Calls, KeptTensor, Operand } from "../protocol.js";
import { Device, type DeviceTensor } from "../tilewright.js";
import { Handle } from "./handles.js";
import { Registry } from "./registry.js";

export class DeviceHandle extends Handle {
  readonly tensors = new Registry<DeviceTensor>("tensor");

  async keep({ data, shape }: Calls["keepTensor"]["args"]): Promise<KeptTensor> {
    return stored(this.tensors, await this.place.device.upload(data, Uint32Array.from(shape)));
  }

  protected override release(): void {
    this.tensors.clear();
  }
}

function stored(tensors: Registry<DeviceTensor>, tensor: DeviceTensor): KeptTensor {
  return { kept: tensors.put(tensor), shape: [...tensor.shape()] };
}

/** Runs a kernel on tensors and numbers, and keeps or reads its result. */
export async function compute<const Operands extends readonly Operand[]>(
  { place: { device }, tensors }: DeviceHandle,
  operands: Operands,
  keep: boolean,
  kernel: (device: Device, ...tensors: { [I in keyof Operands]: DeviceTensor }) => DeviceTensor,
): Promise<Float32Array | KeptTensor> {
  let ours: DeviceTensor[] = [];
  try {
    const operandTensors: DeviceTensor[] = [];
    for (const operand of operands) {
      if (typeof operand === "number") {
        operandTensors.push(tensors.get(operand));
      } else {
        const tensor = await device.upload(operand);
        ours.push(tensor);
        operandTensors.push(tensor);
      }
    }
    const result = kernel(device, ...operandTensors as { [I in keyof Operands]: DeviceTensor });
    ours.push(result);
    if (!keep) {
      return await result.read();
    }
    result.compute();
    // The caller owns it now.
    ours.pop();
    return stored(tensors, result);
  } catch (error) {
    if (isTrap(error)) {
      ours = [];
    }
    throw error;
  } finally {
    ours.forEach((tensor) => tensor.free());
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
  return {
    schema: head.schema,
    tilewright: head.tilewright,
    source: "web",
    unix_time: Math.floor(Date.now() / 1000),
    host: { os: null, arch: null, browser: globalThis.navigator?.userAgent ?? null },
    device: head.device,
    adapter: adapter?.described ?? null,
    settings: head.settings,
    probes,
    kernels: rows,
    models: [],
  };
}
