/** Vectors of a worker: what indices and mixtures of logits have in common. */

import type { Connection } from "./connection.js";
import type { Embeddings } from "./embeddings.js";
import { vectorsOf } from "./given.js";
import type { KeptOptions } from "./load-options.js";
import { connectionFor, placeOf } from "./load.js";
import { WorkerObject, type Parts } from "./loaded.js";
import type { MadeVectors, Where } from "./protocol.js";

/** Makes an object where the options say. */
export async function makeIn<Info>(
  options: KeptOptions, make: (connection: Connection, where: Where) => Promise<MadeVectors<Info>>,
): Promise<Parts<Info>> {
  const place = placeOf(options);
  const connection = await connectionFor(options);
  return connection.orClose("nothing was made", async () => ({ connection, ...await make(connection, place.on ?? place.device) }));
}

export abstract class VectorCollection<Info extends { length: number }> extends WorkerObject {
  #info: Info;

  protected constructor(parts: Parts<Info>, freed: string) {
    super(parts, freed);
    this.#info = parts.info;
  }

  /** Its facts after the last call that changed it. */
  get info(): Info {
    return this.#info;
  }

  /** Vectors that can be found. */
  get length(): number {
    return this.#info.length;
  }

  /**
   * Appends vectors, one after another, and resolves to the id of the first; the others' ids follow.
   *
   * @throws {@link TilewrightError} if a number is not finite or the last vector is not whole, and of an {@link Index}
   * for a zero vector where cosines are searched; nothing is appended then.
   */
  async append(vectors: Float32Array | Embeddings): Promise<number> {
    const mine = vectorsOf("vectors", vectors);
    const { first, info } = await this.call("appendVectors", { vectors: mine }, { transfer: [mine.buffer] });
    this.update(info as unknown as Info);
    return first;
  }

  /** @internal */
  protected update(info: Info): void {
    this.#info = info;
  }
}
