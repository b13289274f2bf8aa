/** The common part of chat and text completions: finish reasons, usage, tokens and streams. */

import type { Generation } from "../generation.js";
import type { GenerateResult, Piece, StopReason, ToolCall } from "../types.js";

/** Why a completion ended: by itself or at a stop text, at a limit, or with tool calls. */
export type FinishReason = "stop" | "length" | "tool_calls";

/** Tokens of a request and all of its choices. */
export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

/** The identity of a response. */
export interface Head {
  id: string;
  /** Seconds since 1970. */
  created: number;
  model: string;
}

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

export function usageOf(prompts: readonly (readonly GenerateResult[])[]): CompletionUsage {
  const sum = (numbers: number[]): number => numbers.reduce((sum, number) => sum + number, 0);
  // The choices of a prompt share it: the first one computes what the others find cached.
  const prompt = sum(prompts.map(([first]) => first?.promptTokens ?? 0));
  const generated = sum(prompts.flat().map(({ generatedTokens }) => generatedTokens));
  return {
    prompt_tokens: prompt,
    completion_tokens: generated,
    total_tokens: prompt + generated,
    prompt_tokens_details: { cached_tokens: sum(prompts.map(([first]) => first?.cachedTokens ?? 0)) },
  };
}

/** The end of a generation: its result, and the last tokens that are certain. */
interface End {
  result: GenerateResult;
  tokens: Piece[];
}

/**
 * Runs a generation, and yields what `emit` makes of each piece and of the tokens whose text is certain by then, so
 * that the tokens of a stop text never appear. Without the token that ends the text. `stopSignal` stops it.
 */
export async function* emitting<Chunk>(
  generation: Generation, emit: (piece: Piece, tokens: Piece[]) => Iterable<Chunk>, stopSignal?: AbortSignal,
): AsyncGenerator<Chunk, End, undefined> {
  const stop = (): void => generation.stop();
  stopSignal?.addEventListener("abort", stop, { once: true });
  if (stopSignal?.aborted === true) {
    stop();
  }
  const waiting: Piece[] = [];
  try {
    for await (const piece of generation) {
      waiting.push(piece);
      yield* emit(piece, waiting.splice(0, waiting.length - (piece.held ?? 0)));
    }
    const result = await generation.result;
    const isCut = result.stopReason === "stop_text" || result.stopReason === "cancelled";
    return { result, tokens: isCut ? [] : result.stopReason === "eos" ? waiting.slice(0, -1) : waiting };
  } finally {
    stopSignal?.removeEventListener("abort", stop);
  }
}

export async function collect(generation: Generation): Promise<End & { text: string }> {
  let text = "";
  const certain: Piece[] = [];
  const running = emitting(generation, (piece, tokens): never[] => {
    text += piece.text;
    certain.push(...tokens);
    return [];
  });
  // Nothing is emitted, so the first outcome is the end.
  const { result, tokens } = (await running.next()).value as End;
  return { text, result, tokens: [...certain, ...tokens] };
}

/** A streamed response. Leaving the loop ends the generation. */
export class CompletionStream<Chunk> implements AsyncIterableIterator<Chunk, void, undefined> {
  /** Its abort ends the generation and the stream. */
  readonly controller = new AbortController();
  readonly #chunks: AsyncGenerator<Chunk, void, undefined>;
  #first: IteratorResult<Chunk, void> | undefined;

  private constructor(chunksOf: (stopSignal: AbortSignal) => AsyncGenerator<Chunk, void, undefined>) {
    this.#chunks = chunksOf(this.controller.signal);
  }

  /** Resolves with the first chunk, so that it rejects for a bad request. */
  static async begin<Chunk>(chunksOf: (stopSignal: AbortSignal) => AsyncGenerator<Chunk, void, undefined>): Promise<CompletionStream<Chunk>> {
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
    this.controller.abort();
    return this.#chunks.return();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}
