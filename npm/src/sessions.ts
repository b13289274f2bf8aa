/** Sessions that the browser's storage keeps: what a model has computed of a text, by digest of the model and of the text's tokens. */

import { codeOf, messageOf, TilewrightError } from "./errors.js";
import { sha256Of } from "./helpers.js";
import { openFolder, type Store, type StoredFile, type StoredRecord } from "./store.js";
import type { KeptSession } from "./types.js";

/** Where they lie, apart from downloads. */
const FOLDER = "tilewright-sessions";
const SCHEME = "tilewright-session:";
/** Tokens that are computed sooner than a kept session of them is read. */
const FEW = 16;

/** A record of one that is complete. */
type SessionRecord = StoredRecord & { tokens: number[] };

/** Bytes that are read at a time. */
const CHUNK_BYTES = 1 << 20;
/** Through it tabs and workers tell each other that other sessions are kept than before. */
const CHANNEL = "tilewright-sessions";

/** A session's file, piece by piece. */
export interface SessionContent {
  /** Bytes of the whole file. */
  size(): number;
  /** The next bytes, or nothing at the end. */
  next(): Promise<Uint8Array | undefined>;
  free(): void;
}

/** A SHA-256 of bytes that come piece by piece. */
interface Digest {
  update(bytes: Uint8Array): void;
  hex(): string;
  free(): void;
}

/** Makes one. */
export type NewDigest = () => Digest;

/** A kept session that a prompt can go on with. */
export interface FoundSession {
  size: number;
  /** Some of the bytes from an offset on. */
  read(offset: number): Promise<Uint8Array>;
  /** Lets others delete it. */
  close(): void;
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

let opened: Sessions | undefined;
let listening: BroadcastChannel | undefined;

/**
 * The sessions of this worker; nothing if none were ever kept and the place for them is not to be made. Throws `storage` with the reason
 * where there is none.
 */
export function openSessions(make: true): Promise<Sessions>;
export function openSessions(make: boolean): Promise<Sessions | undefined>;
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

/** Stored sessions of all models. */
export class Sessions {
  readonly #store: Store;
  /** Called when other sessions are kept than before. */
  readonly #onChange: () => void;
  /** Those that are complete, once they were looked for. */
  #known: SessionRecord[] | undefined;

  constructor(store: Store, onChange: () => void = () => {}) {
    this.#store = store;
    this.#onChange = onChange;
  }

  /** Looks for them again when they are needed. */
  forget(): void {
    this.#known = undefined;
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
    await this.#store.clear();
    this.#changed();
  }

