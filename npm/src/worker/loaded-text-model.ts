/** A language model that is loaded, and its sequence of tokens. */

import { codeOf, isTrap, messageOf, TilewrightError, type ErrorCode } from "../errors.js";
import type { Calls, EngineSettings, GenerateRequest, Prompt } from "../protocol.js";
import { common, openSessions, storing, type FoundSession } from "../sessions.js";
import * as output from "../output-parser.js";
import { Sha256, type EngineOutcome, type GenerationOptions, type Model, type Session } from "../tilewright.js";
import type { GenerateResult, HeadWeights, KeptSession, MemoryInfo, Piece, Timeline, TokenLogprob } from "../types.js";
import { nextTask, type CallContext } from "./port.js";
import { LoadedModel } from "./loaded-model.js";
import { Registry } from "./registry.js";
import { LoadedEngine } from "./loaded-engine.js";
import { inTurn } from "./turns.js";

/** A model and its one sequence of tokens. */
export class LoadedTextModel extends LoadedModel<Model> {
  #session: Session | undefined;
  /** What computes many texts at once. */
  readonly #engines = new Registry<LoadedEngine>("engine");

  /** The model, also after it was loaded again. */
  readonly #current = (): Model => this.loaded;

  get model(): Model {
    return this.loaded;
  }

  async generate(request: Calls["generate"]["args"], context: CallContext<"generate">): Promise<GenerateResult> {
    const { ids, options, parser } = await this.#prepare(request, context.signal);
    try {
      return await this.#run(ids, options, parser, context);
    } catch (error) {
      if (codeOf(error) !== "device_lost") {
        throw error;
      }
      // The device was lost before the sequence could begin, so nothing was given out that would come twice.
      const model = await this.rebuild(error, context.signal);
      this.#replace(model);
      return await this.#run(ids, options, parser, context);
    } finally {
      parser?.free();
      this.freeLost();
    }
  }

