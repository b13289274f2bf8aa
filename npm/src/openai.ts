/** Chat completions in the shape of OpenAI's API, so that code written for it, or for other engines with it, moves over. */

import { TilewrightError } from "./errors.js";
import type { Model } from "./model.js";
import { defined } from "./loaded.js";
import { known } from "./options.js";
import type { ChatMessage, ChatOptions, GenerateResult, Piece, ResponseFormat, StopReason, TokenLogprob, ToolCall, ToolChoice } from "./types.js";

/** A message of a request. */
export interface ChatCompletionMessageParam {
  role: "system" | "developer" | "user" | "assistant" | "tool" | (string & {});
  /** May be missing where there are `tool_calls`. */
  content?: string | { type: "text"; text: string }[] | null;
  /** Calls of an earlier answer. */
  tool_calls?: ChatCompletionToolCall[];
  /** Which of them a message of the role `tool` answers. */
  tool_call_id?: string;
  name?: string;
}

/** A tool that the model calls. */
export interface ChatCompletionToolCall {
  id: string;
  type: "function";
  function: {
    name: string;
    /** JSON. */
    arguments: string;
  };
}

/** A tool that a model may call. */
export interface ChatCompletionTool {
  type: "function";
  function: { name: string; description?: string; parameters?: object };
}

/** A request. Fields of the API that are not here are refused with the error `unsupported`, unless they are `null`. */
export interface ChatCompletionRequest {
  messages: ChatCompletionMessageParam[];
  /** Repeated in the answer; there is only the model that was passed. */
  model?: string;
  /** `true`: the answer is an async iterable of chunks. */
  stream?: boolean | null;
  stream_options?: { include_usage?: boolean } | null;
  /** Default 1, as in OpenAI's API. The other sampling options have the defaults of {@link GenerateOptions}. */
  temperature?: number | null;
  top_p?: number | null;
  /** Tokens to generate at most. Default: as many as the context holds. */
  max_completion_tokens?: number | null;
  /** The older name of `max_completion_tokens`. */
  max_tokens?: number | null;
  stop?: string | string[] | null;
  seed?: number | null;
  /** -2 to 2. */
  presence_penalty?: number | null;
  /** -2 to 2. */
  frequency_penalty?: number | null;
  /** Biases of -100 to 100 by token ids. */
  logit_bias?: Record<string, number> | null;
  /** Whether choices say how likely their tokens were. */
  logprobs?: boolean | null;
  /** How many of the likeliest tokens each of them comes with: 0 to 20. Needs `logprobs`. Default 0. */
  top_logprobs?: number | null;
  tools?: ChatCompletionTool[] | null;
  tool_choice?: ToolChoice | null;
  parallel_tool_calls?: boolean | null;
  response_format?: { type: "text" } | { type: "json_object" } | { type: "json_schema"; json_schema: { name?: string; schema?: object } } | null;
  /** Answers to give, 1 to 128, one after the other; with `seed`, the second one's is `seed + 1`, and so on. Default 1. */
  n?: number | null;
  /** Ignored. */
  user?: string | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  top_k?: number | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  min_p?: number | null;
  /** Not in OpenAI's API: see {@link GenerateOptions}. */
  repeat_penalty?: number | null;
}

/** A token, and how likely it was. */
export interface ChatCompletionTokenLogprob {
  token: string;
  /** Natural logarithm of its probability. */
  logprob: number;
  /** Its text in UTF-8: a token may be a part of a character. */
  bytes: number[];
}

/** The tokens of an answer, without the one that ends it. Those of thoughts and calls are among them. */
export interface ChatCompletionLogprobs {
  content: (ChatCompletionTokenLogprob & { top_logprobs: ChatCompletionTokenLogprob[] })[];
  refusal: null;
}

/** Why an answer ended: by itself or at a stop text, because there was no room for more, or with calls of tools. */
export type FinishReason = "stop" | "length" | "tool_calls";

/** Tokens of a request and all of its answers. */
export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

/** A whole answer. */
export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: {
    index: number;
    message: {
      role: "assistant";
      content: string;
      refusal: null;
      tool_calls?: ChatCompletionToolCall[];
      /** Not in OpenAI's API: what the model thought, where the answer was taken apart. */
      reasoning_content?: string;
    };
    finish_reason: FinishReason;
    logprobs: ChatCompletionLogprobs | null;
  }[];
  usage: CompletionUsage;
}

/** What a part of an answer adds. Calls come whole. */
export interface ChatCompletionDelta {
  role?: "assistant";
  content?: string;
  tool_calls?: (ChatCompletionToolCall & { index: number })[];
  reasoning_content?: string;
}

