/** The messages between the caller's thread and the worker that owns the engine. */

import type { WireError } from "./errors.js";
import type {
  AvailableDevice, ChatMessage, Counters, DeviceChoice, DeviceInfo, GenerateOptions, GenerateResult, MemoryInfo, ModelInfo, Notice,
  Piece, Progress, Tier,
} from "./types.js";

/** One file of a model, with its address made absolute. */
export type FileSpec =
  | { kind: "url"; name: string; url: string }
  | { kind: "blob"; name: string; blob: Blob }
  | { kind: "path"; name: string; path: string };

/** A model's files, or the folder that they are to be looked up in. */
export type SourceSpec =
  | { kind: "files"; files: FileSpec[] }
  | { kind: "folder"; url: string }
  | { kind: "directory"; path: string }
  | { kind: "builtin" };

/** How to open a device. */
export interface DeviceRequest {
  choice: DeviceChoice;
  tier?: Tier;
  subgroups: boolean;
}

/** What the worker needs to load a model. */
export interface LoadRequest {
  source: SourceSpec;
  device: DeviceRequest;
  cache: boolean;
  /** Whether to measure the model's products on the device. */
  tune: boolean;
  contextLength?: number;
  memoryLimit?: number;
}

/** A prompt: text, tokens, or a conversation for the model's template. */
export type Prompt =
  | { kind: "text"; text: string }
  | { kind: "tokens"; ids: Uint32Array }
  | { kind: "chat"; messages: ChatMessage[] };

/** Everything that the worker does: arguments, what it sends meanwhile, what it replies. */
export interface Calls {
  load: { args: LoadRequest; event: Progress; reply: ModelInfo };
  generate: { args: { prompt: Prompt; options: Omit<GenerateOptions, "signal"> }; event: Piece; reply: GenerateResult };
  tokenize: { args: { text: string; addSpecial: boolean }; event: never; reply: Uint32Array };
  detokenize: { args: { ids: Uint32Array }; event: never; reply: string };
  memory: { args: Record<string, never>; event: never; reply: MemoryInfo };
  counters: { args: Record<string, never>; event: never; reply: Counters };
  destroyDevice: { args: Record<string, never>; event: never; reply: undefined };
  /** Frees model and device; the caller ends the worker afterwards. */
  close: { args: Record<string, never>; event: never; reply: undefined };
  devices: { args: Record<string, never>; event: never; reply: AvailableDevice[] };
  openDevice: { args: DeviceRequest; event: never; reply: DeviceInfo };
  matmul: { args: { a: Float32Array; b: Float32Array; m: number; n: number; k: number }; event: never; reply: Float32Array };
  rmsNorm: { args: { x: Float32Array; weight: Float32Array; eps: number }; event: never; reply: Float32Array };
  softmax: { args: { x: Float32Array; columns: number }; event: never; reply: Float32Array };
  rope: {
    args: { x: Float32Array; nHeads: number; headDim: number; firstPos: number; theta: number; style: "interleaved" | "halves" };
    event: never;
    reply: Float32Array;
  };
  attention: {
    args: { q: Float32Array; k: Float32Array; v: Float32Array; nHeads: number; nKvHeads: number; headDim: number };
    event: never;
    reply: Float32Array;
  };
}

/** Name of a call. */
export type CallName = keyof Calls;

/** From the caller's thread to the worker. */
export type ToWorker =
  | { type: "call"; id: number; name: CallName; args: Calls[CallName]["args"] }
  | { type: "abort"; id: number };

/** From the worker to the caller's thread. */
export type FromWorker =
  /** The worker listens. It holds the lock of this name as long as it lives. */
  | { type: "ready"; lock?: string }
  | { type: "reply"; id: number; value: Calls[CallName]["reply"] }
  | { type: "event"; id: number; value: Calls[CallName]["event"] }
  | { type: "fail"; id: number; error: WireError }
  /** The engine is broken; nothing that was asked will be answered. */
  | { type: "fatal"; error: WireError }
  | { type: "notice"; notice: Notice }
  | { type: "device"; device: DeviceInfo };
