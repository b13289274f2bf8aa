/** Benchmarks of a device: probes, and the kernels of a forward pass. */

import type { BenchOptions, BenchReport } from "./bench-types.js";
import { openDevice } from "./kernels.js";
import { known } from "./options.js";

/**
 * Measures a device in a worker of its own: some seconds on a GPU, up to a minute on a software adapter. Sizes adapt
 * to the device, so that no dispatch takes over 100 ms.
 *
 * @throws {@link TilewrightError}, or the reason of `options.signal`; TypeError for an unknown option.
 */
export async function bench(options: BenchOptions = {}): Promise<BenchReport> {
  const { quick = false, signal, onProgress, ...device } = known("bench", options);
  signal?.throwIfAborted();
  const { connection } = await openDevice(device);
  try {
    return await connection.call("bench", { quick }, { signal, onEvent: onProgress });
  } finally {
    void connection.close("the device was measured");
  }
}
