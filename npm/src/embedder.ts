/** Encoders. */

import { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";
import { textOf, textsOf } from "./arguments.js";
import { defined } from "./helpers.js";
import { imagesOf } from "./images.js";
import type { EmbedderOptions } from "./load-options.js";
import { loadInto } from "./load.js";
import { Loaded, progressOf } from "./loaded.js";
import { known } from "./options.js";
import { specOf } from "./spec.js";
import type { EmbedderInfo, EmbedImagesOptions, EmbedOptions, ImageSource, ModelSource, PromptOptions } from "./types.js";

/**
 * An encoder of texts (BERT, RoBERTa and what sentence-transformers makes of them), or of texts and images in one space
 * (CLIP, SigLIP), loaded onto a device in a worker of its own.
 *
 * ```ts
 * const embedder = await Embedder.load("https://example.org/all-MiniLM-L6-v2/");
 * const vectors = await embedder.embed(["A cat sleeps.", "The kitten naps."]);
 * console.log(vectors.count, vectors.dims, vectors.at(0));
 * embedder.free();
 * ```
 *
 * On one device, a text's vector does not depend on the other texts. Calls run in turn.
 */
export class Embedder extends Loaded<EmbedderInfo> {
  /**
   * Loads an encoder from any source of a model.
   *
   * @throws {@link TilewrightError}, `unsupported` for another kind of model; or the reason of `options.signal`.
   */
  static async load(source: ModelSource, options: EmbedderOptions = {}): Promise<Embedder> {
    const { maxTokens, pooling, normalize, maxBatchTokens, cachedVectors, textsOnly, memoryLimit, ...common } = known("Embedder.load", options);
    const settings = defined({ maxTokens, pooling, normalize, maxBatchTokens, cachedVectors, textsOnly, memoryLimit });
    return new Embedder(await loadInto("loadEmbedder", await specOf(source, common.signal, common), { settings }, common));
  }

  /**
   * The vector of one text, which may be empty.
   *
   * @throws {@link TilewrightError}, `option` for an unknown prompt or a wrong `dimensions`; or the reason of `options.signal`.
   */
  embed(text: string, options?: EmbedOptions): Promise<Float32Array>;
  /** The vectors of texts, in their order. */
  embed(texts: readonly string[], options?: EmbedOptions): Promise<Embeddings>;
  async embed(given: string | readonly string[], options: EmbedOptions = {}): Promise<Float32Array | Embeddings> {
    const { prompt, dimensions, signal, onProgress } = known("embed", options);
    const dims = this.#dimsOf(dimensions);
    const texts = typeof given === "string" ? [given] : textsOf("texts", given, "a text or ");
    const vectors = await this.call("embed", { texts, ...defined({ prompt, dimensions }) }, { signal, onEvent: progressOf(texts, onProgress) });
    return typeof given === "string" ? vectors : new Embeddings(vectors, dims);
  }

  /**
   * The vector of one image, in the space of texts: the cosine of two says how well a text describes an image. For
   * CLIP, SigLIP and SigLIP 2 (`info.takesImages`).
   *
   * @throws {@link TilewrightError}, `unsupported` by any other model; `format`, `truncated` or `unsupported` for bytes
   * that are no image, or one too large; or the reason of `options.signal`.
   */
  embedImages(image: ImageSource, options?: EmbedImagesOptions): Promise<Float32Array>;
  /** The vectors of images, in their order. Several at once take less time than one by one. */
  embedImages(images: readonly ImageSource[], options?: EmbedImagesOptions): Promise<Embeddings>;
  async embedImages(given: ImageSource | readonly ImageSource[], options: EmbedImagesOptions = {}): Promise<Float32Array | Embeddings> {
    const { dimensions, signal, onProgress } = known("embedImages", options);
    const dims = this.#dimsOf(dimensions);
    const images = imagesOf(given);
    const vectors = await this.call("embedImages", { images, ...defined({ dimensions }) }, { signal, onEvent: progressOf(images, onProgress) });
    return Array.isArray(given) ? new Embeddings(vectors, dims) : vectors;
  }

  /** Token ids of a text with its prompt and special tokens, cut to `info.maxTokens`. */
  async tokenize(text: string, options: PromptOptions = {}): Promise<Uint32Array> {
    const { prompt } = known("Embedder.tokenize", options);
    return this.call("encode", { text: textOf("text", text), ...defined({ prompt }) });
  }

  /** The length of vectors with this option. */
  #dimsOf(dimensions: number | undefined): number {
    const most = this.info.dims;
    ensure(dimensions === undefined || (Number.isInteger(dimensions) && dimensions >= 1 && dimensions <= most),
      "option", `dimensions is ${dimensions}, expected 1 to ${most}, the size of the model's vectors`);
    return dimensions ?? most;
  }
}
