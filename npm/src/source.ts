/** A model's files as byte streams, wherever they come from: addresses, blobs, paths. */

import { askVersion, A_WEB_PAGE, describeImpostor, differs, Download, WebPage, type Asking, type DownloadOptions, type FileVersion } from "./download.js";
import type { Fetch } from "./fetching.js";
import { GitDigest, type GitBlob } from "./git.js";
import { codeOf, messageOf, TilewrightError, type ErrorCode } from "./errors.js";
import { importHidden } from "./platform.js";
import type { FileSpec, PathSpec, Pins, SourceSpec, UrlSpec } from "./protocol.js";
import { isFull, type Store, type StoredFile, type StoredRecord, type StoreWriter } from "./store.js";
import type { Sha256 } from "./tilewright.js";
import type { Notice, Progress } from "./types.js";

/** Bytes that are handed on at a time. */
const CHUNK_BYTES = 1 << 20;
/** Bytes after which a download's record is renewed. */
const FLUSH_BYTES = 16 << 20;
/** The most that a file may have that is read as a whole: more than any vocabulary needs. */
const SMALL_FILE_BYTES = 256 << 20;
/** Bytes of a kept copy that are compared at a time: about a millisecond of work. */
const VERIFY_BYTES = 256 << 10;
/** Milliseconds after which files that a folder did not have are looked for again. */
const ABSENT_MS = 24 * 60 * 60 * 1000;

/** One file of a model. Reading is sequential; going back is possible and may be slow. */
export interface ModelFile {
  readonly name: string;
  /** Its address, if it is to be kept. */
  readonly url?: string | undefined;
  /** Bytes of the file, where it is known. */
  readonly size: number | undefined;
  /** Whether all of it is from a copy that an earlier load kept. */
  readonly isKept?: boolean;
  /** Whether its bytes can be read again after the load: it is a file of this machine, or a copy of it is kept. */
  readonly isLocal: boolean;
  /** Where the bytes come from at the moment. */
  readonly phase: Progress["phase"];
  /** Bytes that have arrived, from the start on. */
  readonly arrived: number;
  /** The bytes from `offset` on, some of them, or nothing at the end of the file. */
  read(offset: number): Promise<Uint8Array | undefined>;
  /** `length` bytes from `offset` on, fewer at the end, of a file that is local. */
  bytes(offset: number, length: number): Promise<Uint8Array>;
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
  /** Little is wanted of large files, and nothing is kept that is not already: copies are read, and the rest comes in pieces. */
  peek?: boolean;
  /** What cannot be kept is an error. */
  mustKeep?: boolean;
  /** What sends requests instead of `fetch`. */
  fetch?: Fetch;
  newDigest(): Sha256;
  notify(notice: Notice): void;
  /** Called when a file is read from a copy that an earlier load kept. */
  onCopy(copy: KeptCopy): void;
  /** Called when so many bytes are kept that were not before. */
  onStored(bytes: number): void;
  /** Called when something of a file is kept. */
  onKept?(): Promise<void>;
  /** Called when bytes of a file have arrived. */
  onBytes(file: ModelFile): void;
}

/** Codes of errors that say that a file is of no use, as opposed to what was done with it. */
const USELESS: ReadonlySet<ErrorCode> = new Set<ErrorCode>(
  ["format", "unsupported", "config", "tokenizer", "truncated", "not_a_model", "range", "digest", "storage", "non_finite"]);

/** Whether an error leaves nothing worth keeping of the files that it came from. */
export function isUseless(error: unknown): boolean {
  return USELESS.has(codeOf(error));
}

/** Opens all files of a model, in the order in which they were given. Those with addresses are noted as its once one of them is kept. */
export async function openFiles(source: SourceSpec, context: OpenContext): Promise<ModelFile[]> {
  const { given } = source;
  const { store, peek } = context;
  if (given === undefined || store === undefined || peek === true) {
    return openThem(source, context);
  }
  let isNoted = false;
  let files: ModelFile[] = [];
  const note = async (): Promise<void> => {
    if (!isNoted && files.length > 0) {
      isNoted = true;
      // It only tells which copies belong together, so a storage that refuses it is no loss.
      await store.setModel({ ...given, files: files.flatMap(({ url }) => url ?? []) }).catch(() => {});
    }
  };
  files = await openThem(source, { ...context, onKept: note });
  if (files.some(({ isKept }) => isKept === true)) {
    await note();
  }
  return files;
}

