/** Vectors of texts. Iterable. */
export class Embeddings implements Iterable<Float32Array> {
  /** All vectors in one array. */
  readonly vectors: Float32Array;
  /** Length of a vector. */
  readonly dims: number;

  /** @internal */
  constructor(vectors: Float32Array, dims: number) {
    this.vectors = vectors;
    this.dims = dims;
  }

  /** Number of vectors. */
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
