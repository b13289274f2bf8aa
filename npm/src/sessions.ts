/** Sessions in the browser's storage: the KV cache of a sequence, by digest of the model and the tokens. */

import { codeOf, ensure } from "./errors.js";
import { hexOf, sha256Of, type Digest } from "./helpers.js";
import { attempt, openFolder, withStore, type Store, type StoredFile, type StoredRecord } from "./store.js";
import type { Saving } from "./tilewright.js";
import type { KeptSession } from "./types.js";

const FOLDER = "tilewright-sessions";
const SCHEME = "tilewright-session:";
/** Tokens that are computed faster than a saved session is read. */
const MIN_SAVED_TOKENS = 16;

type SessionRecord = StoredRecord & { tokens: number[] };

const CHUNK_BYTES = 1 << 20;
/** Channel on which tabs and workers report that the saved sessions changed. */
const CHANNEL = "tilewright-sessions";

/** A saved session that a prompt can continue. */
export interface FoundSession {
  size: number;
  /** Some bytes from an offset. */
  read(offset: number): Promise<Uint8Array>;
  close(): void;
  drop(): Promise<void>;
}

export interface SessionLimits {
  /** Most tokens: the model's context. */
  mostTokens: number;
  /** Most tokens at the end that the model can drop. */
  mostBack: number;
}

let opened: Sessions | undefined;
let listening: BroadcastChannel | undefined;

/** The saved sessions; `undefined` if there are none and `make` is false. Throws `storage` if there cannot be any. @internal */
export async function openSessions(make: boolean): Promise<Sessions | undefined> {
  if (opened === undefined) {
    const store = await openFolder(FOLDER, make);
    opened ??= store && new Sessions(store, notifyOthers);
    if (listening === undefined && globalThis.BroadcastChannel !== undefined) {
      listening = new BroadcastChannel(CHANNEL);
      listening.onmessage = () => opened?.forget();
    }
  }
  return opened;
}

function notifyOthers(): void {
  if (globalThis.BroadcastChannel !== undefined) {
    const channel = new BroadcastChannel(CHANNEL);
    channel.postMessage("changed");
    channel.close();
  }
}

/** The saved sessions of all models. @internal */
export class Sessions {
  #known: SessionRecord[] | undefined;

  constructor(private readonly store: Store, private readonly onChange: () => void = () => {}) {}

  forget(): void {
    this.#known = undefined;
  }

