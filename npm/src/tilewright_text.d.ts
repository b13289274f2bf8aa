/** The exports of the second WASM module that this package uses: constraints and output parsing. */

export default function init(input?: { module_or_path: BufferSource | string | URL }): Promise<{ memory: WebAssembly.Memory }>;
/** Resets the module's memory. Earlier objects must not be used any more, not even freed. */
export function __wbg_reset_state(): void;

/** A model's vocabulary, from the same methods of the engine's `Model`. */
export class Vocabulary {
  constructor(tokens: Uint32Array, tokenBytes: Uint8Array, endIds: Uint32Array, vocabSize: number, encodeWithin: (text: string) => Uint32Array | undefined);
  /** `constraint` is JSON of a `ResponseFormat`. */
  guide(constraint: string, endIds: Uint32Array): Guide;
  /** The same after thinking, if there is any. */
  answerGuide(constraint: string, endIds: Uint32Array, reader: AnswerReader, mayThink: boolean): Guide;
  /** Constrains the calls of the reader's tools; `undefined` without a constraint. */
  toolGuide(reader: AnswerReader, choice: string, tool: string | undefined, parallel: boolean, mayThink: boolean, endIds: Uint32Array): Guide | undefined;
  /** `tools` is JSON, `prompt` the tokens before the output. */
  answerReader(templates: string, tools: string | undefined, prompt: Uint32Array, begun: string | undefined, firstCall: number): AnswerReader;
  free(): void;
}

export class Guide {
  private constructor();
  allowed(): Uint32Array;
  accept(id: number): Uint32Array | undefined;
  free(): void;
}

/** Both methods return JSON of `{ text, thinking?, toolCalls?, problem? }`. */
export class AnswerReader {
  private constructor();
  push(id: number, text: string): string;
  finish(): string;
  free(): void;
}