  /**
   * Keeps a session. It takes the place of those of the same model that it goes on with; beyond that, the ones that were not used for
   * longest go where all together would take more than `maxBytes`, or more than the browser has room for.
   *
   * @throws {@link TilewrightError}: `quota` where it has no room by itself, `storage` where the storage fails or another tab is in the way.
   */
  async save(model: string, tokens: Uint32Array, begin: () => SessionContent, maxBytes: number, newDigest: NewDigest): Promise<KeptSession> {
    let content = begin();
    try {
      const size = content.size();
      if (size > maxBytes) {
        throw new TilewrightError("quota", `a session of ${size} bytes is to be kept, expected at most ${maxBytes} (maxBytes)`);
      }
      const id = await sha256Of(`${model} ${tokens.join(" ")}`);
      const url = `${SCHEME}${model}/${id}`;
      const file = await this.#store.claim(url, "exclusive");
      if (file === undefined) {
        throw new TilewrightError("storage", "this session is being kept by another tab");
      }
      const record: SessionRecord = { url, size, stored: 0, complete: false, date: Date.now(), tokens: [...tokens] };
      try {
        await this.#store.sweep();
        this.forget();
        const others = (await this.#records()).filter((record) => record.url !== url);
        const isBegun = (record: SessionRecord): boolean => isOf(record, model) && common(record.tokens, tokens) === record.tokens.length;
        // What comes first goes first.
        const begun = others.filter(isBegun);
        const dispensable = [...begun, ...others.filter((record) => !isBegun(record)).reverse()];
        let sum = others.reduce((sum, { stored }) => sum + stored, size);
        while (sum > maxBytes && await this.#dropOne(dispensable, (stored) => sum -= stored)) {
          // The condition does the work.
        }
        for (;;) {
          try {
            const sha256 = await write(file, record, content, newDigest());
            await file.save({ ...record, stored: size, complete: true, sha256 });
            break;
          } catch (error) {
            if (codeOf(error) !== "quota" || !await this.#dropOne(dispensable, () => undefined)) {
              await file.removePart();
              throw error;
            }
            const again = begin();
            content.free();
            content = again;
          }
        }
        await Promise.all(dispensable.filter((record) => begun.includes(record)).map(({ url }) => this.#delete(url).catch(() => false)));
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
   * The session of a model that has most of a prompt, if it saves enough beyond the first `nKnown` tokens to be worth reading.
   * `mostTokens`: what the context has room for; `mostBack`: how many tokens at the end of a session the model can do without. One whose
   * bytes are not those that were written is deleted, and `onDamaged` is told.
   */
  async find(
    model: string, ids: Uint32Array, nKnown: number, { mostTokens, mostBack }: SessionLimits, newDigest: NewDigest, onDamaged: () => void,
  ): Promise<FoundSession | undefined> {
    if (ids.length - nKnown <= FEW) {
      return undefined;
    }
    const gain = ({ tokens }: SessionRecord): number => Math.min(common(tokens, ids), ids.length - 1) - nKnown;
    const fits = (record: SessionRecord): boolean => isOf(record, model) && record.tokens.length <= mostTokens
      && record.tokens.length - common(record.tokens, ids) <= mostBack
      // All of it is read, however little of it is of use.
      && gain(record) > 0 && gain(record) * 4 >= record.tokens.length;
    for (const record of (await this.#records()).filter(fits).sort((a, b) => gain(b) - gain(a))) {
      const found = await this.#open(record, newDigest, onDamaged);
      if (found !== undefined) {
        return found;
      }
    }
    return undefined;
  }

  /** Opens one to read it; nothing if another tab is writing it or has deleted it, or if it is damaged. */
  async #open(record: SessionRecord, newDigest: NewDigest, onDamaged: () => void): Promise<FoundSession | undefined> {
    const file = await this.#store.claimIfFree(record.url);
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
      if (bytes !== undefined && await digestOfBlob(bytes, newDigest()) === whole.sha256) {
        record.date = Date.now();
        // A date that cannot be kept makes it go sooner.
        await file.renew(record.date).catch(() => {});
        found = {
          size: bytes.size,
          read: (offset) => readBlob(bytes, offset),
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
    try {
      return await this.#store.delete(url);
    } finally {
      this.#changed();
    }
  }

  #changed(): void {
    this.forget();
    this.#onChange();
  }
}

/** Writes a session's bytes and returns their SHA-256. */
async function write(file: StoredFile, record: SessionRecord, content: SessionContent, digest: Digest): Promise<string> {
  try {
    // A part that an interrupted call left is written anew.
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
 * Sessions that {@link Model.saveSession} has kept in the browser's storage for this origin. They hold the texts that they are of.
 *
 * Where there is no storage (Node, Deno without `--location`, some private windows) nothing is kept, and the list is empty.
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
  let store: Store | undefined;
  try {
    store = await openFolder(FOLDER, false);
  } catch (error) {
    if (codeOf(error) !== "storage") {
      throw error;
    }
  }
  return storing(() => work(store && new Sessions(store, notifyOthers)));
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
    // The place may be gone, with all that the user has deleted; it is looked for again.
    opened = undefined;
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

async function readBlob(blob: Blob, offset: number): Promise<Uint8Array> {
  return new Uint8Array(await blob.slice(offset, offset + CHUNK_BYTES).arrayBuffer());
}

async function digestOfBlob(blob: Blob, digest: Digest): Promise<string | undefined> {
  try {
    for (let offset = 0; offset < blob.size; offset += CHUNK_BYTES) {
      digest.update(await readBlob(blob, offset));
    }
    return digest.hex();
  } catch {
    // What cannot be read is as good as damaged.
    return undefined;
  } finally {
    digest.free();
  }
}
