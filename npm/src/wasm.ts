/** The engine's WASM module, started on first use. */

import { besidePackage, importHidden, isNode } from "./platform.js";
import init from "./tilewright.js";

let started: Promise<WebAssembly.Memory> | undefined;

/** Starts the module unless it runs. Resolves to its memory. */
export function start(): Promise<WebAssembly.Memory> {
  started ??= (async () => {
    if (!isNode) {
      return (await init()).memory;
    }
    // Node cannot fetch files.
    const { readFile } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
    return (await init({ module_or_path: await readFile(besidePackage("tilewright_bg.wasm")) })).memory;
  })();
  return started;
}
