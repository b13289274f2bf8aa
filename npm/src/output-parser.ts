/** Constraints and answers in the worker: the second WASM module, started when one is first asked for, and what it does for a generation. */

import { ensure, isTrap, messageOf, TilewrightError } from "./errors.js";
import { orAborted } from "./helpers.js";
import { wasmAt } from "./platform.js";
import type { OutputRequest, Prompt } from "./protocol.js";
import type { Model, TokenGuide } from "./tilewright.js";
import init, { __wbg_reset_state as reset, Vocabulary, type AnswerReader, type Guide } from "./tilewright_text.js";
import type { GenerateResult, Piece, ToolCall } from "./types.js";

let started: Promise<void> | undefined;
let isThere = false;
let url: string | undefined;
/** Those of models, by what says which model it is now. */
const vocabularies = new Map<() => Model, { of: Model; words: Vocabulary }>();

/** Says where the module is, if not beside the worker. */
export function findAt(given: string | undefined): void {
  url = given;
}

function start(): Promise<void> {
  started ??= (async () => {
    const other = await wasmAt(url, "tilewright_text_bg.wasm");
    await (other === undefined ? init() : init({ module_or_path: other }));
    isThere = true;
  })();
  started.catch(() => {
    // The next one who needs it tries again.
    started = undefined;
  });
  return started;
}

/** Frees what the module knows of a model. */
export function forget(model: () => Model): void {
  vocabularies.get(model)?.words.free();
  vocabularies.delete(model);
}

/** What a generation asks of this module, or nothing if it asks for nothing. `endIds` may end the text. */
export async function outputParserOf(
  model: () => Model, { constraint, tools, toolChoice, parallel = true, reads, mayThink }: OutputRequest, prompt: Prompt, ids: Uint32Array, endIds: Uint32Array, signal: AbortSignal,
): Promise<OutputParser | undefined> {
  if (constraint === undefined && !reads) {
    return undefined;
  }
  try {
    await orAborted(start(), signal);
  } catch (error) {
    signal.throwIfAborted();
    throw new TilewrightError("network", `the module for constraints and answers could not be started: ${messageOf(error)}`, { cause: error });
  }
  return guarded(() => {
    const words = wordsOf(model);
    if (!reads || prompt.kind !== "chat") {
      return new OutputParser(words.guide(constraint ?? "", endIds), undefined);
    }
    const { messages, templateOptions } = prompt;
    const begun = templateOptions.continueFinalMessage === true ? messages.at(-1)?.content : undefined;
    const given = typeof begun === "string" ? begun : undefined;
    const reader = words.answerReader(model().templates(), tools, ids, given, messages.length * 100);
    try {
      const guide = constraint !== undefined ? words.answerGuide(constraint, endIds, reader, mayThink)
        : tools === undefined || toolChoice === undefined ? undefined
        : typeof toolChoice === "string" ? words.toolGuide(reader, toolChoice, undefined, parallel, mayThink, endIds)
        : words.toolGuide(reader, "auto", toolChoice.name, parallel, mayThink, endIds);
      return new OutputParser(guide, reader);
    } catch (error) {
      if (!isTrap(error)) {
        reader.free();
      }
      throw error;
    }
  });
}

/** The vocabulary of a model. Guides outlive a model whose device is lost, and then ask the one that was loaded again. */
function wordsOf(model: () => Model): Vocabulary {
  const of = model();
  const known = vocabularies.get(model);
  if (known?.of === of) {
    return known.words;
  }
  forget(model);
  const encodeWithin = (text: string): Uint32Array | undefined => model().encodeWithin(text);
  const words = new Vocabulary(of.tokens(), of.tokenBytes(), of.endIds(), of.info().vocabSize, encodeWithin);
  vocabularies.set(model, { of, words });
  return words;
}

/** Counts how often the module was made anew. */
let life = 0;

/** Does something with the module. Where that stops it, such as for want of stack, there is a new one afterwards, and the error is the caller's. */
function guarded<T>(work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (!isTrap(error)) {
      throw error;
    }
    life += 1;
    vocabularies.clear();
    reset();
    throw new TilewrightError("constraint", `constraint: too complex for the module that reads it, which stopped: ${messageOf(error)}`, { cause: error });
  }
}

/** One generation's constraint, and the reader of what it generates. */
export class OutputParser implements TokenGuide {
  readonly #guide: Guide | undefined;
  readonly #life = life;
  readonly #toolCalls: ToolCall[] = [];
  #thinking = "";
  /** What the engine is not told of an error. */
  failure: unknown;

  constructor(guide: Guide | undefined, private readonly reader: AnswerReader | undefined) {
    this.#guide = guide;
  }

  /** What says which tokens may come, if anything does. */
  get guide(): TokenGuide | undefined {
    return this.#guide === undefined ? undefined : this;
  }

  allowed(): Uint32Array {
    return this.#keepingFailure(() => this.#guide?.allowed() ?? new Uint32Array());
  }

  accept(id: number): Uint32Array | undefined {
    return this.#keepingFailure(() => this.#guide?.accept(id));
  }

  /** What a token and its text are. */
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

  /** What the answer came to. */
  get result(): Pick<GenerateResult, "thinking" | "toolCalls"> {
    return { thinking: this.#thinking, toolCalls: this.#toolCalls };
  }

  free(): void {
    if (this.#life === life) {
      this.#guide?.free();
      this.reader?.free();
    }
  }

  /** Another text may have stopped the module that this one's guide and reader were of. */
  #check(): void {
    ensure(this.#life === life,
      "constraint", "constraint: the module that reads it was stopped by another text, and this text cannot go on without it");
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

/** Bytes of the module's memory: none if nothing has needed it. */
export async function memoryBytes(): Promise<number> {
  return isThere ? (await init()).memory.buffer.byteLength : 0;
}
