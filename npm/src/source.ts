/** A model's files as byte streams, wherever they come from: addresses, blobs, paths. */

import { askVersion, describeImpostor, differs, Download, type FileVersion } from "./download.js";
import { codeOf, messageOf, TilewrightError, type ErrorCode } from "./errors.js";
import { importHidden } from "./platform.js";
import type { FileSpec, PathSpec, SourceSpec } from "./protocol.js";
import { isFull, type Store, type StoredFile, type StoredRecord, type StoreWriter } from "./store.js";
import type { Sha256 } from "./tilewright.js";
import type { Notice, Progress } from "./types.js";

/** Bytes that are handed on at a time. */
const CHUNK_BYTES = 1 << 20;
/** Bytes after which a download's record is renewed. */
const FLUSH_BYTES = 16 << 20;

/** One file of a model. Reading is sequential; going back is possible and may be slow. */
export interface ModelFile {
  readonly name: string;
  /** Bytes of the file, where it is known. */
  readonly size: number | undefined;
  /** Where the bytes come from at the moment. */
  readonly phase: Progress["phase"];
  /** Bytes that have arrived, from the start on. */
  readonly arrived: number;
  /** The bytes from `offset` on, some of them, or nothing at the end of the file. */
  read(offset: number): Promise<Uint8Array | undefined>;
  /** Reads what is left, so that the file can be kept and its digest compared. */
  finish(): Promise<void>;
  /** Lets go of connections while other files are read. */
  pause(): void;
  /** Closes the file. `useless`: nothing of it is worth keeping. */
  close(useless: boolean): Promise<void>;
}

/** What opening a file needs. */
export interface OpenContext {
  signal: AbortSignal;
  /** Where downloads are kept; nothing: they are not. */
  store: Store | undefined;
  /** Names of files that a folder of this kind of model may have besides. */
  extras: readonly string[];
  newDigest(): Sha256;
  notify(notice: Notice): void;
  /** Called when bytes of a file have arrived. */
  onBytes(file: ModelFile): void;
}

/** Codes of errors that say that a file is of no use, as opposed to what was done with it. */
const USELESS: ReadonlySet<ErrorCode> = new Set<ErrorCode>(
  ["format", "unsupported", "config", "tokenizer", "truncated", "not_a_model", "range", "storage", "non_finite"]);

/** Whether an error leaves nothing worth keeping of the files that it came from. */
export function isUseless(error: unknown): boolean {
  return USELESS.has(codeOf(error));
}

/** Opens all files of a model, in the order in which they were given. */
export async function openFiles(source: SourceSpec, context: OpenContext): Promise<ModelFile[]> {
  switch (source.kind) {
    case "files":
      return openAll(source.files, context, "no-store");
    case "folder":
      return openFolder(source.url, context);
    case "path":
      return openAll(await filesAt(source.file, context.extras), context, "no-store");
    case "builtin":
      // The page's own file needs no second copy: the browser's HTTP cache has it.
      return openAll([builtinSpec()], { ...context, store: undefined }, "default");
  }
}

async function openAll(specs: FileSpec[], context: OpenContext, httpCache: RequestCache): Promise<ModelFile[]> {
  const files: ModelFile[] = [];
  try {
    for (const spec of specs) {
      const file = await openFile(spec, context, httpCache);
      files.push(file);
      if (specs.length > 1) {
        file.pause();
      }
    }
    return files;
  } catch (error) {
    await Promise.all(files.map((file) => file.close(isUseless(error))));
    throw error;
  }
}

async function openFile(spec: FileSpec, context: OpenContext, httpCache: RequestCache): Promise<ModelFile> {
  switch (spec.kind) {
    case "url":
      return UrlFile.open(spec, context, httpCache);
    case "blob":
      return new BlobFile(spec.name, spec.blob);
    case "path":
      return PathFile.open(spec);
  }
}

function builtinSpec(): FileSpec {
  const url = new URL("./stories.gguf", import.meta.url);
  return url.protocol === "file:" ? { kind: "path", name: "stories.gguf", path: url.href } : { kind: "url", name: "stories.gguf", url: url.href };
}

/** Files of a Hugging Face folder besides its weights: those that every model needs, and one that it may have. */
const NEEDED_FILES = ["config.json", "tokenizer.json"];
const OPTIONAL_FILE = "tokenizer_config.json";
/** What sentence-transformers adds to a folder. */
export const SENTENCE_FILES: readonly string[] = [
  "modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
];
const INDEX = "model.safetensors.index.json";

