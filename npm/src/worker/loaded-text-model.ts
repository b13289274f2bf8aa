/** Loaded language models. */

import { Pictures, Sha256 } from "../classes.js";
import { codeOf, ensure, type ErrorCode, isTrap, messageOf } from "../errors.js";
import { cancelling, defined, orFree } from "../helpers.js";
import { forget, outputParserOf, type OutputParser } from "../output-parser.js";
import type { Calls, GenerateRequest, GivenImage, Prompt } from "../protocol.js";
import { commonPrefix, openSessions, storing, type FoundSession } from "../sessions.js";
import type { EngineOutcome, GenerationOptions, Model, Session } from "../tilewright.js";
import type {
  EngineOptions, GenerateResult, HeadWeights, KeptSession, MemoryInfo, Piece, Timeline, TokenLogprob,
} from "../types.js";
import { LoadedEngine } from "./loaded-engine.js";
import { LoadedModel } from "./loaded-model.js";
import { pixelsOf } from "./pixels.js";
import { nextTask, type CallContext } from "./port.js";
import { Registry } from "./registry.js";
import { inTurn } from "./turns.js";

export class LoadedTextModel extends LoadedModel<Model> {
  #session: Session | undefined;
  readonly engines = new Registry<LoadedEngine>("engine");

  /** The model, also after it was loaded again. */
  readonly #current = (): Model => this.loaded;

  generate(request: Calls["generate"]["args"], context: CallContext<"generate">): Promise<GenerateResult> {
    const { signal } = context;
    const encode = (work: () => Promise<Pictures>): Promise<Pictures> => this.retrying(signal, work);
    return this.#prepared(request, context, encode, (prepared) => this.retrying(signal, () => this.#run(prepared, context)));
  }

