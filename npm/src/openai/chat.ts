/** OpenAI's chat completions. */

import { defined } from "../helpers.js";
import type { Model } from "../model.js";
import type { ChatMessage, ChatOptions, GenerateResult, Piece, RequestOptions, ResponseFormat, TokenLogprob, ToolCall, ToolChoice } from "../types.js";
import {
  collect, CompletionStream, emitting, finishOf, headOf, usageOf, type CompletionUsage, type FinishReason, type Head,
} from "./common.js";
import { ensureValid, invalid, unsupported } from "./errors.js";
import {
  anything, checked, flag, optionsOf, SAMPLING_FIELDS, samplingOf, whole, type Fields, type Present, type SamplingFields,
} from "./request.js";

/** A message of a request. */
export interface ChatCompletionMessageParam {
  role: "system" | "developer" | "user" | "assistant" | "tool" | (string & {});
  /** Optional with `tool_calls`. */
  content?: string | ChatCompletionContentPart[] | null;
  /** Calls of an earlier reply. */
  tool_calls?: ChatCompletionToolCall[];
  /** The call that a message of the role `tool` answers. */
  tool_call_id?: string;
  name?: string;
}

/**
 * A part of a message. Images are for models that were loaded with `vision`, at the address of a file or as `data:`
 * address. The hint `detail` is not followed, as by the program's server: `vision.maxTokens` of the load limits images.
 */
export type ChatCompletionContentPart =
  | { type: "text"; text: string }
  | { type: "image_url"; image_url: { url: string; detail?: "auto" | "low" | "high" | null } };

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
  function: { name: string; description?: string; parameters?: object; strict?: boolean | null };
}

/** A request. The API's other fields are the error `unsupported`, unless they are `null`. */
export interface ChatCompletionRequest extends SamplingFields {
  messages: ChatCompletionMessageParam[];
  /** Repeated in the response; a client uses the model of this name. */
  model?: string;
  /** Most tokens to generate. Default: whatever the context holds. */
  max_completion_tokens?: number | null;
  /** The older name of `max_completion_tokens`. */
  max_tokens?: number | null;
  /** Whether choices have log-probabilities. */
  logprobs?: boolean | null;
  /** Number of likeliest tokens, 0 to 20. Needs `logprobs`. Default 0. */
  top_logprobs?: number | null;
  tools?: ChatCompletionTool[] | null;
  tool_choice?: ToolChoice | null;
  parallel_tool_calls?: boolean | null;
  /** `none`: as `thinking: false` in {@link ChatOptions}. The others are passed to the template. */
  reasoning_effort?: (typeof EFFORTS)[number] | null;
  response_format?:
    | { type: "text" } | { type: "json_object" }
    | { type: "json_schema"; json_schema: { name?: string; schema?: object; strict?: boolean | null } } | null;
}

/** A token and its log-probability. */
export interface ChatCompletionTokenLogprob extends Pick<TokenLogprob, "logprob" | "bytes"> {
  token: string;
}

/** The tokens of a choice, thinking and calls included, without the token or stop text that ends it. */
export interface ChatCompletionLogprobs {
  content: (ChatCompletionTokenLogprob & { top_logprobs: ChatCompletionTokenLogprob[] })[];
  refusal: null;
}

/** A complete response. */
export interface ChatCompletion extends Head {
  object: "chat.completion";
  choices: {
    index: number;
    message: {
      role: "assistant";
      content: string;
      refusal: null;
      tool_calls?: ChatCompletionToolCall[];
      /** Not in OpenAI's API: the thinking, if the output was parsed. */
      reasoning_content?: string;
    };
    finish_reason: FinishReason;
    logprobs: ChatCompletionLogprobs | null;
  }[];
  usage: CompletionUsage;
}

/** An addition to a choice. Calls are complete. */
export interface ChatCompletionDelta {
  role?: "assistant";
  content?: string;
  tool_calls?: (ChatCompletionToolCall & { index: number })[];
  reasoning_content?: string;
}

