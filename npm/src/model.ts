/** Models and what they generate: the part of the package that most people use. */

import { TilewrightError } from "./errors.js";
import { cachedModels, prefetchModel, removeModel } from "./copies.js";
import { asJson, constraintOf, toolChoiceOf } from "./format.js";
import { isId } from "./given.js";
import { isHubAddress } from "./hub.js";
import { inspectModel } from "./inspect.js";
import { defined, Loaded, loadInto } from "./loaded.js";
import { known } from "./options.js";
import table from "./models.js";
import { PEFT_FILES, type AnswerRequest, type GenerateEvent, type ModelRequest, type Prompt, type SourceSpec } from "./protocol.js";
import { specOf } from "./spec.js";
import type {
  AdapterOptions, CachedModel, ChatMessage, ChatOptions, GenerateOptions, GenerateResult, GenerationUsage, HeadOptions, HeadWeights, InspectOptions,
  KeptSession, KnownModel, LoadOptions, ModelInfo, ModelReport, ModelSource, Piece, PrefetchOptions, RemoveOptions, SaveSessionOptions, Timeline,
  TokenizeOptions,
} from "./types.js";

/**
 * A language model, loaded onto a device in a worker of its own.
 *
 * ```ts
 * const model = await Model.load("https://example.org/model.gguf", { onProgress: ({ loaded }) => console.log(loaded) });
 * for await (const { text } of model.chat([{ role: "user", content: "Hello!" }])) {
 *   console.log(text);
 * }
 * model.free();
 * ```
 *
 * One thing runs at a time on a model: generations queue up in the order in which they were asked for.
 */
export class Model extends Loaded<ModelInfo> {
  /**
   * Loads a model. Its bytes are streamed to the device and never lie in memory as a whole.
   *
   * @throws {@link TilewrightError}, or the reason of `options.signal`; TypeError for an option that there is not.
   */
  static async load(source: ModelSource, options: LoadOptions = {}): Promise<Model> {
    const given = known("Model.load", options);
    return Model.#load(await specOf(source, given.signal, given), given);
  }

  /** Models that are known to run, with addresses that `Model.load` and, for those whose use is `embed`, `Embedder.load` take. Nothing is fetched. */
  static list(): KnownModel[] {
    return table.models.map(({ size_bytes: sizeBytes, cache_bytes_per_token: cacheBytesPerToken, max_context_length: maxContextLength, ...model }) =>
      ({ ...model, sizeBytes, cacheBytesPerToken, maxContextLength }));
  }

  /**
   * What a model's headers say, and whether it fits here: only they are fetched, also of an encoder or a cross-encoder, which other classes
   * load. A `Response` is awaited as a whole.
   *
   * @throws {@link TilewrightError}, as a load does for what is broken or not there; what is well formed and of another kind has a report.
   * Or the reason of `options.signal`.
   */
  static inspect(source: ModelSource, options: InspectOptions = {}): Promise<ModelReport> {
    return inspectModel(source, options);
  }

  /**
   * The models in the browser's storage for this origin, encoders and cross-encoders too, the one that was asked for last first. Those with
   * `complete: false` were interrupted. Empty where there is no storage, as in Node and Deno. `cache` has the single files.
   */
  static cached(): Promise<CachedModel[]> {
    return cachedModels();
  }

  /**
   * Downloads a model, or what is missing of it, into the browser's storage without loading it. A later load finds it there.
   *
   * @throws {@link TilewrightError}: `storage` where nothing can be kept, as in Node and Deno; `quota` where there is no room; those of
   * downloads. Or the reason of `options.signal`.
   */
  static prefetch(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
    return prefetchModel(source, options);
  }

  /**
   * Deletes a model from the browser's storage, by what it was loaded by or what `cached` calls its source. Resolves to whether it was there.
   *
   * @throws {@link TilewrightError} `storage` while it is being loaded, here or in another tab.
   */
  static remove(source: ModelSource, options: RemoveOptions = {}): Promise<boolean> {
    return removeModel(source, options);
  }

  /** Loads the small story model that comes with the package (1.2 MB): it writes English children's stories, and nothing else. */
  static async builtin(options: LoadOptions = {}): Promise<Model> {
    return Model.#load({ kind: "builtin" }, known("Model.builtin", options));
  }