  async generateWith({ engine: number, ...request }: Calls["generateWith"]["args"], context: CallContext<"generateWith">): Promise<GenerateResult> {
    const engine = this.engines.get(number);
    // The encoder is the model's, which may have to be loaded again.
    const encode = (work: () => Promise<Pictures>): Promise<Pictures> =>
      inTurn(context.target, context.signal, () => this.retrying(context.signal, work));
    return this.#prepared(request, context, encode, ({ ids, pictures, options, parser, onBegin, onPiece }) =>
      engine.generate(ids, pictures, options, parser, context, onBegin, onPiece));
  }

  makeEngine(settings: EngineOptions, target: number): number {
    let its = this.loaded;
    return this.engines.put(new LoadedEngine(this.#current, settings, (lost, signal) => inTurn(target, signal, async () => {
      // The session or another engine may have loaded it again already.
      if (its === this.loaded) {
        this.replace(await this.rebuild(lost, signal));
        this.freeLost();
      }
      its = this.loaded;
      return its;
    })));
  }

  timeline(): Promise<Timeline> {
    return this.#written("timeline").timeline();
  }

  async headWeights({ layer, head, lastQueries }: Calls["headWeights"]["args"]): Promise<HeadWeights> {
    const session = this.#written("attention");
    const tokens = this.loaded.pieces(session.tokens());
    const weights = await session.headWeights(layer, head, lastQueries);
    return { tokens, weights, rows: weights.length / tokens.length, columns: tokens.length };
  }

  /** The session. Throws if it has no tokens. */
  #written(call: string): Session {
    ensure(this.#session !== undefined && this.#session.tokens().length !== 0,
      "option", `${call} is about what was generated, and nothing was so far`);
    return this.#session;
  }

  async saveSession({ maxBytes }: Calls["saveSession"]["args"]): Promise<KeptSession> {
    const session = this.#session;
    ensure(session !== undefined && session.nCached() !== 0,
      "option", "saveSession stores what was generated, and nothing was so far");
    const digest = this.loaded.digest();
    ensure(digest !== undefined,
      "option", "saveSession needs a model all of whose weights are in memory; this one reads some from its files");
    ensure(this.recipe.request.cache,
      "option", "saveSession needs the browser's storage, and the model was loaded with `cache: false`");
    return storing(async () => {
      const kept = await openSessions(true);
      // Tokens without cached keys are left out.
      const tokens = session.tokens().subarray(0, session.nCached());
      ensure(kept !== undefined, "storage", "the browser made no storage for sessions");
      return kept.save(digest, tokens, () => session.saving(), maxBytes, () => new Sha256());
    });
  }

  /** Restores a saved session that has more of the prompt than the current one. */
  async #reopen(session: Session, ids: Uint32Array): Promise<void> {
    if (!this.recipe.request.cache) {
      return;
    }
    const dropped = (why: string): void => this.caller.notify("session_dropped", `a saved session is not used: ${why}`);
    let found: FoundSession | undefined;
    try {
      const kept = await openSessions(false).catch(() => undefined);
      const nKnown = Math.min(commonPrefix(session.tokens(), ids), session.nCached());
      const limits = { mostTokens: this.loaded.info().contextLength, mostBack: this.loaded.mostBack() ?? Infinity };
      const damaged = (): void => dropped("its SHA-256 is another one");
      const digest = this.loaded.digest();
      found = digest === undefined ? undefined : await storing(async () => kept?.find(digest, ids, nKnown, limits, () => new Sha256(), damaged));
      await (found && session.restore(found.size, found.read));
    } catch (error) {
      if (isTrap(error) || codeOf(error) === "device_lost") {
        throw error;
      }
      // A session that does not fit this machine's memory now is not deleted.
      if (USELESS.has(codeOf(error))) {
        await found?.drop().catch(() => {});
      }
      dropped(messageOf(error));
    } finally {
      found?.close();
    }
  }

  override async memory(): Promise<MemoryInfo> {
    return { ...await super.memory(), ...defined({ streamedBytes: this.loaded.streamedBytes() }) };
  }

  override bytes(): number {
    return super.bytes() + this.engines.all().reduce((sum, engine) => sum + engine.bytes(), 0);
  }

  protected override release(): void {
    this.engines.clear();
    super.release();
  }

  protected override freeLoaded(): void {
    this.engines.all().forEach((engine) => engine.leave());
    this.#session?.free();
    this.#session = undefined;
    forget(this.#current);
    super.freeLoaded();
  }

  async #run(
    { ids, pictures, options, parser, onBegin, onPiece }: Prepared, { signal, stopSignal }: CallContext<"generate">,
  ): Promise<EngineOutcome> {
    const session = this.#session ??= this.loaded.session();
    await this.#reopen(session, ids);
    signal.throwIfAborted();
    const cancel = (): void => session.cancel();
    const eitherEnd = AbortSignal.any([signal, stopSignal]);
    const begin = (cachedTokens: number): void => {
      onBegin(cachedTokens);
      if (eitherEnd.aborted) {
        cancel();
      }
    };
    const emit = async (...piece: Parameters<Prepared["onPiece"]>): Promise<boolean> => {
      onPiece(...piece);
      await nextTask();
      return !eitherEnd.aborted;
    };
    // The session moves to the new model. The old one keeps the vocabulary, which needs no device.
    return cancelling(eitherEnd, cancel, () =>
      session.generate(ids, pictures, options, parser?.guide, begin, emit, (error) => this.rebuild(error, signal)));
  }

  protected override replace(model: Model): void {
    this.lost.push(...this.#session === undefined ? [] : [this.#session]);
    this.#session = undefined;
    super.replace(model);
  }

  /** Does `work` with a request in the engine's terms. */
  async #prepared(
    { prompt, options: given, output }: GenerateRequest, { signal, emit }: CallContext<"generate" | "generateWith">,
    encode: (work: () => Promise<Pictures>) => Promise<Pictures>, work: (prepared: Prepared) => Promise<EngineOutcome>,
  ): Promise<GenerateResult> {
    const images = prompt.kind === "chat" ? prompt.images : [];
    const pictures = images.length === 0 ? new Pictures() : await encode(() => this.#picturesOf(images, signal));
    try {
      return await this.#generated({ prompt, options: given, output }, { signal, emit }, pictures, work);
    } finally {
      pictures.free();
    }
  }

  /** The rows of images, in order. */
  async #picturesOf(images: readonly GivenImage[], signal: AbortSignal): Promise<Pictures> {
    // Fails without an encoder.
    this.loaded.imageTokens(1, 1);
    const pictures = new Pictures();
    return orFree(pictures, async () => {
      for (const image of images) {
        signal.throwIfAborted();
        const { width, height, data } = await pixelsOf(image, signal);
        await pictures.add(this.loaded, width, height, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
      }
      return pictures;
    });
  }

  async #generated(
    { prompt, options: given, output }: GenerateRequest, { signal, emit }: Pick<CallContext<"generate" | "generateWith">, "signal" | "emit">,
    pictures: Pictures, work: (prepared: Prepared) => Promise<EngineOutcome>,
  ): Promise<GenerateResult> {
    const ids = this.#encode(prompt, pictures);
    const options: GenerationOptions = prompt.kind === "chat" ? this.#endingTurns(given) : given;
    const endIds = options.ignoreEos === true ? new Uint32Array() : Uint32Array.from([...this.loaded.endIds(), ...options.stopIds ?? []]);
    const parser = await outputParserOf(this.#current, output, prompt, ids, endIds, signal);
    try {
      const outcome = await work({
        ids, pictures, options, parser,
        onBegin: (cachedTokens) => emit({ promptTokens: ids.length, cachedTokens }),
        onPiece: (id, text, isLast, logprobs) => {
          const piece = parser?.piece(id, text, isLast) ?? { id, text };
          emit(logprobs === undefined ? piece : { ...piece, ...likelihoods(logprobs) });
        },
      });
      return { ...outcome, ...parser?.result ?? { thinking: "", toolCalls: [] } };
    } catch (error) {
      throw parser?.failure ?? error;
    } finally {
      parser?.free();
    }
  }

  #encode(prompt: Prompt, pictures: Pictures): Uint32Array {
    switch (prompt.kind) {
      case "text":
        return this.loaded.tokenize(prompt.text, true);
      case "tokens":
        return prompt.ids;
      case "chat":
        return this.loaded.chatTokens(prompt.messages, { ...prompt.templateOptions, now: Math.floor(Date.now() / 1000) }, pictures);
    }
  }

  /** Options that also stop at the end of the assistant's turn. */
  #endingTurns(options: GenerationOptions): GenerationOptions {
    if (options.ignoreEos === true) {
      return options;
    }
    const { ids, texts } = this.loaded.chatStops();
    return { ...options, stopIds: ids, stop: [...(options.stop ?? []), ...texts] };
  }
}