/** A part of a streamed response. */
export interface ChatCompletionChunk extends Head {
  object: "chat.completion.chunk";
  choices: {
    index: number;
    delta: ChatCompletionDelta;
    finish_reason: FinishReason | null;
    logprobs: ChatCompletionLogprobs | null;
  }[];
  /** In the last chunk with `stream_options.include_usage`, else absent or `null`. */
  usage?: CompletionUsage | null;
}

const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"] as const;

const NO_LIMIT = 2 ** 31 - 1;

const FIELDS: Fields<ChatCompletionRequest> = {
  ...SAMPLING_FIELDS, messages: anything, model: anything, max_completion_tokens: whole(0, NO_LIMIT), max_tokens: whole(0, NO_LIMIT),
  logprobs: flag, top_logprobs: whole(0, 20), parallel_tool_calls: flag, response_format: anything,
  tools: (param, value) => ensureValid(Array.isArray(value), param, value, "a list of tools"),
  tool_choice: (param, value) => {
    const isOne = typeof value === "string" ? ["auto", "none", "required"].includes(value)
      : typeof (value as Partial<Exclude<ToolChoice, string>>).function?.name === "string";
    ensureValid(isOne, param, value, '"auto", "none", "required" or { type: "function", function: { name } }');
  },
  reasoning_effort: (param, value) => ensureValid((EFFORTS as readonly unknown[]).includes(value), param, value, EFFORTS.join(", ")),
};

/**
 * Answers a conversation.
 *
 * ```ts
 * const answer = await createChatCompletion(model, { messages: [{ role: "user", content: "Hello!" }], max_tokens: 64 });
 * console.log(answer.choices[0].message.content);
 * ```
 *
 * A stream resolves with its first chunk. Leaving its loop, or `stream.controller.abort()`, ends the generation.
 *
 * @throws {@link TilewrightError} `unsupported` for unsupported fields, `option` for invalid values, both with the
 * field as `param`; errors of a generation; or the reason of `options.signal`.
 */
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest & { stream: true }, options?: RequestOptions,
): Promise<CompletionStream<ChatCompletionChunk>>;
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest & { stream?: false | null }, options?: RequestOptions,
): Promise<ChatCompletion>;
export function createChatCompletion(
  model: Model, request: ChatCompletionRequest, options?: RequestOptions,
): Promise<ChatCompletion | CompletionStream<ChatCompletionChunk>>;
export async function createChatCompletion(
  model: Model, given: ChatCompletionRequest, options: RequestOptions = {},
): Promise<ChatCompletion | CompletionStream<ChatCompletionChunk>> {
  optionsOf("createChatCompletion", options);
  const request = checked(given, FIELDS);
  const { logprobs, top_logprobs: top } = request;
  ensureValid(Array.isArray(request.messages), "messages", request.messages, "a list of messages");
  ensureValid(top === undefined || logprobs === true, "top_logprobs", top, "none unless logprobs is true");
  const messages = request.messages.map(messageOf);
  const own = ownOptions(request);
  const each = samplingOf(request, options, request.max_completion_tokens ?? request.max_tokens ?? NO_LIMIT)
    .map((sampling): ChatOptions => ({ ...sampling, ...own }));
  const head = headOf("chatcmpl", request.model ?? model.info.name);
  return request.stream === true
    ? CompletionStream.begin((stopSignal) => chunksOf(model, messages, each, head, request.stream_options?.include_usage === true, stopSignal))
    : complete(model, messages, each, head);
}

async function complete(model: Model, messages: ChatMessage[], each: ChatOptions[], head: Head): Promise<ChatCompletion> {
  const choices: ChatCompletion["choices"] = [];
  const results: GenerateResult[] = [];
  const ids = new CallIds(messages.length);
  for (const [index, options] of each.entries()) {
    const { text, tokens, result } = await collect(model.chat(messages, options));
    const message: ChatCompletion["choices"][number]["message"] = { role: "assistant", content: text, refusal: null };
    if (result.toolCalls.length > 0) {
      message.tool_calls = result.toolCalls.map((call) => ids.toolCall(call));
    }
    if (result.thinking !== "") {
      message.reasoning_content = result.thinking;
    }
    const logprobs = options.logprobs === undefined ? null : logprobsOf(tokens);
    choices.push({ index, message, finish_reason: finishOf(result), logprobs });
    results.push(result);
  }
  return { ...head, object: "chat.completion", choices, usage: usageOf([results]) };
}

