/** Errors of the package: one class, with a code for programs and a message for people. */

/** What went wrong, for programs. */
export type ErrorCode =
  /** The file breaks its format. */
  | "format"
  /** The file is well formed and uses something that is not supported. */
  | "unsupported"
  /** The model's configuration is missing a value or contradicts itself. */
  | "config"
  /** An adapter is one of another model, or none. */
  | "adapter"
  /** The model does not fit the memory limit. */
  | "memory"
  /** An option is out of range. */
  | "option"
  /** What a text must match is invalid, contradicts itself, cannot be enforced or is too large; or no token can follow. */
  | "constraint"
  /** The prompt and the tokens asked for do not fit the context. */
  | "context_full"
  /** As many texts wait as may. */
  | "busy"
  /** The engine that had the text is gone. */
  | "stopped"
  /** The vocabulary is inconsistent. */
  | "tokenizer"
  /** The chat template cannot be rendered. */
  | "template"
  /** The GPU device was lost and could not be rebuilt. */
  | "device_lost"
  /** The GPU has no memory left for a buffer; smaller models, contexts or batches may still fit. */
  | "out_of_memory"
  /** The GPU reported an error. */
  | "gpu"
  /** There is no adapter. */
  | "no_adapter"
  /** The model exceeds a limit of the adapter. */
  | "limit"
  /** The model computed a number that is not finite. */
  | "non_finite"
  /** The file ends too early. */
  | "truncated"
  /** An operand of a kernel has the wrong shape. */
  | "shape"
  /** An argument of a kernel is outside what it computes. */
  | "operand"
  /** An index does not take these vectors or ids, or is one for another model. */
  | "index"
  /** The connection failed and trying again did not help, or the server does not let other sites' pages read its files (CORS). */
  | "network"
  /** The server answered with an error status, which `status` has. */
  | "http"
  /** The address holds something else, such as a web page. */
  | "not_a_model"
  /** The server's answers to range requests contradict each other, or the file changed during the download. */
  | "range"
  /** A file has another SHA-256 than the caller or the hub says. */
  | "digest"
  /** The browser's storage is full. */
  | "quota"
  /** The browser's storage failed, a kept file is damaged, or a file cannot be read any more. */
  | "storage"
  /** A call was aborted without a reason of its own. */
  | "aborted"
  /** The worker with the engine is gone. */
  | "worker_crashed"
  /** A GPU was demanded, and there is none. */
  | "webgpu_unavailable"
  /** A client has no model of the name that a request has. */
  | "model_not_found"
  /** The model was freed. */
  | "disposed"
  /** The platform lacks something that the package needs, such as module workers. */
  | "unsupported_platform"
  /** A fault of the package itself. */
  | "internal";

interface TilewrightErrorOptions {
  cause?: unknown;
  status?: number | undefined;
  param?: string;
}

/** Every error that the package throws itself; an abort throws the signal's reason instead. */
export class TilewrightError extends Error {
  override readonly name = "TilewrightError";
  /** What went wrong, for programs. */
  readonly code: ErrorCode;
  /** The HTTP status that the server answered with, where `code` is `http`. */
  readonly status: number | undefined;
  /** The field that is at fault, of a request in the shape of OpenAI's API. */
  readonly param: string | undefined;

  constructor(code: ErrorCode, message: string, { status, param, ...options }: TilewrightErrorOptions = {}) {
    super(message, options);
    this.code = code;
    this.status = status;
    this.param = param;
  }
}

/** Throws unless the condition holds. */
export function ensure(condition: unknown, code: ErrorCode, message: string, options: TilewrightErrorOptions = {}): asserts condition {
  if (!condition) {
    throw new TilewrightError(code, message, options);
  }
}

/** An error as it travels between threads. `fatal`: the engine cannot be used any more. */
export interface WireError {
  code: ErrorCode;
  message: string;
  status?: number | undefined;
  stack?: string | undefined;
  fatal: boolean;
}

/** Codes that the engine in WASM gives to its errors. */
export const ENGINE_CODES: ReadonlySet<string> = new Set<ErrorCode>([
  "format", "unsupported", "config", "memory", "option", "constraint", "context_full", "busy", "stopped", "tokenizer", "template", "device_lost", "out_of_memory", "gpu",
  "adapter", "no_adapter", "limit", "non_finite", "truncated", "shape", "operand", "index",
]);

/** Code of any thrown value. */
export function codeOf(error: unknown): ErrorCode {
  if (error instanceof TilewrightError) {
    return error.code;
  }
  if (isTrap(error)) {
    return "worker_crashed";
  }
  if (error instanceof Error) {
    if (error.name === "AbortError") {
      return "aborted";
    }
    if (error.name === "QuotaExceededError") {
      return "quota";
    }
    const code = (error as { code?: unknown }).code;
    if (code === "io") {
      return "storage";
    }
    if (typeof code === "string" && ENGINE_CODES.has(code)) {
      return code as ErrorCode;
    }
  }
  return "internal";
}

/** Message of any thrown value. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Whether WASM stopped in the middle of something: its memory is in no defined state afterwards. */
export function isTrap(error: unknown): boolean {
  return error instanceof WebAssembly.RuntimeError
    || (error instanceof RangeError && error.message.includes("call stack"))
    // Firefox has an error of its own.
    || (error instanceof Error && error.name === "InternalError" && error.message.includes("recursion"))
    // By wasm-bindgen: a trap left it borrowed, and was caught.
    || (error instanceof Error && error.message.includes("Rust value while it was borrowed"));
}

/** Prepares any thrown value for the journey to the other thread. */
export function toWire(error: unknown): WireError {
  const fatal = isTrap(error);
  const message = fatal ? `the engine stopped: ${messageOf(error)}` : messageOf(error);
  const stack = error instanceof Error ? error.stack : undefined;
  return { code: codeOf(error), message, status: error instanceof TilewrightError ? error.status : undefined, stack, fatal };
}

/** The error at the end of the journey; its cause has the stack of the other thread. */
export function fromWire({ code, message, status, stack }: WireError): TilewrightError {
  return new TilewrightError(code, message, { status, ...(stack === undefined ? {} : { cause: stack }) });
}
