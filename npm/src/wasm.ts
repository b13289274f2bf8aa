/** The engine's WASM module, started on first use. */

import { messageOf, TilewrightError } from "./errors.js";
import { wasmAt } from "./platform.js";
import init from "./tilewright.js";

let url: string | undefined;
let started: Promise<WebAssembly.Memory> | undefined;

/** Sets the module's address, if it is not beside the worker. */
export function findAt(given: string | undefined): void {
  url = given;
}

/** Starts the module once. Resolves to its memory. */
export function start(): Promise<WebAssembly.Memory> {
  started ??= (async () => {
    try {
      const other = await wasmAt(url, "tilewright_bg.wasm");
      return (await (other === undefined ? init() : init({ module_or_path: other }))).memory;
    } catch (error) {
      const place = url === undefined ? "tilewright_bg.wasm beside worker.js" : url;
      throw new TilewrightError("network", `the engine, expected as ${place}, could not be started: ${messageOf(error)}`, { cause: error });
    }
  })();
  return started;
}