/** A part of an answer. */
export interface ChatCompletionChunk {
  id: string;
  object: "chat.completion.chunk";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: {
    index: number;
    delta: ChatCompletionDelta;
    finish_reason: FinishReason | null;
    logprobs: ChatCompletionLogprobs | null;
  }[];
  /** In the last chunk if `stream_options.include_usage` is on, else missing or `null`. */
  usage?: CompletionUsage | null;
}

/** What does not go into the request's JSON. */
export interface ChatCompletionCallOptions {
  /** Ends the generation. */
  signal?: AbortSignal;
}

/** More tokens than any context holds. */
const NO_LIMIT = 2 ** 31 - 1;

const KNOWN: ReadonlySet<string> = new Set<keyof ChatCompletionRequest>([
  "messages", "model", "stream", "stream_options", "temperature", "top_p", "max_completion_tokens", "max_tokens", "stop", "seed", "n",
  "user", "top_k", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
  "tools", "tool_choice", "parallel_tool_calls", "response_format",
]);

/** Values of other fields that ask for nothing. */
const NEUTRAL: Record<string, (value: unknown) => boolean> = {
  store: (value) => value === false,
};

/**
 * Answers a conversation.
 *
 * ```ts
 * const answer = await createChatCompletion(model, { messages: [{ role: "user", content: "Hello!" }], max_tokens: 64 });
 * console.log(answer.choices[0].message.content);
 * ```
 *
 * @throws {@link TilewrightError} `unsupported` for fields that ask for what this engine does not do, `option` for values that no answer
 * can be computed with.
 */
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest & { stream: true }, options?: ChatCompletionCallOptions,
): Promise<AsyncIterable<ChatCompletionChunk>>;
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest & { stream?: false | null }, options?: ChatCompletionCallOptions,
): Promise<ChatCompletion>;
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest, options?: ChatCompletionCallOptions,
): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>>;
export async function createChatCompletion(
  model: Model, request: ChatCompletionRequest, options: ChatCompletionCallOptions = {},
): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>> {
  refuseUnknown(request);
  refuseOutOfRange(request);
  const messages = request.messages.map(messageOf);
  const generateOptions = optionsOf(request, known("createChatCompletion", options));
  // Pages without https have no `randomUUID`.
  const random = Array.from(crypto.getRandomValues(new Uint32Array(3)), (word) => word.toString(36)).join("");
  const head = { id: `chatcmpl-${random}`, created: Math.floor(Date.now() / 1000), model: request.model ?? model.info.name };
  // They are the same generation but for their seeds, and the prompt is computed once where the model can go back to it.
  const each = Array.from({ length: request.n ?? 1 }, (_, at) => ({
    ...generateOptions, ...(generateOptions.seed === undefined ? {} : { seed: generateOptions.seed + at }),
  }));
  return request.stream
    ? streamChunks(model, messages, each, head, request.stream_options?.include_usage === true)
    : complete(model, messages, each, head);
}

type Head = Pick<ChatCompletion, "id" | "created" | "model">;

async function complete(model: Model, messages: ChatMessage[], each: ChatOptions[], head: Head): Promise<ChatCompletion> {
  const choices: ChatCompletion["choices"] = [];
  const results: GenerateResult[] = [];
  for (const [index, options] of each.entries()) {
    const generation = model.chat(messages, options);
    const pieces: Piece[] = [];
    for await (const piece of generation) {
      pieces.push(piece);
    }
    const result = await generation.result;
    const content = pieces.map(({ text }) => text).join("");
    const message: ChatCompletion["choices"][number]["message"] = { role: "assistant", content, refusal: null };
    if (result.toolCalls.length > 0) {
      message.tool_calls = result.toolCalls.map(callOf);
    }
    if (result.thinking !== "") {
      message.reasoning_content = result.thinking;
    }
    const logprobs = options.logprobs === undefined ? null : logprobsOf(result.stopReason === "eos" ? pieces.slice(0, -1) : pieces);
    choices.push({ index, message, finish_reason: finishOf(result), logprobs });
    results.push(result);
  }
  return { ...head, object: "chat.completion", choices, usage: usageOf(results) };
}

