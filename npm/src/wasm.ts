/** The WASM modules: the engine, and constraints with output parsing. Each is started on first use. */

import { messageOf, TilewrightError } from "./errors.js";
import { wasmAt } from "./platform.js";
import initEngine from "./tilewright.js";
import initText from "./tilewright_text.js";

class WasmModule {
  /** Its address, if it is not beside the worker. */
  url: string | undefined;
  #started: Promise<void> | undefined;
  #isThere = false;

  constructor(private readonly what: string, private readonly file: string, private readonly init: typeof initEngine) {}

  /** Starts it once. After a failure the next use tries again. */
  async start(): Promise<void> {
    this.#started ??= (async () => {
      const other = await wasmAt(this.url, this.file);
      await (other === undefined ? this.init() : this.init({ module_or_path: other }));
      this.#isThere = true;
    })();
    try {
      await this.#started;
    } catch (error) {
      this.#started = undefined;
      const place = this.url ?? `${this.file} beside worker.js`;
      throw new TilewrightError("network", `${this.what}, expected as ${place}, could not be started: ${messageOf(error)}`, { cause: error });
    }
  }

  /** Bytes of its memory; 0 before its first use. */
  async memoryBytes(): Promise<number> {
    return this.#isThere ? (await this.init()).memory.buffer.byteLength : 0;
  }
}

export const engineModule = new WasmModule("the engine", "tilewright_bg.wasm", initEngine);
export const textModule = new WasmModule("the module for constraints and output parsing", "tilewright_text_bg.wasm", initText);
