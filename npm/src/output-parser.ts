/** Constraints and output parsing in the worker: the second WASM module, started on first use. */

import { ensure, isTrap, messageOf, TilewrightError } from "./errors.js";
import { orAborted } from "./helpers.js";
import type { OutputRequest, Prompt } from "./protocol.js";
import { textModule } from "./text-module.js";
import type { Model, TokenConstraint } from "./tilewright.js";
import { __wbg_reset_state as reset, Vocabulary, type AnswerReader, type Guide } from "./tilewright_text.js";
import type { GenerateResult, Piece, ToolCall } from "./types.js";

const vocabularies = new Map<() => Model, { of: Model; vocabulary: Vocabulary }>();

export function forget(model: () => Model): void {
  vocabularies.get(model)?.vocabulary.free();
  vocabularies.delete(model);
}

/** A generation's constraint and parser, or `undefined` without any. `endIds` may end the text. */
export async function outputParserOf(
  model: () => Model, { constraint, tools, toolChoice, parallel = true, isParsed, mayThink }: OutputRequest, prompt: Prompt,
  ids: Uint32Array, endIds: Uint32Array, signal: AbortSignal,
): Promise<OutputParser | undefined> {
  if (constraint === undefined && !isParsed) {
    return undefined;
  }
  await orAborted(textModule.start(), signal);
  return guarded(() => {
    const vocabulary = vocabularyOf(model);
    if (!isParsed || prompt.kind !== "chat") {
      return new OutputParser(vocabulary.guide(constraint ?? "", endIds), undefined);
    }
    const { messages, templateOptions } = prompt;
    const begun = templateOptions.continueFinalMessage === true ? messages.at(-1)?.content : undefined;
    const given = typeof begun === "string" ? begun : undefined;
    const reader = vocabulary.answerReader(model().templates(), tools, ids, given, messages.length * 100);
    try {
      const guide = constraint !== undefined ? vocabulary.answerGuide(constraint, endIds, reader, mayThink)
        : tools === undefined || toolChoice === undefined ? undefined
        : typeof toolChoice === "string" ? vocabulary.toolGuide(reader, toolChoice, undefined, parallel, mayThink, endIds)
        : vocabulary.toolGuide(reader, "auto", toolChoice.name, parallel, mayThink, endIds);
      return new OutputParser(guide, reader);
    } catch (error) {
      if (!isTrap(error)) {
        reader.free();
      }
      throw error;
    }
  });
}

/** The vocabulary of a model. Guides outlive a lost model, and then use the one that was loaded again. */
function vocabularyOf(model: () => Model): Vocabulary {
  const of = model();
  const known = vocabularies.get(model);
  if (known?.of === of) {
    return known.vocabulary;
  }
  forget(model);
  const encodeWithin = (text: string): Uint32Array | undefined => model().encodeWithin(text);
  const vocabulary = new Vocabulary(of.tokens(), of.tokenBytes(), of.endIds(), of.info().vocabSize, encodeWithin);
  vocabularies.set(model, { of, vocabulary });
  return vocabulary;
}

/** Number of resets of the module. */
let nResets = 0;

/** Uses the module. If that stops it, such as by a stack overflow, the module is reset, and the error thrown. */
function guarded<T>(work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (!isTrap(error)) {
      throw error;
    }
    nResets += 1;
    vocabularies.clear();
    reset();
    throw new TilewrightError("constraint", `constraint: too complex for the module that reads it, which stopped: ${messageOf(error)}`, { cause: error });
  }
}

export class OutputParser implements TokenConstraint {
  readonly #nResets = nResets;
  readonly #toolCalls: ToolCall[] = [];
  #thinking = "";
  /** The original error, which the engine does not pass on. */
  failure: unknown;

  constructor(private readonly constraint: Guide | undefined, private readonly reader: AnswerReader | undefined) {}

  get guide(): TokenConstraint | undefined {
    return this.constraint && this;
  }

  allowed(): Uint32Array {
    return this.#keepingFailure(() => this.constraint?.allowed() ?? new Uint32Array());
  }

  accept(id: number): Uint32Array | undefined {
    return this.#keepingFailure(() => this.constraint?.accept(id));
  }

  piece(id: number, text: string, isLast: boolean): Piece {
    const reader = this.reader;
    if (reader === undefined) {
      return { id, text };
    }
    this.#check();
    const parts = guarded(() => [reader.push(id, text), ...isLast ? [reader.finish()] : []]).map((json) => JSON.parse(json) as Omit<Piece, "id">);
    const [piece = { text }, rest] = parts;
    const toolCalls = [...piece.toolCalls ?? [], ...rest?.toolCalls ?? []];
    const thinking = (piece.thinking ?? "") + (rest?.thinking ?? "");
    const problem = piece.problem ?? rest?.problem;
    this.#toolCalls.push(...toolCalls);
    this.#thinking += thinking;
    return {
      id,
      text: piece.text + (rest?.text ?? ""),
      ...(thinking === "" ? {} : { thinking }),
      ...(toolCalls.length === 0 ? {} : { toolCalls }),
      ...(problem === undefined ? {} : { problem }),
    };
  }

  get result(): Pick<GenerateResult, "thinking" | "toolCalls"> {
    return { thinking: this.#thinking, toolCalls: this.#toolCalls };
  }

  free(): void {
    if (this.#nResets === nResets) {
      this.constraint?.free();
      this.reader?.free();
    }
  }

  /** Throws if another generation has stopped the module. */
  #check(): void {
    ensure(this.#nResets === nResets,
      "constraint", "constraint: its module was stopped by another generation, and this one cannot continue");
  }

  #keepingFailure<T>(work: () => T): T {
    try {
      this.#check();
      return guarded(work);
    } catch (error) {
      this.failure ??= error;
      throw error;
    }
  }
}
