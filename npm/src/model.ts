/** Models and what they generate: the part of the package that most people use. */

import { ensure } from "./errors.js";
import { cachedModels, prefetchModel, removeModel } from "./copies.js";
import { chatSpec, completionSpec, Generation, type SendRequest } from "./generation.js";
import { isId } from "./given.js";
import { isHubAddress } from "./hub.js";
import { inspectModel } from "./inspect.js";
import type { AdapterOptions, InspectOptions, LoadOptions, PrefetchOptions } from "./load-options.js";
import { loadInto } from "./load.js";
import { defined } from "./helpers.js";
import { Loaded } from "./loaded.js";
import { known } from "./options.js";
import table from "./models.js";
import { PEFT_FILES, type ModelRequest, type SourceSpec } from "./protocol.js";
import { specOf } from "./spec.js";
import { Engine } from "./engine.js";
import type {
  CachedModel, ChatMessage, ChatOptions, EngineOptions, GenerateOptions, HeadOptions, HeadWeights, KeptSession, KnownModel, ModelInfo, ModelReport,
  ModelSource, RemoveOptions, SaveSessionOptions, Timeline, TokenizeOptions,
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
 * One thing runs at a time on a model: generations queue up in the order in which they were asked for. {@link Model.engine} computes many at once.
 */
export class Model extends Loaded<ModelInfo> {
  readonly #send: SendRequest = (request, options) => this.call("generate", request, options);

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
    const spec = completionSpec(prompt, known("generate", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Answers a conversation, rendered by the model's chat template. Pass all messages each time: what is unchanged is not computed again.
   *
   * @throws TypeError, at once, for an option that there is not.
   * @throws {@link TilewrightError} `template` from the generation if the model has no chat template, or one that refuses the messages.
   */
  chat(messages: readonly ChatMessage[], options: ChatOptions = {}): Generation {
    const spec = chatSpec(messages, known("chat", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Makes what computes many texts at once, in the place of one after the other: their next tokens in one pass, whose weights are read once
   * for all of them. Its cache is beside the model's own; a `memoryLimit` counts both.
   *
   * @throws {@link TilewrightError}: `option` for an option that is out of range, and for a model that is shared with other tabs; `memory` if
   * the cache does not fit. TypeError for an option that there is not.
   */
  async engine(options: EngineOptions = {}): Promise<Engine> {
    return Engine.of(this, known("Model.engine", options));
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
    ensure(maxBytes >= 0, "option", `maxBytes is ${maxBytes}, expected 0 or more`);
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
      ensure(isId(value), "option", `${name} is ${String(value)}, expected a whole number`);
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

/** What the worker is told of an adapter. */
async function adapterOf(given: AdapterOptions, { signal, fetch }: LoadOptions): Promise<NonNullable<ModelRequest["adapter"]>> {
  const { source, scale = 1, ...options } = known("adapter", given);
  ensure(Number.isFinite(scale), "option", `adapter.scale is ${String(scale)}, expected a number`);
  const isFolder = typeof source === "string" ? !isHubAddress(source) && source.endsWith("/") : source instanceof URL && source.pathname.endsWith("/");
  const at = (name: string): string => URL.canParse(String(source)) ? new URL(name, String(source)).href : `${String(source)}${name}`;
  const files = isFolder ? PEFT_FILES.map(at) : source;
  const { given: _, ...spec } = await specOf(files, signal, { ...options, ...defined({ fetch }) });
  return { source: spec, scale };
}