async function* streamChunks(
  model: Model, messages: ChatMessage[], each: ChatOptions[], head: Head, withUsage: boolean,
): AsyncGenerator<ChatCompletionChunk, void, undefined> {
  const chunk = (choices: ChatCompletionChunk["choices"]): ChatCompletionChunk =>
    ({ ...head, object: "chat.completion.chunk", choices, ...(withUsage ? { usage: null } : {}) });
  const results: GenerateResult[] = [];
  for (const [index, options] of each.entries()) {
    const delta = (part: ChatCompletionDelta, finish: FinishReason | null, logprobs: ChatCompletionLogprobs | null = null): ChatCompletionChunk =>
      chunk([{ index, delta: part, finish_reason: finish, logprobs }]);
    yield delta({ role: "assistant", content: "" }, null);
    // Not before, so that whoever leaves at the first chunk has nothing run.
    const generation = model.chat(messages, options);
    let calls = 0;
    // What a token adds, and how likely it was.
    const parts = function* (piece: Piece, isEnd: boolean): Generator<ChatCompletionChunk, void, undefined> {
      const { text, thinking, toolCalls = [] } = piece;
      let logprobs = options.logprobs === undefined || isEnd ? null : logprobsOf([piece]);
      if (thinking !== undefined) {
        yield delta({ reasoning_content: thinking }, null, logprobs);
        logprobs = null;
      }
      if (text !== "" || (logprobs !== null && toolCalls.length === 0)) {
        yield delta({ content: text }, null, logprobs);
        logprobs = null;
      }
      if (toolCalls.length > 0) {
        yield delta({ tool_calls: toolCalls.map((call, at) => ({ index: calls + at, ...callOf(call) })) }, null, logprobs);
        calls += toolCalls.length;
      }
    };
    // Whether a token is the one that ends the answer shows when the answer is over.
    let last: Piece | undefined;
    for await (const piece of generation) {
      if (options.logprobs === undefined) {
        yield* parts(piece, false);
        continue;
      }
      if (last !== undefined) {
        yield* parts(last, false);
      }
      last = piece;
    }
    const result = await generation.result;
    if (last !== undefined) {
      yield* parts(last, result.stopReason === "eos");
    }
    yield delta({}, finishOf(result));
    results.push(result);
  }
  if (withUsage) {
    yield { ...chunk([]), usage: usageOf(results) };
  }
}

function logprobsOf(pieces: readonly Piece[]): ChatCompletionLogprobs {
  const told = ({ text, logprob, bytes }: TokenLogprob): ChatCompletionTokenLogprob => ({ token: text, logprob, bytes });
  const content = pieces.flatMap(({ logprob, topLogprobs = [] }) =>
    logprob === undefined ? [] : [{ ...told(logprob), top_logprobs: topLogprobs.map(told) }]);
  return { content, refusal: null };
}

function refuseUnknown(request: ChatCompletionRequest): void {
  for (const [field, value] of Object.entries(request)) {
    if (!KNOWN.has(field) && value !== undefined && value !== null && NEUTRAL[field]?.(value) !== true) {
      throw new TilewrightError("unsupported", `chat completion: ${field} is not supported`);
    }
  }
  if (!Array.isArray(request.messages)) {
    throw new TilewrightError("option", "chat completion: messages is missing, expected a list of messages");
  }
}

/** The ranges of OpenAI's API, which are within those of the engine. */
function refuseOutOfRange(request: ChatCompletionRequest): void {
  const refuse = (field: string, found: unknown, expected: string): never => {
    throw new TilewrightError("option", `chat completion: ${field} is ${JSON.stringify(found)}, expected ${expected}`);
  };
  const check = (field: "n" | "top_logprobs" | "presence_penalty" | "frequency_penalty", least: number, most: number, isWhole: boolean): void => {
    const given: unknown = request[field] ?? undefined;
    if (given !== undefined && !(typeof given === "number" && given >= least && given <= most && (!isWhole || Number.isInteger(given)))) {
      refuse(field, given, `${isWhole ? "a whole number" : "a number"} from ${least} to ${most}`);
    }
  };
  check("n", 1, 128, true);
  check("top_logprobs", 0, 20, true);
  check("presence_penalty", -2, 2, false);
  check("frequency_penalty", -2, 2, false);
  const { logprobs, top_logprobs: top, logit_bias: biases } = request;
  if (logprobs !== undefined && logprobs !== null && typeof logprobs !== "boolean") {
    refuse("logprobs", logprobs, "true or false");
  }
  if (top !== undefined && top !== null && logprobs !== true) {
    refuse("top_logprobs", top, "none where logprobs is not true");
  }
  if (biases !== undefined && biases !== null && typeof biases !== "object") {
    refuse("logit_bias", biases, "biases by token ids");
  }
  for (const [id, bias] of Object.entries(biases ?? {})) {
    if (!(typeof bias === "number" && Math.abs(bias) <= 100)) {
      refuse(`logit_bias[${JSON.stringify(id)}]`, bias, "a number from -100 to 100");
    }
  }
}

