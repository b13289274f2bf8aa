/**
 * The browser's storage for downloads: the origin private file system, or Cache Storage where that is missing.
 *
 * A download is a record and its bytes, both named after the SHA-256 of the address. The record is what counts: it is written before
 * the first byte as incomplete, renewed as bytes are flushed, and says `complete` only when everything is there and its digest is known.
 * There are two slots for each address, so that a complete copy stays until the one that replaces it is complete as well.
 * Whoever writes holds the file's Web Lock, so tabs do not get in each other's way.
 */

import { codeOf, messageOf, TilewrightError } from "./errors.js";
import { defined, sha256Of } from "./helpers.js";
import type { CacheEntry } from "./types.js";

/** What is known of a download; `stored` bytes from the file's start are on the disk. */
export type StoredRecord = CacheEntry & {
  lastModified?: string;
  /** Of a folder rather than a file: names of files that it does not have. */
  absent?: string[];
  /** Of a model rather than a file: what it was asked for by, and the addresses of its files. */
  model?: ModelRecord;
  /** Of a session: its tokens. */
  tokens?: number[];
};

/** Which files belong together. */
export interface ModelRecord {
  /** The source, with absolute addresses. */
  source: string | string[];
  /** Address of the hub, if it is not the usual one. */
  endpoint?: string;
  /** What the files are kept under. */
  files: string[];
}

/** Appends to a download's bytes. */
export interface StoreWriter {
  write(bytes: Uint8Array): Promise<void>;
  /** Brings to the disk what it can and returns how many bytes are there; `last` ends the file. */
  flush(last: boolean): Promise<number>;
  close(): void;
}

/** Where records and bytes lie. */
interface Backend {
  keys(): Promise<string[]>;
  readRecord(key: string): Promise<StoredRecord | undefined>;
  writeRecord(key: string, record: StoredRecord): Promise<void>;
  readBytes(key: string): Promise<Blob>;
  openWriter(key: string, at: number): Promise<StoreWriter>;
  remove(key: string): Promise<void>;
}

const FOLDER = "tilewright";
/** Size of the pieces in Cache Storage, which cannot append. */
const PIECE_BYTES = 16 << 20;

/** How often a record is tried to be read. */
const READ_ATTEMPTS = 5;

/** Opens the storage for downloads. Throws `storage` with the reason where there is none, as in some private windows. */
export async function openStore(): Promise<Store> {
  return openFolder(FOLDER, true);
}