  static async #load(source: SourceSpec, { tune = false, contextLength, kvType, memoryLimit, adapter, ...common }: LoadOptions): Promise<Model> {
    const fitContext = contextLength === "auto" ? true : undefined;
    const settings = defined({ contextLength: contextLength === "auto" ? undefined : contextLength, fitContext, kvType, memoryLimit });
    const own = { tune, settings, ...(adapter === undefined ? {} : { adapter: await adapterOf(adapter, common) }) };
    return new Model(await loadInto("loadModel", source, own, common));
  }

  /**
   * Continues a text, or a sequence of tokens as it is. What the prompt has in common with the sequence before it is not computed again.
   * The generation starts at once, also if nobody iterates over it.
   *
   * @throws TypeError, at once, for an option that there is not.
   */
  generate(prompt: string | Uint32Array | readonly number[], options: GenerateOptions = {}): Generation {
    const { responseFormat, ...rest } = known("generate", options);
    return new Generation(this, typeof prompt === "string"
      ? { kind: "text", text: prompt }
      : { kind: "tokens", ids: Uint32Array.from(prompt) }, rest, () => ({
      ...defined({ constraint: constraintOf(responseFormat) }), reads: false, mayThink: false,
    }));
  }

  /**
   * Answers a conversation, rendered by the model's chat template. Pass all messages each time: what is unchanged is not computed again.
   *
   * @throws TypeError, at once, for an option that there is not.
   * @throws {@link TilewrightError} `template` from the generation if the model has no chat template, or one that refuses the messages.
   */
  chat(messages: readonly ChatMessage[], options: ChatOptions = {}): Generation {
    const { tools, toolChoice, parallelToolCalls, thinking, responseFormat, documents, templateVariables, templateName, continueFinalMessage, ...generate } =
      known("chat", options);
    const variables = typeof thinking !== "boolean" ? templateVariables : { enable_thinking: thinking, thinking, ...templateVariables };
    const told = defined({ tools, documents, templateVariables: variables, templateName, continueFinalMessage });
    const prompt: Prompt = { kind: "chat", messages: messages.map((message) => ({ ...message })), told };
    return new Generation(this, prompt, generate, () => {
      const constraint = constraintOf(responseFormat);
      const choice = toolChoiceOf(toolChoice);
      const some = tools !== undefined && tools.length > 0 ? asJson("tools", tools) : undefined;
      if (some === undefined && choice !== "auto" && choice !== "none") {
        throw new TilewrightError("option", "toolChoice asks for a call, and there are no tools");
      }
      const isBound = constraint !== undefined || continueFinalMessage === true;
      if (isBound && choice !== "auto" && choice !== "none") {
        throw new TilewrightError("option", "toolChoice asks for a call, and a responseFormat or the final message leaves no room for it");
      }
      return {
        ...defined({ constraint, tools: some, toolChoice: isBound ? undefined : choice, parallel: parallelToolCalls }),
        reads: constraint !== undefined || thinking !== undefined || toolChoice !== undefined || some !== undefined,
        mayThink: thinking !== false,
      };
    });
  }

  /**
   * Keeps in the browser's storage what the model has computed of the latest text or conversation. A later `generate` or `chat` of the same
   * model, also in another page of this origin, whose prompt begins like it goes on from there. What is kept is exact: the text is the same.
   * It is as large as the cached keys and values of its tokens. `sessions` lists and deletes what is kept.
   *
   * @throws {@link TilewrightError}: `storage` where the browser stores nothing, as in Node and in Deno without `--location`; `quota` where there is no room;
   * `option` if nothing was generated so far, or with `cache: false`.
   */
  async saveSession(options: SaveSessionOptions = {}): Promise<KeptSession> {
    const { maxBytes = 2 ** 30 } = known("saveSession", options);
    if (!(maxBytes >= 0)) {
      throw new TilewrightError("option", `maxBytes is ${maxBytes}, expected 0 or more`);
    }
    return this.call("saveSession", { maxBytes });
  }

  /**
   * How long each dispatch of a pass takes. The pass over the latest token is computed once more, one dispatch at a time; the latest text stays
   * as it is, and nothing else becomes slower.
   *
   * @throws {@link TilewrightError} `option` if nothing was generated so far.
   */
  timeline(): Promise<Timeline> {
    return this.call("timeline", {});
  }

  /**
   * What one head of one layer looks at: the weights that the latest tokens give to all tokens of the latest text. They are not kept while a
   * text is generated; the latest tokens are computed once more for it, and the text stays as it is.
   *
   * @throws {@link TilewrightError} `option` for a layer or head that there is not, for a layer without keys (of a model that is recurrent in
   * part), for no queries or for more than 16 million weights, and if nothing was generated so far.
   */
  async attention(options: HeadOptions): Promise<HeadWeights> {
    const { layer, head, lastQueries = 64 } = known("Model.attention", options);
    for (const [name, value] of Object.entries({ layer, head, lastQueries })) {
      if (!isId(value)) {
        throw new TilewrightError("option", `${name} is ${String(value)}, expected a whole number`);
      }
    }
    return this.call("headWeights", { layer, head, lastQueries });
  }

  /** Token ids of a text. */
  async tokenize(text: string, options: TokenizeOptions = {}): Promise<Uint32Array> {
    const { addSpecial = true } = known("tokenize", options);
    return this.call("tokenize", { text, addSpecial });
  }

  /** Text of token ids, without special tokens. */
  detokenize(ids: Uint32Array | readonly number[]): Promise<string> {
    return this.call("detokenize", { ids: Uint32Array.from(ids) });
  }
}

/**
 * A text while it is generated. Iterate over it for its pieces, or await {@link Generation.text}.
 *
 * Leaving the loop early stops the generation, as {@link Generation.stop} does. An abort makes the loop, `text()` and `result` throw the
 * signal's reason.
 */
