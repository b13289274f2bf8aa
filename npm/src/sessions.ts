/** Sessions that the browser's storage keeps: what a model has computed of a text, by digest of the model and of the text's tokens. */

import { codeOf, messageOf, TilewrightError } from "./errors.js";
import { openStore, type Store, type StoredRecord } from "./store.js";
import type { KeptSession } from "./types.js";

/** Where they lie, apart from downloads. */
const FOLDER = "tilewright-sessions";
const SCHEME = "tilewright-session:";
/** Tokens that are computed sooner than a kept session of them is read. */
const FEW = 16;

/** A record of one that is complete. */
type SessionRecord = StoredRecord & { tokens: number[] };

/** A kept session that a prompt can go on with. */
export interface FoundSession {
  bytes: Uint8Array;
  /** Deletes it, because it is of no use. */
  drop(): Promise<void>;
}

/** What a model can go on with. */
export interface SessionLimits {
  /** Tokens that its context has room for. */
  mostTokens: number;
  /** Tokens at the end that it can go back by. */
  mostBack: number;
}

/** Opens the place for sessions. Throws `storage` with the reason where there is none. */
export async function openSessions(): Promise<Sessions> {
  return new Sessions(await openStore(FOLDER));
}

/** Kept sessions of all models. */
export class Sessions {
  readonly #store: Store;
  /** Those that are complete, once they were looked for. */
  #known: SessionRecord[] | undefined;

  constructor(store: Store) {
    this.#store = store;
  }

