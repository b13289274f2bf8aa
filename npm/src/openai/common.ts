/** What answers of chats and of plain texts have in common: why they end, their numbers, their tokens, and how they are streamed. */

import type { Generation } from "../generation.js";
import type { GenerateResult, Piece, StopReason, ToolCall } from "../types.js";

/** Why an answer ended: by itself or at a stop text, because there was no room for more, or with calls of tools. */
export type FinishReason = "stop" | "length" | "tool_calls";

/** Tokens of a request and all of its answers. */
export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

/** What identifies an answer. */
export interface Head {
  id: string;
  /** Seconds since 1970. */
  created: number;
  model: string;
}

/** A head with a new id. */
export function headOf(kind: "chatcmpl" | "cmpl", model: string): Head {
  // Pages without https have no `randomUUID`.
  const random = Array.from(crypto.getRandomValues(new Uint32Array(3)), (word) => word.toString(36)).join("");
  return { id: `${kind}-${random}`, created: Math.floor(Date.now() / 1000), model };
}

export function finishOf({ stopReason, toolCalls }: { stopReason: StopReason; toolCalls: ToolCall[] }): FinishReason {
  if (stopReason === "max_tokens" || stopReason === "context_full" || stopReason === "deadline") {
    return "length";
  }
  return toolCalls.length > 0 ? "tool_calls" : "stop";
}

/** The numbers of answers to some prompts, each of which has a list of results. */
export function usageOf(prompts: readonly (readonly GenerateResult[])[]): CompletionUsage {
  const sum = (numbers: number[]): number => numbers.reduce((sum, number) => sum + number, 0);
  // All answers to a prompt have it in common; what the later ones found of it was computed for the first.
  const prompt = sum(prompts.map(([first]) => first?.promptTokens ?? 0));
  const generated = sum(prompts.flat().map(({ generatedTokens }) => generatedTokens));
  return {
    prompt_tokens: prompt,
    completion_tokens: generated,
    total_tokens: prompt + generated,
    prompt_tokens_details: { cached_tokens: sum(prompts.map(([first]) => first?.cachedTokens ?? 0)) },
  };
}

/** Holds tokens back until their text is out, so that those of a stop text never come. */
export class TokenQueue {
  #waiting: Piece[] = [];

  /** Adds a token. Returns those that are certain now. */
  push(piece: Piece): Piece[] {
    this.#waiting.push(piece);
    return this.#waiting.splice(0, this.#waiting.length - (piece.held ?? 0));
  }

  /** Those that are left when the generation is over, without the one that ends the text. */
  end(reason: StopReason): Piece[] {
    const rest = this.#waiting.splice(0);
    return reason === "stop_text" || reason === "cancelled" ? [] : reason === "eos" ? rest.slice(0, -1) : rest;
  }
}

/** Pieces of a generation, which the signal ends as `stop` does. */
export async function* piecesUntil(generation: Generation, ending: AbortSignal): AsyncGenerator<Piece, void, undefined> {
  const stop = (): void => generation.stop();
  ending.addEventListener("abort", stop, { once: true });
  if (ending.aborted) {
    stop();
  }
  try {
    yield* generation;
  } finally {
    ending.removeEventListener("abort", stop);
  }
}

/** An answer's chunks while it is generated. Leaving the loop ends the generation. */
export class CompletionStream<Chunk> implements AsyncIterableIterator<Chunk, void, undefined> {
  /** Its abort ends the generation, and the stream with what came until then. */
  readonly controller = new AbortController();
  readonly #chunks: AsyncGenerator<Chunk, void, undefined>;
  #first: IteratorResult<Chunk, void> | undefined;

  private constructor(chunksOf: (ending: AbortSignal) => AsyncGenerator<Chunk, void, undefined>) {
    this.#chunks = chunksOf(this.controller.signal);
  }

  /** Resolves with the first chunk in hand, so that what is wrong with the request is known by then. */
  static async begin<Chunk>(chunksOf: (ending: AbortSignal) => AsyncGenerator<Chunk, void, undefined>): Promise<CompletionStream<Chunk>> {
    const stream = new CompletionStream(chunksOf);
    stream.#first = await stream.#chunks.next();
    return stream;
  }

  async next(): Promise<IteratorResult<Chunk, void>> {
    const first = this.#first;
    this.#first = undefined;
    return first ?? this.#chunks.next();
  }

  async return(): Promise<IteratorResult<Chunk, void>> {
    this.#first = undefined;
    // What is being waited for comes to its end, too.
    this.controller.abort();
    return this.#chunks.return();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}
