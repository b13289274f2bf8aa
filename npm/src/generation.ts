/** Generations, and the requests for them. */

import type { CallOptions } from "./connection.js";
import { ensure, TilewrightError } from "./errors.js";
import { asJson, constraintOf, toolChoiceOf } from "./format.js";
import { isId } from "./arguments.js";
import { defined } from "./helpers.js";
import { withoutImages } from "./images.js";
import type { OutputRequest, GenerateEvent, GenerateRequest, Prompt } from "./protocol.js";
import type { ChatMessage, ChatOptions, GenerateOptions, GenerateResult, GenerationUsage, Piece } from "./types.js";

export type SendRequest = (request: GenerateRequest, options: CallOptions<"generate">) => Promise<GenerateResult>;

/** A generation's request. Errors of `prompt` and `output` are the generation's. */
interface GenerationSpec {
  prompt: () => Prompt;
  options: Omit<GenerateOptions, "responseFormat">;
  output: () => OutputRequest;
}

export function completionSpec(
  given: string | Uint32Array | readonly number[], { responseFormat, ...options }: GenerateOptions,
): GenerationSpec {
  const prompt: Prompt = typeof given === "string" ? { kind: "text", text: given } : { kind: "tokens", ids: Uint32Array.from(given) };
  return { prompt: () => prompt, options, output: () => ({ ...defined({ constraint: constraintOf(responseFormat) }), isParsed: false, mayThink: false }) };
}

export function chatSpec(messages: readonly ChatMessage[], options: ChatOptions): GenerationSpec {
  const { tools, toolChoice, parallelToolCalls, thinking, responseFormat, documents, templateVariables, templateName, continueFinalMessage, ...generate } =
  options;
  const variables = typeof thinking !== "boolean" ? templateVariables : { enable_thinking: thinking, thinking, ...templateVariables };
  const templateOptions = defined({ tools, documents, templateVariables: variables, templateName, continueFinalMessage });
  const copies = messages.map((message) => ({ ...message }));
  return { prompt: () => ({ kind: "chat", ...withoutImages(copies), templateOptions }), options: generate, output: () => {
    const constraint = constraintOf(responseFormat);
    const choice = toolChoiceOf(toolChoice);
    const some = tools !== undefined && tools.length > 0 ? asJson("tools", tools) : undefined;
    ensure(some !== undefined || choice === "auto" || choice === "none",
      "option", "toolChoice asks for a call, and there are no tools");
    const isBound = constraint !== undefined || continueFinalMessage === true;
    ensure(!isBound || choice === "auto" || choice === "none",
      "option", "toolChoice requires a call, which responseFormat and continueFinalMessage rule out");
    return {
      ...defined({ constraint, tools: some, toolChoice: isBound ? undefined : choice, parallel: parallelToolCalls }),
      isParsed: constraint !== undefined || thinking !== undefined || toolChoice !== undefined || some !== undefined,
      mayThink: thinking !== false,
    };
  } };
}

/**
 * A running generation. Iterate over its pieces, or await {@link Generation.text}.
 *
 * Leaving the loop early stops the generation, as {@link Generation.stop} does. An abort makes the loop, `text()` and
 * `result` throw the signal's reason.
 */
export class Generation implements AsyncIterable<Piece> {
  readonly result: Promise<GenerateResult>;
  readonly #pieces: Piece[] = [];
  readonly #stopSignal = new AbortController();
  #usage: GenerationUsage = { promptTokens: 0, cachedTokens: 0, generatedTokens: 0, prefillSeconds: 0, decodeSeconds: 0 };
  #failure: { error: unknown } | undefined;
  #over = false;
  #wake: (() => void)[] = [];

  /** @internal */
  constructor(send: SendRequest, { prompt, options: { signal, logitBias, ...options }, output }: GenerationSpec) {
    let since = 0;
    const seconds = (): number => (performance.now() - since) / 1000;
    const onEvent = (event: GenerateEvent): void => {
      if (!("id" in event)) {
        if (this.#pieces.length === 0) {
          since = performance.now();
        }
        this.#usage = { ...this.#usage, ...event };
        return;
      }
      if (this.#pieces.length === 0) {
        this.#usage.prefillSeconds = seconds();
        since = performance.now();
      }
      this.#pieces.push(event);
      this.#usage.generatedTokens = this.#pieces.length;
      this.#usage.decodeSeconds = seconds();
      this.#wakeAll();
    };
    // Errors of the request are the generation's.
    this.result = (async () => send({
      prompt: prompt(),
      options: { temperature: 0, seed: randomSeed(), ...defined(options, [undefined, null]), ...defined({ logitBias: biasesOf(logitBias) }) },
      output: output(),
    }, { signal, stopSignal: this.#stopSignal.signal, onEvent }))();
    this.result.then(({ promptTokens, cachedTokens, generatedTokens, prefillSeconds, decodeSeconds }) => {
      this.#usage = { promptTokens, cachedTokens, generatedTokens, prefillSeconds, decodeSeconds };
    }, (error: unknown) => {
      this.#failure = { error };
    }).finally(() => {
      this.#over = true;
      this.#wakeAll();
    });
  }

  /**
   * Ends the generation after the current token. The loop ends, `text()` is the text so far, and `result` has the
   * reason `cancelled`. A queued generation ends without any text.
   */
  stop(): void {
    this.#stopSignal.abort();
  }

  /** The numbers so far, also after an abort or an error; finally those of `result`. */
  get usage(): GenerationUsage {
    return { ...this.#usage };
  }

  /** The whole text. */
  async text(): Promise<string> {
    await this.result;
    return this.#pieces.map(({ text }) => text).join("");
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece, void, undefined> {
    try {
      for (let next = 0; ;) {
        const piece = this.#pieces[next];
        if (this.#failure !== undefined) {
          throw this.#failure.error;
        }
        if (piece !== undefined) {
          next += 1;
          yield piece;
        } else if (this.#over) {
          return;
        } else {
          await new Promise<void>((resolve) => this.#wake.push(resolve));
        }
      }
    } finally {
      this.stop();
    }
  }

  #wakeAll(): void {
    this.#wake.splice(0).forEach((wake) => wake());
  }
}

function biasesOf(given: GenerateOptions["logitBias"]): [id: number, bias: number][] | undefined {
  if (given === undefined) {
    return undefined;
  }
  if (typeof given !== "object" || given === null || Symbol.iterator in given) {
    const found = given === null ? "null" : typeof given === "object" ? "a list" : typeof given;
    throw new TilewrightError("option", `logitBias is ${found}, expected an object of biases by token ids`);
  }
  return Object.entries(given).map(([key, bias]) => {
    const id = /^(0|[1-9]\d*)$/.test(key) ? Number(key) : NaN;
    ensure(isId(id), "option", `logitBias has the key ${JSON.stringify(key)}, expected a token's id`);
    ensure(typeof bias === "number", "option", `logitBias[${key}] is ${typeof bias}, expected a number`);
    return [id, bias];
  });
}

function randomSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
}