  /** All of them, the one that was used last first. */
  async list(): Promise<KeptSession[]> {
    return (await this.#records()).map(({ url, tokens, stored, date }) => ({ ...partsOf(url), nTokens: tokens.length, sizeBytes: stored, date }));
  }

  /** Deletes one. Returns whether it was there. */
  async delete(id: string): Promise<boolean> {
    const record = (await this.#records()).find(({ url }) => partsOf(url).id === id);
    return record !== undefined && this.#delete(record.url);
  }

  /** Deletes all of them. */
  async clear(): Promise<void> {
    this.#known = undefined;
    await this.#store.clear();
  }

  /**
   * Keeps a session. It takes the place of those of the same model that it goes on with; beyond that, the ones that were not used for
   * longest go where all together would take more than `maxBytes`, or more than the browser has room for.
   *
   * @throws {@link TilewrightError}: `quota` where it has no room by itself, `storage` where the storage fails or another tab is in the way.
   */
  async save(model: string, tokens: Uint32Array, bytes: Uint8Array, maxBytes: number): Promise<KeptSession> {
    if (bytes.length > maxBytes) {
      throw new TilewrightError("quota", `a session of ${bytes.length} bytes is to be kept, expected at most ${maxBytes} (maxBytes)`);
    }
    const id = await digestOf(Uint8Array.from(new TextEncoder().encode(`${model} ${tokens.join(" ")}`)));
    const url = `${SCHEME}${model}/${id}`;
    this.#known = undefined;
    // What tabs have left that were closed while they wrote; what one is writing stays.
    const left = (await this.#store.list()).filter((record) => !record.complete && record.url !== url);
    await Promise.all(left.map((record) => this.#delete(record.url).catch(() => false)));
    const others = (await this.#records()).filter((record) => record.url !== url);
    const isBegun = (record: SessionRecord): boolean => isOf(record, model) && common(record.tokens, tokens) === record.tokens.length;
    // What comes first goes first.
    const dispensable = [...others.filter(isBegun), ...others.filter((record) => !isBegun(record)).reverse()];
    let sum = others.reduce((sum, { stored }) => sum + stored, bytes.length);
    while (sum > maxBytes && await this.#dropOne(dispensable, (stored) => sum -= stored)) {
      // The condition does the work.
    }
    const record: SessionRecord = { url, size: bytes.length, stored: 0, complete: false, date: Date.now(), tokens: [...tokens] };
    const file = await this.#store.claim(url, "exclusive");
    if (file === undefined) {
      throw new TilewrightError("storage", "this session is being kept by another tab");
    }
    try {
      // A part that an interrupted call left is written anew.
      for (;;) {
        try {
          const writer = await file.write(record);
          try {
            await writer.write(bytes);
            record.stored = await writer.flush(true);
          } finally {
            writer.close();
          }
          break;
        } catch (error) {
          if (codeOf(error) !== "quota" || !await this.#dropOne(dispensable, () => undefined)) {
            await file.removePart();
            throw error;
          }
        }
      }
      await file.save({ ...record, complete: true, sha256: await digestOf(bytes) });
    } finally {
      file.release();
    }
    await Promise.all(dispensable.filter(isBegun).map(({ url }) => this.#delete(url).catch(() => false)));
    this.#known = undefined;
    return { ...partsOf(url), nTokens: tokens.length, sizeBytes: bytes.length, date: record.date };
  }

  /**
   * The session of a model that has most of a prompt, if it saves enough beyond the first `nKnown` tokens to be worth reading.
   * `mostTokens`: what the context has room for; `mostBack`: how many tokens at the end of a session the model can do without. One whose
   * bytes are not those that were written is deleted, and `onDamaged` is told.
   */
  async find(
    model: string, ids: Uint32Array, nKnown: number, { mostTokens, mostBack }: SessionLimits, onDamaged: () => void,
  ): Promise<FoundSession | undefined> {
    if (ids.length - nKnown <= FEW) {
      return undefined;
    }
    const gain = ({ tokens }: SessionRecord): number => Math.min(common(tokens, ids), ids.length - 1) - nKnown;
    const fits = (record: SessionRecord): boolean => isOf(record, model) && record.tokens.length <= mostTokens
      && record.tokens.length - common(record.tokens, ids) <= mostBack
      // All of it is read, however little of it is of use.
      && gain(record) > 0 && gain(record) * 4 >= record.tokens.length;
    const [best] = (await this.#records()).filter(fits).sort((a, b) => gain(b) - gain(a));
    const file = best === undefined ? undefined : await this.#store.claim(best.url, "exclusive");
    if (best === undefined || file === undefined) {
      return undefined;
    }
    try {
      const { whole } = file;
      if (whole === undefined) {
        // Another tab has deleted it.
        this.#known = undefined;
        return undefined;
      }
      const bytes = await file.bytes(whole).then(async (blob) => new Uint8Array(await blob.arrayBuffer()), () => undefined);
      if (bytes === undefined || await digestOf(bytes) !== whole.sha256) {
        this.#known = undefined;
        await file.removeWhole();
        onDamaged();
        return undefined;
      }
      best.date = Date.now();
      // A date that cannot be kept makes it go sooner.
      await file.renew(best.date).catch(() => {});
      return { bytes, drop: async () => void await this.#delete(best.url) };
    } finally {
      file.release();
    }
  }

  async #records(): Promise<SessionRecord[]> {
    this.#known ??= (await this.#store.list()).filter((record): record is SessionRecord => record.complete && record.tokens !== undefined);
    return this.#known.sort((a, b) => b.date - a.date);
  }

  /** Deletes the first one, and takes it from the list. Returns whether there was one. */
  async #dropOne(records: SessionRecord[], onDropped: (stored: number) => void): Promise<boolean> {
    const record = records.shift();
    if (record === undefined) {
      return false;
    }
    // One that a tab is reading stays.
    if (await this.#delete(record.url).catch(() => false)) {
      onDropped(record.stored);
    }
    return true;
  }

  async #delete(url: string): Promise<boolean> {
    this.#known = undefined;
    return this.#store.delete(url);
  }
}

/**
 * Sessions that {@link Model.saveSession} has kept in the browser's storage for this origin. They hold the texts that they are of.
 *
 * Where there is no storage (Node, Deno, some private windows) nothing is kept, and the list is empty.
 */
export const sessions = {
  /** All of them, the one that was used last first. */
  async list(): Promise<KeptSession[]> {
    return attempt(async (kept) => await kept?.list() ?? []);
  },

  /** Deletes one. Resolves to whether there was one. */
  async delete(id: string): Promise<boolean> {
    return attempt(async (kept) => await kept?.delete(id) ?? false);
  },

  /** Deletes all of them. */
  async clear(): Promise<void> {
    return attempt(async (kept) => kept?.clear());
  },
};

/** Makes the browser's own errors the package's. */
async function attempt<T>(work: (kept: Sessions | undefined) => Promise<T>): Promise<T> {
  let kept: Sessions | undefined;
  try {
    kept = await openSessions();
  } catch (error) {
    if (codeOf(error) !== "storage") {
      throw error;
    }
  }
  return storing(() => work(kept));
}

/** The same for what the storage is open for. */
export async function storing<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    const code = codeOf(error);
    if (error instanceof TilewrightError || (code !== "internal" && code !== "quota")) {
      throw error;
    }
    throw new TilewrightError(code === "quota" ? code : "storage", `the browser's storage failed: ${messageOf(error)}`, { cause: error });
  }
}

/** How many tokens two sequences begin with alike. */
export function common(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) {
    n += 1;
  }
  return n;
}

function isOf({ url }: StoredRecord, model: string): boolean {
  return partsOf(url).model === model;
}

function partsOf(url: string): { model: string; id: string } {
  const [model = "", id = ""] = url.slice(SCHEME.length).split("/");
  return { model, id };
}

async function digestOf(bytes: Uint8Array): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>);
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
