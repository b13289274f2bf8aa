/**
 * The browser's storage for downloads: the origin private file system, or Cache Storage where that is missing.
 *
 * A download is a record and its bytes, both named after the SHA-256 of the address. The record is authoritative: it
 * is written as incomplete before the first byte, updated as bytes are flushed, and `complete` only when all bytes and
 * the digest are known. Each address has two slots, so that a complete copy stays until its successor is complete.
 * Writers hold the file's Web Lock.
 */

import { codeOf, ensure, messageOf, TilewrightError } from "./errors.js";
import { defined, delay, sha256Of } from "./helpers.js";
import type { CacheEntry } from "./types.js";

/** The record of a download, of which the first `stored` bytes are on the disk. */
export type StoredRecord = CacheEntry & {
  lastModified?: string;
  /** Of a folder: names of its absent files. */
  absent?: string[];
  model?: ModelRecord;
  /** Of a session: its tokens. */
  tokens?: number[];
};

export interface ModelRecord {
  /** The source, with absolute addresses. */
  source: string | string[];
  /** Address of the hub, if it is not the default. */
  endpoint?: string;
  /** Stored addresses of the files. */
  files: string[];
}

/** Appends to a download's bytes. */
export interface StoreWriter {
  write(bytes: Uint8Array): Promise<void>;
  /** Writes what it can to the disk, and returns the number of bytes there; `last` ends the file. */
  flush(last: boolean): Promise<number>;
  close(): void;
}

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

const READ_ATTEMPTS = 5;

/** Opens the storage for downloads. Throws `storage` where there is none, as in some private windows. */
export async function openStore(): Promise<Store> {
  return await openFolder(FOLDER, true) as Store;
}

