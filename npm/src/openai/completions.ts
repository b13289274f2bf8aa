/** Completions of plain texts, in the shape of OpenAI's API. */

import type { Model } from "../model.js";
import type { GenerateOptions, GenerateResult, Piece, RequestOptions } from "../types.js";
import {
  CompletionStream, finishOf, headOf, piecesUntil, TokenQueue, usageOf, type CompletionUsage, type FinishReason, type Head,
} from "./common.js";
import { invalid, unsupported } from "./errors.js";
import {
  checkFields, checkFlag, checkNumber, checkSampling, optionsOf, SAMPLING_FIELDS, samplingOf, type Fields, type SamplingFields,
} from "./request.js";

/** A text, or its tokens by the model's own ids. */
type Prompt = string | number[];

/** A request. Fields of the API that are not here are refused with the error `unsupported`, unless they are `null`. */
export interface CompletionRequest extends SamplingFields {
  /** Name of the model that completes it. */
  model: string;
  /** What is completed: one text or several, or their tokens. */
  prompt: string | string[] | number[] | number[][];
  /** Tokens to generate at most. Default 16, as in OpenAI's API. */
  max_tokens?: number | null;
  /** Whether texts begin with their prompts. Default `false`. */
  echo?: boolean | null;
  /** Has choices say how likely their tokens were, and which ones were the likeliest, so many of them: 0 to 5. */
  logprobs?: number | null;
}

/** The tokens of a text, without what ends it. */
export interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: number[];
  top_logprobs: Record<string, number>[];
  /** Where each token begins in the text, in UTF-16 units. */
  text_offset: number[];
}

/** An answer, or a part of one. The choices to a prompt come one behind the other, and then those to the next. */
export interface Completion extends Head {
  object: "text_completion";
  choices: { index: number; text: string; finish_reason: Exclude<FinishReason, "tool_calls"> | null; logprobs: CompletionLogprobs | null }[];
  /** In a stream in the last chunk alone, if `stream_options.include_usage` is on. */
  usage?: CompletionUsage | null;
}

const FIELDS: Fields<CompletionRequest> = { ...SAMPLING_FIELDS, model: true, prompt: true, max_tokens: true, echo: true, logprobs: true };

/** Completes texts: the request's model is the one that is given. */
export async function createCompletion(
  model: Model, request: CompletionRequest, options: RequestOptions = {},
): Promise<Completion | CompletionStream<Completion>> {
  const given = optionsOf("completions.create", options);
  checkFields(request, FIELDS);
  checkSampling(request);
  checkNumber("max_tokens", request.max_tokens, 0, 2 ** 31 - 1, "whole number");
  checkNumber("logprobs", request.logprobs, 0, 5, "whole number");
  checkFlag("echo", request.echo);
  const { echo, logprobs } = request;
  if (echo === true && typeof logprobs === "number") {
    throw unsupported("logprobs", "logprobs of a prompt, with echo, are not supported");
  }
  const prompts = promptsOf(request.prompt);
  const each = samplingOf(request, given, request.max_tokens ?? 16)
    .map((sampling): GenerateOptions => ({ ...sampling, logprobs: logprobs ?? undefined }));
  const head = headOf("cmpl", request.model);
  return request.stream === true
    ? CompletionStream.begin((ending) => chunksOf(model, prompts, each, head, echo === true, request.stream_options?.include_usage === true, ending))
    : complete(model, prompts, each, head, echo === true);
}

async function complete(model: Model, prompts: Prompt[], each: GenerateOptions[], head: Head, echo: boolean): Promise<Completion> {
  const choices: Completion["choices"] = [];
  const results: GenerateResult[][] = [];
  for (const prompt of prompts) {
    const own: GenerateResult[] = [];
    for (const options of each) {
      let text = echo ? await textOf(model, prompt) : "";
      const generation = model.generate(prompt, options);
      const tokens = new TokenQueue();
      const certain: Piece[] = [];
      for await (const piece of generation) {
        text += piece.text;
        certain.push(...tokens.push(piece));
      }
      const result = await generation.result;
      certain.push(...tokens.end(result.stopReason));
      const logprobs = options.logprobs === undefined ? null : new Offsets().logprobsOf(certain);
      choices.push({ index: choices.length, text, finish_reason: endOf(result), logprobs });
      own.push(result);
    }
    results.push(own);
  }
  return { ...head, object: "text_completion", choices, usage: usageOf(results) };
}