  /** An engine's number. */
  makeEngine(settings: EngineSettings, target: number): number {
    let its = this.loaded;
    return this.#engines.put(new LoadedEngine(this.#current, settings, (lost, signal) => inTurn(target, signal, async () => {
      // Unless it was loaded again for another engine, or for a text of the model's own.
      if (its === this.loaded) {
        this.#replace(await this.rebuild(lost, signal));
        this.freeLost();
      }
      its = this.loaded;
      return its;
    })));
  }

  /** The engine with a number. */
  engine(number: number): LoadedEngine {
    const engine = this.#engines.find(number);
    if (engine === undefined) {
      throw new TilewrightError("disposed", "the engine was freed");
    }
    return engine;
  }

  freeEngine(number: number): undefined {
    this.engine(number);
    return this.#engines.free(number);
  }

  /** A text of an engine. */
  async generateWith({ engine: number, ...request }: Calls["generateWith"]["args"], context: CallContext<"generateWith">): Promise<GenerateResult> {
    const engine = this.engine(number);
    const { ids, options, parser } = await this.#prepare(request, context.signal);
    const { emit } = context;
    try {
      const outcome = await engine.generate(
        ids, options, parser, context, (cachedTokens) => emit({ promptTokens: ids.length, cachedTokens }),
        (id, text, isLast, logprobs) => emit(pieceOf(parser, id, text, isLast, logprobs)),
      );
      return resultOf(outcome, parser);
    } catch (error) {
      throw parser?.failure ?? error;
    } finally {
      parser?.free();
    }
  }

  /** Times the pass over the latest token once more. */
  timeline(): Promise<Timeline> {
    return this.#written("timeline").timeline();
  }

  /** What a head of a layer looks at. */
  async headWeights({ layer, head, lastQueries }: Calls["headWeights"]["args"]): Promise<HeadWeights> {
    const session = this.#written("attention");
    const tokens = this.loaded.pieces(session.tokens());
    const weights = await session.headWeights(layer, head, lastQueries);
    return { tokens, weights, rows: weights.length / tokens.length, columns: tokens.length };
  }

  /** The session, which has tokens. */
  #written(call: string): Session {
    if (this.#session === undefined || this.#session.tokens().length === 0) {
      throw new TilewrightError("option", `${call} is about what was generated, and nothing was so far`);
    }
    return this.#session;
  }

  /** Keeps the session in the browser's storage. */
  async saveSession({ maxBytes }: Calls["saveSession"]["args"]): Promise<KeptSession> {
    const session = this.#session;
    if (session === undefined || session.nCached() === 0) {
      throw new TilewrightError("option", "saveSession keeps what was generated, and nothing was so far");
    }
    const digest = this.loaded.digest();
    if (digest === undefined) {
      throw new TilewrightError("option", "saveSession needs a model all of whose weights are in memory; this one reads some from its files");
    }
    if (!this.request.cache) {
      throw new TilewrightError("option", "saveSession needs the browser's storage, and the model was loaded with `cache: false`");
    }
    return storing(async () => {
      const kept = await openSessions(true);
      // A token that is no key yet is not kept.
      const tokens = session.tokens().subarray(0, session.nCached());
      return kept.save(digest, tokens, () => session.saving(), maxBytes, () => new Sha256());
    });
  }

  /** Goes on with a kept session, if one has more of the prompt than the latest sequence has. */
  async #reopen(session: Session, ids: Uint32Array): Promise<void> {
    if (!this.request.cache) {
      return;
    }
    const dropped = (why: string): void => this.caller.notify("session_dropped", `a kept session is not used: ${why}`);
    let found: FoundSession | undefined;
    try {
      // Where nothing can be kept, nothing was.
      const kept = await openSessions(false).catch(() => undefined);
      const nKnown = Math.min(common(session.tokens(), ids), session.nCached());
      const limits = { mostTokens: this.loaded.info().contextLength, mostBack: this.loaded.mostBack() ?? Infinity };
      const damaged = (): void => dropped("its SHA-256 is another one");
      const digest = this.loaded.digest();
      found = digest === undefined ? undefined : await storing(async () => kept?.find(digest, ids, nKnown, limits, () => new Sha256(), damaged));
      await (found && session.restore(found.size, found.read));
    } catch (error) {
      if (isTrap(error) || codeOf(error) === "device_lost") {
        throw error;
      }
      // What this machine has no room for now is no fault of the session's.
      if (USELESS.has(codeOf(error))) {
        await found?.drop().catch(() => {});
      }
      dropped(messageOf(error));
    } finally {
      found?.close();
    }
  }

  override async memory(): Promise<MemoryInfo> {
    const streamedBytes = this.loaded.streamedBytes();
    return { ...await super.memory(), ...streamedBytes === undefined ? {} : { streamedBytes } };
  }

  override bytes(): number {
    return super.bytes() + this.#engines.all().reduce((sum, engine) => sum + engine.bytes(), 0);
  }

  protected override release(): void {
    this.#engines.clear();
    super.release();
  }

  protected override freeLoaded(): void {
    this.#engines.all().forEach((engine) => engine.leave());
    this.#session?.free();
    this.#session = undefined;
    output.forget(this.#current);
    super.freeLoaded();
  }

  async #run(
    ids: Uint32Array, options: GenerationOptions, parser: output.OutputParser | undefined, { signal, ending, emit }: CallContext<"generate">,
  ): Promise<GenerateResult> {
    const session = this.#session ??= this.loaded.session();
    await this.#reopen(session, ids);
    signal.throwIfAborted();
    const cancel = (): void => session.cancel();
    const eitherEnd = AbortSignal.any([signal, ending]);
    eitherEnd.addEventListener("abort", cancel, { once: true });
    const onBegin = (cachedTokens: number): void => {
      emit({ promptTokens: ids.length, cachedTokens });
      if (eitherEnd.aborted) {
        cancel();
      }
    };
    const onPiece = async (id: number, text: string, isLast: boolean, logprobs: string | undefined): Promise<boolean> => {
      emit(pieceOf(parser, id, text, isLast, logprobs));
      await nextTask();
      return !eitherEnd.aborted;
    };
    try {
      // The session takes the new model over. The old one stays here: it has the vocabulary, which needs no device.
      const outcome = await session.generate(ids, options, parser?.guide, onBegin, onPiece, (error) => this.rebuild(error, signal));
      return resultOf(outcome, parser);
    } catch (error) {
      throw parser?.failure ?? error;
    } finally {
      eitherEnd.removeEventListener("abort", cancel);
    }
  }

  /** What was lost is freed when nobody has it any more. */
  #replace(model: Model): void {
    this.lost.push(this.loaded, ...(this.#session === undefined ? [] : [this.#session]));
    this.loaded = model;
    this.#session = undefined;
  }

  /** What a text goes on from, its options, and what reads it. */
  async #prepare({ prompt, options: given, output: asked }: GenerateRequest, signal: AbortSignal): Promise<Prepared> {
    const ids = this.#encode(prompt);
    const options: GenerationOptions = prompt.kind === "chat" ? this.#endingTurns(given) : given;
    const endIds = options.ignoreEos === true ? new Uint32Array() : Uint32Array.from([...this.loaded.endIds(), ...options.stopIds ?? []]);
    return { ids, options, parser: await output.outputParserOf(this.#current, asked, prompt, ids, endIds, signal) };
  }

  #encode(prompt: Prompt): Uint32Array {
    switch (prompt.kind) {
      case "text":
        return this.loaded.tokenize(prompt.text, true);
      case "tokens":
        return prompt.ids;
      case "chat":
        return this.loaded.chatTokens(prompt.messages, { ...prompt.templateOptions, now: Math.floor(Date.now() / 1000) });
    }
  }

  /** Options that also end where the assistant's turn does. */
  #endingTurns(options: GenerationOptions): GenerationOptions {
    const { ids, texts } = this.loaded.chatStops();
    return { ...options, stopIds: ids, stop: [...(options.stop ?? []), ...texts] };
  }
}

