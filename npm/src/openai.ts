/** Chat completions in the shape of OpenAI's API, so that code written for it, or for other engines with it, moves over. */

import { TilewrightError } from "./errors.js";
import type { Model } from "./model.js";
import { defined } from "./loaded.js";
import { known } from "./options.js";
import type { ChatMessage, ChatOptions, GenerateResult, ResponseFormat, StopReason, ToolCall, ToolChoice } from "./types.js";

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
  tools?: ChatCompletionTool[] | null;
  tool_choice?: ToolChoice | null;
  parallel_tool_calls?: boolean | null;
  response_format?: { type: "text" } | { type: "json_object" } | { type: "json_schema"; json_schema: { name?: string; schema?: object } } | null;
  /** Answers to give; only 1. */
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

/** Why an answer ended: by itself or at a stop text, because there was no room for more, or with calls of tools. */
export type FinishReason = "stop" | "length" | "tool_calls";

/** Tokens of a request and its answer. */
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
    logprobs: null;
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
    logprobs: null;
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
  "user", "top_k", "min_p", "repeat_penalty", "tools", "tool_choice", "parallel_tool_calls", "response_format",
]);

/** Values of other fields that ask for nothing. */
const NEUTRAL: Record<string, (value: unknown) => boolean> = {
  frequency_penalty: (value) => value === 0,
  presence_penalty: (value) => value === 0,
  logprobs: (value) => value === false,
  logit_bias: (value) => typeof value === "object" && Object.keys(value ?? {}).length === 0,
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
 * @throws {@link TilewrightError} `unsupported` for fields that ask for what this engine does not do.
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
  const messages = request.messages.map(messageOf);
  const generateOptions = optionsOf(request, known("createChatCompletion", options));
  // Pages without https have no `randomUUID`.
  const random = Array.from(crypto.getRandomValues(new Uint32Array(3)), (word) => word.toString(36)).join("");
  const head = { id: `chatcmpl-${random}`, created: Math.floor(Date.now() / 1000), model: request.model ?? model.info.name };
  return request.stream
    ? streamChunks(model, messages, generateOptions, head, request.stream_options?.include_usage === true)
    : complete(model, messages, generateOptions, head);
}

type Head = Pick<ChatCompletion, "id" | "created" | "model">;

async function complete(model: Model, messages: ChatMessage[], options: ChatOptions, head: Head): Promise<ChatCompletion> {
  const generation = model.chat(messages, options);
  const content = await generation.text();
  const result = await generation.result;
  const message: ChatCompletion["choices"][number]["message"] = { role: "assistant", content, refusal: null };
  if (result.toolCalls.length > 0) {
    message.tool_calls = result.toolCalls.map(callOf);
  }
  if (result.thinking !== "") {
    message.reasoning_content = result.thinking;
  }
  return {
    ...head,
    object: "chat.completion",
    choices: [{ index: 0, message, finish_reason: finishOf(result), logprobs: null }],
    usage: usageOf(result),
  };
}

async function* streamChunks(
  model: Model, messages: ChatMessage[], options: ChatOptions, head: Head, withUsage: boolean,
): AsyncGenerator<ChatCompletionChunk, void, undefined> {
  const chunk = (choices: ChatCompletionChunk["choices"]): ChatCompletionChunk =>
    ({ ...head, object: "chat.completion.chunk", choices, ...(withUsage ? { usage: null } : {}) });
  const delta = (part: ChatCompletionDelta, finish: FinishReason | null): ChatCompletionChunk =>
    chunk([{ index: 0, delta: part, finish_reason: finish, logprobs: null }]);
  const generation = model.chat(messages, options);
  yield delta({ role: "assistant", content: "" }, null);
  let calls = 0;
  for await (const { text, thinking, toolCalls = [] } of generation) {
    if (thinking !== undefined) {
      yield delta({ reasoning_content: thinking }, null);
    }
    if (text !== "") {
      yield delta({ content: text }, null);
    }
    if (toolCalls.length > 0) {
      yield delta({ tool_calls: toolCalls.map((call, at) => ({ index: calls + at, ...callOf(call) })) }, null);
      calls += toolCalls.length;
    }
  }
  const result = await generation.result;
  yield delta({}, finishOf(result));
  if (withUsage) {
    yield { ...chunk([]), usage: usageOf(result) };
  }
}

function refuseUnknown(request: ChatCompletionRequest): void {
  for (const [field, value] of Object.entries(request)) {
    if (!KNOWN.has(field) && value !== undefined && value !== null && NEUTRAL[field]?.(value) !== true) {
      throw new TilewrightError("unsupported", `chat completion: ${field} is not supported`);
    }
  }
  if (request.n !== undefined && request.n !== null && request.n !== 1) {
    throw new TilewrightError("unsupported", `chat completion: n is ${request.n}, only 1 is supported`);
  }
  if (!Array.isArray(request.messages)) {
    throw new TilewrightError("option", "chat completion: messages is missing, expected a list of messages");
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

function usageOf({ promptTokens, generatedTokens, cachedTokens }: GenerateResult): CompletionUsage {
  return {
    prompt_tokens: promptTokens,
    completion_tokens: generatedTokens,
    total_tokens: promptTokens + generatedTokens,
    prompt_tokens_details: { cached_tokens: cachedTokens },
  };
}