/** Opens a storage of another name; nothing if there is none and it is not to be made. Throws `storage` as {@link openStore}. */
export function openFolder(folder: string, make: true): Promise<Store>;
export function openFolder(folder: string, make: boolean): Promise<Store | undefined>;
export async function openFolder(folder: string, make: boolean): Promise<Store | undefined> {
  if (globalThis.crypto?.subtle === undefined) {
    throw new TilewrightError("storage", "the browser offers storage only to pages served over https");
  }
  if (typeof globalThis.navigator?.storage?.getDirectory === "function" && hasSyncHandles()) {
    try {
      const root = await navigator.storage.getDirectory();
      return new Store(new FileBackend(await root.getDirectoryHandle(folder, { create: make })));
    } catch (error) {
      if (!make && isMissing(error)) {
        return undefined;
      }
      if (globalThis.caches === undefined) {
        throw new TilewrightError("storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
      }
    }
  }
  // Deno has Cache Storage of its own without a page's origin, so there is nothing to name its entries after.
  if (globalThis.caches === undefined || globalThis.location?.origin === undefined) {
    throw new TilewrightError("storage", "there is no storage of a browser here");
  }
  try {
    return make || await caches.has(folder) ? new Store(new PieceBackend(await caches.open(folder))) : undefined;
  } catch (error) {
    throw new TilewrightError("storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
  }
}

/** Safari before 15.2 has the folder and not the means to write; pages never have them, and need not. */
function hasSyncHandles(): boolean {
  return "document" in globalThis || "createSyncAccessHandle" in (globalThis.FileSystemFileHandle?.prototype ?? {});
}

/** Milliseconds to wait for a lock: a worker that was told to stop still holds it while it puts its files in order. */
const PATIENCE_MS = 1500;

/** The storage, by address. */
export class Store {
  readonly #backend: Backend;

  constructor(backend: Backend) {
    this.#backend = backend;
  }

  /** A record for each address, that of the complete copy if there is one; the newest first. */
  async list(): Promise<StoredRecord[]> {
    const records = (await this.#records()).filter(({ absent, model }) => absent === undefined && model === undefined);
    records.sort((a, b) => Number(b.complete) - Number(a.complete) || b.date - a.date);
    const byAddress = new Map<string, StoredRecord>();
    for (const record of records) {
      if (!byAddress.has(record.url)) {
        byAddress.set(record.url, record);
      }
    }
    return [...byAddress.values()].sort((a, b) => b.date - a.date);
  }

  /** What was said of models, the one that was asked for last first. */
  async models(): Promise<(ModelRecord & { date: number })[]> {
    const found = (await this.#records()).flatMap(({ model, date }) => isModel(model) ? [{ ...model, date }] : []);
    return found.sort((a, b) => b.date - a.date);
  }

  /** Remembers which files are a model's. */
  async setModel({ source, endpoint, files }: ModelRecord): Promise<void> {
    const model = { source, ...defined({ endpoint }), files: files.map(storedAddress) };
    const key = await modelKey(model);
    const release = await lockIfFree(key, "exclusive");
    // Else another tab is about to remember the same.
    if (release !== undefined) {
      try {
        await this.#backend.writeRecord(key, { url: key, stored: 0, complete: false, date: Date.now(), model });
      } finally {
        release();
      }
    }
  }

  /** Forgets which files are a model's; they stay. */
  async removeModel(model: Omit<ModelRecord, "files">): Promise<void> {
    await this.#backend.remove(await modelKey(model));
  }

  async #records(): Promise<StoredRecord[]> {
    const read = await Promise.all((await this.#backend.keys()).map((key) => this.#backend.readRecord(key)));
    return read.filter((record) => record !== undefined);
  }

  /** Deletes a download. Returns whether there was one. Throws `storage` while a tab loads it. */
  async delete(url: string): Promise<boolean> {
    return this.#deleteKey(await sha256Of(storedAddress(url)));
  }

  /** Deletes all downloads. */
  async clear(): Promise<void> {
    const keys = (await this.#backend.keys()).map((slot) => slot.replace(SECOND, ""));
    for (const key of new Set(keys)) {
      await this.#deleteKey(key);
    }
  }

  /**
   * Claims a download: shared to read a complete one, exclusive to write. Returns nothing when another tab is in the way for longer
   * than it takes to put things in order. The caller releases it.
   */
  async claim(url: string, mode: "shared" | "exclusive", signal?: AbortSignal): Promise<StoredFile | undefined> {
    const key = await sha256Of(storedAddress(url));
    return this.#open(url, key, await lock(key, mode, signal));
  }

  /** The same to read, without waiting for anyone. */
  async claimIfFree(url: string): Promise<StoredFile | undefined> {
    const key = await sha256Of(storedAddress(url));
    return this.#open(url, key, await lockIfFree(key, "shared"));
  }

  async #open(url: string, key: string, release: (() => void) | undefined): Promise<StoredFile | undefined> {
    if (release === undefined) {
      return undefined;
    }
    try {
      return await StoredFile.open(this.#backend, key, storedAddress(url), release);
    } catch (error) {
      release();
      throw error;
    }
  }

  /**
   * Deletes what tabs have left that were closed while they wrote: downloads that were interrupted, and bytes without a record. What one
   * is writing stays.
   */
  async sweep(): Promise<void> {
    for (const slot of await this.#backend.keys()) {
      const isLeft = async (): Promise<boolean> => (await this.#backend.readRecord(slot))?.complete !== true;
      const release = await isLeft() ? await lockIfFree(slot.replace(SECOND, ""), "exclusive") : undefined;
      try {
        if (release !== undefined && await isLeft()) {
          await this.#backend.remove(slot);
        }
      } finally {
        release?.();
      }
    }
  }

  /** Files of a folder that were not there when they were looked for, and when that was; nothing if nobody looked. */
  async absent(folder: string): Promise<{ names: ReadonlySet<string>; date: number } | undefined> {
    const record = await this.#backend.readRecord(await sha256Of(storedAddress(folder)));
    return record?.absent === undefined ? undefined : { names: new Set(record.absent), date: record.date };
  }

  /** Remembers which files of a folder are not there. */
  async setAbsent(folder: string, names: readonly string[]): Promise<void> {
    const url = storedAddress(folder);
    await this.#backend.writeRecord(await sha256Of(url), { url, stored: 0, complete: false, date: Date.now(), absent: [...names] });
  }

  async #deleteKey(key: string): Promise<boolean> {
    const release = await lock(key, "exclusive");
    if (release === undefined) {
      throw new TilewrightError("storage", "this file is in use, here or in another tab: it is being loaded, or a model reads weights from it; it can be deleted after that");
    }
    try {
      let existed = false;
      for (const slot of slotsOf(key)) {
        existed = (await this.#backend.readRecord(slot)) !== undefined || existed;
        await this.#backend.remove(slot);
      }
      return existed;
    } finally {
      release();
    }
  }
}

/** Whether it is what {@link Store.setModel} wrote: files of an origin's storage are anybody's of that origin. */
function isModel(model: Partial<ModelRecord> | undefined): model is ModelRecord {
  const areTexts = (list: unknown): boolean => Array.isArray(list) && list.every((text) => typeof text === "string");
  return model !== undefined && (typeof model.source === "string" || areTexts(model.source)) && areTexts(model.files)
    && (model.endpoint === undefined || typeof model.endpoint === "string");
}

function modelKey({ source, endpoint }: Omit<ModelRecord, "files">): Promise<string> {
  return sha256Of(JSON.stringify({ source, endpoint }));
}

/** A download while it is claimed. */
export class StoredFile {
  readonly #backend: Backend;
  /** What it is kept under: its address without what signs it. */
  readonly address: string;
  readonly release: () => void;
  /** Slot of the complete copy, or the one that it would have, and slot of one that is being written. */
  readonly #wholeSlot: string;
  readonly #partSlot: string;
  #whole: StoredRecord | undefined;
  #part: StoredRecord | undefined;

  private constructor(backend: Backend, address: string, release: () => void, whole: Slot, part: Slot) {
    this.#backend = backend;
    this.address = address;
    this.release = release;
    [this.#wholeSlot, this.#whole] = [whole.name, whole.record];
    [this.#partSlot, this.#part] = [part.name, part.record];
  }

  /** @internal */
  static async open(backend: Backend, key: string, address: string, release: () => void): Promise<StoredFile> {
    const [first, second] = slotsOf(key);
    const slots = await Promise.all([first, second].map(async (name): Promise<Slot> => ({ name, record: await backend.readRecord(name) })));
    // Of two complete ones the newer has just replaced the other, which could not be deleted any more.
    const rank = ({ record }: Slot): number => record?.complete === true ? record.date : -1;
    const [whole, part] = slots.sort((a, b) => rank(b) - rank(a)) as [Slot, Slot];
    return rank(whole) >= 0
      ? new StoredFile(backend, address, release, whole, part.record?.complete === true ? { name: part.name } : part)
      : new StoredFile(backend, address, release, ...wherePartIs(whole, part));
  }

  /** The complete copy. */
  get whole(): StoredRecord | undefined {
    return this.#whole;
  }

  /** A download that was interrupted. */
  get part(): StoredRecord | undefined {
    return this.#part;
  }

  /** The bytes that a record speaks of. */
  async bytes(record: StoredRecord): Promise<Blob> {
    const blob = await this.#backend.readBytes(record === this.#whole ? this.#wholeSlot : this.#partSlot);
    if (blob.size < record.stored) {
      throw new TilewrightError("storage", `${record.stored} bytes of ${record.url} should be stored, found ${blob.size}`);
    }
    return blob.slice(0, record.stored);
  }

  /**
   * Begins to write beside a complete copy, or goes on after `record.stored` bytes. Where the browser has no room for both, the complete
   * copy makes room.
   *
   * @throws {@link TilewrightError} `quota` if the browser has no room for a file of the size that the record has.
   */
  async write(record: StoredRecord): Promise<StoreWriter> {
    const missing = (record.size ?? record.stored) - record.stored;
    const room = await freeBytes();
    if (missing > room) {
      const whole = this.#whole?.stored ?? 0;
      if (missing > room + whole) {
        throw new TilewrightError("quota", `${missing} bytes are to be stored, and the browser has room for ${room + whole}`);
      }
      await this.removeWhole();
    }
    await this.save(record);
    return this.#backend.openWriter(this.#partSlot, record.stored);
  }

  /** Renews the record of the download that is being written. One that is complete replaces the complete copy. */
  async save(record: StoredRecord): Promise<void> {
    await this.#backend.writeRecord(this.#partSlot, record);
    this.#part = record;
    if (record.complete) {
      // Where the old one cannot be deleted, the newer of the two counts.
      await this.removeWhole().catch(() => {});
    }
  }

  /** Changes when the complete copy was stored, or used. */
  async renew(date: number): Promise<void> {
    if (this.#whole !== undefined) {
      this.#whole = { ...this.#whole, date };
      await this.#backend.writeRecord(this.#wholeSlot, this.#whole);
    }
  }

  /** Deletes what an interrupted download left. */
  async removePart(): Promise<void> {
    await this.#backend.remove(this.#partSlot);
    this.#part = undefined;
  }

  /** Deletes the complete copy. */
  async removeWhole(): Promise<void> {
    await this.#backend.remove(this.#wholeSlot);
    this.#whole = undefined;
  }
}

/** A place for a download, with what is there. */
interface Slot {
  name: string;
  record?: StoredRecord | undefined;
}

/** The slots, neither of which is complete, with the one last that has the longer part. */
function wherePartIs(a: Slot, b: Slot): [Slot, Slot] {
  const [whole, part] = (a.record?.stored ?? 0) > (b.record?.stored ?? 0) ? [b, a] : [a, b];
  return [{ name: whole.name }, part];
}

const SECOND = /-2$/;

function slotsOf(key: string): [string, string] {
  return [key, `${key}-2`];
}

/** Bytes that the browser would still store for this origin, as far as it says. */
async function freeBytes(): Promise<number> {
  try {
    const { quota, usage } = await navigator.storage.estimate();
    return quota === undefined || usage === undefined ? Infinity : Math.max(0, quota - usage);
  } catch {
    // Writing will show.
    return Infinity;
  }
}

/** Parameters of an address that sign it: they are others for each visit, and nobody else should read them. */
const SIGNATURE = /^(x-amz-.*|x-goog-.*|x-oss-.*|x-bce-.*|q-(sign-|ak$|signature$).*|signature|sig|token|access_token|__token__|hdnt[lsa]?|hdnea)$/i;
/** Parameters that are part of a signed address and say nothing of the file. */
const SIGNED = new RegExp(
  "^(expires|expiry|policy|key-pair-id|awsaccesskeyid|googleaccessid|ossaccesskeyid|security-token|response-.*|x-id"
  + "|s[etprvsi]|sip|spr|srt|sk[a-z]{1,3}|saoid|suoid|scid|sdd|rsc[cdelt])$", "i");

/** The address that a file is kept under: a signed one without its signature, and without a fragment. */
export function storedAddress(url: string): string {
  const address = new URL(url);
  address.hash = "";
  const names = [...address.searchParams.keys()];
  if (names.some((name) => SIGNATURE.test(name))) {
    for (const name of names) {
      if (SIGNATURE.test(name) || SIGNED.test(name)) {
        address.searchParams.delete(name);
      }
    }
  }
  return address.href;
}

/**
 * Takes the lock, at once or when the one who holds it has put things in order; nothing if that takes too long. Without Web Locks the
 * exclusive file handles have to do.
 */
async function lock(key: string, mode: "shared" | "exclusive", signal?: AbortSignal): Promise<(() => void) | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return () => {};
  }
  const patience = AbortSignal.timeout(PATIENCE_MS);
  try {
    return await new Promise((resolve, reject) => {
      const options = { mode, signal: signal === undefined ? patience : AbortSignal.any([signal, patience]) };
      navigator.locks.request(`${FOLDER}/${key}`, options, () => new Promise<void>((release) => resolve(release))).catch(reject);
    });
  } catch (error) {
    signal?.throwIfAborted();
    if (patience.aborted) {
      return undefined;
    }
    throw error;
  }
}

/** The same, only if nobody is in the way. */
async function lockIfFree(key: string, mode: "shared" | "exclusive"): Promise<(() => void) | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return () => {};
  }
  return new Promise((resolve, reject) => {
    navigator.locks.request(`${FOLDER}/${key}`, { mode, ifAvailable: true }, (lock) => {
      if (lock === null) {
        return resolve(undefined);
      }
      return new Promise<void>((release) => resolve(release));
    }).catch(reject);
  });
}

/** A record as it was read; anything else is no record. */
function parseRecord(text: string): StoredRecord | undefined {
  let record: Partial<StoredRecord> | null;
  try {
    record = JSON.parse(text);
  } catch {
    // A tab that was closed in the middle of writing leaves half a record: as good as none.
    return undefined;
  }
  const valid = typeof record?.url === "string" && typeof record.stored === "number" && typeof record.complete === "boolean";
  return valid ? record as StoredRecord : undefined;
}

/**
 * Files that are just being opened to write. Chromium never settles the promise of `createSyncAccessHandle` if the file's handle is
 * collected as garbage before the answer comes, and an `await` alone does not keep the handle alive.
 */
const opening = new Set<FileSystemFileHandle>();

/** Renames a file and replaces the one of that name; not every browser has it. */
type Movable = FileSystemFileHandle & { move?(name: string): Promise<void> };

/** Records and bytes as files, `<key>.json` and `<key>.bin`, and `<key>.new` while a record is written. */
class FileBackend implements Backend {
  readonly #folder: FileSystemDirectoryHandle;

  constructor(folder: FileSystemDirectoryHandle) {
    this.#folder = folder;
  }

  async keys(): Promise<string[]> {
    const keys = new Set<string>();
    for await (const name of this.#folder.keys()) {
      keys.add(name.replace(/\.(json|bin|new)$/, ""));
    }
    return [...keys];
  }

  async readRecord(key: string): Promise<StoredRecord | undefined> {
    for (let attempt = 1; ; attempt += 1) {
      const file = await this.#find(`${key}.json`);
      if (file === undefined) {
        return undefined;
      }
      // A record that is being written just now cannot be read, or only in part; that takes a moment.
      let text: string | undefined;
      try {
        text = await (await file.getFile()).text();
      } catch (error) {
        if (attempt === READ_ATTEMPTS) {
          throw error;
        }
      }
      const record = text === undefined ? undefined : parseRecord(text);
      if (record !== undefined || attempt === READ_ATTEMPTS) {
        return record;
      }
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }

  async writeRecord(key: string, record: StoredRecord): Promise<void> {
    const bytes = new TextEncoder().encode(JSON.stringify(record));
    // Beside the one that is there and then in its place: a tab that is closed meanwhile leaves the old one.
    await this.#writeAll(`${key}.new`, bytes);
    const file: Movable = await this.#folder.getFileHandle(`${key}.new`);
    try {
      if (file.move !== undefined) {
        await file.move(`${key}.json`);
        return;
      }
    } catch {
      // What cannot be moved is written where it belongs.
    }
    await this.#writeAll(`${key}.json`, bytes);
    await this.#folder.removeEntry(`${key}.new`);
  }

  async readBytes(key: string): Promise<Blob> {
    return (await this.#folder.getFileHandle(`${key}.bin`)).getFile();
  }

  async openWriter(key: string, at: number): Promise<StoreWriter> {
    const handle = await this.#openToWrite(`${key}.bin`);
    try {
      handle.truncate(at);
    } catch (error) {
      handle.close();
      throw error;
    }
    let end = at;
    return {
      async write(bytes) {
        writeAll(handle, bytes, end);
        end += bytes.length;
      },
      async flush() {
        handle.flush();
        return end;
      },
      close: () => handle.close(),
    };
  }

  async remove(key: string): Promise<void> {
    // The record last, so that nothing is left that no record tells of.
    for (const name of [`${key}.bin`, `${key}.new`, `${key}.json`]) {
      if ((await this.#find(name)) !== undefined) {
        await this.#folder.removeEntry(name);
      }
    }
  }

  async #writeAll(name: string, bytes: Uint8Array): Promise<void> {
    const handle = await this.#openToWrite(name);
    try {
      handle.truncate(0);
      writeAll(handle, bytes, 0);
      handle.flush();
    } finally {
      handle.close();
    }
  }

  async #openToWrite(name: string): Promise<FileSystemSyncAccessHandle> {
    const file = await this.#folder.getFileHandle(name, { create: true });
    opening.add(file);
    try {
      return await file.createSyncAccessHandle();
    } finally {
      opening.delete(file);
    }
  }

  async #find(name: string): Promise<FileSystemFileHandle | undefined> {
    try {
      return await this.#folder.getFileHandle(name);
    } catch (error) {
      if (isMissing(error)) {
        return undefined;
      }
      throw error;
    }
  }
}

/** Whether an error says that a file or folder is not there. */
function isMissing(error: unknown): boolean {
  return error instanceof DOMException && error.name === "NotFoundError";
}

function writeAll(handle: FileSystemSyncAccessHandle, bytes: Uint8Array, at: number): void {
  const written = handle.write(bytes, { at });
  if (written !== bytes.length) {
    // Browsers differ: some throw when the storage is full, some write a part.
    throw new TilewrightError("quota", `the browser's storage took ${written} of ${bytes.length} bytes`);
  }
}

/** Records and bytes as answers to requests nobody makes; bytes in pieces, because an answer cannot grow. */
class PieceBackend implements Backend {
  readonly #cache: Cache;

  constructor(cache: Cache) {
    this.#cache = cache;
  }

  async keys(): Promise<string[]> {
    const paths = (await this.#cache.keys()).map((request) => new URL(request.url).pathname.split("/")[2]);
    return [...new Set(paths.filter((key) => key !== undefined))];
  }

  async readRecord(key: string): Promise<StoredRecord | undefined> {
    const response = await this.#cache.match(address(key, "record"));
    return response === undefined ? undefined : parseRecord(await response.text());
  }

  async writeRecord(key: string, record: StoredRecord): Promise<void> {
    await this.#cache.put(address(key, "record"), new Response(JSON.stringify(record)));
  }

  async readBytes(key: string): Promise<Blob> {
    const pieces: Blob[] = [];
    for (;;) {
      const response = await this.#cache.match(address(key, pieces.length));
      if (response === undefined) {
        return new Blob(pieces);
      }
      pieces.push(await response.blob());
    }
  }

  async openWriter(key: string, at: number): Promise<StoreWriter> {
    const cache = this.#cache;
    // Only whole pieces are ever noted as stored, unless the file is complete.
    let index = at / PIECE_BYTES;
    let piece = new Uint8Array(PIECE_BYTES);
    let filled = 0;
    const put = async (): Promise<void> => {
      await cache.put(address(key, index), new Response(piece.slice(0, filled)));
      index += 1;
      filled = 0;
    };
    return {
      async write(bytes) {
        for (let taken = 0; taken < bytes.length;) {
          const part = bytes.subarray(taken, taken + PIECE_BYTES - filled);
          piece.set(part, filled);
          filled += part.length;
          taken += part.length;
          if (filled === PIECE_BYTES) {
            await put();
          }
        }
      },
      async flush(last) {
        const stored = index * PIECE_BYTES + (last ? filled : 0);
        if (last && filled > 0) {
          await put();
        }
        return stored;
      },
      close() {
        piece = new Uint8Array(0);
      },
    };
  }

  async remove(key: string): Promise<void> {
    // The last piece first and the record last: what an interruption leaves is found again.
    let pieces = 0;
    while (await this.#cache.match(address(key, pieces)) !== undefined) {
      pieces += 1;
    }
    for (const part of [...Array(pieces).keys()].reverse()) {
      await this.#cache.delete(address(key, part));
    }
    await this.#cache.delete(address(key, "record"));
  }
}

function address(key: string, part: string | number): string {
  return `${location.origin}/${FOLDER}/${key}/${part}`;
}

/** Whether an error says that the storage is full. */
export function isFull(error: unknown): boolean {
  return codeOf(error) === "quota";
}
