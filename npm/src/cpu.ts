/** A file of its own, for the CPU: the glue of its module. As a worker's script, it is one of the module's threads. */

import { messageOf } from "./errors.js";
import { importHidden, isNode } from "./platform.js";
import { failCpu, helpCpu, initSync, type SharedModule } from "./tilewright_cpu.js";

export * from "./tilewright_cpu.js";
export { default } from "./tilewright_cpu.js";

/** Name of workers that are threads; in Node, their data. */
export const CPU_THREAD = "tilewright-cpu-thread";

/** From a thread: it is about to help, or has ended. */
export type FromCpuThread = { type: "ready" } | { type: "failed"; message: string };

/** Bytes of a thread's stack. */
const STACK_BYTES = 1 << 20;

function help(shared: SharedModule, post: (message: FromCpuThread) => void): void {
  try {
    initSync({ ...shared, thread_stack_size: STACK_BYTES });
    post({ type: "ready" });
    try {
      helpCpu();
    } catch (error) {
      failCpu();
      throw error;
    }
  } catch (error) {
    post({ type: "failed", message: messageOf(error) });
  }
}

if (isNode) {
  void importHidden<typeof import("node:worker_threads")>("node:worker_threads").then(({ parentPort, workerData }) => {
    if (workerData === CPU_THREAD) {
      parentPort?.once("message", (shared: SharedModule) => help(shared, (message) => parentPort.postMessage(message)));
    }
  });
} else if (globalThis.name === CPU_THREAD) {
  const scope = self as unknown as DedicatedWorkerGlobalScope;
  scope.addEventListener("message", ({ data }) => help(data as SharedModule, (message) => scope.postMessage(message)), { once: true });
}
