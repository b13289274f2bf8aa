/** Loaded encoders of texts, and of images. */

import { PreparedPictures } from "../classes.js";
import type { Calls } from "../protocol.js";
import type { Embedder } from "../tilewright.js";
import { LoadedFunction } from "./loaded-model.js";
import { pixelsOf } from "./pixels.js";
import { nextTask, type CallContext } from "./port.js";

export class LoadedEmbedder extends LoadedFunction<Embedder> {
  /** The vectors of images, by batches. Of an image that waits for its batch only the patches are kept. */
  async embedImages(
    { images, dimensions }: Calls["embedImages"]["args"], { signal, emit }: CallContext<"embedImages">,
  ): Promise<Float32Array> {
    const nInBatch = this.loaded.nImages();
    const vectors: Float32Array[] = [];
    for (let first = 0; first < images.length; first += nInBatch) {
      const batch = images.slice(first, first + nInBatch);
      const prepared = new PreparedPictures(first);
      try {
        for (const image of batch) {
          signal.throwIfAborted();
          const { width, height, data } = await pixelsOf(image, signal);
          prepared.add(this.loaded, width, height, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
        }
        signal.throwIfAborted();
        vectors.push(await this.retrying(signal, () => this.loaded.embedImages(prepared, dimensions)));
      } finally {
        prepared.free();
      }
      emit(first + batch.length);
      await nextTask();
    }
    const all = new Float32Array(vectors.reduce((sum, { length }) => sum + length, 0));
    vectors.reduce((at, part) => (all.set(part, at), at + part.length), 0);
    return all;
  }
}
