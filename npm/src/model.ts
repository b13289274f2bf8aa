/** Models and what they generate: the part of the package that most people use. */

import { Engine } from "./engine.js";
import { TilewrightError } from "./errors.js";
import { hasPaths } from "./platform.js";
import type { FileSpec, LoadRequest, Prompt, SourceSpec } from "./protocol.js";
import type {
  ChatMessage, Counters, DeviceInfo, FileSource, GenerateOptions, GenerateResult, LoadOptions, MemoryInfo, ModelInfo, ModelSource,
  Piece, TokenizeOptions,
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
export class Model {
  readonly #engine: Engine;
  #device: DeviceInfo;
  /** What the model's files say. */
  readonly info: ModelInfo;

  private constructor(engine: Engine, info: ModelInfo, device: DeviceInfo) {
    this.#engine = engine;
    this.info = info;
    this.#device = device;
    engine.onDevice = (current) => {
      this.#device = current;
    };
  }

  /**
   * Loads a model. Its bytes are streamed to the device and never lie in memory as a whole.
   *
   * @throws {@link TilewrightError}, or the reason of `options.signal`.
   */
  static async load(source: ModelSource, options: LoadOptions = {}): Promise<Model> {
    return Model.#load(specOf(source), options);
  }

  /** Loads the small story model that comes with the package (1.2 MB): it writes English children's stories, and nothing else. */
  static async builtin(options: LoadOptions = {}): Promise<Model> {
    return Model.#load({ kind: "builtin" }, options);
  }

  static async #load(source: SourceSpec, options: LoadOptions): Promise<Model> {
    const { signal, onProgress, onNotice, device = "auto", tier, cache = true, tune = false, contextLength, memoryLimit, subgroups = true } = options;
    signal?.throwIfAborted();
    const request: LoadRequest = {
      source,
      device: { choice: device, subgroups, ...(tier === undefined ? {} : { tier }) },
      cache,
      tune,
      ...(contextLength === undefined ? {} : { contextLength }),
      ...(memoryLimit === undefined ? {} : { memoryLimit }),
    };
    const engine = await Engine.start();
    let current: DeviceInfo | undefined;
    engine.onNotice = onNotice;
    engine.onDevice = (info) => {
      current = info;
    };
    try {
      const info = await engine.call("load", request, { signal, ...(onProgress === undefined ? {} : { onEvent: onProgress }) });
      if (current === undefined) {
        throw new TilewrightError("internal", "the engine did not say which device it runs on");
      }
      return new Model(engine, info, current);
    } catch (error) {
      // The worker puts its files in order; nobody needs to wait for that.
      void engine.close("the model was not loaded");
      throw error;
    }
  }

  /** What runs the model. Another one than at first after a device was lost. */
  get device(): DeviceInfo {
    return this.#device;
  }

  /**
   * Continues a text, or a sequence of tokens as it is. What the prompt has in common with the sequence before it is not computed again.
   * The generation starts at once, also if nobody iterates over it.
   */
  generate(prompt: string | Uint32Array | readonly number[], options: GenerateOptions = {}): Generation {
    return new Generation(this.#engine, typeof prompt === "string"
      ? { kind: "text", text: prompt }
      : { kind: "tokens", ids: Uint32Array.from(prompt) }, options);
  }

  /**
   * Answers a conversation, rendered by the model's chat template. Pass all messages each time: what is unchanged is not computed again.
   *
   * @throws {@link TilewrightError} `template` from the generation if the model has no chat template.
   */
  chat(messages: readonly ChatMessage[], options: GenerateOptions = {}): Generation {
    return new Generation(this.#engine, { kind: "chat", messages: messages.map(({ role, content }) => ({ role, content })) }, options);
  }

  /** Token ids of a text. */
  tokenize(text: string, { addSpecial = true }: TokenizeOptions = {}): Promise<Uint32Array> {
    return this.#engine.call("tokenize", { text, addSpecial });
  }

  /** Text of token ids, without special tokens. */
  detokenize(ids: Uint32Array | readonly number[]): Promise<string> {
    return this.#engine.call("detokenize", { ids: Uint32Array.from(ids) });
  }

  /** Memory that the model takes now, in bytes. */
  memory(): Promise<MemoryInfo> {
    return this.#engine.call("memory", {});
  }

  /** What the device has done since it was opened. */
  counters(): Promise<Counters> {
    return this.#engine.call("counters", {});
  }

  /**
   * Destroys the GPU device, as a driver's reset would. For tests of what happens then: the next token opens another one and loads the
   * model again. Does nothing on the CPU.
   */
  async destroyDevice(): Promise<void> {
    await this.#engine.call("destroyDevice", {});
  }

  /** Frees the model, its device and its worker. What is still asked of it is rejected with `disposed`. */
  free(): void {
    void this.#engine.close("the model was freed");
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

/**
 * A text while it is generated. Iterate over it for its pieces, or await {@link Generation.text}.
 *
 * Leaving the loop early stops the generation. An abort makes the loop, `text()` and `result` throw the signal's reason.
 */
export class Generation implements AsyncIterable<Piece> {
  /** What the generation came to, when it is over. */
  readonly result: Promise<GenerateResult>;
  readonly #pieces: Piece[] = [];
  readonly #stop = new AbortController();
  #failure: { error: unknown } | undefined;
  #over = false;
  /** Called when there is a new piece or none to come. */
  #wake: (() => void)[] = [];

  /** @internal */
  constructor(engine: Engine, prompt: Prompt, { signal, ...options }: GenerateOptions) {
    const onEvent = (piece: Piece): void => {
      this.#pieces.push(piece);
      this.#wakeAll();
    };
    const running = engine.call("generate", { prompt, options: { temperature: 0, seed: randomSeed(), ...defined(options) } }, {
      signal: signal === undefined ? this.#stop.signal : AbortSignal.any([signal, this.#stop.signal]),
      onEvent,
    });
    this.result = running.catch((error: unknown) => {
      if (error === LEFT) {
        return { stopReason: "cancelled", promptTokens: 0, cachedTokens: 0, generatedTokens: this.#pieces.length, prefillSeconds: 0, decodeSeconds: 0 };
      }
      throw error;
    });
    this.result.then(() => {}, (error: unknown) => {
      this.#failure = { error };
    }).finally(() => {
      this.#over = true;
      this.#wakeAll();
    });
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
      this.#stop.abort(LEFT);
    }
  }

  #wakeAll(): void {
    for (const wake of this.#wake.splice(0)) {
      wake();
    }
  }
}

/** Reason of the abort of a generation whose loop was left. */
const LEFT = new DOMException("the loop over the generation was left", "AbortError");

function randomSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
}

/** Without the options that were passed as `undefined`. */
function defined<T extends object>(options: T): T {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as T;
}

function specOf(source: ModelSource): SourceSpec {
  if (Array.isArray(source)) {
    if (source.length === 0) {
      throw new TilewrightError("option", "source is an empty list, expected the files of a model");
    }
    return { kind: "files", files: (source as readonly FileSource[]).map(fileOf) };
  }
  const file = fileOf(source as FileSource);
  if (file.kind === "url" && new URL(file.url).pathname.endsWith("/")) {
    return { kind: "folder", url: file.url };
  }
  return file.kind === "path" && /[/\\]$/.test(file.path) ? { kind: "directory", path: file.path } : { kind: "files", files: [file] };
}

function fileOf(source: FileSource): FileSpec {
  if (source instanceof Blob) {
    return { kind: "blob", name: (source as Partial<File>).name ?? "model.gguf", blob: source };
  }
  const text = String(source);
  const isAddress = /^(https?|data|blob):/i.test(text);
  if (hasPaths && !isAddress) {
    return { kind: "path", name: lastPart(text), path: text };
  }
  const base = (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href;
  let url: URL;
  try {
    url = new URL(text, base);
  } catch (error) {
    throw new TilewrightError("option", `source is ${JSON.stringify(text)}, expected an address, a file, or a list of them`, { cause: error });
  }
  // What follows a # is the page's and never reaches a server.
  url.hash = "";
  return { kind: "url", name: decodeURIComponent(lastPart(url.pathname)), url: url.href };
}

function lastPart(path: string): string {
  return path.split(/[/\\]/).at(-1) || "model.gguf";
}
