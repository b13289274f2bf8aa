/** Errors of the package. */

/** What went wrong, for programs. */
export type ErrorCode =
  /** The file breaks its format. */
  | "format"
  /** The file is valid but not supported. */
  | "unsupported"
  /** The model's configuration is incomplete or contradictory. */
  | "config"
  /** An adapter is invalid, or for another model. */
  | "adapter"
  /** The model does not fit the memory limit. */
  | "memory"
  /** An option is out of range. */
  | "option"
  /** A constraint is invalid, contradictory, too large or cannot be enforced; or no token can follow. */
  | "constraint"
  /** The prompt does not fit the context. */
  | "context_full"
  /** The queue is full. */
  | "busy"
  /** The engine is gone. */
  | "stopped"
  /** The vocabulary is inconsistent. */
  | "tokenizer"
  /** The chat template cannot be rendered. */
  | "template"
  /** The GPU device was lost and could not be rebuilt. */
  | "device_lost"
  /** The GPU is out of memory; smaller models, contexts or batches may still fit. */
  | "out_of_memory"
  /** The GPU reported an error. */
  | "gpu"
  /** There is no adapter. */
  | "no_adapter"
  /** The model exceeds a limit of the adapter. */
  | "limit"
  /** The model computed a non-finite number. */
  | "non_finite"
  /** The file ends too early. */
  | "truncated"
  /** An operand of a kernel has the wrong shape. */
  | "shape"
  /** An argument of a kernel is out of range. */
  | "operand"
  /** Vectors or ids do not suit the index, or it is for another model. */
  | "index"
  /** The connection failed repeatedly, or the server forbids access by other sites (CORS). */
  | "network"
  /** The server responded with an error, see `status`. */
  | "http"
  /** The file is something else, such as a web page. */
  | "not_a_model"
  /** The sound is in no format that the browser decodes, or damaged. */
  | "not_a_sound"
  /** The server's range responses are inconsistent, or the file changed during the download. */
  | "range"
  /** A file's SHA-256 differs from the caller's or the hub's. */
  | "digest"
  /** The browser's storage is full. */
  | "quota"
  /** The browser's storage failed, a stored file is damaged, or a file cannot be read any more. */
  | "storage"
  /** A call was aborted without a reason of its own. */
  | "aborted"
  /** The worker with the engine is gone. */
  | "worker_crashed"
  /** A GPU was requested, but there is none. */
  | "webgpu_unavailable"
  /** A client has no model of the requested name. */
  | "model_not_found"
  /** The model was freed. */
  | "disposed"
  /** The platform lacks a requirement, such as module workers. */
  | "unsupported_platform"
  /** A bug of the package. */
  | "internal";

interface TilewrightErrorOptions {
  cause?: unknown;
  status?: number | undefined;
  param?: string;
}

/** The package's errors; an abort throws the signal's reason instead. */
export class TilewrightError extends Error {
  override readonly name = "TilewrightError";
  readonly code: ErrorCode;
  /** The HTTP status, with the code `http`. */
  readonly status: number | undefined;
  /** The invalid field of a request of OpenAI's API. */
  readonly param: string | undefined;

  constructor(code: ErrorCode, message: string, { status, param, ...options }: TilewrightErrorOptions = {}) {
    super(message, options);
    this.code = code;
    this.status = status;
    this.param = param;
  }
}

export function ensure(
  condition: unknown, code: ErrorCode, message: string, options: TilewrightErrorOptions = {},
): asserts condition {
  if (!condition) {
    throw new TilewrightError(code, message, options);
  }
}

/** An error as a message between threads. `fatal`: the engine is broken. */
export interface WireError {
  code: ErrorCode;
  message: string;
  status?: number | undefined;
  stack?: string | undefined;
  fatal: boolean;
}

export const ENGINE_CODES: ReadonlySet<string> = new Set<ErrorCode>([
  "format", "unsupported", "config", "memory", "option", "constraint", "context_full", "busy", "stopped", "tokenizer", "template", "device_lost", "out_of_memory", "gpu",
  "adapter", "no_adapter", "limit", "non_finite", "truncated", "shape", "operand", "index",
]);

export function codeOf(error: unknown): ErrorCode {
  if (error instanceof TilewrightError) {
    return error.code;
  }
  if (isTrap(error)) {
    return "worker_crashed";
  }
  const { name, code } = error instanceof Error ? error as Error & { code?: string } : { name: "", code: undefined };
  const ofName: ErrorCode | undefined = name === "AbortError" ? "aborted" : name === "QuotaExceededError" ? "quota" : undefined;
  return ofName ?? (code === "io" ? "storage" : code !== undefined && ENGINE_CODES.has(code) ? code as ErrorCode : "internal");
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Whether WASM trapped, so that its memory is in an undefined state. */
export function isTrap(error: unknown): boolean {
  return error instanceof WebAssembly.RuntimeError
    || (error instanceof RangeError && error.message.includes("call stack"))
    // Firefox has an error of its own.
    || (error instanceof Error && error.name === "InternalError" && error.message.includes("recursion"))
    // From wasm-bindgen: an earlier trap left it borrowed.
    || (error instanceof Error && error.message.includes("Rust value while it was borrowed"));
}

/** Where the module leaves the message of a panic, which then traps. */
const panicked = globalThis as { tilewrightPanic?: string };

export function toWire(error: unknown): WireError {
  const fatal = isTrap(error);
  const message = fatal ? `the engine stopped: ${panicked.tilewrightPanic ?? messageOf(error)}` : messageOf(error);
  const stack = error instanceof Error ? error.stack : undefined;
  return { code: codeOf(error), message, status: error instanceof TilewrightError ? error.status : undefined, stack, fatal };
}

/** Its cause has the stack of the other thread. */
export function fromWire({ code, message, status, stack }: WireError): TilewrightError {
  return new TilewrightError(code, message, { status, ...(stack === undefined ? {} : { cause: stack }) });
}