/** The weight files that an index names. */
function shardsOf(index: string, where: string): string[] {
  let map: unknown;
  try {
    map = (JSON.parse(index) as { weight_map?: unknown } | null)?.weight_map;
  } catch (error) {
    throw new TilewrightError("format", `${where}: not JSON: ${messageOf(error)}`);
  }
  const names = typeof map === "object" && map !== null ? [...new Set<unknown>(Object.values(map))] : [];
  const good = names.filter((name) => typeof name === "string" && /^[^/\\]+\.safetensors$/.test(name));
  if (good.length === 0 || good.length !== names.length) {
    throw new TilewrightError("format", `${where}: weight_map does not name safetensors files of the same folder`);
  }
  return (good as string[]).sort();
}

/** Opens the files of a Hugging Face folder on a server. Which there are is only known by asking. */
async function openFolder(folder: string, context: OpenContext): Promise<ModelFile[]> {
  const files: ModelFile[] = [];
  const open = async (name: string, needed: boolean): Promise<ModelFile | undefined> => {
    const url = new URL(name, folder).href;
    try {
      const file = await UrlFile.open({ name, url }, context, "no-store");
      files.push(file);
      // A browser opens few connections to one server, so none is held while others are needed.
      file.pause();
      return file;
    } catch (error) {
      if (!needed && await isAbsent(error, folder, context)) {
        return undefined;
      }
      throw error;
    }
  };
  try {
    for (const name of NEEDED_FILES) {
      await open(name, true);
    }
    for (const name of [OPTIONAL_FILE, ...context.extras]) {
      await open(name, false);
    }
    const index = await open(INDEX, false);
    for (const name of index === undefined ? ["model.safetensors"] : shardsOf(await readText(index), `${folder}${INDEX}`)) {
      await open(name, true);
    }
    return files;
  } catch (error) {
    await Promise.all(files.map((file) => file.close(isUseless(error))));
    throw error;
  }
}

/** Whether a file that need not be there is not there. Offline that is known from the load that kept the others. */
async function isAbsent(error: unknown, folder: string, context: OpenContext): Promise<boolean> {
  if (error instanceof TilewrightError && error.code === "http") {
    return error.message.includes("there is no such file");
  }
  return codeOf(error) === "network" && await context.store?.has(new URL("config.json", folder).href) === true;
}

async function readText(file: ModelFile): Promise<string> {
  const bytes = await readAll(file);
  file.pause();
  return new TextDecoder().decode(bytes);
}

/** All bytes of a small file. */
export async function readAll(file: ModelFile): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  for (let piece; (piece = await file.read(length)) !== undefined;) {
    pieces.push(piece);
    length += piece.length;
  }
  return join(pieces, length);
}

/** A file on the disk, or the files of a Hugging Face folder there. */
async function filesAt(file: PathSpec, extras: readonly string[]): Promise<FileSpec[]> {
  const { stat } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
  try {
    const path = await pathOf(file);
    return (await stat(path)).isDirectory() ? await listDirectory(path, extras) : [file];
  } catch (error) {
    throw error instanceof TilewrightError ? error : unreadable(file.path, error);
  }
}

/** The path that a `file:` address stands for, or that is one already. */
async function pathOf({ path }: PathSpec): Promise<string> {
  const { fileURLToPath } = await importHidden<typeof import("node:url")>("node:url");
  return path.startsWith("file:") ? fileURLToPath(path) : path;
}

async function listDirectory(folder: string, extras: readonly string[]): Promise<FileSpec[]> {
  const { access, readFile } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
  const { join: joinPath } = await importHidden<typeof import("node:path")>("node:path");
  const at = (name: string): string => joinPath(folder, name);
  const names = [...NEEDED_FILES];
  let shards = ["model.safetensors"];
  for (const name of [OPTIONAL_FILE, ...extras, INDEX]) {
    if (await access(at(name)).then(() => true, () => false)) {
      names.push(name);
    }
  }
  if (names.includes(INDEX)) {
    shards = shardsOf(await readFile(at(INDEX), "utf8"), at(INDEX));
  }
  return [...names, ...shards].map((name) => ({ kind: "path", name, path: at(name) }));
}

/** Throws if a file begins like something else than a model. */
function checkStart(name: string, bytes: Uint8Array): void {
  const impostor = describeImpostor(bytes);
  if (impostor !== undefined) {
    throw new TilewrightError("not_a_model", `${name} holds ${impostor}, not a model file`);
  }
}

