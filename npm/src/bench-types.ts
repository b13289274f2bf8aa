/** The types of `bench`: its options, its rows and its report. */

import type { KernelOptions, RequestOptions } from "./types.js";

/** Options of {@link bench}. */
export interface BenchOptions extends KernelOptions, RequestOptions {
  /** Measures one weight type instead of four, and each thing for a shorter time. Default `false`. */
  quick?: boolean;
  /** Called for each measured probe and kernel. */
  onProgress?: ((progress: BenchProgress) => void) | undefined;
}

/** The latest probe or kernel, and the number of rows so far. */
export interface BenchProgress {
  done: number;
  total: number;
  probe?: BenchProbe;
  kernel?: BenchKernel;
}

/** Times and rates of one run. */
interface BenchRates {
  /** Label of the shader variant, such as `matvec.Q4_0.t2`. */
  kernel: string;
  seconds: number;
  /** Read and written; of a kernel each operand once. */
  bytes: number;
  /** Multiplications and additions; of a kernel those of matrix products. */
  flop: number;
  bytes_per_second: number;
  flop_per_second: number;
}

/** One repeated operation of an idle device. */
export interface BenchProbe extends BenchRates {
  /** `copy`, `read`, `read_strided`, `read_random`, `reduce`, `fma_f32`, `fma_f16`; natively also `matrix_f16`. */
  probe: string;
}

/** A kernel of a forward pass. */
export interface BenchKernel extends BenchRates {
  /** What it computes in the forward pass, such as `qkv`. */
  operation: string;
  n_tokens: number;
  /** Its bytes per second by those of the probe `copy`; above 1 where a cache holds the operands. */
  copy_share: number;
  /** Its operations per second by those of the probe `fma_f32`; above 1 where it multiplies in half precision. */
  fma_share: number;
}

/** Rates of a model, measured by the caller. */
export interface BenchModel {
  name: string;
  architecture: string;
  weight_types: string[];
  weights_bytes: number;
  kv_type: string;
  tests: BenchTest[];
}

/** Prefill of a prompt, or decoding of tokens. */
export interface BenchTest {
  /** As llama-bench names it: `pp512`, `tg128`. */
  test: string;
  phase: "prefill" | "decode";
  n_tokens: number;
  /** Tokens that the context held before. */
  depth: number;
  tokens_per_second: { lowest: number; median: number; highest: number };
}

/** The browser's adapter. */
export interface BenchAdapter {
  vendor: string;
  architecture: string;
  description: string;
  kind: "other" | "software";
  /** Names of WebGPU features. */
  features: string[];
  /** By their names in WebGPU. */
  limits: Record<string, number>;
}

/** A report. `benches/record/community/README.md` explains it; the names are those of its JSON. */
export interface BenchReport {
  schema: string;
  /** The package's version. */
  tilewright: string;
  source: "web" | "cli";
  /** Seconds since 1970. */
  unix_time: number;
  host: { os: string | null; arch: string | null; browser: string | null };
  device: { name: string; backend: string; driver: string; tier: string; is_software: boolean };
  /** Missing on the CPU. */
  adapter: BenchAdapter | null;
  settings: { quick: boolean; dim: number; n_prompt: number; n_cached: number; cold_bytes: number };
  probes: BenchProbe[];
  kernels: BenchKernel[];
  models: BenchModel[];
}
