// Search by a learned similarity, next to that by cosine: a mixture of logits, if its weights lie beside the page and were made for the
// vectors of the encoder.
import { Mol, type Embedder, type Hit, type MolInfo } from "../tilewright/index.js";

/** Vectors that are appended together: each part of a mixture is searched by itself. */
const GROUP = 1024;

/** The mixture beside the page, on an encoder's device. */
export class Mixture {
  private waiting: Float32Array[] = [];

  private constructor(
    private readonly embedder: Embedder,
    private readonly weights: Uint8Array,
    private mol: Mol,
  ) {}

  /** The mixture beside the page for this encoder, or a sentence that says why there is none. */
  static async load(embedder: Embedder, signal: AbortSignal): Promise<Mixture | string> {
    try {
      const response = await fetch(new URL("mol.safetensors", document.baseURI), { signal });
      if (!response.ok) return "There is no learned similarity (mol.safetensors) beside this page.";
      const weights = new Uint8Array(await response.arrayBuffer());
      const mol = await Mol.load(weights, { on: embedder, signal });
      const why = unfit(mol.info, embedder);
      if (why === undefined) return new Mixture(embedder, weights, mol);
      mol.free();
      return why;
    } catch (error) {
      signal.throwIfAborted();
      return `The learned similarity beside this page cannot be used: ${error instanceof Error ? error.message : String(error)}.`;
    }
  }

  /** What it is. */
  get info(): MolInfo {
    return this.mol.info;
  }

  /** Forgets all vectors. */
  async renew(): Promise<void> {
    this.waiting = [];
    this.mol.free();
    this.mol = await Mol.load(this.weights, { on: this.embedder });
  }

  /** Takes vectors, which can be found from the next `flush` on at the latest. */
  async add(vectors: Float32Array): Promise<void> {
    this.waiting.push(vectors);
    if (this.waiting.reduce((sum, { length }) => sum + length, 0) >= GROUP * this.info.itemDims) await this.flush();
  }

  /** Makes what was added searchable. */
  async flush(): Promise<void> {
    const parts = this.waiting.splice(0);
    const all = new Float32Array(parts.reduce((sum, { length }) => sum + length, 0));
    let end = 0;
    for (const part of parts) {
      all.set(part, end);
      end += part.length;
    }
    if (end > 0) await this.mol.append(all);
  }

  /** The best `k` vectors. */
  async search(query: Float32Array, k: number, signal: AbortSignal): Promise<Hit[]> {
    const [hits = []] = await this.mol.search(query, k, { signal });
    return hits;
  }
}

/** Why a mixture is not for the vectors of an encoder. */
function unfit({ model, queryDims, itemDims }: MolInfo, { info: { name, dims } }: Embedder): string | undefined {
  if (model !== name) return `The learned similarity beside this page is for ${model ?? "an encoder that it does not name"}, not for ${name}.`;
  return queryDims === dims && itemDims === dims ? undefined
    : `The learned similarity beside this page takes ${queryDims} and ${itemDims} numbers, and vectors of ${name} have ${dims}.`;
}