/** A file that the user picked. */
class BlobFile implements ModelFile {
  readonly name: string;
  readonly phase = "file";
  readonly size: number;
  arrived = 0;
  readonly #blob: Blob;

  constructor(name: string, blob: Blob) {
    this.name = name;
    this.size = blob.size;
    this.#blob = blob;
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    if (offset >= this.size) {
      return undefined;
    }
    const bytes = await readBlob(this.name, this.#blob, offset);
    if (offset === 0) {
      checkStart(this.name, bytes);
    }
    this.arrived = Math.max(this.arrived, offset + bytes.length);
    return bytes;
  }

  async finish(): Promise<void> {
    this.arrived = this.size;
  }

  pause(): void {}

  async close(): Promise<void> {}
}

async function readBlob(name: string, blob: Blob, offset: number): Promise<Uint8Array> {
  try {
    return new Uint8Array(await blob.slice(offset, offset + CHUNK_BYTES).arrayBuffer());
  } catch (error) {
    throw new TilewrightError("storage", `${name} cannot be read any more; it may have been moved or changed (${messageOf(error)})`, { cause: error });
  }
}

/** A file with a path, in Node and Deno. */
class PathFile implements ModelFile {
  readonly name: string;
  readonly phase = "file";
  readonly size: number;
  arrived = 0;
  readonly #handle: import("node:fs/promises").FileHandle;

  private constructor(name: string, size: number, handle: import("node:fs/promises").FileHandle) {
    this.name = name;
    this.size = size;
    this.#handle = handle;
  }

