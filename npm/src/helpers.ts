/** Small functions that several modules need. */

import { isTrap } from "./errors.js";

/** Without the properties that are `undefined`, or one of `absent`. */
export function defined<T extends object>(options: T, absent: readonly unknown[] = [undefined]): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => !absent.includes(value))) as T;
}

/** Settles as `work` does, or rejects when the signal aborts. */
export function orAborted<T>(work: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = (): void => reject(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    if (signal?.aborted === true) {
      abort();
    }
    work.then(resolve, reject).finally(() => signal?.removeEventListener("abort", abort));
  });
}

/** Resolves after a time, or rejects when the signal aborts. */
export function delay(milliseconds: number, signal?: AbortSignal): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const over = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, milliseconds);
  });
  return orAborted(over, signal).finally(() => clearTimeout(timer));
}

/** The sum of sizes; `undefined` unless all are known. */
export function sumOf(sizes: readonly (number | undefined)[]): number | undefined {
  return sizes.reduce<number | undefined>((sum, size) => sum === undefined || size === undefined ? undefined : sum + size, 0);
}

/** Does `work`, and calls `cancel` if the signal aborts meanwhile. */
export async function cancelling<T>(
  signal: AbortSignal | undefined, cancel: () => void, work: () => Promise<T>,
): Promise<T> {
  signal?.addEventListener("abort", cancel, { once: true });
  try {
    return await work();
  } finally {
    signal?.removeEventListener("abort", cancel);
  }
}

/** Does `work`, and frees the object if that fails, unless WASM trapped: it may still be borrowed. */
export async function orFree<T>(object: { free(): void }, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (!isTrap(error)) {
      object.free();
    }
    throw error;
  }
}

export async function sha256Of(text: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Bytes of a blob that are digested at a time: about a millisecond of work. */
const DIGEST_BYTES = 256 << 10;

/** An incremental SHA-256. */
export interface Digest {
  update(bytes: Uint8Array): void;
  hex(): string;
  free(): void;
}

/** Digests a blob; `undefined` if it cannot be read. `turn` is awaited before each piece. */
export async function hexOf(blob: Blob, digest: Digest, turn = async (): Promise<void> => {}): Promise<string | undefined> {
  try {
    for (let offset = 0; offset < blob.size; offset += DIGEST_BYTES) {
      await turn();
      const piece = await blob.slice(offset, offset + DIGEST_BYTES).arrayBuffer().catch(() => undefined);
      if (piece === undefined) {
        return undefined;
      }
      digest.update(new Uint8Array(piece));
    }
    return digest.hex();
  } finally {
    digest.free();
  }
}

/** A decoded part of an address; one with invalid escapes as it is. */
export function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