function messageOf({ role, content, tool_calls, tool_call_id, name }: ChatCompletionMessageParam): ChatMessage {
  const calls = tool_calls?.map(({ function: { name, arguments: given }, ...call }) => ({ ...call, function: { name, arguments: argumentsOf(given) } }));
  const hasNone = (content === null || content === undefined) && calls !== undefined;
  return {
    role: role === "developer" ? "system" : role,
    content: typeof content === "string" ? content : hasNone ? "" : joinParts(content),
    ...defined({ tool_calls: calls, tool_call_id, name }),
  };
}

/** Templates take objects. */
function argumentsOf(given: string): unknown {
  try {
    return JSON.parse(given);
  } catch (error) {
    throw new TilewrightError("option", `chat completion: arguments of a call are no JSON (${String(error)})`);
  }
}

function callOf({ id, type, function: { name, arguments: given } }: ToolCall): ChatCompletionToolCall {
  return { id, type, function: { name, arguments: JSON.stringify(given) } };
}

function joinParts(parts: { type: string; text?: string }[] | null | undefined): string {
  if (!Array.isArray(parts)) {
    throw new TilewrightError("unsupported", "chat completion: a message has no content, only text is supported");
  }
  return parts.map(({ type, text }) => {
    if (type !== "text" || text === undefined) {
      throw new TilewrightError("unsupported", `chat completion: a message holds a part of type ${type}, only text is supported`);
    }
    return text;
  }).join("");
}

function optionsOf(request: ChatCompletionRequest, { signal }: ChatCompletionCallOptions): ChatOptions {
  const { temperature, top_p, max_completion_tokens, max_tokens, stop, seed, top_k, min_p, repeat_penalty } = request;
  const tools = request.tools ?? undefined;
  return {
    signal,
    maxTokens: max_completion_tokens ?? max_tokens ?? NO_LIMIT,
    temperature: temperature ?? 1,
    topP: top_p ?? undefined,
    stop: typeof stop === "string" ? [stop] : stop ?? undefined,
    seed: seed ?? undefined,
    topK: top_k ?? undefined,
    minP: min_p ?? undefined,
    repeatPenalty: repeat_penalty ?? undefined,
    presencePenalty: request.presence_penalty ?? undefined,
    frequencyPenalty: request.frequency_penalty ?? undefined,
    logitBias: request.logit_bias ?? undefined,
    logprobs: request.logprobs === true ? request.top_logprobs ?? 0 : undefined,
    responseFormat: formatOf(request.response_format ?? undefined),
    // Without tools there is nothing to choose, but a call that is asked for all the same is refused.
    ...(tools === undefined || tools.length === 0 ? asksForCall(request.tool_choice) : {
      tools, toolChoice: request.tool_choice ?? undefined, parallelToolCalls: request.parallel_tool_calls ?? undefined,
    }),
  };
}

function asksForCall(choice: ChatCompletionRequest["tool_choice"]): Pick<ChatOptions, "toolChoice"> {
  return choice === undefined || choice === null || choice === "auto" || choice === "none" ? {} : { toolChoice: choice };
}

function formatOf(format: NonNullable<ChatCompletionRequest["response_format"]> | undefined): ResponseFormat | undefined {
  if (format?.type !== "json_schema") {
    return format;
  }
  const schema = format.json_schema?.schema;
  if (schema === undefined) {
    throw new TilewrightError("option", "chat completion: response_format.json_schema.schema is missing");
  }
  return { type: "json_schema", schema };
}

function finishOf({ stopReason, toolCalls }: { stopReason: StopReason; toolCalls: ToolCall[] }): FinishReason {
  if (stopReason === "max_tokens" || stopReason === "context_full") {
    return "length";
  }
  return toolCalls.length > 0 ? "tool_calls" : "stop";
}

function usageOf(results: readonly GenerateResult[]): CompletionUsage {
  // All choices have one prompt; what the later ones found of it was computed for the first.
  const { promptTokens, cachedTokens } = results[0] ?? { promptTokens: 0, cachedTokens: 0 };
  const generated = results.reduce((sum, { generatedTokens }) => sum + generatedTokens, 0);
  return {
    prompt_tokens: promptTokens,
    completion_tokens: generated,
    total_tokens: promptTokens + generated,
    prompt_tokens_details: { cached_tokens: cachedTokens },
  };
}
