/** Continuous batching. */

import type { Connection } from "./connection.js";
import { ensure } from "./errors.js";
import { chatSpec, completionSpec, Generation, type SendRequest } from "./generation.js";
import type { Loaded } from "./loaded.js";
import { known } from "./options.js";
import { finalizer } from "./platform.js";
import { SharedConnection } from "./shared.js";
import type { ChatMessage, EngineChatOptions, EngineGenerateOptions, EngineOptions, EngineStats, ModelInfo } from "./types.js";

const collected = finalizer<{ connection: Connection; engine: number }>(({ connection, engine }) => {
  // The model may be gone, and its engines with it.
  connection.call("freeEngine", { engine }).catch(() => {});
});

/**
 * Continuous batching with a shared prefix cache: many sequences of a model per pass. {@link Model.engine} makes one.
 *
 * ```ts
 * const engine = await model.engine({ maxSequences: 8 });
 * const texts = await Promise.all(prompts.map((prompt) => engine.generate(prompt).text()));
 * engine.free();
 * ```
 *
 * A text does not depend on other requests. A model's own `generate` sums in another order, so it may differ where two
 * tokens are almost equally likely.
 */
export class Engine {
  readonly #model: Loaded<ModelInfo>;
  readonly #number: number;
  readonly #send: SendRequest = (request, options) =>
    this.#model.connection.call("generateWith", { engine: this.#number, ...request }, { ...options, keeps: this });

  private constructor(model: Loaded<ModelInfo>, number: number) {
    this.#model = model;
    this.#number = number;
    collected.register(this, { connection: model.connection, engine: number });
  }

  /** @internal */
  static async of(model: Loaded<ModelInfo>, { maxQueued = 1000, ...options }: EngineOptions): Promise<Engine> {
    ensure(!(model.connection instanceof SharedConnection),
      "option", "the model is shared with other tabs, and an engine is not, expected a model without `shared`");
    return new Engine(model, await model.call("makeEngine", { maxQueued, ...options }));
  }

  /**
   * Continues a text or a sequence of tokens. Cached prefixes are not computed again. The request is queued at once.
   *
   * @throws TypeError, at once, for an unknown option.
   * @throws {@link TilewrightError} `busy` from the generation if the queue is full.
   */
  generate(prompt: string | Uint32Array | readonly number[], options: EngineGenerateOptions = {}): Generation {
    const spec = completionSpec(prompt, known("Engine.generate", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Continues a conversation, rendered by the model's chat template.
   *
   * @throws TypeError, at once, for an unknown option.
   * @throws {@link TilewrightError} from the generation: `template` as of {@link Model.chat}, `busy` if the queue is
   * full.
   */
  chat(messages: readonly ChatMessage[], options: EngineChatOptions = {}): Generation {
    const spec = chatSpec(messages, known("Engine.chat", options));
    return new Generation(this.#send, spec);
  }

  stats(): Promise<EngineStats> {
    return this.#model.connection.call("engineStats", { engine: this.#number }, { keeps: this });
  }

  /** Frees its cache, and rejects its requests with `disposed`. Freeing the model frees it as well. */
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