/** Opens another storage; `undefined` if it is absent and `make` is false. Throws as {@link openStore}. */
export async function openFolder(folder: string, make: boolean): Promise<Store | undefined> {
  ensure(globalThis.crypto?.subtle !== undefined,
    "storage", "the browser offers storage only to pages served over https");
  if (typeof globalThis.navigator?.storage?.getDirectory === "function" && hasSyncHandles()) {
    try {
      const root = await navigator.storage.getDirectory();
      return new Store(new FileBackend(await root.getDirectoryHandle(folder, { create: make })));
    } catch (error) {
      if (!make && isMissing(error)) {
        return undefined;
      }
      ensure(globalThis.caches !== undefined,
        "storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
    }
  }
  // Deno has Cache Storage, but no origin to name entries after.
  ensure(globalThis.caches !== undefined && globalThis.location?.origin !== undefined,
    "storage", "there is no storage of a browser here");
  try {
    return make || await caches.has(folder) ? new Store(new PieceBackend(await caches.open(folder))) : undefined;
  } catch (error) {
    throw new TilewrightError("storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
  }
}

/** Safari before 15.2 has the folder but cannot write. Pages never can, and need not. */
function hasSyncHandles(): boolean {
  return "document" in globalThis || "createSyncAccessHandle" in (globalThis.FileSystemFileHandle?.prototype ?? {});
}

/** Milliseconds to wait for a lock: a stopping worker holds it until its files are closed. */
const PATIENCE_MS = 1500;

export class Store {
  constructor(private readonly backend: Backend) {}

  /** A record for each address, preferably of a complete copy; the newest first. */
  async list(): Promise<StoredRecord[]> {
    const records = (await this.#records()).filter(({ absent, model }) => absent === undefined && model === undefined);
    records.sort((a, b) => Number(a.complete) - Number(b.complete) || a.date - b.date);
    // Of several records of an address, the last one stays.
    return [...new Map(records.map((record) => [record.url, record])).values()].sort((a, b) => b.date - a.date);
  }

  /** Records of models, the latest load first. */
  async models(): Promise<(ModelRecord & { date: number })[]> {
    const found = (await this.#records()).flatMap(({ model, date }) => isModel(model) ? [{ ...model, date }] : []);
    return found.sort((a, b) => b.date - a.date);
  }

  async setModel({ source, endpoint, files }: ModelRecord): Promise<void> {
    const model = { source, ...defined({ endpoint }), files: files.map(storedAddress) };
    const key = await modelKey(model);
    // Unless another tab is storing the same.
    await locked(key, false, () => this.backend.writeRecord(key, { url: key, stored: 0, complete: false, date: Date.now(), model }));
  }

  /** Deletes a model's record, but not its files. */
  async removeModel(model: Omit<ModelRecord, "files">): Promise<void> {
    await this.backend.remove(await modelKey(model));
  }

  async #records(): Promise<StoredRecord[]> {
    const read = await Promise.all((await this.backend.keys()).map((key) => this.backend.readRecord(key)));
    return read.filter((record) => record !== undefined);
  }

  /** Deletes a download. Returns whether there was one. Throws `storage` while a tab loads it. */
  async delete(url: string): Promise<boolean> {
    return this.#deleteKey(await sha256Of(storedAddress(url)));
  }

  async clear(): Promise<void> {
    const keys = (await this.backend.keys()).map((slot) => slot.replace(SECOND, ""));
    for (const key of new Set(keys)) {
      await this.#deleteKey(key);
    }
  }

  /** Claims a download: shared to read a complete one, exclusive to write; `undefined` if another tab holds it. */
  async claim(url: string, mode: "shared" | "exclusive", signal?: AbortSignal, wait = true): Promise<StoredFile | undefined> {
    const address = storedAddress(url);
    const key = await sha256Of(address);
    const release = await lock(key, mode, { signal, wait });
    try {
      return release && await StoredFile.open(this.backend, key, address, release);
    } catch (error) {
      release?.();
      throw error;
    }
  }

  /** Deletes interrupted downloads and bytes without a record, unless a tab is writing them. */
  async sweep(): Promise<void> {
    for (const slot of await this.backend.keys()) {
      const isLeft = async (): Promise<boolean> => (await this.backend.readRecord(slot))?.complete !== true;
      if (await isLeft()) {
        await locked(slot.replace(SECOND, ""), false, async () => await isLeft() ? this.backend.remove(slot) : undefined);
      }
    }
  }

  /** A folder's absent files, and when they were requested; `undefined` if they never were. */
  async absent(folder: string): Promise<{ names: ReadonlySet<string>; date: number } | undefined> {
    const record = await this.backend.readRecord(await sha256Of(storedAddress(folder)));
    return record?.absent === undefined ? undefined : { names: new Set(record.absent), date: record.date };
  }

  async setAbsent(folder: string, names: readonly string[]): Promise<void> {
    const url = storedAddress(folder);
    await this.backend.writeRecord(await sha256Of(url), { url, stored: 0, complete: false, date: Date.now(), absent: [...names] });
  }

  async #deleteKey(key: string): Promise<boolean> {
    const existed = await locked(key, true, async () => {
      const records = await Promise.all(slotsOf(key).map((slot) => this.backend.readRecord(slot)));
      for (const slot of slotsOf(key)) {
        await this.backend.remove(slot);
      }
      return records.some((record) => record !== undefined);
    });
    ensure(existed !== undefined,
      "storage", "this file is in use, here or in another tab: it is being loaded, or a model reads weights from it; it can be deleted after that");
    return existed;
  }
}

/** Validates a record: anything of the same origin can write to the storage. */
function isModel(model: Partial<ModelRecord> | undefined): model is ModelRecord {
  const areTexts = (list: unknown): boolean => Array.isArray(list) && list.every((text) => typeof text === "string");
  return model !== undefined && (typeof model.source === "string" || areTexts(model.source)) && areTexts(model.files)
    && (model.endpoint === undefined || typeof model.endpoint === "string");
}

function modelKey({ source, endpoint }: Omit<ModelRecord, "files">): Promise<string> {
  return sha256Of(JSON.stringify({ source, endpoint }));
}

export class StoredFile {
  /** Slots of the complete copy and of the incomplete one. */
  readonly #wholeSlot: string;
  readonly #partSlot: string;
  whole: StoredRecord | undefined;
  part: StoredRecord | undefined;

  private constructor(
    private readonly backend: Backend, readonly address: string, readonly release: () => void, whole: Slot, part: Slot,
  ) {
    this.#wholeSlot = whole.name;
    this.#partSlot = part.name;
    this.whole = whole.record?.complete === true ? whole.record : undefined;
    this.part = part.record?.complete === true ? undefined : part.record;
  }

  /** @internal */
  static async open(backend: Backend, key: string, address: string, release: () => void): Promise<StoredFile> {
    const [first, second] = slotsOf(key);
    const slots = await Promise.all([first, second].map(async (name): Promise<Slot> => ({ name, record: await backend.readRecord(name) })));
    // Of two complete copies, the newer replaced the other, which could not be deleted. Of two parts, the longer one counts.
    const rank = ({ record }: Slot): number => record?.complete === true ? record.date : -1 - (record?.stored ?? 0);
    const [whole, part] = slots.sort((a, b) => rank(b) - rank(a)) as [Slot, Slot];
    return new StoredFile(backend, address, release, whole, part);
  }

  async bytes(record: StoredRecord): Promise<Blob> {
    const blob = await this.backend.readBytes(record === this.whole ? this.#wholeSlot : this.#partSlot);
    ensure(blob.size >= record.stored,
      "storage", `${record.stored} bytes of ${record.url} should be stored, found ${blob.size}`);
    return blob.slice(0, record.stored);
  }

  /**
   * Begins to write beside a complete copy, or continues after `record.stored` bytes. The complete copy is deleted if
   * there is no room for both.
   *
   * @throws {@link TilewrightError} `quota` if there is no room for the record's size.
   */
  async write(record: StoredRecord): Promise<StoreWriter> {
    const missing = (record.size ?? record.stored) - record.stored;
    const room = await freeBytes();
    if (missing > room) {
      const whole = this.whole?.stored ?? 0;
      ensure(missing <= room + whole,
        "quota", `${missing} bytes are to be stored, and the browser has room for ${room + whole}`);
      await this.removeWhole();
    }
    await this.save(record);
    return this.backend.openWriter(this.#partSlot, record.stored);
  }

  /** Updates the record of the download. A complete one replaces the complete copy. */
  async save(record: StoredRecord): Promise<void> {
    await this.backend.writeRecord(this.#partSlot, record);
    this.part = record;
    if (record.complete) {
      // If the old one cannot be deleted, the newer counts.
      await this.removeWhole().catch(() => {});
    }
  }

  async renew(date: number): Promise<void> {
    if (this.whole !== undefined) {
      this.whole = { ...this.whole, date };
      await this.backend.writeRecord(this.#wholeSlot, this.whole);
    }
  }

  async removePart(): Promise<void> {
    await this.backend.remove(this.#partSlot);
    this.part = undefined;
  }

  async removeWhole(): Promise<void> {
    await this.backend.remove(this.#wholeSlot);
    this.whole = undefined;
  }
}

interface Slot {
  name: string;
  record?: StoredRecord | undefined;
}

const SECOND = /-2$/;

function slotsOf(key: string): [string, string] {
  return [key, `${key}-2`];
}

/** Bytes of storage left for this origin, as the browser estimates. */
export async function freeBytes(): Promise<number> {
  try {
    const { quota, usage } = await navigator.storage.estimate();
    return quota === undefined || usage === undefined ? Infinity : Math.max(0, quota - usage);
  } catch {
    return Infinity;
  }
}

/** Parameters that sign an address: they change with each visit and are secret. */
const SIGNATURE = /^(x-amz-.*|x-goog-.*|x-oss-.*|x-bce-.*|q-(sign-|ak$|signature$).*|signature|sig|token|access_token|__token__|hdnt[lsa]?|hdnea)$/i;
/** Other parameters of signed addresses that do not identify the file. */
const SIGNED = new RegExp(
  "^(expires|expiry|policy|key-pair-id|awsaccesskeyid|googleaccessid|ossaccesskeyid|security-token|response-.*|x-id"
  + "|s[etprvsi]|sip|spr|srt|sk[a-z]{1,3}|saoid|suoid|scid|sdd|rsc[cdelt])$", "i");

/** The address that a file is stored under: without signature and fragment. */
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
 * Takes a lock; `undefined` if another holds it for long, or with `wait: false` at all. Without Web Locks, exclusive
 * file handles must suffice.
 */
async function lock(
  key: string, mode: "shared" | "exclusive", { signal, wait = true }: { signal?: AbortSignal | undefined; wait?: boolean } = {},
): Promise<(() => void) | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return () => {};
  }
  const patience = wait ? AbortSignal.timeout(PATIENCE_MS) : undefined;
  const options = patience === undefined ? { mode, ifAvailable: true }
    : { mode, signal: signal === undefined ? patience : AbortSignal.any([signal, patience]) };
  try {
    return await new Promise((resolve, reject) => {
      navigator.locks.request(`${FOLDER}/${key}`, options, (lock) =>
        lock === null ? resolve(undefined) : new Promise<void>((release) => resolve(release))).catch(reject);
    });
  } catch (error) {
    signal?.throwIfAborted();
    if (patience?.aborted === true) {
      return undefined;
    }
    throw error;
  }
}

/** Does `work` with an exclusive lock; `undefined` without one. */
async function locked<T>(key: string, wait: boolean, work: () => Promise<T>): Promise<T | undefined> {
  const release = await lock(key, "exclusive", { wait });
  try {
    return release && await work();
  } finally {
    release?.();
  }
}

function parseRecord(text: string): StoredRecord | undefined {
  let record: Partial<StoredRecord> | null;
  try {
    record = JSON.parse(text);
  } catch {
    // A tab that was closed while writing leaves half a record.
    return undefined;
  }
  const valid = typeof record?.url === "string" && typeof record.stored === "number" && typeof record.complete === "boolean";
  return valid ? record as StoredRecord : undefined;
}

/**
 * Files that are being opened to write. Chromium never settles the promise of `createSyncAccessHandle` if the file's
 * handle is garbage collected before the response, and an `await` alone does not keep the handle alive.
 */
const opening = new Set<FileSystemFileHandle>();

/** Not every browser can rename files. */
type Movable = FileSystemFileHandle & { move?(name: string): Promise<void> };

/** Records and bytes as files, `<key>.json` and `<key>.bin`, and `<key>.new` while a record is written. */
class FileBackend implements Backend {
  constructor(private readonly folder: FileSystemDirectoryHandle) {}

  async keys(): Promise<string[]> {
    const keys = new Set<string>();
    for await (const name of this.folder.keys()) {
      keys.add(name.replace(/\.(json|bin|new)$/, ""));
    }
    return [...keys];
  }

  async readRecord(key: string): Promise<StoredRecord | undefined> {
    for (let attempt = 1; ; attempt += 1) {
      const file = await this.#find(`${key}.json`);
      try {
        const record = file && parseRecord(await (await file.getFile()).text());
        if (file === undefined || record !== undefined || attempt === READ_ATTEMPTS) {
          return record;
        }
      } catch (error) {
        if (attempt === READ_ATTEMPTS) {
          throw error;
        }
      }
      // A record that is being written may be unreadable for a moment.
      await delay(20);
    }
  }

  async writeRecord(key: string, record: StoredRecord): Promise<void> {
    const bytes = new TextEncoder().encode(JSON.stringify(record));
    // Written beside the old one, which stays if the tab is closed meanwhile.
    await this.#writeAll(`${key}.new`, bytes);
    const file: Movable = await this.folder.getFileHandle(`${key}.new`);
    try {
      if (file.move !== undefined) {
        await file.move(`${key}.json`);
        return;
      }
    } catch {
      // Otherwise it is written in place.
    }
    await this.#writeAll(`${key}.json`, bytes);
    await this.folder.removeEntry(`${key}.new`);
  }

  async readBytes(key: string): Promise<Blob> {
    return (await this.folder.getFileHandle(`${key}.bin`)).getFile();
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
    // The record last, so that nothing remains without one.
    for (const name of [`${key}.bin`, `${key}.new`, `${key}.json`]) {
      if ((await this.#find(name)) !== undefined) {
        await this.folder.removeEntry(name);
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
    const file = await this.folder.getFileHandle(name, { create: true });
    opening.add(file);
    try {
      return await file.createSyncAccessHandle();
    } finally {
      opening.delete(file);
    }
  }

  async #find(name: string): Promise<FileSystemFileHandle | undefined> {
    try {
      return await this.folder.getFileHandle(name);
    } catch (error) {
      if (isMissing(error)) {
        return undefined;
      }
      throw error;
    }
  }
}

function isMissing(error: unknown): boolean {
  return error instanceof DOMException && error.name === "NotFoundError";
}

function writeAll(handle: FileSystemSyncAccessHandle, bytes: Uint8Array, at: number): void {
  const written = handle.write(bytes, { at });
  if (written !== bytes.length) {
    // When the storage is full, some browsers throw, and some write a part.
    throw new TilewrightError("quota", `the browser's storage took ${written} of ${bytes.length} bytes`);
  }
}

/** Records and bytes as responses to made-up requests; bytes in pieces, because a response cannot grow. */
class PieceBackend implements Backend {
  constructor(private readonly cache: Cache) {}

  async keys(): Promise<string[]> {
    const paths = (await this.cache.keys()).map((request) => new URL(request.url).pathname.split("/")[2]);
    return [...new Set(paths.filter((key) => key !== undefined))];
  }

  async readRecord(key: string): Promise<StoredRecord | undefined> {
    const response = await this.cache.match(address(key, "record"));
    return response === undefined ? undefined : parseRecord(await response.text());
  }

  async writeRecord(key: string, record: StoredRecord): Promise<void> {
    await this.cache.put(address(key, "record"), new Response(JSON.stringify(record)));
  }

  async readBytes(key: string): Promise<Blob> {
    const pieces: Blob[] = [];
    for (;;) {
      const response = await this.cache.match(address(key, pieces.length));
      if (response === undefined) {
        return new Blob(pieces);
      }
      pieces.push(await response.blob());
    }
  }

  async openWriter(key: string, at: number): Promise<StoreWriter> {
    const cache = this.cache;
    // Unless the file is complete, only whole pieces count as stored.
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
    // The last piece first and the record last, so that an interruption leaves findable pieces.
    let pieces = 0;
    while (await this.cache.match(address(key, pieces)) !== undefined) {
      pieces += 1;
    }
    for (const part of [...Array(pieces).keys()].reverse()) {
      await this.cache.delete(address(key, part));
    }
    await this.cache.delete(address(key, "record"));
  }
}

function address(key: string, part: string | number): string {
  return `${location.origin}/${FOLDER}/${key}/${part}`;
}

/** Does `work` with the storage of this name, or without one where there is none. */
export async function withStore<T>(work: (store: Store | undefined) => Promise<T>, folder = FOLDER): Promise<T> {
  let store: Store | undefined;
  try {
    store = await openFolder(folder, folder === FOLDER);
  } catch (error) {
    if (codeOf(error) !== "storage") {
      throw error;
    }
  }
  return attempt(() => work(store));
}

/** Turns the browser's own errors into the package's. */
export async function attempt<T>(work: () => Promise<T>): Promise<T> {
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