async function* chunksOf(
  model: Model, prompts: Prompt[], each: GenerateOptions[], head: Head, echo: boolean, withUsage: boolean, ending: AbortSignal,
): AsyncGenerator<Completion, void, undefined> {
  const chunk = (choices: Completion["choices"]): Completion =>
    ({ ...head, object: "text_completion", choices, ...(withUsage ? { usage: null } : {}) });
  const results: GenerateResult[][] = [];
  for (const [at, prompt] of prompts.entries()) {
    const own: GenerateResult[] = [];
    for (const [nth, options] of each.entries()) {
      if (ending.aborted) {
        return;
      }
      const queue = new TokenQueue();
      const offsets = new Offsets();
      const part = (text: string, finish: Completion["choices"][number]["finish_reason"], certain: Piece[]): Completion =>
        chunk([{
          index: at * each.length + nth, text, finish_reason: finish,
          logprobs: options.logprobs === undefined || certain.length === 0 ? null : offsets.logprobsOf(certain),
        }]);
      const generation = model.generate(prompt, options);
      let begin = echo ? await textOf(model, prompt) : "";
      for await (const piece of piecesUntil(generation, ending)) {
        const certain = queue.push(piece);
        const text = begin + piece.text;
        begin = "";
        if (text !== "" || certain.length > 0) {
          yield part(text, null, certain);
        }
      }
      const result = await generation.result;
      yield part(begin, endOf(result), queue.end(result.stopReason));
      own.push(result);
    }
    results.push(own);
  }
  if (withUsage) {
    yield { ...chunk([]), usage: usageOf(results) };
  }
}

/** No tool is called in plain text. */
function endOf(result: GenerateResult): Exclude<FinishReason, "tool_calls"> {
  return finishOf({ ...result, toolCalls: [] }) === "length" ? "length" : "stop";
}

/** Where the tokens of a text begin. A token may be a part of a character. */
class Offsets {
  readonly #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #length = 0;

  logprobsOf(pieces: readonly Piece[]): CompletionLogprobs {
    const result: CompletionLogprobs = { tokens: [], token_logprobs: [], top_logprobs: [], text_offset: [] };
    for (const { logprob, topLogprobs = [] } of pieces) {
      if (logprob === undefined) {
        continue;
      }
      result.tokens.push(logprob.text);
      result.token_logprobs.push(logprob.logprob);
      result.top_logprobs.push(Object.fromEntries(topLogprobs.map(({ text, logprob }) => [text, logprob])));
      result.text_offset.push(this.#length);
      this.#length += this.#decoder.decode(Uint8Array.from(logprob.bytes), { stream: true }).length;
    }
    return result;
  }
}

async function textOf(model: Model, prompt: Prompt): Promise<string> {
  return typeof prompt === "string" ? prompt : model.detokenize(prompt);
}

function promptsOf(given: CompletionRequest["prompt"]): Prompt[] {
  const isId = (id: unknown): boolean => Number.isInteger(id) && (id as number) >= 0 && (id as number) < 2 ** 32;
  const isOne = (prompt: unknown): prompt is Prompt =>
    typeof prompt === "string" || (Array.isArray(prompt) && prompt.length > 0 && prompt.every(isId));
  if (isOne(given)) {
    return [given];
  }
  if (Array.isArray(given) && given.length > 0 && (given as unknown[]).every(isOne)) {
    return [...given as Prompt[]];
  }
  throw invalid("prompt", given, "a text, a list of token ids, or a list of those");
}
