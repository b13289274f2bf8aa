/**
 * The browser's storage for downloads: the origin private file system, or Cache Storage where that is missing.
 *
 * A download is a record and its bytes, both named after the SHA-256 of the address. The record is what counts: it is written before
 * the first byte as incomplete, renewed as bytes are flushed, and says `complete` only when everything is there and its digest is known.
 * Whoever writes holds the file's Web Lock, so tabs do not get in each other's way.
 */

import { codeOf, messageOf, TilewrightError } from "./errors.js";
import type { CacheEntry } from "./types.js";

/** What is known of a download; `stored` bytes from the file's start are on the disk. */
export type StoredRecord = CacheEntry & { lastModified?: string };

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

/** Opens the storage. Throws `storage` with the reason where there is none, as in some private windows. */
export async function openStore(): Promise<Store> {
  if (globalThis.crypto?.subtle === undefined) {
    throw new TilewrightError("storage", "the browser offers storage only to pages served over https");
  }
  if (typeof globalThis.navigator?.storage?.getDirectory === "function" && hasSyncHandles()) {
    try {
      const root = await navigator.storage.getDirectory();
      return new Store(new FileBackend(await root.getDirectoryHandle(FOLDER, { create: true })));
    } catch (error) {
      if (globalThis.caches === undefined) {
        throw new TilewrightError("storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
      }
    }
  }
  // Deno has Cache Storage of its own without a page's origin, so there is nothing to name its entries after.
  if (globalThis.caches === undefined || globalThis.location?.origin === undefined) {
    throw new TilewrightError("storage", "there is no storage for downloads here");
  }
  try {
    return new Store(new PieceBackend(await caches.open(FOLDER)));
  } catch (error) {
    throw new TilewrightError("storage", `the browser refuses storage: ${messageOf(error)}`, { cause: error });
  }
}

/** Safari before 15.2 has the folder and not the means to write; pages never have them, and need not. */
function hasSyncHandles(): boolean {
  return "document" in globalThis || "createSyncAccessHandle" in (globalThis.FileSystemFileHandle?.prototype ?? {});
}

/** The storage, by address. */
export class Store {
  readonly #backend: Backend;

  constructor(backend: Backend) {
    this.#backend = backend;
  }

  /** All records, the newest first. */
  async list(): Promise<StoredRecord[]> {
    const records = await Promise.all((await this.#backend.keys()).map((key) => this.#backend.readRecord(key)));
    return records.filter((record) => record !== undefined).sort((a, b) => b.date - a.date);
  }

  /** Whether a download is here as a whole. */
  async has(url: string): Promise<boolean> {
    return (await this.#backend.readRecord(await keyOf(url)))?.complete === true;
  }

  /** Deletes a download. Returns whether there was one. Throws `storage` while a tab loads it. */
  async delete(url: string): Promise<boolean> {
    return this.#deleteKey(await keyOf(url));
  }

  /** Deletes all downloads. */
  async clear(): Promise<void> {
    for (const key of await this.#backend.keys()) {
      await this.#deleteKey(key);
    }
  }

  /**
   * Claims a download: shared to read a complete one, exclusive to write. Returns nothing when another tab is in the way.
   * The caller releases it.
   */
  async claim(url: string, mode: "shared" | "exclusive"): Promise<StoredFile | undefined> {
    const key = await keyOf(url);
    const release = await lock(key, mode);
    return release === undefined ? undefined : new StoredFile(this.#backend, key, release);
  }

  async #deleteKey(key: string): Promise<boolean> {
    const release = await lock(key, "exclusive");
    if (release === undefined) {
      throw new TilewrightError("storage", "this file is being loaded, here or in another tab; it can be deleted after that");
    }
    try {
      const existed = (await this.#backend.readRecord(key)) !== undefined;
      await this.#backend.remove(key);
      return existed;
    } finally {
      release();
    }
  }
}

/** One download while it is claimed. */
export class StoredFile {
  readonly #backend: Backend;
  readonly #key: string;
  readonly release: () => void;

  constructor(backend: Backend, key: string, release: () => void) {
    this.#backend = backend;
    this.#key = key;
    this.release = release;
  }

  record(): Promise<StoredRecord | undefined> {
    return this.#backend.readRecord(this.#key);
  }

  async bytes(record: StoredRecord): Promise<Blob> {
    const blob = await this.#backend.readBytes(this.#key);
    if (blob.size < record.stored) {
      throw new TilewrightError("storage", `${record.stored} bytes of ${record.url} should be stored, found ${blob.size}`);
    }
    return blob.slice(0, record.stored);
  }

  /** Begins to write, or goes on after `record.stored` bytes. */
  async write(record: StoredRecord): Promise<StoreWriter> {
    await this.#backend.writeRecord(this.#key, record);
    return this.#backend.openWriter(this.#key, record.stored);
  }

  save(record: StoredRecord): Promise<void> {
    return this.#backend.writeRecord(this.#key, record);
  }

  remove(): Promise<void> {
    return this.#backend.remove(this.#key);
  }
}

async function keyOf(url: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Takes the lock at once or not at all; without Web Locks the exclusive file handles have to do. */
function lock(key: string, mode: "shared" | "exclusive"): Promise<(() => void) | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return Promise.resolve(() => {});
  }
  return new Promise((resolve, reject) => {
    navigator.locks.request(`${FOLDER}/${key}`, { mode, ifAvailable: true }, (held) => {
      if (held === null) {
        resolve(undefined);
        return undefined;
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

/** Records and bytes as files: `<key>.json` and `<key>.bin`. */
class FileBackend implements Backend {
  readonly #folder: FileSystemDirectoryHandle;

  constructor(folder: FileSystemDirectoryHandle) {
    this.#folder = folder;
  }

  async keys(): Promise<string[]> {
    const keys = new Set<string>();
    for await (const name of this.#folder.keys()) {
      keys.add(name.replace(/\.(json|bin)$/, ""));
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
    const handle = await (await this.#folder.getFileHandle(`${key}.json`, { create: true })).createSyncAccessHandle();
    try {
      const bytes = new TextEncoder().encode(JSON.stringify(record));
      handle.truncate(0);
      writeAll(handle, bytes, 0);
      handle.flush();
    } finally {
      handle.close();
    }
  }

  async readBytes(key: string): Promise<Blob> {
    return (await this.#folder.getFileHandle(`${key}.bin`)).getFile();
  }

  async openWriter(key: string, at: number): Promise<StoreWriter> {
    const handle = await (await this.#folder.getFileHandle(`${key}.bin`, { create: true })).createSyncAccessHandle();
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
    for (const name of [`${key}.json`, `${key}.bin`]) {
      if ((await this.#find(name)) !== undefined) {
        await this.#folder.removeEntry(name);
      }
    }
  }

  async #find(name: string): Promise<FileSystemFileHandle | undefined> {
    try {
      return await this.#folder.getFileHandle(name);
    } catch (error) {
      if (error instanceof DOMException && error.name === "NotFoundError") {
        return undefined;
      }
      throw error;
    }
  }
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
    const answer = await this.#cache.match(address(key, "record"));
    return answer === undefined ? undefined : parseRecord(await answer.text());
  }

  async writeRecord(key: string, record: StoredRecord): Promise<void> {
    await this.#cache.put(address(key, "record"), new Response(JSON.stringify(record)));
  }

  async readBytes(key: string): Promise<Blob> {
    const pieces: Blob[] = [];
    for (;;) {
      const answer = await this.#cache.match(address(key, pieces.length));
      if (answer === undefined) {
        return new Blob(pieces);
      }
      pieces.push(await answer.blob());
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
    await this.#cache.delete(address(key, "record"));
    for (let index = 0; await this.#cache.delete(address(key, index)); index += 1) {
      // The condition does the work: pieces are numbered without gaps.
    }
  }
}

function address(key: string, part: string | number): string {
  return `${location.origin}/${FOLDER}/${key}/${part}`;
}

/** Whether an error says that the storage is full. */
export function isFull(error: unknown): boolean {
  return codeOf(error) === "quota";
}