async function openThem(source: SourceSpec, context: OpenContext): Promise<ModelFile[]> {
  const { pins } = source;
  switch (source.kind) {
    case "files":
      return openAll(pinned(source.files, pins), context, "no-store");
    case "folder":
      return openFolder(source.url, pins, context);
    case "path":
      return openAll(pinned(await filesAt(source.file, context), pins), context, "no-store");
    case "builtin":
      // The page's own file needs no second copy: the browser's HTTP cache has it.
      return openAll(pinned([builtinSpec()], pins), { ...context, store: undefined }, "default");
  }
}

/** The files with the digests that the caller says they have. */
function pinned(specs: FileSpec[], pins: Pins | undefined): FileSpec[] {
  if (pins === undefined) {
    return specs;
  }
  const names = specs.map(({ name }) => name);
  const all = pinsOf(pins, names);
  return specs.map((spec) => withPin(spec, all[spec.name]));
}

/** Digests by the names of files. Of one that has no name there may be one file. */
function pinsOf(pins: Pins, names: readonly string[]): Record<string, string> {
  const shown = names.slice(0, 40).join(", ");
  if (typeof pins === "string") {
    const [name, ...others] = names;
    if (name === undefined || others.length > 0) {
      throw new TilewrightError("option", `sha256 is one digest, and the model has the files ${shown}; expected an object of digests by their names`);
    }
    return { [name]: pins };
  }
  const unknown = Object.keys(pins).find((name) => !names.includes(name));
  if (unknown !== undefined) {
    throw new TilewrightError("option", `sha256 has the key ${JSON.stringify(unknown)}, and the model has the files ${shown}`);
  }
  return pins;
}

function withPin<T extends FileSpec | UrlSpec>(spec: T, pin: string | undefined): T {
  if (pin === undefined) {
    return spec;
  }
  if (spec.sha256 !== undefined && spec.sha256 !== pin) {
    throw otherDigest(spec.name, spec.sha256, pin, "the hub says");
  }
  return { ...spec, sha256: pin, isPinned: true };
}

function otherDigest(what: string, found: string, expected: string, who = "it has"): TilewrightError {
  return new TilewrightError("digest", `${what}: ${who} the SHA-256 ${found}, expected ${expected}`);
}

async function openAll(specs: FileSpec[], context: OpenContext, httpCache: RequestCache): Promise<ModelFile[]> {
  return together(specs.map((spec) => openFile(spec, context, httpCache, specs.length > 1)));
}

/** Files that are opened at the same time, without those that are not there. If one fails, none stays open. */
async function together(opening: Promise<ModelFile | undefined>[]): Promise<ModelFile[]> {
  const outcomes = await Promise.allSettled(opening);
  const files = outcomes.flatMap((outcome) => outcome.status === "fulfilled" && outcome.value !== undefined ? [outcome.value] : []);
  const failure = outcomes.find((outcome) => outcome.status === "rejected");
  if (failure !== undefined) {
    await closeAll(files, failure.reason);
    throw failure.reason;
  }
  return files;
}

async function closeAll(files: ModelFile[], error: unknown): Promise<void> {
  await Promise.all(files.map((file) => file.close(isUseless(error))));
}

/** Opens a file. `isOneOfMany`: others may be read before it, so it must hold no connection. */
async function openFile(spec: FileSpec, context: OpenContext, httpCache: RequestCache, isOneOfMany: boolean): Promise<ModelFile> {
  switch (spec.kind) {
    case "url":
      return UrlFile.open(spec, context, httpCache, isOneOfMany);
    case "blob":
      return checked(new BlobFile(spec.name, spec.blob), spec, context);
    case "path":
      return checked(await PathFile.open(spec), spec, context);
  }
}