/** A request in the engine's terms, and what receives its output. */
interface Prepared {
  ids: Uint32Array;
  pictures: Pictures;
  options: GenerationOptions;
  parser: OutputParser | undefined;
  onBegin(cachedTokens: number): void;
  onPiece(id: number, text: string, isLast: boolean, logprobs?: string): void;
}

/** The result of a generation that was stopped before its turn. */
export const CANCELLED: GenerateResult = {
  stopReason: "cancelled", promptTokens: 0, cachedTokens: 0, generatedTokens: 0, draftedTokens: 0, acceptedTokens: 0, prefillSeconds: 0,
  decodeSeconds: 0, thinking: "", toolCalls: [],
};

const USELESS: ReadonlySet<ErrorCode> = new Set(["format", "unsupported", "truncated", "context_full", "shape", "operand"]);

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Log-probabilities, from the engine's JSON. */
function likelihoods(json: string): Pick<Piece, "logprob" | "topLogprobs" | "held"> {
  const { tokens, held } = JSON.parse(json) as { tokens: Omit<TokenLogprob, "text">[]; held: number };
  const [logprob, ...topLogprobs] = tokens.map((token): TokenLogprob => ({ ...token, text: decoder.decode(Uint8Array.from(token.bytes)) }));
  return logprob === undefined ? {} : { logprob, topLogprobs, held };
}