/** What a generation begins with. */
interface Prepared {
  ids: Uint32Array;
  options: GenerationOptions;
  parser: output.OutputParser | undefined;
}

/** A piece as callers have it. */
function pieceOf(parser: output.OutputParser | undefined, id: number, text: string, isLast: boolean, logprobs: string | undefined): Piece {
  const piece = parser === undefined ? { id, text } : parser.piece(id, text, isLast);
  return logprobs === undefined ? piece : { ...piece, ...likelihoods(logprobs) };
}

function resultOf(outcome: EngineOutcome, parser: output.OutputParser | undefined): GenerateResult {
  return { ...outcome, ...parser?.result ?? { thinking: "", toolCalls: [] } };
}

/** What comes of a generation that is stopped before its turn. */
export const NOTHING: GenerateResult = {
  stopReason: "cancelled", promptTokens: 0, cachedTokens: 0, generatedTokens: 0, draftedTokens: 0, acceptedTokens: 0, prefillSeconds: 0,
  decodeSeconds: 0, thinking: "", toolCalls: [],
};

/** Codes of sessions that no attempt will read. */
const USELESS: ReadonlySet<ErrorCode> = new Set(["format", "unsupported", "truncated", "context_full", "shape", "operand"]);

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** How likely a token was, the likeliest ones, and how many have no text out, as the engine says it. */
function likelihoods(json: string): Pick<Piece, "logprob" | "topLogprobs" | "held"> {
  const { tokens, held } = JSON.parse(json) as { tokens: Omit<TokenLogprob, "text">[]; held: number };
  const [logprob, ...topLogprobs] = tokens.map((token): TokenLogprob => ({ ...token, text: decoder.decode(Uint8Array.from(token.bytes)) }));
  return logprob === undefined ? {} : { logprob, topLogprobs, held };
}