/** A file whose digest is compared, if it is known. */
function checked(file: ModelFile, { sha256 }: FileSpec, { newDigest, peek }: OpenContext): ModelFile {
  return sha256 === undefined || peek === true ? file : new PinnedFile(file, sha256, newDigest());
}

function builtinSpec(): FileSpec {
  const url = new URL("./stories.gguf", import.meta.url);
  return url.protocol === "file:" ? { kind: "path", name: "stories.gguf", path: url.href } : { kind: "url", name: "stories.gguf", url: url.href };
}

/** Files of a Hugging Face folder besides its weights: those that every model needs, and those that it may have. */
export const TOKENIZER = "tokenizer.json";
export const NEEDED_FILES: readonly string[] = ["config.json", TOKENIZER];
export const OPTIONAL_FILES: readonly string[] = ["tokenizer_config.json", "generation_config.json"];
/** Where newer folders have the chat template. */
export const CHAT_FILES: readonly string[] = ["chat_template.jinja"];
/** What sentence-transformers adds to a folder. */
export const SENTENCE_FILES: readonly string[] = [
  "modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
];
export const INDEX = "model.safetensors.index.json";

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

/**
 * Opens the files of a Hugging Face folder on a server. Which there are is only known by asking, which happens for all at the same time;
 * what the folder did not have is asked for again after a day, or when it has changed.
 */
async function openFolder(folder: string, pins: Pins | undefined, context: OpenContext): Promise<ModelFile[]> {
  if (typeof pins === "string") {
    throw new TilewrightError("option", "sha256 is one digest, and the source is a folder, expected an object of digests by the names of its files");
  }
  const specOf = (name: string): UrlSpec => withPin({ name, url: new URL(name, folder).href }, pins?.[name]);
  const openSmall = async (name: string): Promise<SmallFile> => SmallFile.open(await UrlFile.open(specOf(name), context, "no-store", false));
  const remembered = await context.store?.absent(folder).catch(() => undefined);
  const needed: Promise<ModelFile & { isKept: boolean }>[] = NEEDED_FILES.map((name) =>
    // A vocabulary is large, and says nothing of what a model is.
    context.peek === true && name === TOKENIZER ? UrlFile.open(specOf(name), context, "no-store", true) : openSmall(name));
  const isUnchanged = Promise.all(needed).then((files) => files.every(({ isKept }) => isKept), () => false);
  const absent: string[] = [];
  let hasAsked = false;
  const openOptional = async (name: string): Promise<SmallFile | undefined> => {
    const wasAbsent = remembered?.names.has(name) === true;
    if (!wasAbsent || Date.now() - remembered.date > ABSENT_MS || !await isUnchanged) {
      try {
        const file = await openSmall(name);
        hasAsked ||= !file.isKept;
        return file;
      } catch (error) {
        // Without a network it is known from the load that kept the others.
        if (!isAbsent(error) && !(wasAbsent && codeOf(error) === "network")) {
          throw error;
        }
        hasAsked ||= isAbsent(error);
      }
    }
    absent.push(name);
    return undefined;
  };
  const files = await together([...needed, ...[...OPTIONAL_FILES, ...context.extras, INDEX].map(openOptional)]);
  try {
    if (context.peek !== true && hasAsked && (absent.length > 0 || remembered !== undefined)) {
      // It only spares requests, so a storage that refuses it is no loss.
      await context.store?.setAbsent(folder, absent).catch(() => {});
    }
    const index = files.find(({ name }) => name === INDEX);
    const shards = index === undefined ? ["model.safetensors"] : shardsOf(new TextDecoder().decode(await readAll(index)), `${folder}${INDEX}`);
    const all = [...files, ...await together(shards.map((name) => UrlFile.open(specOf(name), context, "no-store", true)))];
    if (pins !== undefined) {
      try {
        pinsOf(pins, all.map(({ name }) => name));
      } catch (error) {
        await closeAll(all.slice(files.length), error);
        throw error;
      }
    }
    return all;
  } catch (error) {
    await closeAll(files, error);
    throw error;
  }
}

