/** OpenAI's text completions. */

import { isId } from "../arguments.js";
import type { Model } from "../model.js";
import type { GenerateOptions, GenerateResult, Piece, RequestOptions } from "../types.js";
import {
  collect, CompletionStream, emitting, finishOf, headOf, usageOf, type CompletionUsage, type FinishReason, type Head,
} from "./common.js";
import { invalid, unsupported } from "./errors.js";
import {
  anything, checked, flag, optionsOf, SAMPLING_FIELDS, samplingOf, whole, type Fields, type SamplingFields,
} from "./request.js";

/** A text, or its tokens by the model's own ids. */
type Prompt = string | number[];

/** A request. The API's other fields are the error `unsupported`, unless they are `null`. */
export interface CompletionRequest extends SamplingFields {
  model: string;
  /** One text or several, or their tokens. */
  prompt: string | string[] | number[] | number[][];
  /** Most tokens to generate. Default 16, as in OpenAI's API. */
  max_tokens?: number | null;
  /** Whether choices begin with their prompts. Default `false`. */
  echo?: boolean | null;
  /** Adds log-probabilities: of the tokens, and of this many likeliest ones, 0 to 5. */
  logprobs?: number | null;
}

/** The tokens of a choice, without the token or stop text that ends it. */
export interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: number[];
  top_logprobs: Record<string, number>[];
  /** Where each token begins in the text, in UTF-16 units. */
  text_offset: number[];
}

/** A response, or a part of one. Choices are ordered by prompt. */
export interface Completion extends Head {
  object: "text_completion";
  choices: { index: number; text: string; finish_reason: Exclude<FinishReason, "tool_calls"> | null; logprobs: CompletionLogprobs | null }[];
  /** In a stream only in the last chunk, with `stream_options.include_usage`. */
  usage?: CompletionUsage | null;
}

const FIELDS: Fields<CompletionRequest> = {
  ...SAMPLING_FIELDS, model: anything, prompt: anything, max_tokens: whole(0, 2 ** 31 - 1), echo: flag, logprobs: whole(0, 5),
};

/** Completes texts with the given model, whatever the request names. */
export async function createCompletion(
  model: Model, given: CompletionRequest, options: RequestOptions = {},
): Promise<Completion | CompletionStream<Completion>> {
  optionsOf("completions.create", options);
  const request = checked(given, FIELDS);
  const { echo, logprobs } = request;
  if (echo === true && logprobs !== undefined) {
    throw unsupported("logprobs", "logprobs with echo are not supported");
  }
  const prompts = promptsOf(request.prompt);
  const each = samplingOf(request, options, request.max_tokens ?? 16).map((sampling) => ({ ...sampling, logprobs }));
  const head = headOf("cmpl", request.model);
  return request.stream === true
    ? CompletionStream.begin((stopSignal) => chunksOf(model, prompts, each, head, echo === true, request.stream_options?.include_usage === true, stopSignal))
    : complete(model, prompts, each, head, echo === true);
}

async function complete(model: Model, prompts: Prompt[], each: GenerateOptions[], head: Head, echo: boolean): Promise<Completion> {
  const choices: Completion["choices"] = [];
  const results: GenerateResult[][] = [];
  for (const prompt of prompts) {
    const own: GenerateResult[] = [];
    for (const options of each) {
      const begin = echo ? await textOf(model, prompt) : "";
      const { text, tokens, result } = await collect(model.generate(prompt, options));
      const logprobs = options.logprobs === undefined ? null : new Offsets().logprobsOf(tokens);
      choices.push({ index: choices.length, text: begin + text, finish_reason: endOf(result), logprobs });
      own.push(result);
    }
    results.push(own);
  }
  return { ...head, object: "text_completion", choices, usage: usageOf(results) };
}

async function* chunksOf(
  model: Model, prompts: Prompt[], each: GenerateOptions[], head: Head, echo: boolean, withUsage: boolean, stopSignal: AbortSignal,
): AsyncGenerator<Completion, void, undefined> {
  const chunk = (choices: Completion["choices"]): Completion =>
    ({ ...head, object: "text_completion", choices, ...(withUsage ? { usage: null } : {}) });
  const results: GenerateResult[][] = [];
  for (const [at, prompt] of prompts.entries()) {
    const own: GenerateResult[] = [];
    for (const [nth, options] of each.entries()) {
      if (stopSignal.aborted) {
        return;
      }
      const offsets = new Offsets();
      const part = (text: string, finish: Completion["choices"][number]["finish_reason"], certain: Piece[]): Completion =>
        chunk([{
          index: at * each.length + nth, text, finish_reason: finish,
          logprobs: options.logprobs === undefined || certain.length === 0 ? null : offsets.logprobsOf(certain),
        }]);
      let begin = echo ? await textOf(model, prompt) : "";
      const { result, tokens } = yield* emitting(model.generate(prompt, options), (piece, certain) => {
        const text = begin + piece.text;
        begin = "";
        return text !== "" || certain.length > 0 ? [part(text, null, certain)] : [];
      }, stopSignal);
      yield part(begin, endOf(result), tokens);
      own.push(result);
    }
    results.push(own);
  }
  if (withUsage) {
    yield { ...chunk([]), usage: usageOf(results) };
  }
}

function endOf(result: GenerateResult): Exclude<FinishReason, "tool_calls"> {
  return finishOf({ ...result, toolCalls: [] }) === "length" ? "length" : "stop";
}

/** Offsets of tokens, which may be parts of characters. */
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
