/** What the second WASM module exports, as this package uses it: constraints and answers. It is fetched when one is first asked for. */

export default function init(input?: { module_or_path: BufferSource | string | URL }): Promise<{ memory: WebAssembly.Memory }>;
/** Makes the module anew, with memory of its own. Objects of before must not be touched any more, not even freed. */
export function __wbg_reset_state(): void;

/** A model's vocabulary, of which there is one at a time. The arguments are what `Model` of the engine gives by these names. */
export class Vocabulary {
  constructor(tokens: Uint32Array, tokenBytes: Uint8Array, endIds: Uint32Array, vocabSize: number, encodeWithin: (text: string) => Uint32Array | undefined);
  /** `constraint` is JSON of a `ResponseFormat`. */
  guide(constraint: string, endIds: Uint32Array): Guide;
  /** The same for what follows a thought, if there is one. */
  answerGuide(constraint: string, endIds: Uint32Array, reader: AnswerReader, mayThink: boolean): Guide;
  /** Of an answer to the reader's prompt with its tools; nothing where nothing is to be kept to. */
  toolGuide(reader: AnswerReader, choice: string, tool: string | undefined, parallel: boolean, mayThink: boolean, endIds: Uint32Array): Guide | undefined;
  /** `tools` is JSON, `prompt` the tokens in front of the answer. */
  answerReader(templates: string, tools: string | undefined, prompt: Uint32Array, begun: string | undefined, firstCall: number): AnswerReader;
  free(): void;
}

export class Guide {
  private constructor();
  allowed(): Uint32Array;
  accept(id: number): Uint32Array | undefined;
  free(): void;
}

/** Both methods give JSON of `{ text, thinking?, toolCalls?, problem? }`. */
export class AnswerReader {
  private constructor();
  push(id: number, text: string): string;
  finish(): string;
  free(): void;
}