/** Answers for a file that is not there: S3 refuses what it does not have, and some servers send their start page. */
const ABSENT_STATUS: ReadonlySet<number | undefined> = new Set([401, 403, 404, 410]);

function isAbsent(error: unknown): boolean {
  return error instanceof WebPage || (error instanceof TilewrightError && error.code === "http" && ABSENT_STATUS.has(error.status));
}

/** All bytes of a file. Throws `format` for more than `limit`. */
export async function readAll(file: ModelFile, limit = Infinity): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  for (let piece; (piece = await file.read(length)) !== undefined;) {
    pieces.push(piece);
    length += piece.length;
    if (length > limit) {
      throw new TilewrightError("format", `${file.name} is larger than ${limit} bytes, expected less`);
    }
  }
  return join(pieces, length);
}

/** A file on the disk, or the files of a Hugging Face folder there. */
async function filesAt(file: PathSpec, { extras }: OpenContext): Promise<FileSpec[]> {
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
  for (const name of [...OPTIONAL_FILES, ...extras, INDEX]) {
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
  if (impostor === A_WEB_PAGE) {
    throw new WebPage(name);
  }
  if (impostor !== undefined) {
    throw new TilewrightError("not_a_model", `${name} holds ${impostor}, not a model file`);
  }
}

/** A file that the user picked. */
class BlobFile implements ModelFile {
  readonly name: string;
  readonly isLocal = true;
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

  bytes(offset: number, length: number): Promise<Uint8Array> {
    return readBlob(this.name, this.#blob, offset, length);
  }

  async finish(): Promise<void> {
    this.arrived = this.size;
  }

  pause(): void {}

  async close(): Promise<void> {}
}

async function readBlob(name: string, blob: Blob, offset: number, length = CHUNK_BYTES): Promise<Uint8Array> {
  try {
    return new Uint8Array(await blob.slice(offset, offset + length).arrayBuffer());
  } catch (error) {
    throw new TilewrightError("storage", `${name} cannot be read any more; it may have been moved or changed (${messageOf(error)})`, { cause: error });
  }
}

/** A file with a path, in Node and Deno. */
class PathFile implements ModelFile {
  readonly name: string;
  readonly isLocal = true;
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
    const bytes = await this.bytes(offset, CHUNK_BYTES);
    if (offset === 0) {
      checkStart(this.name, bytes);
    }
    this.arrived = Math.max(this.arrived, offset + bytes.length);
    return bytes.length === 0 ? undefined : bytes;
  }

  async bytes(offset: number, length: number): Promise<Uint8Array> {
    try {
      const buffer = new Uint8Array(length);
      return buffer.subarray(0, (await this.#handle.read(buffer, 0, length, offset)).bytesRead);
    } catch (error) {
      throw unreadable(this.name, error);
    }
  }

  async finish(): Promise<void> {
    this.arrived = this.size;
  }

  pause(): void {}

  async close(): Promise<void> {
    await this.#handle.close();
  }
}

/** A file here whose digest is compared when all of it has been read. */
class PinnedFile implements ModelFile {
  readonly name: string;
  readonly phase = "file";
  readonly size: number | undefined;
  readonly #file: ModelFile;
  readonly #expected: string;
  readonly #digest: Sha256;
  #digested = 0;

  constructor(file: ModelFile, expected: string, digest: Sha256) {
    this.name = file.name;
    this.size = file.size;
    this.#file = file;
    this.#expected = expected;
    this.#digest = digest;
  }

  get isLocal(): boolean {
    return this.#file.isLocal;
  }

  get arrived(): number {
    return this.#file.arrived;
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    // What lies between is part of the digest although the engine does not want it.
    while (this.#digested < offset && await this.#digestMore() !== undefined);
    return offset === this.#digested ? this.#digestMore() : this.#file.read(offset);
  }

  bytes(offset: number, length: number): Promise<Uint8Array> {
    return this.#file.bytes(offset, length);
  }

  async finish(): Promise<void> {
    while (await this.#digestMore() !== undefined);
    const found = this.#digest.hex();
    if (found !== this.#expected) {
      throw otherDigest(this.name, found, this.#expected);
    }
    await this.#file.finish();
  }

  pause(): void {}

  async close(useless: boolean): Promise<void> {
    this.#digest.free();
    await this.#file.close(useless);
  }

  async #digestMore(): Promise<Uint8Array | undefined> {
    const bytes = await this.#file.read(this.#digested);
    if (bytes !== undefined) {
      this.#digest.update(bytes);
      this.#digested += bytes.length;
    }
    return bytes;
  }
}

function unreadable(path: string, cause: unknown): TilewrightError {
  return new TilewrightError("storage", `${path} cannot be read: ${messageOf(cause)}`, { cause });
}

/** A copy that was kept by an earlier load, and read without a look at its digest. */
export class KeptCopy {
  readonly url: string;
  readonly #store: Store;
  readonly #record: StoredRecord;
  readonly #bytes: Blob;
  readonly #newDigest: () => Sha256;

  constructor(url: string, store: Store, record: StoredRecord, bytes: Blob, newDigest: () => Sha256) {
    this.url = url;
    this.#store = store;
    this.#record = record;
    this.#bytes = bytes;
    this.#newDigest = newDigest;
  }

  /**
   * Whether its bytes are those that were downloaded. `turn` is awaited before each piece. A copy can be unreadable because another one
   * has taken its place.
   */
  async check(turn: () => Promise<void>): Promise<"good" | "damaged" | "unreadable"> {
    const digest = this.#newDigest();
    try {
      for (let offset = 0; offset < this.#bytes.size; offset += VERIFY_BYTES) {
        await turn();
        let piece: ArrayBuffer;
        try {
          piece = await this.#bytes.slice(offset, offset + VERIFY_BYTES).arrayBuffer();
        } catch {
          return "unreadable";
        }
        digest.update(new Uint8Array(piece));
      }
      return this.#record.sha256 === undefined || digest.hex() === this.#record.sha256 ? "good" : "damaged";
    } finally {
      digest.free();
    }
  }

  /** Deletes it, unless another one has taken its place. Throws `storage` while another tab loads it. */
  async delete(signal: AbortSignal): Promise<void> {
    const owned = await this.#store.claim(this.url, "exclusive", signal);
    if (owned === undefined) {
      throw new TilewrightError("storage", `the kept copy of ${this.url} is damaged, and another tab is loading it; try again after that`);
    }
    try {
      if (owned.whole?.date === this.#record.date) {
        await owned.removeWhole();
      }
    } finally {
      owned.release();
    }
  }
}

/** A file that was read as a whole when it was opened, so that it needs no connection while others are read. */
class SmallFile implements ModelFile {
  readonly #file: UrlFile;
  readonly #bytes: Uint8Array;

  private constructor(file: UrlFile, bytes: Uint8Array) {
    this.#file = file;
    this.#bytes = bytes;
  }

  static async open(file: UrlFile): Promise<SmallFile> {
    try {
      return new SmallFile(file, await readAll(file, SMALL_FILE_BYTES));
    } catch (error) {
      await file.close(isUseless(error));
      throw error;
    }
  }

  get name(): string {
    return this.#file.name;
  }

  get url(): string {
    return this.#file.url;
  }

  get isKept(): boolean {
    return this.#file.isKept;
  }

  get isLocal(): boolean {
    return this.#file.isLocal;
  }

  get phase(): Progress["phase"] {
    return this.#file.phase;
  }

  get size(): number {
    return this.#bytes.length;
  }

  get arrived(): number {
    return this.#file.arrived;
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    return offset < this.size ? this.#bytes.subarray(offset, offset + CHUNK_BYTES) : undefined;
  }

  async bytes(offset: number, length: number): Promise<Uint8Array> {
    return this.#bytes.subarray(offset, offset + length);
  }

  finish(): Promise<void> {
    return this.#file.finish();
  }

  pause(): void {}

  close(useless: boolean): Promise<void> {
    return this.#file.close(useless);
  }
}

/** A file on a server, with the part of it that is kept here already. */
class UrlFile implements ModelFile {
  readonly name: string;
  readonly url: string;
  readonly #headers: Record<string, string> | undefined;
  /** SHA-256 that the file must have, where that is known. */
  readonly #expected: string | undefined;
  /** Whether the caller says so: then a kept copy is compared as well, before anything runs with it. */
  readonly #isPinned: boolean;
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
  /** What it must be by Git, and what has come of it so far. */
  readonly #git: GitBlob | undefined;
  #gitDigest: GitDigest | undefined;
  #digested = 0;
  /** Where the next bytes come from. */
  #position = 0;
  /** The chunk read last, and where it begins: the engine goes back into it when it turns from a header to the data behind. */
  #last: Uint8Array = new Uint8Array();
  #lastOffset = 0;
  arrived = 0;

  private constructor(spec: UrlSpec, context: OpenContext, httpCache: RequestCache) {
    this.name = spec.name;
    this.url = spec.url;
    this.#headers = spec.headers;
    this.#expected = spec.sha256;
    this.#git = spec.git;
    this.#isPinned = spec.isPinned === true;
    this.#context = context;
    this.#httpCache = httpCache;
  }

  /** Opens a file. `lazily`: the server is asked what there is, and no connection is held until the first read. */
  static async open(spec: UrlSpec, context: OpenContext, httpCache: RequestCache, lazily: boolean): Promise<UrlFile> {
    const file = new UrlFile(spec, context, httpCache);
    try {
      await file.#claim();
      const hasDigest = file.#expected !== undefined || file.#git !== undefined;
      if (context.peek !== true && hasDigest && (file.#isPinned || !file.#isComplete)) {
        file.#digest ??= context.newDigest();
        file.#gitDigest = file.#git && new GitDigest(file.#git.size);
      }
      if (!file.#isComplete) {
        const options = { ...file.#downloadOptions, lazily: lazily || file.#inPieces };
        file.#download = await file.#resume(options) ?? await Download.open(spec.url, options);
      }
      return file;
    } catch (error) {
      await file.close(false);
      throw error;
    }
  }

  /** Whether all of it is from a copy that an earlier load kept. */
  get isKept(): boolean {
    return this.#isComplete;
  }

  get isLocal(): boolean {
    return this.#context.store !== undefined;
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
    if (offset < this.#position || (this.#isComplete && this.#digest === undefined) || this.#inPieces) {
      this.#position = offset;
    }
    // Bytes before the offset belong to the file that is kept and to its digest although the engine does not want them.
    for (;;) {
      const chunk = await this.#readChunk();
      if (chunk === undefined || offset < this.#position) {
        return chunk?.subarray(offset - this.#lastOffset);
      }
    }
  }

  bytes(offset: number, length: number): Promise<Uint8Array> {
    return readBlob(this.url, this.#kept, offset, length);
  }

  async finish(): Promise<void> {
    if (this.#isComplete && this.#digest === undefined) {
      this.arrived = this.#kept.size;
      return;
    }
    this.#position = Math.max(this.#position, this.#digested);
    while ((await this.#readChunk()) !== undefined) {
      // Reading is all there is to do: each chunk is kept and digested on its way.
    }
    const sha256 = this.#digest?.hex();
    if (sha256 !== undefined && this.#expected !== undefined && sha256 !== this.#expected) {
      throw this.#isComplete
        ? new TilewrightError("storage", `the kept copy of ${this.url} is damaged: its SHA-256 is ${sha256}, expected ${this.#expected}`)
        : otherDigest(this.url, sha256, this.#expected);
    }
    if (this.#isComplete) {
      return;
    }
    const sha1 = this.#gitDigest?.hex();
    this.#gitDigest = undefined;
    if (sha1 !== undefined && sha1 !== this.#git?.sha1) {
      throw new TilewrightError("digest", `${this.url}: it has the Git digest ${sha1}, expected ${this.#git?.sha1}`);
    }
    await this.#storing(async (stored) => {
      const writer = await this.#openWriter(stored);
      const size = await writer.flush(true);
      await stored.save({ ...this.#newRecord(stored, size), size, complete: true, ...(sha256 === undefined ? {} : { sha256 }) });
      writer.close();
      this.#writer = undefined;
      this.#context.onStored(size);
      await this.#context.onKept?.();
    });
  }

  pause(): void {
    this.#download?.close();
  }

  async close(useless: boolean): Promise<void> {
    this.#download?.close();
    this.#digest?.free();
    this.#digest = undefined;
    if (useless && !this.#isComplete) {
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

  /** Whether it is read in pieces; a text is read as a whole anyway. */
  get #inPieces(): boolean {
    return this.#context.peek === true && !/\.(json|jinja)$/.test(this.name);
  }

  get #asking(): Asking {
    const { fetch } = this.#context;
    return { ...(fetch === undefined ? {} : { fetch }), ...(this.#headers === undefined ? {} : { headers: this.#headers }) };
  }

  get #downloadOptions(): DownloadOptions {
    const { signal, notify } = this.#context;
    const onReconnect = (message: string): void => notify({ code: "reconnected", message });
    return { ...this.#asking, signal, httpCache: this.#httpCache, inPieces: this.#inPieces, onReconnect };
  }

  /** Finds out what is kept, and keeps others from changing it. */
  async #claim(): Promise<void> {
    const { store, newDigest, notify, onCopy, signal, peek, mustKeep } = this.#context;
    if (store === undefined) {
      return;
    }
    try {
      const readable = await store.claim(this.url, "shared", signal);
      const whole = readable?.whole;
      this.#stored = readable;
      const bytes = readable !== undefined && whole !== undefined && await this.#isCurrent(whole) ? await this.#bytesOf(readable, whole) : undefined;
      if (whole !== undefined && bytes !== undefined) {
        this.#kept = bytes;
        this.#record = whole;
        onCopy(new KeptCopy(this.url, store, whole, bytes, newDigest));
        return;
      }
      readable?.release();
      this.#stored = undefined;
      if (peek === true) {
        return;
      }
      this.#stored = readable && await store.claim(this.url, "exclusive", signal);
      if (this.#stored === undefined) {
        if (mustKeep === true) {
          throw new TilewrightError("storage", `${this.url} is being loaded elsewhere, here or in another tab; it can be fetched after that`);
        }
        notify({ code: "not_cached", message: `${this.url} is being loaded in another tab as well; this tab does not keep its copy` });
        return;
      }
      const { part } = this.#stored;
      if (part !== undefined && part.stored > 0) {
        this.#kept = await this.#stored.bytes(part);
        this.#record = part;
      } else {
        await this.#stored.removePart();
      }
      this.#digest = newDigest();
    } catch (error) {
      this.#context.signal.throwIfAborted();
      await this.#giveUpStoring(error);
    }
  }

  /** The bytes of a complete copy, unless some of them are missing. */
  async #bytesOf(stored: StoredFile, whole: StoredRecord): Promise<Blob | undefined> {
    try {
      return await stored.bytes(whole);
    } catch (error) {
      this.#context.notify(damaged(this.url, messageOf(error)));
      return undefined;
    }
  }

  /** Asks the server whether a kept file is still the newest. Without an answer it is taken as it is. */
  async #isCurrent(record: StoredRecord): Promise<boolean> {
    const known = this.#expected !== undefined && record.sha256 !== undefined;
    const version = known ? {} : await askVersion(this.url, this.#context.signal, this.#asking);
    if (version === undefined) {
      this.#context.notify({ code: "not_revalidated", message: `${this.url} could not be checked for a newer version; the kept copy is used` });
      return true;
    }
    const current = known ? record.sha256 === this.#expected : !differs(record, version);
    if (!current) {
      this.#context.notify({ code: "cache_outdated", message: `${this.url} is newer on the server than the kept copy; it is downloaded again` });
    }
    return current;
  }

  /** Goes on behind what is kept of an interrupted download, if the server still has the same file. */
  async #resume(options: DownloadOptions): Promise<Download | undefined> {
    if (this.#stored === undefined || this.#record === undefined) {
      return undefined;
    }
    const download = await Download.resume(this.url, this.#kept.size, versionOf(this.#record), options);
    if (download === undefined) {
      this.#context.notify({ code: "cache_outdated", message: `${this.url} was replaced since its download was interrupted; it begins anew` });
      this.#kept = new Blob();
      this.#record = undefined;
    }
    return download;
  }

  #newRecord({ address }: StoredFile, stored: number): StoredRecord {
    return { ...this.#download?.version, url: address, stored, complete: false, date: Date.now() };
  }

  /** Writing begins with the first byte that is new: a browser gives nothing of a file to read any more once it is written to. */
  async #openWriter(stored: StoredFile): Promise<StoreWriter> {
    this.#written = this.#writer === undefined ? this.#kept.size : this.#written;
    return this.#writer ??= await stored.write(this.#newRecord(stored, this.#written));
  }

  async #saveProgress(stored: StoredFile): Promise<void> {
    if (this.#writer === undefined) {
      return;
    }
    const bytes = await this.#writer.flush(false);
    if (bytes > 0) {
      await stored.save(this.#newRecord(stored, bytes));
      await this.#context.onKept?.();
    } else {
      await stored.removePart();
    }
  }

  /** About a mebibyte from the position on, kept and digested. */
  async #readChunk(): Promise<Uint8Array | undefined> {
    const chunk = this.#position < this.#kept.size && this.#writer === undefined
      ? await readBlob(this.url, this.#kept, this.#position)
      : await this.#readNetwork();
    if (chunk === undefined) {
      return undefined;
    }
    if (this.#position === 0) {
      checkStart(this.url, chunk);
    }
    const end = this.#position + chunk.length;
    if (this.#digest !== undefined && end > this.#digested) {
      const more = chunk.subarray(this.#digested - this.#position);
      this.#digest.update(more);
      this.#gitDigest?.update(more);
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
    // Pieces are not read ahead: the first may be all that is wanted.
    while (length < CHUNK_BYTES && (length === 0 || !this.#inPieces || download.isOpen)) {
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
    if (this.#context.mustKeep === true) {
      // What another tab writes is not ours.
      if (this.#stored !== undefined) {
        await this.#drop();
      }
      throw error instanceof TilewrightError ? error
        : new TilewrightError(isFull(error) ? "quota" : "storage", `${this.url} cannot be kept: ${messageOf(error)}`, { cause: error });
    }
    const why = isFull(error) ? `the browser's storage for this page is full (${messageOf(error)})` : `the browser's storage failed (${messageOf(error)})`;
    this.#context.notify({ code: "not_cached", message: `${this.url} will not be kept for the next time: ${why}` });
    if (this.#position < this.#kept.size) {
      // Nothing was given out yet that the server could not give again.
      this.#kept = new Blob();
      this.#record = undefined;
    }
    await this.#drop();
  }

  /** Deletes what is kept of this download, or the complete copy that cannot be read, and keeps nothing more. */
  async #drop(): Promise<void> {
    this.#writer?.close();
    this.#writer = undefined;
    this.#stored?.release();
    this.#stored = undefined;
    let owned: StoredFile | undefined;
    try {
      owned = await this.#context.store?.claim(this.url, "exclusive");
      await owned?.removePart();
    } catch (error) {
      this.#context.notify({ code: "not_cached", message: `what was kept of ${this.url} could not be deleted (${messageOf(error)})` });
    } finally {
      owned?.release();
    }
  }
}

/** The notice for a kept copy that is not what was downloaded. */
export function damaged(url: string, why: string): Notice {
  return { code: "cache_damaged", message: `the kept copy of ${url} is damaged (${why}); it is downloaded again` };
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
