/** The common part of chat and text requests: fields, ranges, and options for the model. */

import { ensure } from "../errors.js";
import { known } from "../options.js";
import type { GenerateOptions, RequestOptions } from "../types.js";
import { invalid, unsupported } from "./errors.js";

/** Sampling fields. `null` is as absent. */
export interface SamplingFields {
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
  /** Number of choices, 1 to 128, generated in turn; with `seed`, the second one uses `seed + 1`, and so on. Default 1. */
  n?: number | null;
  /** `true`: the response is a stream of chunks. */
  stream?: boolean | null;
  stream_options?: { include_usage?: boolean; include_obfuscation?: false } | null;
  /** Ignored. */
  user?: string | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  top_k?: number | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  min_p?: number | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  repeat_penalty?: number | null;
}

/** The field names of a request. */
export type Fields<Request> = Readonly<Record<keyof Request, true>>;

export const SAMPLING_FIELDS: Fields<SamplingFields> = {
  temperature: true, top_p: true, stop: true, seed: true, presence_penalty: true, frequency_penalty: true, logit_bias: true, n: true, stream: true,
  stream_options: true, user: true, top_k: true, min_p: true, repeat_penalty: true,
};

/** Seeds are exact up to here. */
const MOST = Number.MAX_SAFE_INTEGER;

/** Unsupported fields and values without effect. */
const NEUTRAL: Readonly<Record<string, (value: unknown) => boolean>> = {
  store: (value) => value === false,
  service_tier: (value) => value === "auto" || value === "default",
};

/** Throws `option` for anything but a request, and `unsupported` for unsupported fields. */
export function checkFields(request: object, fields: Readonly<Record<string, true>>): void {
  ensure(typeof request === "object" && request !== null && !Array.isArray(request), "option", "the request is no object");
  for (const [field, value] of Object.entries(request)) {
    if (!Object.hasOwn(fields, field) && value !== undefined && value !== null && NEUTRAL[field]?.(value) !== true) {
      throw unsupported(field, `${field} is not supported`);
    }
  }
}

export function checkNumber(param: string, value: unknown, least: number, most: number, kind: "number" | "whole number"): void {
  const isIn = typeof value === "number" && value >= least && value <= most && (kind === "number" || Number.isInteger(value));
  if (value !== undefined && value !== null && !isIn) {
    throw invalid(param, value, `a ${kind} from ${least} to ${most}`);
  }
}

export function checkFlag(param: string, value: unknown): void {
  if (value !== undefined && value !== null && typeof value !== "boolean") {
    throw invalid(param, value, "true or false");
  }
}

/** Checks the ranges of OpenAI's API, which are within the engine's. */
export function checkSampling(request: SamplingFields): void {
  checkNumber("temperature", request.temperature, 0, 2, "number");
  checkNumber("top_p", request.top_p, 0, 1, "number");
  checkNumber("presence_penalty", request.presence_penalty, -2, 2, "number");
  checkNumber("frequency_penalty", request.frequency_penalty, -2, 2, "number");
  checkNumber("n", request.n, 1, 128, "whole number");
  checkNumber("seed", request.seed, 0, MOST + 1 - (request.n ?? 1), "whole number");
  checkNumber("top_k", request.top_k, 0, 2 ** 32 - 1, "whole number");
  checkNumber("min_p", request.min_p, 0, 1, "number");
  checkFlag("stream", request.stream);
  const { stop, logit_bias: biases, stream_options: streamOptions } = request;
  const isText = (value: unknown): boolean => typeof value === "string" && value !== "";
  if (stop !== undefined && stop !== null && !(Array.isArray(stop) ? stop.every(isText) : isText(stop))) {
    throw invalid("stop", stop, "a text or a list of texts, none of them empty");
  }
  if (biases !== undefined && biases !== null && (typeof biases !== "object" || Array.isArray(biases))) {
    throw invalid("logit_bias", biases, "an object of biases by token ids");
  }
  for (const [id, bias] of Object.entries(biases ?? {})) {
    ensure(/^(0|[1-9]\d{0,9})$/.test(id), "option", `logit_bias has the key ${JSON.stringify(id)}, expected a token's id`, { param: "logit_bias" });
    if (!(typeof bias === "number" && Math.abs(bias) <= 100)) {
      throw invalid(`logit_bias[${JSON.stringify(id)}]`, bias, "a number from -100 to 100");
    }
  }
  if (streamOptions !== undefined && streamOptions !== null) {
    if (typeof streamOptions !== "object") {
      throw invalid("stream_options", streamOptions, "an object");
    }
    checkFlag("stream_options.include_usage", streamOptions.include_usage);
    if ((streamOptions.include_obfuscation as unknown) === true) {
      throw unsupported("stream_options.include_obfuscation", "stream_options.include_obfuscation is not supported");
    }
  }
}

/** Options of each choice's generation: they differ in the seed. */
export function samplingOf(request: SamplingFields, options: RequestOptions, maxTokens: number): GenerateOptions[] {
  const { stop, seed } = request;
  const common: GenerateOptions = {
    signal: options.signal,
    maxTokens,
    temperature: request.temperature ?? 1,
    topP: request.top_p ?? undefined,
    topK: request.top_k ?? undefined,
    minP: request.min_p ?? undefined,
    stop: typeof stop === "string" ? [stop] : stop ?? undefined,
    repeatPenalty: request.repeat_penalty ?? undefined,
    presencePenalty: request.presence_penalty ?? undefined,
    frequencyPenalty: request.frequency_penalty ?? undefined,
    logitBias: request.logit_bias ?? undefined,
  };
  return Array.from({ length: request.n ?? 1 }, (_, at) => ({ ...common, seed: seed === undefined || seed === null ? undefined : seed + at }));
}

export function optionsOf(call: "createChatCompletion" | "completions.create" | "embeddings.create", options: RequestOptions): RequestOptions {
  const given = known(call, options);
  given.signal?.throwIfAborted();
  return given;
}
