/** WASM modules. Each is started on first use. */

import { messageOf, TilewrightError } from "./errors.js";
import { wasmAt } from "./platform.js";
import initEngine from "./tilewright.js";

/** Modules that were started. */
const started = new Set<WasmModule>();

/** What a module's `init` gives. */
type Started = { memory: WebAssembly.Memory };

/** Starts another module, whose `init` it returns; `undefined` where there can be none. */
export type Start = () => Promise<(() => Promise<Started>) | undefined>;

export class WasmModule {
  /** Its address, if it is not beside the worker. */
  url: string | undefined;
  #started: Promise<void> | undefined;
  /** Of a module that was started in its place. */
  #other: (() => Promise<Started>) | undefined;

  /** `file`: its name beside the worker. */
  constructor(private readonly what: string, public file: string, private readonly init: typeof initEngine) {}

  /** Starts it once, or another one in its place. After a failure the next use tries again. */
  async start(inPlace?: Start): Promise<void> {
    this.#started ??= (async () => {
      this.#other = await inPlace?.();
      if (this.#other === undefined) {
        const given = await wasmAt(this.url, this.file);
        await (given === undefined ? this.init() : this.init({ module_or_path: given }));
      }
      started.add(this);
    })();
    try {
      await this.#started;
    } catch (error) {
      this.#started = undefined;
      const place = this.url ?? `${this.file} beside worker.js`;
      throw new TilewrightError("network", `${this.what}, expected as ${place}, could not be started: ${messageOf(error)}`, { cause: error });
    }
  }

  /** Bytes of its memory, after its start. */
  async memoryBytes(): Promise<number> {
    return (await (this.#other ?? this.init)()).memory.buffer.byteLength;
  }
}

/** Bytes of the memory of all modules. */
export async function heapBytes(): Promise<number> {
  const sizes = await Promise.all([...started].map((module) => module.memoryBytes()));
  return sizes.reduce((sum, bytes) => sum + bytes, 0);
}

/** The engine. A transcriber's worker has another in its place, see `scripts/bundle.mjs`. */
export const engineModule = new WasmModule("the engine", "tilewright_bg.wasm", initEngine);
