/** Text encoders and the vectors that they make. */

import { TilewrightError } from "./errors.js";
import { defined, Loaded, loadInto } from "./loaded.js";
import { specOf } from "./spec.js";
import type { EmbedderInfo, EmbedderOptions, EmbedOptions, ModelSource } from "./types.js";

/**
 * A text encoder (BERT, RoBERTa and what sentence-transformers makes of them), loaded onto a device in a worker of its own.
 *
 * ```ts
 * const embedder = await Embedder.load("https://example.org/all-MiniLM-L6-v2/");
 * const vectors = await embedder.embed(["A cat sleeps.", "The kitten naps."]);
 * console.log(vectors.count, vectors.dims, vectors.at(0));
 * embedder.free();
 * ```
 *
 * A text's vector is the same to the last bit alone and in any list, on one device. Calls queue up in the order in which they are made.
 */
export class Embedder extends Loaded<EmbedderInfo> {
  /**
   * Loads an encoder, from the same sources as a model.
   *
   * @throws {@link TilewrightError}, `unsupported` for a model of another kind; or the reason of `options.signal`.
   */
  static async load(source: ModelSource, options: EmbedderOptions = {}): Promise<Embedder> {
    const { maxTokens, pooling, normalize, maxBatchTokens, cachedVectors, memoryLimit, ...common } = options;
    const settings = defined({ maxTokens, pooling, normalize, maxBatchTokens, cachedVectors, memoryLimit });
    return new Embedder(await loadInto("loadEmbedder", specOf(source), { settings }, common));
  }

  /** The vector of one text. An empty text has one too. */
  embed(text: string, options?: EmbedOptions): Promise<Float32Array>;
  /** The vectors of texts, in their order. */
  embed(texts: readonly string[], options?: EmbedOptions): Promise<Embeddings>;
  async embed(given: string | readonly string[], { signal, onProgress }: EmbedOptions = {}): Promise<Float32Array | Embeddings> {
    const texts = typeof given === "string" ? [given] : textsOf(given);
    const onEvent = onProgress && ((done: number): void => onProgress({ done, total: texts.length }));
    const vectors = await this.engine.call("embed", { texts }, { signal, ...defined({ onEvent }) });
    return typeof given === "string" ? vectors : new Embeddings(vectors, this.info.dims);
  }

  /** Token ids of a text as the encoder reads it: with the tokens around it, and cut to `info.maxTokens`. */
  async tokenize(text: string): Promise<Uint32Array> {
    return this.engine.call("encode", { text });
  }
}

/** Vectors of texts. Iterate over it for one after the other. */
export class Embeddings implements Iterable<Float32Array> {
  /** All numbers, one vector behind the other. */
  readonly vectors: Float32Array;
  /** Numbers in a vector. */
  readonly dims: number;

  /** @internal */
  constructor(vectors: Float32Array, dims: number) {
    this.vectors = vectors;
    this.dims = dims;
  }

  /** Vectors. */
  get count(): number {
    return this.vectors.length / this.dims;
  }

  /** A vector, as a view into `vectors`; a negative index counts from the end. */
  at(index: number): Float32Array | undefined {
    const i = Math.trunc(index) + (index < 0 ? this.count : 0);
    return i >= 0 && i < this.count ? this.vectors.subarray(i * this.dims, (i + 1) * this.dims) : undefined;
  }

  *[Symbol.iterator](): Generator<Float32Array, void, undefined> {
    for (let start = 0; start < this.vectors.length; start += this.dims) {
      yield this.vectors.subarray(start, start + this.dims);
    }
  }
}

/** A copy that a worker can be given. */
function textsOf(texts: unknown): string[] {
  const found = Array.isArray(texts) ? texts.findIndex((text) => typeof text !== "string") : -2;
  if (found !== -1) {
    const [name, value] = found === -2 ? ["texts", texts] : [`texts[${found}]`, (texts as unknown[])[found]];
    throw new TilewrightError("option", `${name} is ${Object.prototype.toString.call(value).slice(8, -1)}, expected ${found === -2 ? "a text or a list of texts" : "a text"}`);
  }
  return [...texts as string[]];
}
