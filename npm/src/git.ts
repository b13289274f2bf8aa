/** Git's digest of a file's content, which hubs report for files outside Git LFS. */

export interface GitBlob {
  /** SHA-1 of Git's header and the content, in lower-case hexadecimal digits. */
  sha1: string;
  /** Bytes of the content, which are in the header. */
  size: number;
}

const BLOCK_BYTES = 64;

/** An incremental digest. `crypto.subtle` needs all bytes at once, and a secure context. */
export class GitDigest {
  readonly #state = Uint32Array.of(0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0);
  readonly #words = new Uint32Array(80);
  readonly #rest = new Uint8Array(BLOCK_BYTES);
  #nBytes = 0;

  constructor(size: number) {
    this.update(new TextEncoder().encode(`blob ${size}\0`));
  }

  update(bytes: Uint8Array): void {
    let at = 0;
    while (at < bytes.length) {
      const filled = this.#nBytes % BLOCK_BYTES;
      const n = Math.min(BLOCK_BYTES - filled, bytes.length - at);
      if (n === BLOCK_BYTES) {
        this.#compress(bytes, at);
      } else {
        this.#rest.set(bytes.subarray(at, at + n), filled);
        if (filled + n === BLOCK_BYTES) {
          this.#compress(this.#rest, 0);
        }
      }
      at += n;
      this.#nBytes += n;
    }
  }

  hex(): string {
    const n = this.#nBytes;
    const end = new Uint8Array((n % BLOCK_BYTES < 56 ? BLOCK_BYTES : 2 * BLOCK_BYTES) - n % BLOCK_BYTES);
    end[0] = 0x80;
    new DataView(end.buffer).setBigUint64(end.length - 8, BigInt(n) * 8n);
    this.update(end);
    return Array.from(this.#state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  /** FIPS 180-4, 6.1.2. */
  #compress(bytes: Uint8Array, at: number): void {
    const words = this.#words;
    const view = new DataView(bytes.buffer, bytes.byteOffset + at, BLOCK_BYTES);
    const rotateLeft = (word: number, by: number): number => (word << by) | (word >>> (32 - by));
    const word = (t: number): number => words[t] as number;
    for (let t = 0; t < 80; t += 1) {
      words[t] = t < 16 ? view.getUint32(4 * t) : rotateLeft(word(t - 3) ^ word(t - 8) ^ word(t - 14) ^ word(t - 16), 1);
    }
    const state = this.#state;
    let [a = 0, b = 0, c = 0, d = 0, e = 0] = state;
    for (let t = 0; t < 80; t += 1) {
      const mixed = t < 20 ? ((b & c) | (~b & d)) + 0x5a827999
        : t < 40 ? (b ^ c ^ d) + 0x6ed9eba1
        : t < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8f1bbcdc
        : (b ^ c ^ d) + 0xca62c1d6;
      const next = (rotateLeft(a, 5) + mixed + e + word(t)) | 0;
      [e, d, c, b, a] = [d, c, rotateLeft(b, 30), a, next];
    }
    [a, b, c, d, e].forEach((sum, i) => {
      state[i] = (state[i] as number) + sum;
    });
  }
}
