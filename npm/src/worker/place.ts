/** Open devices. Several models can share one, and a lost one is replaced for all of them. */

import { Device } from "../classes.js";
import { codeOf, ensure, type ErrorCode, isTrap, messageOf } from "../errors.js";
import { inspectGpu, requestSubgroups } from "../gpu.js";
import type { DeviceRequest } from "../protocol.js";
import type { Adapter } from "../tilewright.js";
import type { AvailableDevice, DeviceInfo } from "../types.js";
import { engineModule, type Start } from "../wasm.js";
import type { Caller } from "./port.js";

/** Codes of errors after which another device may work. */
export const GPU_FAILURES: ReadonlySet<ErrorCode> = new Set<ErrorCode>(["webgpu_unavailable", "device_lost", "out_of_memory", "gpu", "no_adapter"]);

/** An open device. Its last user frees it. */
export class Place {
  #users = 0;
  #isFree = false;
  #next: Promise<Place> | undefined;

  /** `reason`: why it was chosen, if it was not the first choice. */
  constructor(readonly device: Device, readonly request: DeviceRequest, private readonly reason?: string) {}

  use(): this {
    this.#users += 1;
    return this;
  }

  /** Leaves the device to its other users. */
  free(): void {
    this.#users -= 1;
    if (this.#users === 0) {
      this.#isFree = true;
      this.device.free();
    }
  }

  /** The successor of a lost device: the same for all users, while one of them uses it. */
  next(caller: Caller): Promise<Place> {
    const opened: Promise<Place | undefined> = this.#next ?? Promise.resolve(undefined);
    this.#next = opened.catch(() => undefined).then((place) => place === undefined || place.#isFree ? openPlace(this.request, caller) : place);
    return this.#next;
  }

  info(): DeviceInfo {
    const info = this.device.info();
    return { ...info, reason: this.reason ?? info.reason };
  }
}

let startOfCpu: ((threads: number | undefined, lack: (message: string) => void) => Start) | undefined;

/** Has models on the CPU run with a module of their own, if they are a worker's first. */
export function useCpuEngine(start: typeof startOfCpu): void {
  startOfCpu = start;
}

/** Opens a device. With `auto`, the CPU replaces a GPU that fails. */
export async function openPlace(request: DeviceRequest, caller: Caller): Promise<Place> {
  const { choice, tier, subgroups, threads } = request;
  const startForCpu = (): Promise<void> => engineModule.start(startOfCpu?.(threads, (message) => caller.notify("cpu_slow", message)));
  if (choice === "cpu") {
    await startForCpu();
    return new Place(await Device.open("cpu", undefined, tier), request);
  }
  const report = await inspectGpu();
  if (report.adapter === undefined) {
    ensure(choice !== "gpu", "webgpu_unavailable", `a GPU was requested, but there is none: ${report.reason}`);
    await startForCpu();
    return openCpu(request, report.reason, caller);
  }
  // The CPU is chosen before such an adapter.
  await (choice === "auto" && report.adapter.isSoftware ? startForCpu() : engineModule.start());
  requestSubgroups(subgroups);
  // The engine must not request a feature that the device will lack.
  const adapter: Adapter = { ...report.adapter, hasSubgroups: report.adapter.hasSubgroups && subgroups };
  let device: Device;
  try {
    device = await Device.open(choice, adapter, tier);
  } catch (error) {
    if (choice === "gpu" || isTrap(error) || codeOf(error) === "option") {
      throw error;
    }
    return openCpu(request, `${adapter.name} could not be opened (${messageOf(error)})`, caller);
  }
  if (choice === "auto" && !device.isGpu()) {
    caller.notify("cpu_fallback", `running on the CPU: ${device.info().reason}`);
  }
  return new Place(device, request);
}

export async function openCpu(request: DeviceRequest, reason: string, caller: Caller): Promise<Place> {
  const device = await Device.open("cpu", undefined);
  caller.notify("cpu_fallback", `running on the CPU: ${reason}`);
  return new Place(device, request, reason);
}

export async function listDevices(): Promise<AvailableDevice[]> {
  const { adapter } = await inspectGpu();
  const cpu: AvailableDevice = { choice: "cpu", name: "CPU", isSoftware: false, hasSubgroups: false, hasF16: false };
  return adapter === undefined ? [cpu] : [{ choice: "gpu", ...adapter }, cpu];
}
