/** The engine's module for the CPU: relaxed SIMD, and threads where workers may share memory. */

import { useClasses } from "../classes.js";
import type * as cpu from "../cpu.js";
import { messageOf, TilewrightError } from "../errors.js";
import { besidePackage, importHidden, isNode, startable, wasmAt } from "../platform.js";
import type { SharedModule } from "../tilewright_cpu.js";
import type { Start } from "../wasm.js";

/** Addresses of its files, if they are not beside the worker. */
export const cpuFiles: { script?: string | undefined; wasm?: string | undefined } = {};

/** A module with one function that takes a relaxed product of bytes. */
const RELAXED = Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 19, 1, 17, 0,
  65, 0, 253, 15, 65, 0, 253, 15, 65, 0, 253, 15, 253, 147, 2, 11,
);
/** Pages of its memory: what it needs at first is less, and 32 bits address no more. */
const [FIRST_PAGES, MOST_PAGES] = [32, 65536];

/** Whether workers may share memory: in pages that are isolated from other origins, and outside browsers. */
const isShared = (): boolean => isNode || "Deno" in globalThis || globalThis.crossOriginIsolated;

/** Number of processors. */
async function processors(): Promise<number> {
  const known = (globalThis.navigator as Partial<WorkerNavigator> | undefined)?.hardwareConcurrency;
  if (known !== undefined || !isNode) {
    return known ?? 1;
  }
  return (await importHidden<typeof import("node:os")>("node:os")).availableParallelism();
}

/**
 * Starts the module with this many threads, the worker's among them; by default as many as there are processors. `lack` is
 * called with a message if the module or some threads cannot be had.
 */
export function cpuEngine(threads: number | undefined, lack: (message: string) => void): Start {
  return async () => {
    let memory: WebAssembly.Memory;
    try {
      // Futures of a module with shared memory wait by `Atomics.waitAsync`.
      if (!WebAssembly.validate(RELAXED) || !("waitAsync" in Atomics)) {
        return undefined;
      }
      memory = new WebAssembly.Memory({ initial: FIRST_PAGES, maximum: MOST_PAGES, shared: true });
    } catch {
      // No shared memory here, or not enough address space for its maximum. The usual module needs neither.
      return undefined;
    }
    // Bundlers copy the file that they find in this expression. As a worker's script it would be a bundle of its own.
    const script = cpuFiles.script ?? (isNode ? besidePackage("cpu.js") : new URL("./cpu.js", import.meta.url)).href;
    let glue: typeof cpu;
    let module: WebAssembly.Module;
    let own: WebAssembly.Memory;
    try {
      [glue, module] = await Promise.all([importHidden<typeof cpu>(script), compiled()]);
      ({ memory: own } = await glue.default({ module_or_path: module, memory }));
    } catch (error) {
      lack(`the engine's module for the CPU could not be loaded, and its usual one is slower: ${messageOf(error)}`);
      return undefined;
    }
    useClasses(glue);
    const n = isShared() ? (threads ?? await processors()) - 1 : 0;
    const started = await Promise.allSettled(Array.from({ length: n }, () => startThread(glue, script, { module, memory })));
    const failed = started.filter((thread) => thread.status === "rejected");
    glue.setCpuHelpers(n - failed.length);
    if (failed[0] !== undefined) {
      lack(`${failed.length} of ${n + 1} threads of the CPU could not be started: ${messageOf(failed[0].reason)}`);
    }
    return () => Promise.resolve({ memory: own });
  };
}

async function compiled(): Promise<WebAssembly.Module> {
  const given = await wasmAt(cpuFiles.wasm, "tilewright_cpu_bg.wasm");
  if (given instanceof Uint8Array) {
    return WebAssembly.compile(given);
  }
  const response = await fetch(given ?? new URL("./tilewright_cpu_bg.wasm", import.meta.url));
  if (!response.ok) {
    throw new TilewrightError("network", `${response.url}: status ${response.status}`);
  }
  return WebAssembly.compile(await response.arrayBuffer());
}

/** Where a thread's messages go, and why it failed. */
interface ThreadEvents {
  receive(said: cpu.FromCpuThread): void;
  fail(reason: string): void;
}

/** Starts a thread. Should it fail later, so does the engine. */
async function startThread(glue: typeof cpu, script: string, shared: SharedModule): Promise<void> {
  let isReady = false;
  await new Promise<void>((resolve, reject) => {
    const fail = (reason: string): void => {
      if (!isReady) {
        reject(new Error(reason));
        return;
      }
      glue.failCpu();
      // No call waits for this. The worker reports it as fatal.
      void Promise.reject(new TilewrightError("worker_crashed", `a thread of the CPU failed: ${reason}`));
    };
    const receive = (said: cpu.FromCpuThread): void => {
      if (said.type === "failed") {
        fail(said.message);
      } else {
        isReady = true;
        resolve();
      }
    };
    (isNode ? startInNode : startInBrowser)(glue.CPU_THREAD, script, shared, { receive, fail }).catch((error) => fail(messageOf(error)));
  });
}

async function startInNode(name: string, script: string, shared: SharedModule, { receive, fail }: ThreadEvents): Promise<void> {
  const { Worker: NodeWorker } = await importHidden<typeof import("node:worker_threads")>("node:worker_threads");
  const thread = new NodeWorker(new URL(script), { workerData: name });
  thread.on("message", receive);
  thread.on("error", (error) => fail(messageOf(error)));
  thread.on("exit", (code) => fail(`it ended with code ${code}`));
  thread.postMessage(shared);
  // The process does not wait for it.
  thread.unref();
}

async function startInBrowser(name: string, script: string, shared: SharedModule, { receive, fail }: ThreadEvents): Promise<void> {
  const { url, revoke } = startable(script);
  const thread = new Worker(url, { type: "module", name });
  thread.addEventListener("message", revoke, { once: true });
  thread.addEventListener("message", ({ data }) => receive(data as cpu.FromCpuThread));
  thread.addEventListener("error", (event) => {
    event.preventDefault();
    revoke();
    fail(event.message ? event.message : `${script} could not be loaded`);
  });
  thread.postMessage(shared);
}
