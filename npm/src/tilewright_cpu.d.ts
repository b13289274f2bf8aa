/** The engine's module for the CPU: the same, with memory that threads share. */

export * from "./tilewright.js";

export interface SharedModule {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
}

export default function init(input: { module_or_path: WebAssembly.Module; memory: WebAssembly.Memory }): Promise<{ memory: WebAssembly.Memory }>;
/** For a thread: `thread_stack_size` is a multiple of 64 KiB. */
export function initSync(input: SharedModule & { thread_stack_size: number }): unknown;
/** Helps the engine's worker as long as this thread lives. */
export function helpCpu(): void;
/** Tells the engine's worker that `helpCpu` has thrown. */
export function failCpu(): void;
/** Tells the engine how many threads are about to help. */
export function setCpuHelpers(n: number): void;
