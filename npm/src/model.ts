/** Language models. */

import { cachedModels, prefetchModel, removeModel } from "./stored-models.js";
import { Engine } from "./engine.js";
import { ensure } from "./errors.js";
import { chatSpec, completionSpec, Generation, type SendRequest } from "./generation.js";
import { isId } from "./arguments.js";
import { defined } from "./helpers.js";
import { isHubAddress } from "./hub.js";
import type { AdapterOptions, InspectOptions, LoadOptions, PrefetchOptions, VisionOptions } from "./load-options.js";
import { callOnce, loadInto } from "./load.js";
import { Loaded } from "./loaded.js";
import table from "./models.js";
import { known } from "./options.js";
import { PEFT_FILES, type ModelRequest, type SourceSpec } from "./protocol.js";
import { specOf } from "./spec.js";
import type {
  CachedModel, ChatMessage, ChatOptions, EngineOptions, GenerateOptions, HeadOptions, HeadWeights, HubOptions, KeptSession, KnownModel, ModelInfo, ModelReport,
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
 * Calls on a model run in turn. {@link Model.engine} runs many generations at once.
 */
export class Model extends Loaded<ModelInfo> {
  readonly #send: SendRequest = (request, options) => this.call("generate", request, options);

  /**
   * Loads a model. Its bytes are streamed to the device.
   *
   * @throws {@link TilewrightError}, or the reason of `options.signal`; TypeError for an unknown option.
   */
  static async load(source: ModelSource, options: LoadOptions = {}): Promise<Model> {
    const given = known("Model.load", options);
    return Model.#load(await specOf(source, given.signal, given), given, source);
  }

  /** Suggested models, with addresses for `Model.load` or, with the use `embed`, `Embedder.load`. */
  static list(): KnownModel[] {
    return table.models.map(({ size_bytes: sizeBytes, cache_bytes_per_token: cacheBytesPerToken, max_context_length: maxContextLength, ...model }) =>
      ({ ...model, sizeBytes, cacheBytesPerToken, maxContextLength }));
  }

  /**
   * Facts from the headers of a model, an encoder or a reranker, and whether it fits here. Only headers are fetched,
   * but a whole `Response`.
   *
   * @throws {@link TilewrightError}, as a load does for broken or absent files, but not for unsupported ones; or the
   * reason of `options.signal`.
   */
  static async inspect(source: ModelSource, options: InspectOptions = {}): Promise<ModelReport> {
    const given = known("Model.inspect", options);
    const { contextLengths, contextLength, kvType, memoryLimit, device = "auto", cache = true, fetch } = given;
    const wrong = contextLengths?.find((length) => !isId(length) || length === 0);
    ensure(wrong === undefined, "option", `contextLengths has ${String(wrong)}, expected whole numbers from 1 on`);
    ensure(device === "auto" || device === "gpu" || device === "cpu",
      "option", `device is ${String(device)}, expected auto, gpu or cpu`);
    return callOnce("inspect", {
      source: await specOf(source, given.signal, given), cache, device, ownFetch: fetch !== undefined,
      settings: defined({ contextLength, kvType, memoryLimit }), ...defined({ contextLengths: contextLengths && [...contextLengths] }),
    }, given);
  }

  /**
   * Models, encoders and rerankers in the browser's storage for this origin, the latest load first. Those with
   * `complete: false` were interrupted. Empty where there is no storage, as in Node and Deno. `cache` lists files.
   */
  static cached(): Promise<CachedModel[]> {
    return cachedModels();
  }

  /**
   * Downloads a model, or the rest of it, into the browser's storage for a later load.
   *
   * @throws {@link TilewrightError}: `storage` without a storage, as in Node and Deno; `quota` without room; those of
   * downloads. Or the reason of `options.signal`.
   */
  static prefetch(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
    return prefetchModel(source, options);
  }

  /**
   * Deletes a model from the browser's storage, by its source. Resolves to whether it existed.
   *
   * @throws {@link TilewrightError} `storage` while it is being loaded, here or in another tab.
   */
  static remove(source: ModelSource, options: RemoveOptions = {}): Promise<boolean> {
    return removeModel(source, options);
  }

  /** Loads the package's own model (1.2 MB), which only writes children's stories. */
  static async builtin(options: LoadOptions = {}): Promise<Model> {
    return Model.#load({ kind: "builtin" }, known("Model.builtin", options));
  }

  static async #load(
    source: SourceSpec, { tune = false, contextLength, kvType, exact, memoryLimit, adapter, vision, ...common }: LoadOptions, given?: ModelSource,
  ): Promise<Model> {
    const fitContext = contextLength === "auto" ? true : undefined;
    const settings = defined({ contextLength: contextLength === "auto" ? undefined : contextLength, fitContext, kvType, exact, memoryLimit });
    const own = {
      tune, settings, ...(adapter === undefined ? {} : { adapter: await adapterOf(adapter, common) }),
      ...(vision === undefined ? {} : { vision: await visionOf(vision, source, given, common) }),
    };
    return new Model(await loadInto("loadModel", source, own, common));
  }

  /**
   * Continues a text or a sequence of tokens. The common prefix with the previous sequence is not computed again. It
   * starts at once.
   *
   * @throws TypeError, at once, for an unknown option.
   */
  generate(prompt: string | Uint32Array | readonly number[], options: GenerateOptions = {}): Generation {
    const spec = completionSpec(prompt, known("generate", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Continues a conversation, rendered by the model's chat template. Pass all messages each time: the unchanged ones
   * are not computed again.
   *
   * @throws TypeError, at once, for an unknown option.
   * @throws {@link TilewrightError} `template` from the generation if the model has no chat template, or one that
   * refuses the messages.
   */
  chat(messages: readonly ChatMessage[], options: ChatOptions = {}): Generation {
    const spec = chatSpec(messages, known("chat", options));
    return new Generation(this.#send, spec);
  }

  /**
   * Makes an engine, which batches generations: each pass reads the weights once for all of them. It has a KV cache of
   * its own, which counts towards `memoryLimit`.
   *
   * @throws {@link TilewrightError}: `option` for an option out of range, and for a shared model; `memory` if the
   * cache does not fit. TypeError for an unknown option.
   */
  async engine(options: EngineOptions = {}): Promise<Engine> {
    return Engine.of(this, known("Model.engine", options));
  }

  /**
   * Stores the KV cache of the latest sequence in the browser. Later prompts of the same model on this origin that
   * begin alike continue from there, with the same text. `sessions` lists and deletes saved sessions.
   *
   * @throws {@link TilewrightError}: `storage` without a storage, as in Node and in Deno without `--location`; `quota`
   * without room; `option` if nothing was generated, or with `cache: false`.
   */
  async saveSession(options: SaveSessionOptions = {}): Promise<KeptSession> {
    const { maxBytes = 2 ** 30 } = known("saveSession", options);
    ensure(maxBytes >= 0, "option", `maxBytes is ${maxBytes}, expected 0 or more`);
    return this.call("saveSession", { maxBytes });
  }

  /**
   * The duration of each dispatch of a pass. The pass over the latest token is repeated, one dispatch at a time,
   * without effect on the sequence.
   *
   * @throws {@link TilewrightError} `option` if nothing was generated.
   */
  timeline(): Promise<Timeline> {
    return this.call("timeline", {});
  }

  /**
   * Attention weights of one head: of the latest tokens over the whole sequence. The latest tokens are computed again
   * for it, without effect on the sequence.
   *
   * @throws {@link TilewrightError} `option` for an absent layer or head, for a layer without keys (of a partly
   * recurrent model), for no queries or for more than 16 million weights, and if nothing was generated.
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

  /**
   * The number of tokens that an image of this size takes in a prompt.
   *
   * @throws {@link TilewrightError} `unsupported` if the model was loaded without `vision`.
   */
  async imageTokens(width: number, height: number): Promise<number> {
    for (const [name, value] of Object.entries({ width, height })) {
      ensure(isId(value) && value > 0, "option", `${name} is ${String(value)}, expected a whole number from 1 on`);
    }
    return this.call("imageTokens", { width, height });
  }

  /** Text of token ids, without special tokens. */
  detokenize(ids: Uint32Array | readonly number[]): Promise<string> {
    return this.call("detokenize", { ids: Uint32Array.from(ids) });
  }
}

async function adapterOf(given: AdapterOptions, { signal, fetch }: LoadOptions): Promise<NonNullable<ModelRequest["adapter"]>> {
  const { source, scale = 1, ...options } = known("adapter", given);
  ensure(Number.isFinite(scale), "option", `adapter.scale is ${String(scale)}, expected a number`);
  const isFolder = typeof source === "string" ? !isHubAddress(source) && source.endsWith("/") : source instanceof URL && source.pathname.endsWith("/");
  const at = (name: string): string => URL.canParse(String(source)) ? new URL(name, String(source)).href : `${String(source)}${name}`;
  const files = isFolder ? PEFT_FILES.map(at) : source;
  const { given: _, ...spec } = await specOf(files, signal, { ...options, ...defined({ fetch }) });
  return { source: spec, scale };
}

async function visionOf(
  given: true | VisionOptions, model: SourceSpec, of: ModelSource | undefined, { signal, fetch, ...common }: LoadOptions,
): Promise<NonNullable<ModelRequest["vision"]>> {
  ensure(given === true || (typeof given === "object" && given !== null),
    "option", `vision is ${String(given)}, expected true or { source, maxTokens }`);
  const { source, maxTokens, ...options } = known("vision", given === true ? {} : given);
  ensure(maxTokens === undefined || (isId(maxTokens) && maxTokens > 0), "option", `vision.maxTokens is ${String(maxTokens)}, expected 1 or more`);
  const settings = defined({ maxTokens });
  if (source !== undefined) {
    const { given: _, ...spec } = await specOf(source, signal, { ...options, ...defined({ fetch }) }, "vision");
    return { source: spec, isOwn: false, ...settings };
  }
  const [option] = Object.keys(options);
  ensure(option === undefined, "option", `vision.${option} is for the option \`source\` of vision, which is missing`);
  ensure(model.kind !== "builtin", "option", "vision is given, and the built-in model takes no images");
  if (typeof of === "string" && isHubAddress(of)) {
    const { sha256: _, ...hub } = common;
    const { given: __, ...spec } = await specOf(of, signal, { ...hubOptions(hub), ...defined({ fetch }) }, "vision");
    return { source: spec, isOwn: false, ...settings };
  }
  const { given: _, ...spec } = model;
  return { source: spec, isOwn: true, ...settings };
}

function hubOptions({ revision, token, headers, endpoint }: LoadOptions): HubOptions {
  return defined({ revision, token, headers, endpoint });
}