export class Generation implements AsyncIterable<Piece> {
  /** What the generation came to, when it is over. */
  readonly result: Promise<GenerateResult>;
  readonly #pieces: Piece[] = [];
  readonly #ending = new AbortController();
  #usage: GenerationUsage = { promptTokens: 0, cachedTokens: 0, generatedTokens: 0, prefillSeconds: 0, decodeSeconds: 0 };
  #failure: { error: unknown } | undefined;
  #over = false;
  /** Called when there is a new piece or none to come. */
  #wake: (() => void)[] = [];

  /** @internal */
  constructor(
    model: Model, prompt: Prompt, { signal, logitBias, ...options }: Omit<GenerateOptions, "responseFormat">, answer: () => AnswerRequest,
  ) {
    let since = 0;
    const seconds = (): number => (performance.now() - since) / 1000;
    const onEvent = (event: GenerateEvent): void => {
      if (!("id" in event)) {
        if (this.#pieces.length === 0) {
          since = performance.now();
        }
        this.#usage = { ...this.#usage, ...event };
        return;
      }
      if (this.#pieces.length === 0) {
        this.#usage.prefillSeconds = seconds();
        since = performance.now();
      }
      this.#pieces.push(event);
      this.#usage.generatedTokens = this.#pieces.length;
      this.#usage.decodeSeconds = seconds();
      this.#wakeAll();
    };
    // What is wrong with the request is the generation's error.
    this.result = (async () => model.call("generate", {
      prompt,
      options: { temperature: 0, seed: randomSeed(), ...defined(options), ...defined({ logitBias: biasesOf(logitBias) }) },
      answer: answer(),
    }, { signal, ending: this.#ending.signal, onEvent }))();
    this.result.then(({ promptTokens, cachedTokens, generatedTokens, prefillSeconds, decodeSeconds }) => {
      this.#usage = { promptTokens, cachedTokens, generatedTokens, prefillSeconds, decodeSeconds };
    }, (error: unknown) => {
      this.#failure = { error };
    }).finally(() => {
      this.#over = true;
      this.#wakeAll();
    });
  }

  /**
   * Ends the generation after the token in progress. The loop ends, `text()` is what came until then, and `result` says `cancelled`, with
   * its numbers. One that waits for others has not begun and comes to nothing.
   */
  stop(): void {
    this.#ending.abort();
  }

  /** The numbers so far, also after an abort or an error; those of `result` once that is there. */
  get usage(): GenerationUsage {
    return { ...this.#usage };
  }

  /** The whole text. */
  async text(): Promise<string> {
    await this.result;
    return this.#pieces.map(({ text }) => text).join("");
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece, void, undefined> {
    try {
      for (let next = 0; ;) {
        const piece = this.#pieces[next];
        if (this.#failure !== undefined) {
          throw this.#failure.error;
        }
        if (piece !== undefined) {
          next += 1;
          yield piece;
        } else if (this.#over) {
          return;
        } else {
          await new Promise<void>((resolve) => this.#wake.push(resolve));
        }
      }
    } finally {
      this.stop();
    }
  }

  #wakeAll(): void {
    for (const wake of this.#wake.splice(0)) {
      wake();
    }
  }
}

/** What the worker is told of an adapter. */
async function adapterOf(given: AdapterOptions, { signal, fetch }: LoadOptions): Promise<NonNullable<ModelRequest["adapter"]>> {
  const { source, scale = 1, ...options } = known("adapter", given);
  if (!Number.isFinite(scale)) {
    throw new TilewrightError("option", `adapter.scale is ${String(scale)}, expected a number`);
  }
  const isFolder = typeof source === "string" ? !isHubAddress(source) && source.endsWith("/") : source instanceof URL && source.pathname.endsWith("/");
  const at = (name: string): string => URL.canParse(String(source)) ? new URL(name, String(source)).href : `${String(source)}${name}`;
  const files = isFolder ? PEFT_FILES.map(at) : source;
  const { given: _, ...spec } = await specOf(files, signal, { ...options, ...defined({ fetch }) });
  return { source: spec, scale };
}

/** Biases in a list. */
function biasesOf(given: GenerateOptions["logitBias"]): [id: number, bias: number][] | undefined {
  if (given === undefined) {
    return undefined;
  }
  if (typeof given !== "object" || given === null || Symbol.iterator in given) {
    const found = given === null ? "null" : typeof given === "object" ? "a list" : typeof given;
    throw new TilewrightError("option", `logitBias is ${found}, expected an object of biases by token ids`);
  }
  return Object.entries(given).map(([key, bias]) => {
    const id = /^(0|[1-9]\d*)$/.test(key) ? Number(key) : NaN;
    if (!isId(id)) {
      throw new TilewrightError("option", `logitBias has the key ${JSON.stringify(key)}, expected a token's id`);
    }
    if (typeof bias !== "number") {
      throw new TilewrightError("option", `logitBias[${key}] is ${typeof bias}, expected a number`);
    }
    return [id, bias];
  });
}

function randomSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
}
