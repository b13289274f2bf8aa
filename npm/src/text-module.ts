/** The WASM module of constraints and output parsing. */

import initText from "./tilewright_text.js";
import { WasmModule } from "./wasm.js";

export const textModule = new WasmModule("the module for constraints and output parsing", "tilewright_text_bg.wasm", initText);