  static async open(spec: PathSpec): Promise<PathFile> {
    const { open } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
    try {
      const handle = await open(await pathOf(spec));
      return new PathFile(spec.name, (await handle.stat()).size, handle);
    } catch (error) {
      throw unreadable(spec.path, error);
    }
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    let bytes: Uint8Array;
    try {
      const buffer = new Uint8Array(CHUNK_BYTES);
      bytes = buffer.subarray(0, (await this.#handle.read(buffer, 0, CHUNK_BYTES, offset)).bytesRead);
    } catch (error) {
      throw unreadable(this.name, error);
    }
    if (offset === 0) {
      checkStart(this.name, bytes);
    }
    this.arrived = Math.max(this.arrived, offset + bytes.length);
    return bytes.length === 0 ? undefined : bytes;
  }

  async finish(): Promise<void> {
    this.arrived = this.size;
  }

  pause(): void {}

  async close(): Promise<void> {
    await this.#handle.close();
  }
}

function unreadable(path: string, cause: unknown): TilewrightError {
  return new TilewrightError("storage", `${path} cannot be read: ${messageOf(cause)}`, { cause });
}

/** A file on a server, with the part of it that is kept here already. */
class UrlFile implements ModelFile {
  readonly name: string;
  readonly #url: string;
  readonly #context: OpenContext;
  readonly #httpCache: RequestCache;
  #download: Download | undefined;
  /** The claim on the kept file, while there is one. */
  #stored: StoredFile | undefined;
  #record: StoredRecord | undefined;
  /** The bytes that were kept when the file was opened. */
  #kept = new Blob();
  #writer: StoreWriter | undefined;
  #written = 0;
  #digest: Sha256 | undefined;
  #digested = 0;
  /** Where the next bytes come from. */
  #position = 0;
  /** The chunk read last, and where it begins: the engine goes back into it when it turns from a header to the data behind. */
  #last: Uint8Array = new Uint8Array();
  #lastOffset = 0;
  arrived = 0;

  private constructor(spec: { name: string; url: string }, context: OpenContext, httpCache: RequestCache) {
    this.name = spec.name;
    this.#url = spec.url;
    this.#context = context;
    this.#httpCache = httpCache;
  }

  static async open(spec: { name: string; url: string }, context: OpenContext, httpCache: RequestCache): Promise<UrlFile> {
    const file = new UrlFile(spec, context, httpCache);
    try {
      await file.#claim();
      if (!file.#isComplete) {
        file.#download = await file.#resume() ?? await Download.open(spec.url, file.#downloadOptions);
      }
      return file;
    } catch (error) {
      await file.close(false);
      throw error;
    }
  }

  get phase(): "cache" | "download" {
    return this.#position < this.#kept.size || this.#isComplete ? "cache" : "download";
  }

  get size(): number | undefined {
    return this.#isComplete ? this.#kept.size : this.#download?.version.size;
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    if (offset >= this.#lastOffset && offset < this.#lastOffset + this.#last.length) {
      return this.#last.subarray(offset - this.#lastOffset);
    }
    if (offset < this.#position) {
      this.#position = offset;
    }
    // Bytes before the offset belong to the kept file and to its digest although the engine does not want them.
    for (;;) {
      const chunk = await this.#readChunk();
      if (chunk === undefined || offset < this.#position) {
        return chunk?.subarray(offset - this.#lastOffset);
      }
    }
  }

  async finish(): Promise<void> {
    while ((await this.#readChunk()) !== undefined) {
      // Reading is all there is to do: each chunk is kept and digested on its way.
    }
    const sha256 = this.#digest?.hex();
    if (this.#isComplete) {
      if (sha256 !== this.#record?.sha256) {
        throw new TilewrightError("storage",
          `the kept copy of ${this.#url} is damaged (SHA-256 is ${sha256}, expected ${this.#record?.sha256}); it was deleted, load the model again`);
      }
      return;
    }
    await this.#storing(async (stored) => {
      const writer = await this.#openWriter(stored);
      const size = await writer.flush(true);
      await stored.save({ ...this.#newRecord(size), size, complete: true, ...(sha256 === undefined ? {} : { sha256 }) });
      writer.close();
      this.#writer = undefined;
    });
  }

  pause(): void {
    this.#download?.close();
  }

  async close(useless: boolean): Promise<void> {
    this.#download?.close();
    this.#digest?.free();
    this.#digest = undefined;
    if (useless) {
      await this.#drop();
    } else {
      await this.#storing((stored) => this.#saveProgress(stored));
    }
    this.#writer?.close();
    this.#writer = undefined;
    this.#stored?.release();
    this.#stored = undefined;
  }

  get #isComplete(): boolean {
    return this.#record?.complete === true;
  }

  get #downloadOptions() {
    const { signal, notify } = this.#context;
    return { signal, httpCache: this.#httpCache, onReconnect: (message: string) => notify({ code: "reconnected", message }) };
  }

  /** Finds out what is kept, and keeps others from changing it. */
  async #claim(): Promise<void> {
    const { store, newDigest, notify } = this.#context;
    if (store === undefined) {
      return;
    }
    try {
      const readable = await store.claim(this.#url, "shared");
      const record = await readable?.record();
      this.#stored = readable;
      if (readable !== undefined && record?.complete === true && await this.#isCurrent(record)) {
        this.#kept = await readable.bytes(record);
        this.#record = record;
        this.#digest = newDigest();
        return;
      }
      readable?.release();
      this.#stored = await store.claim(this.#url, "exclusive");
      if (this.#stored === undefined) {
        notify({ code: "not_cached", message: `${this.#url} is being loaded in another tab as well; this tab does not keep its copy` });
        return;
      }
      const part = await this.#stored.record();
      if (part !== undefined && !part.complete && part.stored > 0) {
        this.#kept = await this.#stored.bytes(part);
        this.#record = part;
      } else {
        await this.#stored.remove();
      }
      this.#digest = newDigest();
    } catch (error) {
      this.#context.signal.throwIfAborted();
      await this.#giveUpStoring(error);
    }
  }

  /** Asks the server whether a kept file is still the newest. Without an answer it is taken as it is. */
  async #isCurrent(record: StoredRecord): Promise<boolean> {
    const version = await askVersion(this.#url, this.#context.signal);
    if (version === undefined) {
      this.#context.notify({ code: "not_revalidated", message: `${this.#url} could not be checked for a newer version; the kept copy is used` });
      return true;
    }
    const current = !differs(record, version);
    if (!current) {
      this.#context.notify({ code: "cache_outdated", message: `${this.#url} is newer on the server than the kept copy; it is downloaded again` });
    }
    return current;
  }

  /** Goes on behind what is kept of an interrupted download, if the server still has the same file. */
  async #resume(): Promise<Download | undefined> {
    if (this.#stored === undefined || this.#record === undefined) {
      return undefined;
    }
    const download = await Download.resume(this.#url, this.#kept.size, versionOf(this.#record), this.#downloadOptions);
    if (download === undefined) {
      this.#context.notify({ code: "cache_outdated", message: `${this.#url} was replaced since its download was interrupted; it begins anew` });
      this.#kept = new Blob();
      this.#record = undefined;
    }
    return download;
  }

  #newRecord(stored: number): StoredRecord {
    return { ...this.#download?.version, url: this.#url, stored, complete: false, date: Date.now() };
  }

  /** Writing begins with the first byte that is new: a browser gives nothing of a file to read any more once it is written to. */
  async #openWriter(stored: StoredFile): Promise<StoreWriter> {
    this.#written = this.#writer === undefined ? this.#kept.size : this.#written;
    return this.#writer ??= await stored.write(this.#newRecord(this.#written));
  }

  async #saveProgress(stored: StoredFile): Promise<void> {
    if (this.#writer === undefined) {
      return;
    }
    const bytes = await this.#writer.flush(false);
    if (bytes > 0) {
      await stored.save(this.#newRecord(bytes));
    } else {
      await stored.remove();
    }
  }

  /** About a mebibyte from the position on, kept and digested. */
  async #readChunk(): Promise<Uint8Array | undefined> {
    const chunk = this.#position < this.#kept.size && this.#writer === undefined
      ? await readBlob(this.#url, this.#kept, this.#position)
      : await this.#readNetwork();
    if (chunk === undefined) {
      return undefined;
    }
    if (this.#position === 0) {
      checkStart(this.#url, chunk);
    }
    const end = this.#position + chunk.length;
    if (this.#digest !== undefined && end > this.#digested) {
      this.#digest.update(chunk.subarray(this.#digested - this.#position));
      this.#digested = end;
    }
    this.#last = chunk;
    this.#lastOffset = this.#position;
    this.#position = end;
    this.arrived = Math.max(this.arrived, end);
    return chunk;
  }

  async #readNetwork(): Promise<Uint8Array | undefined> {
    const download = this.#download;
    if (download === undefined) {
      return undefined;
    }
    if (download.position !== this.#position) {
      download.seek(this.#position);
    }
    const pieces: Uint8Array[] = [];
    let length = 0;
    while (length < CHUNK_BYTES) {
      const piece = await download.next();
      if (piece === undefined) {
        break;
      }
      pieces.push(piece);
      length += piece.length;
      this.arrived = Math.max(this.arrived, download.position);
      this.#context.onBytes(this);
      await this.#keep(piece, download.position - piece.length);
    }
    return length === 0 ? undefined : join(pieces, length);
  }

  async #keep(piece: Uint8Array, offset: number): Promise<void> {
    await this.#storing(async (stored) => {
      const writer = await this.#openWriter(stored);
      const before = this.#written;
      const end = offset + piece.length;
      if (end > before) {
        await writer.write(piece.subarray(before - offset));
        this.#written = end;
      }
      if (Math.floor(this.#written / FLUSH_BYTES) > Math.floor(before / FLUSH_BYTES)) {
        await this.#saveProgress(stored);
      }
    });
  }

  /** Does something with the storage if the file is to be kept. When it fails, the load goes on without. */
  async #storing(action: (stored: StoredFile) => Promise<void>): Promise<void> {
    if (this.#stored === undefined || this.#isComplete) {
      return;
    }
    try {
      await action(this.#stored);
    } catch (error) {
      await this.#giveUpStoring(error);
    }
  }

  async #giveUpStoring(error: unknown): Promise<void> {
    const why = isFull(error) ? "the browser's storage for this page is full" : `the browser's storage failed (${messageOf(error)})`;
    this.#context.notify({ code: "not_cached", message: `${this.#url} will not be kept for the next time: ${why}` });
    if (this.#position < this.#kept.size) {
      // Nothing was given out yet that the server could not give again.
      this.#kept = new Blob();
      this.#record = undefined;
    }
    await this.#drop();
  }

  /** Deletes what is kept, and keeps nothing more. */
  async #drop(): Promise<void> {
    this.#writer?.close();
    this.#writer = undefined;
    this.#stored?.release();
    this.#stored = undefined;
    let owned: StoredFile | undefined;
    try {
      owned = await this.#context.store?.claim(this.#url, "exclusive");
      await owned?.remove();
    } catch (error) {
      this.#context.notify({ code: "not_cached", message: `what was kept of ${this.#url} could not be deleted (${messageOf(error)})` });
    } finally {
      owned?.release();
    }
  }
}

function versionOf({ size, etag, lastModified }: StoredRecord): FileVersion {
  return { ...(size === undefined ? {} : { size }), ...(etag === undefined ? {} : { etag }), ...(lastModified === undefined ? {} : { lastModified }) };
}

function join(pieces: Uint8Array[], length: number): Uint8Array {
  const joined = new Uint8Array(length);
  let end = 0;
  for (const piece of pieces) {
    joined.set(piece, end);
    end += piece.length;
  }
  return joined;
}
