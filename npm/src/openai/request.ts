/** The common part of chat and text requests: fields, ranges, and options for the model. */

import { ensure } from "../errors.js";
import { BOUNDS, type SamplingNumbers } from "../options.generated.js";
import { known } from "../options.js";
import type { GenerateOptions, RequestOptions } from "../types.js";
import { ensureValid, unsupported } from "./errors.js";

/** Those that OpenAI's API lacks: see {@link GenerateOptions}. */
type OwnFields = Partial<Record<"top_k" | "min_p" | "repeat_penalty" | "repeat_last_n", number | null>>;

/** Sampling fields. `null` is as absent. */
export interface SamplingFields extends OwnFields {
  /** 0 to 2. Default 1, as in OpenAI's API. The other sampling options have the defaults of {@link GenerateOptions}. */
  temperature?: number | null;
  /** 0 to 1. */
  top_p?: number | null;
  stop?: string | string[] | null;
  /** A whole number from 0 to 2^53 - 1. */
  seed?: number | null;
  /** -2 to 2. */
  presence_penalty?: number | null;
  /** -2 to 2. */
  frequency_penalty?: number | null;
  /** Biases of -100 to 100 by token ids. */
  logit_bias?: Record<string, number> | null;
  /** Number of choices, 1 to 128, generated in turn. The second one uses `seed + 1`, and so on. Default 1. */
  n?: number | null;
  /** `true`: the response is a stream of chunks. */
  stream?: boolean | null;
  stream_options?: { include_usage?: boolean; include_obfuscation?: false } | null;
  /** Ignored. */
  user?: string | null;
}

/** Unsupported fields and values without effect. */
const NEUTRAL: Readonly<Record<string, (value: unknown) => boolean>> = {
  store: (value) => value === false,
  service_tier: (value) => value === "auto" || value === "default",
};

/** Checks the value of a field, which is not `null`. */
type Check = (param: string, value: unknown) => void;

export type Fields<Request> = Readonly<Record<keyof Request, Check>>;

export const anything: Check = () => {};

export const flag: Check = (param, value) => ensureValid(typeof value === "boolean", param, value, "true or false");

export const between = (least: number, most: number, kind: "number" | "whole number" = "number"): Check => (param, value) => {
  const isIn = typeof value === "number" && value >= least && value <= most && (kind === "number" || Number.isInteger(value));
  ensureValid(isIn, param, value, `a ${kind} from ${least} to ${most}`);
};

export const whole = (least: number, most: number): Check => between(least, most, "whole number");

const stopTexts: Check = (param, value) => {
  const isText = (text: unknown): boolean => typeof text === "string" && text !== "";
  ensureValid(Array.isArray(value) ? value.every(isText) : isText(value),
    param, value, "a text or a list of texts, none of them empty");
};

const biases: Check = (param, value) => {
  ensureValid(typeof value === "object" && value !== null && !Array.isArray(value),
    param, value, "an object of biases by token ids");
  for (const [id, bias] of Object.entries(value)) {
    ensure(/^(0|[1-9]\d{0,9})$/.test(id),
      "option", `${param} has the key ${JSON.stringify(id)}, expected a token's id`, { param });
    ensureValid(typeof bias === "number" && Math.abs(bias) <= 100,
      `${param}[${JSON.stringify(id)}]`, bias, "a number from -100 to 100");
  }
};

const streamOptions: Check = (param, value) => {
  ensureValid(typeof value === "object" && value !== null, param, value, "an object");
  const { include_usage: usage, include_obfuscation: obfuscation } = value as { include_usage?: unknown; include_obfuscation?: unknown };
  if (usage !== undefined && usage !== null) {
    flag(`${param}.include_usage`, usage);
  }
  if (obfuscation === true) {
    throw unsupported(`${param}.include_obfuscation`, `${param}.include_obfuscation is not supported`);
  }
};

/** The ranges of OpenAI's API, which are within the engine's. */
export const SAMPLING_FIELDS: Fields<SamplingFields> = {
  temperature: between(0, 2), top_p: between(...BOUNDS.topP), stop: stopTexts, seed: anything, presence_penalty: between(-2, 2),
  frequency_penalty: between(-2, 2), logit_bias: biases, n: whole(1, 128), stream: flag, stream_options: streamOptions, user: anything,
  top_k: whole(...BOUNDS.topK), min_p: between(...BOUNDS.minP), repeat_penalty: between(...BOUNDS.repeatPenalty),
  repeat_last_n: whole(...BOUNDS.repeatLastN),
};

/** A request without its `null`s. */
export type Present<Request> = { [K in keyof Request]: Exclude<Request[K], null> };

/** Checks a request. Throws `option` for anything but a valid one, and `unsupported` for unsupported fields. */
export function checked<Request extends object>(request: Request, fields: Readonly<Record<string, Check>>): Present<Request> {
  ensure(typeof request === "object" && request !== null && !Array.isArray(request),
    "option", "the request is no object");
  const given = Object.entries(request).filter(([, value]) => value !== undefined && value !== null);
  for (const [field, value] of given) {
    const check = Object.hasOwn(fields, field) ? fields[field] : undefined;
    if (check === undefined && NEUTRAL[field]?.(value) !== true) {
      throw unsupported(field, `${field} is not supported`);
    }
    check?.(field, value);
  }
  return Object.fromEntries(given) as Present<Request>;
}

/** Options of each choice's generation: they differ in the seed. */
export function samplingOf(request: Present<SamplingFields>, { signal }: RequestOptions, maxTokens: number): GenerateOptions[] {
  const { stop, seed, n = 1, temperature = 1 } = request;
  if (seed !== undefined) {
    whole(0, Number.MAX_SAFE_INTEGER + 1 - n)("seed", seed);
  }
  const snake = (name: string): string => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
  const numbers = Object.keys(BOUNDS).map((name) => [name, request[snake(name) as keyof SamplingFields]]);
  const common: GenerateOptions = {
    ...Object.fromEntries(numbers) as SamplingNumbers,
    signal, maxTokens, temperature, stop: typeof stop === "string" ? [stop] : stop, logitBias: request.logit_bias,
  };
  return Array.from({ length: n }, (_, at) => ({ ...common, seed: seed === undefined ? undefined : seed + at }));
}

export function optionsOf(call: "createChatCompletion" | "completions.create" | "embeddings.create", options: RequestOptions): RequestOptions {
  const given = known(call, options);
  given.signal?.throwIfAborted();
  return given;
}
