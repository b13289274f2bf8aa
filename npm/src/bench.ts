/** What a device does: probes, and the kernels of a forward pass next to them, as a report that others can compare. */

import type { BenchOptions, BenchReport } from "./bench-types.js";
import { openDevice } from "./kernels.js";
import { known } from "./options.js";

/**
 * Measures what a device does, in a worker of its own: for some seconds on a GPU, up to a minute where software takes its place. No dispatch
 * takes over 100 ms; what is measured is made to suit what the device turns out to do.
 *
 * @throws {@link TilewrightError}, or the reason of `options.signal`; TypeError for an option that there is not.
 */
export async function bench(options: BenchOptions = {}): Promise<BenchReport> {
  const { quick = false, signal, onProgress, ...device } = known("bench", options);
  signal?.throwIfAborted();
  const { connection } = await openDevice(device);
  try {
    return await connection.call("bench", { quick }, { signal, ...(onProgress === undefined ? {} : { onEvent: onProgress }) });
  } finally {
    void connection.close("the device was measured");
  }
}