  async list(): Promise<KeptSession[]> {
    return (await this.#records()).map(({ url, tokens, stored, date }) => ({ ...partsOf(url), nTokens: tokens.length, sizeBytes: stored, date }));
  }

  async delete(id: string): Promise<boolean> {
    const record = (await this.#records()).find(({ url }) => partsOf(url).id === id);
    return record !== undefined && this.#delete(record.url);
  }

  /** Deletes all of them. */
  async clear(): Promise<void> {
    await this.store.clear();
    this.#changed();
  }

  /**
   * Stores a session. It replaces the sessions that it continues. Then the least recently used ones are deleted while
   * all exceed `maxBytes` or the browser's room.
   *
   * @throws {@link TilewrightError}: `quota` if it does not fit by itself, `storage` if the storage fails or another
   * tab is writing it.
   */
  async save(model: string, tokens: Uint32Array, begin: () => Saving, maxBytes: number, newDigest: () => Digest): Promise<KeptSession> {
    let content = begin();
    try {
      const size = content.size();
      ensure(size <= maxBytes,
        "quota", `a session of ${size} bytes is to be stored, expected at most ${maxBytes} (maxBytes)`);
      const id = await sha256Of(`${model} ${tokens.join(" ")}`);
      const url = `${SCHEME}${model}/${id}`;
      const file = await this.store.claim(url, "exclusive");
      ensure(file !== undefined, "storage", "another tab is storing this session");
      const record: SessionRecord = { url, size, stored: 0, complete: false, date: Date.now(), tokens: [...tokens] };
      try {
        await this.store.sweep();
        this.forget();
        const others = (await this.#records()).filter((record) => record.url !== url);
        const isPrefix = (record: SessionRecord): boolean => isOf(record, model) && commonPrefix(record.tokens, tokens) === record.tokens.length;
        // In the order of deletion.
        const prefixes = others.filter(isPrefix);
        const deletable = [...prefixes, ...others.filter((record) => !isPrefix(record)).reverse()];
        let sum = others.reduce((sum, { stored }) => sum + stored, size);
        while (sum > maxBytes && deletable.length > 0) {
          sum -= await this.#dropFirst(deletable);
        }
        for (let isStored = false; !isStored;) {
          try {
            const sha256 = await write(file, record, content, newDigest());
            await file.save({ ...record, stored: size, complete: true, sha256 });
            isStored = true;
          } catch (error) {
            if (codeOf(error) !== "quota" || deletable.length === 0) {
              await file.removePart();
              throw error;
            }
            await this.#dropFirst(deletable);
            const again = begin();
            content.free();
            content = again;
          }
        }
        await Promise.all(deletable.filter((record) => prefixes.includes(record)).map(({ url }) => this.#delete(url).catch(() => false)));
      } finally {
        file.release();
        this.#changed();
      }
      return { ...partsOf(url), nTokens: tokens.length, sizeBytes: size, date: record.date };
    } finally {
      content.free();
    }
  }

  /**
   * The session with most of a prompt, if it saves enough beyond the first `nKnown` tokens to be worth reading.
   * Damaged ones are deleted, and `onDamaged` is called.
   */
  async find(
    model: string, ids: Uint32Array, nKnown: number, { mostTokens, mostBack }: SessionLimits, newDigest: () => Digest, onDamaged: () => void,
  ): Promise<FoundSession | undefined> {
    if (ids.length - nKnown <= MIN_SAVED_TOKENS) {
      return undefined;
    }
    const gain = ({ tokens }: SessionRecord): number => Math.min(commonPrefix(tokens, ids), ids.length - 1) - nKnown;
    const fits = (record: SessionRecord): boolean => isOf(record, model) && record.tokens.length <= mostTokens
      && record.tokens.length - commonPrefix(record.tokens, ids) <= mostBack
      // All of it is read, even if only a part is used.
      && gain(record) > 0 && gain(record) * 4 >= record.tokens.length;
    for (const record of (await this.#records()).filter(fits).sort((a, b) => gain(b) - gain(a))) {
      const found = await this.#open(record, newDigest, onDamaged);
      if (found !== undefined) {
        return found;
      }
    }
    return undefined;
  }

  /** Opens one to read it, unless another tab is writing it or has deleted it, or it is damaged. */
  async #open(record: SessionRecord, newDigest: () => Digest, onDamaged: () => void): Promise<FoundSession | undefined> {
    const file = await this.store.claim(record.url, "shared", undefined, false);
    if (file === undefined) {
      return undefined;
    }
    let found: FoundSession | undefined;
    try {
      const { whole } = file;
      if (whole === undefined) {
        this.forget();
        return undefined;
      }
      const bytes = await file.bytes(whole).catch(() => undefined);
      if (bytes !== undefined && await hexOf(bytes, newDigest()) === whole.sha256) {
        record.date = Date.now();
        // If this fails, it is only deleted sooner.
        await file.renew(record.date).catch(() => {});
        found = {
          size: bytes.size,
          read: async (offset) => new Uint8Array(await bytes.slice(offset, offset + CHUNK_BYTES).arrayBuffer()),
          close: file.release,
          drop: async () => {
            file.release();
            await this.#delete(record.url);
          },
        };
        return found;
      }
    } finally {
      if (found === undefined) {
        file.release();
      }
    }
    await this.#delete(record.url).catch(() => false);
    onDamaged();
    return undefined;
  }

  async #records(): Promise<SessionRecord[]> {
    this.#known ??= (await this.store.list()).filter((record): record is SessionRecord => record.complete && record.tokens !== undefined);
    return this.#known.sort((a, b) => b.date - a.date);
  }

  /** Removes the first one from the list and deletes it, unless a tab is reading it. Returns the number of bytes. */
  async #dropFirst(records: SessionRecord[]): Promise<number> {
    const record = records.shift();
    return record !== undefined && await this.#delete(record.url).catch(() => false) ? record.stored : 0;
  }

  async #delete(url: string): Promise<boolean> {
    try {
      return await this.store.delete(url);
    } finally {
      this.#changed();
    }
  }

  #changed(): void {
    this.forget();
    this.onChange();
  }
}

async function write(file: StoredFile, record: SessionRecord, content: Saving, digest: Digest): Promise<string> {
  try {
    // The rest of an interrupted call is overwritten.
    const writer = await file.write(record);
    try {
      for (let piece; (piece = await content.next()) !== undefined;) {
        digest.update(piece);
        await writer.write(piece);
      }
      await writer.flush(true);
    } finally {
      writer.close();
    }
    return digest.hex();
  } finally {
    digest.free();
  }
}

/**
 * Sessions that {@link Model.saveSession} has stored for this origin. They contain their texts. Empty where there is
 * no storage (Node, Deno without `--location`, some private windows).
 */
export const sessions = {
  /** All of them, the latest use first. */
  async list(): Promise<KeptSession[]> {
    return withSessions(async (kept) => await kept?.list() ?? []);
  },

  /** Deletes one. Resolves to whether it existed. */
  async delete(id: string): Promise<boolean> {
    return withSessions(async (kept) => await kept?.delete(id) ?? false);
  },

  /** Deletes all of them. */
  async clear(): Promise<void> {
    return withSessions(async (kept) => kept?.clear());
  },
};

function withSessions<T>(work: (stored: Sessions | undefined) => Promise<T>): Promise<T> {
  return withStore((store) => work(store && new Sessions(store, notifyOthers)), FOLDER);
}

/** Uses the opened storage. After an error it is opened anew: the user may have deleted it. */
export async function storing<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await attempt(work);
  } catch (error) {
    opened = undefined;
    throw error;
  }
}

export function commonPrefix(a: ArrayLike<number>, b: ArrayLike<number>): number {
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
