/** Many texts of a model at once. */

import { ensure } from "./errors.js";
import { chatSpec, completionSpec, Generation, type SendRequest } from "./generation.js";
import type { Connection } from "./connection.js";
import type { Loaded } from "./loaded.js";
import { known } from "./options.js";
import { finalizer } from "./platform.js";
import { SharedConnection } from "./shared.js";
import type { ChatMessage, EngineChatOptions, EngineGenerateOptions, EngineOptions, EngineStats, ModelInfo } from "./types.js";

/** Texts that wait at most where nothing else is said. */
const MAX_QUEUED = 1000;

/** Frees what nobody refers to any more. */
const forgotten = finalizer<{ connection: Connection; engine: number }>(({ connection, engine }) => {
  // With the model it is gone as well.
  connection.call("freeEngine", { engine }).catch(() => {});
});

/**
 * Computes many texts of a model at once. {@link Model.engine} makes one.
 *
 * ```ts
 * const engine = await model.engine({ maxSequences: 8 });
 * const texts = await Promise.all(prompts.map((prompt) => engine.generate(prompt).text()));
 * engine.free();
 * ```
 *
 * A text is the same whatever is computed beside it. A model's own `generate` adds numbers up in another order: where two tokens are all but
 * equally likely, it may take the other one.
 */
export class Engine {
  readonly #model: Loaded<ModelInfo>;
  readonly #number: number;
  readonly #send: SendRequest = (request, options) => this.#model.connection.call("generateWith", { engine: this.#number, ...request }, { ...options, keeps: this });

  private constructor(model: Loaded<ModelInfo>, number: number) {
    this.#model = model;
    this.#number = number;
    forgotten.register(this, { connection: model.connection, engine: number });
  }

  /** @internal */
  static async of(model: Loaded<ModelInfo>, { maxQueued = MAX_QUEUED, ...options }: EngineOptions): Promise<Engine> {
    ensure(!(model.connection instanceof SharedConnection),
      "option", "the model is shared with other tabs, and an engine is not, expected a model without `shared`");
    return new Engine(model, await model.call("makeEngine", { maxQueued, ...options }));
  }

  /**
   * Continues a text, or a sequence of tokens as it is. A beginning that an earlier text had as well is not computed again. The text takes its
   * place in the queue at once, also if nobody iterates over it.
   *
   * @throws TypeError, at once, for an option that there is not.
   * @throws {@link TilewrightError} `busy` from the generation if `maxQueued` texts wait already.
   */
  generate(prompt: string | Uint32Array | readonly number[], options: EngineGenerateOptions = {}): Generation {
    const spec = completionSpec(prompt, known("Engine.generate", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Answers a conversation, rendered by the model's chat template.
   *
   * @throws TypeError, at once, for an option that there is not.
   * @throws {@link TilewrightError} from the generation: `template` as of {@link Model.chat}, `busy` if `maxQueued` texts wait already.
   */
  chat(messages: readonly ChatMessage[], options: EngineChatOptions = {}): Generation {
    const spec = chatSpec(messages, known("Engine.chat", options));
    return new Generation(this.#send, spec);
  }

  /** What it has done since it was made, and what it does now. */
  stats(): Promise<EngineStats> {
    return this.#model.connection.call("engineStats", { engine: this.#number }, { keeps: this });
  }

  /** Frees its cache. Texts that it has are rejected with `disposed`. Freeing the model frees it as well. */
  free(): void {
    void this[Symbol.asyncDispose]();
  }

  [Symbol.dispose](): void {
    this.free();
  }

  /** As `free`; resolves when it is done. */
  async [Symbol.asyncDispose](): Promise<void> {
    // The model may be freed already.
    await this.#model.connection.call("freeEngine", { engine: this.#number }).catch(() => {});
  }
}