async function* chunksOf(
  model: Model, messages: ChatMessage[], each: ChatOptions[], head: Head, withUsage: boolean, stopSignal: AbortSignal,
): AsyncGenerator<ChatCompletionChunk, void, undefined> {
  const chunk = (choices: ChatCompletionChunk["choices"]): ChatCompletionChunk =>
    ({ ...head, object: "chat.completion.chunk", choices, ...(withUsage ? { usage: null } : {}) });
  const results: GenerateResult[] = [];
  const ids = new CallIds(messages.length);
  for (const [index, options] of each.entries()) {
    if (stopSignal.aborted) {
      return;
    }
    const delta = (part: ChatCompletionDelta, finish: FinishReason | null, tokens: readonly Piece[] = []): ChatCompletionChunk =>
      chunk([{ index, delta: part, finish_reason: finish, logprobs: tokens.length === 0 ? null : logprobsOf(tokens) }]);
    let isOpen = false;
    let nCalls = 0;
    const parts = function* (piece: Partial<Piece>, certain: Piece[]): Generator<ChatCompletionChunk> {
      const { text = "", thinking, toolCalls = [] } = piece;
      if (!isOpen) {
        isOpen = true;
        yield delta({ role: "assistant", content: "" }, null);
      }
      let tokens = options.logprobs === undefined ? [] : certain;
      if (thinking !== undefined) {
        yield delta({ reasoning_content: thinking }, null, tokens);
        tokens = [];
      }
      if (text !== "" || (tokens.length > 0 && toolCalls.length === 0)) {
        yield delta({ content: text }, null, tokens);
        tokens = [];
      }
      if (toolCalls.length > 0) {
        yield delta({ tool_calls: toolCalls.map((call, at) => ({ index: nCalls + at, ...ids.toolCall(call) })) }, null, tokens);
        nCalls += toolCalls.length;
      }
    };
    const { result, tokens } = yield* emitting(model.chat(messages, options), parts, stopSignal);
    yield* parts({}, tokens);
    yield delta({}, finishOf(result));
    results.push(result);
  }
  if (withUsage) {
    yield { ...chunk([]), usage: usageOf([results]) };
  }
}

function logprobsOf(pieces: readonly Piece[]): ChatCompletionLogprobs {
  const tokenOf = ({ text, logprob, bytes }: TokenLogprob): ChatCompletionTokenLogprob => ({ token: text, logprob, bytes });
  const content = pieces.flatMap(({ logprob, topLogprobs = [] }) =>
    logprob === undefined ? [] : [{ ...tokenOf(logprob), top_logprobs: topLogprobs.map(tokenOf) }]);
  return { content, refusal: null };
}

/** Unique ids of calls. The choices of a request have the same messages, so the ids of their calls may repeat. */
class CallIds {
  readonly #taken = new Set<string>();
  #next: number;

  /** Numbered by the number of messages: see `answerReader`. */
  constructor(nMessages: number) {
    this.#next = nMessages * 100;
  }

  toolCall({ id: given, type, function: { name, arguments: values } }: ToolCall): ChatCompletionToolCall {
    let id = given;
    while (this.#taken.has(id)) {
      id = `call${String(this.#next % 100_000).padStart(5, "0")}`;
      this.#next += 1;
    }
    this.#taken.add(id);
    return { id, type, function: { name, arguments: JSON.stringify(values) } };
  }
}

