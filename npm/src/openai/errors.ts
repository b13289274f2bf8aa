/** Errors of requests, and their form in OpenAI's API. */

import { codeOf, messageOf, TilewrightError, type ErrorCode } from "../errors.js";

export function invalid(param: string, found: unknown, expected: string): TilewrightError {
  return new TilewrightError("option", `${param} is ${shown(found)}, expected ${expected}`, { param });
}

export function ensureValid(condition: unknown, param: string, found: unknown, expected: string): asserts condition {
  if (!condition) {
    throw invalid(param, found, expected);
  }
}

export function unsupported(param: string, message: string): TilewrightError {
  return new TilewrightError("unsupported", message, { param });
}

function shown(value: unknown): string {
  if (value === undefined) {
    return "missing";
  }
  try {
    const json = JSON.stringify(value) ?? typeof value;
    return json.length > 60 ? `${json.slice(0, 60)}…` : json;
  } catch {
    return typeof value;
  }
}

export interface ErrorBody {
  error: { message: string; type: "invalid_request_error" | "server_error"; param: string | null; code: string };
}

/** Statuses of the request's own errors. */
const STATUSES: { readonly [Code in ErrorCode]?: number } = {
  option: 400, unsupported: 400, constraint: 400, context_full: 400, template: 400, tokenizer: 400, operand: 400, busy: 429, model_not_found: 404,
};

/** OpenAI's names of codes. */
const NAMES: { readonly [Code in ErrorCode]?: string } = {
  option: "invalid_value", unsupported: "unsupported_value", context_full: "context_length_exceeded",
};

export function errorResponse(error: unknown): { status: number; body: ErrorBody } {
  const code = codeOf(error);
  const status = STATUSES[code] ?? 500;
  return {
    status,
    body: {
      error: {
        message: messageOf(error),
        type: status === 500 ? "server_error" : "invalid_request_error",
        param: error instanceof TilewrightError ? error.param ?? null : null,
        code: NAMES[code] ?? code,
      },
    },
  };
}