function messageOf(message: ChatCompletionMessageParam, at: number): ChatMessage {
  const param = `messages[${at}]`;
  ensureValid(typeof message === "object" && message !== null && typeof message.role === "string",
    param, message, "an object with a role");
  const { role, content, tool_calls: given, tool_call_id, name } = message;
  ensureValid(given === undefined || given === null || Array.isArray(given),
    `${param}.tool_calls`, given, "a list of calls");
  const calls = given?.map((call, i) => callOf(call, `${param}.tool_calls[${i}]`));
  const hasNone = (content === null || content === undefined) && calls !== undefined;
  return {
    role: role === "developer" ? "system" : role,
    content: typeof content === "string" ? content : hasNone ? "" : partsOf(content, `${param}.content`),
    ...defined({ tool_calls: calls, tool_call_id, name }),
  };
}

/** A call with its arguments as an object, as templates need them. */
function callOf(call: ChatCompletionToolCall, param: string): object {
  ensureValid(typeof call?.function?.name === "string", param, call, "a call of a function");
  const { function: { name, arguments: given }, ...rest } = call;
  try {
    return { ...rest, function: { name, arguments: JSON.parse(given) as unknown } };
  } catch {
    throw invalid(`${param}.function.arguments`, given, "JSON");
  }
}

/** Texts as one, or all parts if there are images. */
function partsOf(parts: ChatCompletionContentPart[] | null | undefined, param: string): string | object[] {
  ensureValid(Array.isArray(parts), param, parts, "a text or a list of texts and images");
  parts.forEach((part, at) => checkPart(part, `${param}[${at}]`));
  const texts = parts.flatMap((part) => part.type === "text" ? part.text : []);
  return texts.length === parts.length ? texts.join("") : parts;
}

function checkPart(part: ChatCompletionContentPart, param: string): void {
  if (part?.type === "image_url") {
    const url = (part.image_url as { url?: unknown } | undefined)?.url;
    ensureValid(typeof url === "string", `${param}.image_url.url`, url, "an address");
  } else if (part?.type !== "text" || typeof part.text !== "string") {
    const { type } = (part ?? {}) as { type?: unknown };
    throw unsupported(param, `${param} has the type ${String(type)}; only text and image_url are supported`);
  }
}

function ownOptions(request: Present<ChatCompletionRequest>): ChatOptions {
  const { logprobs, top_logprobs: top = 0, tool_choice: toolChoice, parallel_tool_calls: parallelToolCalls, reasoning_effort: effort } = request;
  const tools = request.tools?.map(toolOf) ?? [];
  return {
    logprobs: logprobs === true ? top : undefined,
    responseFormat: formatOf(request.response_format),
    ...(effort === "none" ? { thinking: false } : effort === undefined ? {} : { templateVariables: { reasoning_effort: effort } }),
    // Without tools, only a required call matters: it is refused.
    ...(tools.length > 0 ? { tools, toolChoice, parallelToolCalls } : toolChoice === "auto" || toolChoice === "none" ? {} : { toolChoice }),
  };
}

/** A tool in the templates' form. Calls are always valid by its parameters, so `strict` is dropped. */
function toolOf(tool: ChatCompletionTool, at: number): ChatCompletionTool {
  if (tool?.type !== "function") {
    throw unsupported(`tools[${at}]`, `tools[${at}] has the type ${String(tool?.type)}; only functions are supported`);
  }
  ensureValid(typeof tool.function?.name === "string", `tools[${at}].function.name`, tool.function?.name, "a text");
  const { strict: _, ...function_ } = tool.function;
  return { type: "function", function: function_ };
}

function formatOf(format: Present<ChatCompletionRequest>["response_format"]): ResponseFormat | undefined {
  if (format === undefined || format.type === "text" || format.type === "json_object") {
    return format;
  }
  ensureValid(format.type === "json_schema",
    "response_format", format, '{ type: "text" }, { type: "json_object" } or { type: "json_schema", json_schema: { schema } }');
  const schema = format.json_schema?.schema;
  ensureValid(typeof schema === "object" && schema !== null, "response_format.json_schema.schema", schema, "a schema");
  return { type: "json_schema", schema };
}
