/** A model's files as byte streams: from addresses, blobs or paths. */

import { fetchVersion, A_WEB_PAGE, describeImpostor, differs, Download, WebPage, type DownloadOptions } from "./download.js";
import { codeOf, ensure, type ErrorCode, messageOf, TilewrightError } from "./errors.js";
import type { Fetch } from "./fetching.js";
import { GitDigest } from "./git.js";
import { defined, hexOf } from "./helpers.js";
import { importHidden } from "./platform.js";
import type { FileSpec, PathSpec, Pins, SourceSpec, UrlSpec } from "./protocol.js";
import type { Store, StoredFile, StoredRecord, StoreWriter } from "./store.js";
import type { Sha256 } from "./tilewright.js";
import type { Notice, Progress } from "./types.js";

const CHUNK_BYTES = 1 << 20;
/** Bytes between updates of a download's record. */
const FLUSH_BYTES = 16 << 20;
/** Most bytes of a file that is read as a whole: more than any vocabulary needs. */
const SMALL_FILE_BYTES = 256 << 20;
/** Milliseconds until a folder's missing files are requested again. */
const ABSENT_MS = 24 * 60 * 60 * 1000;

/** One file of a model. Reading is sequential; going back may be slow. */
export interface ModelFile {
  readonly name: string;
  /** Its address, if it can be stored. */
  readonly url?: string | undefined;
  readonly size: number | undefined;
  /** Whether it is a complete cached copy. */
  readonly isKept?: boolean;
  /** Whether it can be read again after the load: it is local, or a copy is stored. */
  readonly isLocal: boolean;
  readonly phase: Progress["phase"];
  readonly arrived: number;
  /** Some bytes from `offset`, or `undefined` at the end of the file. */
  read(offset: number): Promise<Uint8Array | undefined>;
  /** `length` bytes from `offset`, fewer at the end, of a local file. */
  bytes(offset: number, length: number): Promise<Uint8Array>;
  /** Reads the rest, to store the file and compare its digest. */
  finish(): Promise<void>;
  /** Closes connections while other files are read. */
  pause(): void;
  /** `useless`: what is stored of it is deleted. */
  close(useless: boolean): Promise<void>;
}

export interface OpenContext {
  signal: AbortSignal;
  /** Where downloads are stored, if they are. */
  store: Store | undefined;
  /** Names of optional files of a folder. */
  extras: readonly string[];
  /** Reads little of large files, and stores nothing: stored copies are read, and other files fetched in pieces. */
  peek?: boolean;
  /** A file that cannot be stored is an error. */
  mustKeep?: boolean;
  fetch?: Fetch;
  newDigest(): Sha256;
  notify(notice: Notice): void;
  onCopy(copy: StoredCopy): void;
  /** Called when this many more bytes are stored. */
  onStored(bytes: number): void;
  /** Called when a part of a file is stored. */
  onKept?(): Promise<void>;
  onBytes(file: ModelFile): void;
}

/** Codes of errors that make a file useless. */
const USELESS: ReadonlySet<ErrorCode> = new Set<ErrorCode>(
  ["format", "unsupported", "config", "tokenizer", "truncated", "not_a_model", "range", "digest", "storage", "non_finite"]);

export function isUseless(error: unknown): boolean {
  return USELESS.has(codeOf(error));
}

/** Opens all files of a model, in order. Once one with an address is stored, the model's record lists them. */
export async function openFiles(source: SourceSpec, context: OpenContext): Promise<ModelFile[]> {
  const { given, pins } = source;
  const { store, peek } = context;
  let isNoted = false;
  let files: ModelFile[] = [];
  const onKept = async (): Promise<void> => {
    if (given !== undefined && store !== undefined && peek !== true && !isNoted && files.length > 0) {
      isNoted = true;
      // A failure only loses which copies belong together.
      await store.setModel({ ...given, files: files.flatMap(({ url }) => url ?? []) }).catch(() => {});
    }
  };
  const own = { ...context, onKept };
  switch (source.kind) {
    case "files":
      files = await openAll(source.files, pins, own);
      break;
    case "folder":
      files = await openFolder(source.url, pins, own);
      break;
    case "path":
      files = await openAll(await filesAt(source.file, own), pins, own);
      break;
    case "builtin":
      // The page's own file needs no second copy: the browser's HTTP cache has it.
      files = await openAll([builtinSpec()], pins, { ...own, store: undefined }, "default");
  }
  if (files.some(({ isKept }) => isKept === true)) {
    await onKept();
  }
  return files;
}

/** Digests by file name. A digest without a name needs a single file. */
function pinsOf(pins: Pins, names: readonly string[]): Record<string, string> {
  const shown = names.slice(0, 40).join(", ");
  if (typeof pins === "string") {
    const [name, ...others] = names;
    ensure(name !== undefined && others.length === 0,
      "option", `sha256 is one digest, and the model has the files ${shown}; expected an object of digests by their names`);
    return { [name]: pins };
  }
  const unknown = Object.keys(pins).find((name) => !names.includes(name));
  ensure(unknown === undefined,
    "option", `sha256 has the key ${JSON.stringify(unknown)}, and the model has the files ${shown}`);
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

async function openAll(
  given: FileSpec[], pins: Pins | undefined, context: OpenContext, httpCache: RequestCache = "no-store",
): Promise<ModelFile[]> {
  const sha256 = pins === undefined ? {} : pinsOf(pins, given.map(({ name }) => name));
  return together(given.map(async (unpinned): Promise<ModelFile> => {
    const spec = withPin(unpinned, sha256[unpinned.name]);
    switch (spec.kind) {
      case "url":
        // Others may be read first, so it must hold no connection.
        return UrlFile.open(spec, context, given.length > 1, httpCache);
      case "blob":
        return new BlobFile(spec, context);
      case "path":
        return PathFile.open(spec, context);
    }
  }));
}

/** Files that are opened concurrently, without absent ones. If one fails, all are closed. */
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

function builtinSpec(): FileSpec {
  const url = new URL("./stories.gguf", import.meta.url);
  return url.protocol === "file:" ? { kind: "path", name: "stories.gguf", path: url.href } : { kind: "url", name: "stories.gguf", url: url.href };
}

/** Files of a Hugging Face folder besides its weights: required and optional ones. */
export const TOKENIZER = "tokenizer.json";
export const NEEDED_FILES: readonly string[] = ["config.json", TOKENIZER];
export const OPTIONAL_FILES: readonly string[] = ["tokenizer_config.json", "generation_config.json"];
/** The chat template of newer folders. */
export const CHAT_FILES: readonly string[] = ["chat_template.jinja"];
export const SENTENCE_FILES: readonly string[] = [
  "modules.json", "1_Pooling/config.json", "1_LogitScore/config.json", "1_Dense/config.json", "2_Dense/config.json",
  "3_Dense/config.json", "1_Dense/model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors",
  "sentence_bert_config.json", "config_sentence_transformers.json", "artifact.metadata",
];
export const INDEX = "model.safetensors.index.json";

/** The weight files in an index. */
function shardsOf(index: string, where: string): string[] {
  let map: unknown;
  try {
    map = (JSON.parse(index) as { weight_map?: unknown } | null)?.weight_map;
  } catch (error) {
    throw new TilewrightError("format", `${where}: not JSON: ${messageOf(error)}`);
  }
  const names = typeof map === "object" && map !== null ? [...new Set<unknown>(Object.values(map))] : [];
  const good = names.filter((name) => typeof name === "string" && /^[^/\\]+\.safetensors$/.test(name));
  ensure(good.length !== 0 && good.length === names.length,
    "format", `${where}: weight_map does not name safetensors files of the same folder`);
  return (good as string[]).sort();
}

/**
 * Opens the files of a Hugging Face folder on a server. All are requested at the same time; absent ones are requested
 * again after a day, or when the folder has changed.
 */
async function openFolder(folder: string, pins: Pins | undefined, context: OpenContext): Promise<ModelFile[]> {
  ensure(typeof pins !== "string",
    "option", "sha256 is one digest, and the source is a folder, expected an object of digests by the names of its files");
  const specOf = (name: string): UrlSpec => withPin({ name, url: new URL(name, folder).href }, pins?.[name]);
  const openLazily = (name: string): Promise<UrlFile> => UrlFile.open(specOf(name), context, true);
  const openSmall = async (name: string): Promise<UrlFile> => (await UrlFile.open(specOf(name), context, false)).readWhole();
  const remembered = await context.store?.absent(folder).catch(() => undefined);
  // A vocabulary is large, and headers do not need it.
  const needed = NEEDED_FILES.map((name) => context.peek === true && name === TOKENIZER ? openLazily(name) : openSmall(name));
  const isUnchanged = Promise.all(needed).then((files) => files.every(({ isKept }) => isKept), () => false);
  const absent: string[] = [];
  let hasAsked = false;
  const openOptional = async (name: string): Promise<UrlFile | undefined> => {
    const wasAbsent = remembered?.names.has(name) === true;
    if (!wasAbsent || Date.now() - remembered.date > ABSENT_MS || !await isUnchanged) {
      try {
        const file = await openSmall(name);
        hasAsked ||= !file.isKept;
        return file;
      } catch (error) {
        // Offline, the record of the load that stored the others counts.
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
      // A failure only costs requests later.
      await context.store?.setAbsent(folder, absent).catch(() => {});
    }
    const index = files.find(({ name }) => name === INDEX);
    const shards = index === undefined ? ["model.safetensors"] : shardsOf(new TextDecoder().decode(await readAll(index)), `${folder}${INDEX}`);
    if (pins !== undefined) {
      pinsOf(pins, [...files.map(({ name }) => name), ...shards]);
    }
    return [...files, ...await together(shards.map(openLazily))];
  } catch (error) {
    await closeAll(files, error);
    throw error;
  }
}

/** Statuses for absent files: S3 denies access to them. Some servers send a web page instead. */
const ABSENT_STATUS: ReadonlySet<number | undefined> = new Set([401, 403, 404, 410]);

function isAbsent(error: unknown): boolean {
  return error instanceof WebPage || (error instanceof TilewrightError && error.code === "http" && ABSENT_STATUS.has(error.status));
}

/** All bytes of a file. Throws `format` beyond `limit`. */
export async function readAll(file: ModelFile, limit = Infinity): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  for (let piece; (piece = await file.read(length)) !== undefined;) {
    pieces.push(piece);
    length += piece.length;
    ensure(length <= limit, "format", `${file.name} is larger than ${limit} bytes, expected less`);
  }
  return join(pieces, length);
}

/** A file on the disk, or the files of a Hugging Face folder. */
async function filesAt(file: PathSpec, { extras }: OpenContext): Promise<FileSpec[]> {
  const { access, readFile, stat } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
  const { join: joinPath } = await importHidden<typeof import("node:path")>("node:path");
  try {
    const folder = await pathOf(file);
    if (!(await stat(folder)).isDirectory()) {
      return [file];
    }
    const at = (name: string): string => joinPath(folder, name);
    const optional = [...OPTIONAL_FILES, ...extras, INDEX];
    const isThere = await Promise.all(optional.map((name) => access(at(name)).then(() => true, () => false)));
    const names = [...NEEDED_FILES, ...optional.filter((_, i) => isThere[i])];
    const shards = names.includes(INDEX) ? shardsOf(await readFile(at(INDEX), "utf8"), at(INDEX)) : ["model.safetensors"];
    return [...names, ...shards].map((name) => ({ kind: "path", name, path: at(name) }));
  } catch (error) {
    throw error instanceof TilewrightError ? error : unreadable(file.path, error);
  }
}

async function pathOf({ path }: PathSpec): Promise<string> {
  const { fileURLToPath } = await importHidden<typeof import("node:url")>("node:url");
  return path.startsWith("file:") ? fileURLToPath(path) : path;
}

/** Throws if a file does not begin like a model. */
function checkStart(name: string, bytes: Uint8Array): void {
  const impostor = describeImpostor(bytes);
  if (impostor === A_WEB_PAGE) {
    throw new WebPage(name);
  }
  ensure(impostor === undefined, "not_a_model", `${name} holds ${impostor}, not a model file`);
}

/** A file of this machine. If a SHA-256 is required, all of it is read and compared. */
abstract class LocalFile implements ModelFile {
  readonly name: string;
  readonly isLocal = true;
  readonly phase = "file";
  arrived = 0;
  readonly #sha256: string | undefined;
  readonly #digest: Sha256 | undefined;
  #digested = 0;

  constructor({ name, sha256 }: FileSpec, readonly size: number, { newDigest, peek }: Pick<OpenContext, "newDigest" | "peek">) {
    this.name = name;
    this.#sha256 = sha256;
    this.#digest = sha256 === undefined || peek === true ? undefined : newDigest();
  }

  abstract bytes(offset: number, length: number): Promise<Uint8Array>;

  async read(offset: number): Promise<Uint8Array | undefined> {
    // Bytes that the engine skips are part of the digest.
    while (this.#digest !== undefined && this.#digested < offset && await this.#readChunk(this.#digested) !== undefined);
    return this.#readChunk(offset);
  }

  async finish(): Promise<void> {
    if (this.#digest !== undefined && this.#sha256 !== undefined) {
      while (await this.#readChunk(this.#digested) !== undefined);
      const found = this.#digest.hex();
      if (found !== this.#sha256) {
        throw otherDigest(this.name, found, this.#sha256);
      }
    }
    this.arrived = this.size;
  }

  pause(): void {}

  async close(): Promise<void> {
    this.#digest?.free();
  }

  async #readChunk(offset: number): Promise<Uint8Array | undefined> {
    const bytes = await this.bytes(offset, CHUNK_BYTES);
    if (offset === 0) {
      checkStart(this.name, bytes);
    }
    if (offset === this.#digested) {
      this.#digest?.update(bytes);
      this.#digested += bytes.length;
    }
    this.arrived = Math.max(this.arrived, offset + bytes.length);
    return bytes.length === 0 ? undefined : bytes;
  }
}

/** A file that the user picked. */
class BlobFile extends LocalFile {
  readonly #blob: Blob;

  constructor(spec: FileSpec & { kind: "blob" }, context: Pick<OpenContext, "newDigest" | "peek">) {
    super(spec, spec.blob.size, context);
    this.#blob = spec.blob;
  }

  bytes(offset: number, length: number): Promise<Uint8Array> {
    return readBlob(this.name, this.#blob, offset, length);
  }
}

/**
 * The files, with one that arrives from a server in memory: for a format whose headers are among its weights, so that all of
 * it is read before its beginning is read again.
 */
export async function inMemory(files: ModelFile[], newDigest: OpenContext["newDigest"]): Promise<ModelFile[]> {
  const [only, ...others] = files;
  if (only === undefined || others.length > 0 || only.url === undefined || only.isKept === true) {
    return files;
  }
  const bytes = await readAll(only);
  await only.finish();
  return [new BlobFile({ kind: "blob", name: only.name, blob: new Blob([bytes as Uint8Array<ArrayBuffer>]) }, { newDigest, peek: true })];
}

async function readBlob(name: string, blob: Blob, offset: number, length = CHUNK_BYTES): Promise<Uint8Array> {
  try {
    return new Uint8Array(await blob.slice(offset, offset + length).arrayBuffer());
  } catch (error) {
    throw new TilewrightError("storage", `${name} cannot be read any more; it may have been moved or changed (${messageOf(error)})`, { cause: error });
  }
}

class PathFile extends LocalFile {
  private constructor(spec: PathSpec, size: number, context: OpenContext, private readonly handle: import("node:fs/promises").FileHandle) {
    super(spec, size, context);
  }

  static async open(spec: PathSpec, context: OpenContext): Promise<PathFile> {
    const { open } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
    try {
      const handle = await open(await pathOf(spec));
      return new PathFile(spec, (await handle.stat()).size, context, handle);
    } catch (error) {
      throw unreadable(spec.path, error);
    }
  }

  async bytes(offset: number, length: number): Promise<Uint8Array> {
    try {
      const buffer = new Uint8Array(length);
      return buffer.subarray(0, (await this.handle.read(buffer, 0, length, offset)).bytesRead);
    } catch (error) {
      throw unreadable(this.name, error);
    }
  }

  override async close(): Promise<void> {
    await super.close();
    await this.handle.close();
  }
}

function unreadable(path: string, cause: unknown): TilewrightError {
  return new TilewrightError("storage", `${path} cannot be read: ${messageOf(cause)}`, { cause });
}

/** A copy that an earlier load stored. Its digest is checked after it was read. */
export class StoredCopy {
  constructor(
    readonly url: string, private readonly store: Store, private readonly record: StoredRecord, private readonly bytes: Blob,
    private readonly newDigest: () => Sha256,
  ) {}

  /** Compares its digest, and awaits `turn` before each piece. A copy that was replaced can be unreadable. */
  async check(turn: () => Promise<void>): Promise<"good" | "damaged" | "unreadable"> {
    const { sha256 } = this.record;
    const found = await hexOf(this.bytes, this.newDigest(), turn);
    return found === undefined ? "unreadable" : sha256 === undefined || found === sha256 ? "good" : "damaged";
  }

  /** Deletes it, unless it was replaced. Throws `storage` while another tab loads it. */
  async delete(signal: AbortSignal): Promise<void> {
    const owned = await this.store.claim(this.url, "exclusive", signal);
    ensure(owned !== undefined,
      "storage", `the cached copy of ${this.url} is damaged, and another tab is loading it; try again after that`);
    try {
      if (owned.whole?.date === this.record.date) {
        await owned.removeWhole();
      }
    } finally {
      owned.release();
    }
  }
}

/** A file on a server, and its stored part. */
class UrlFile implements ModelFile {
  #download: Download | undefined;
  #stored: StoredFile | undefined;
  #record: StoredRecord | undefined;
  /** The stored bytes when the file was opened. */
  #kept = new Blob();
  #writer: StoreWriter | undefined;
  #written = 0;
  #digest: Sha256 | undefined;
  #gitDigest: GitDigest | undefined;
  #digested = 0;
  #position = 0;
  /** The latest chunk and its offset: after a header, the engine goes back into it. */
  #last: Uint8Array = new Uint8Array();
  #lastOffset = 0;
  /** All bytes, after `readWhole`. */
  #whole: Uint8Array | undefined;
  arrived = 0;

  private constructor(
    private readonly spec: UrlSpec, private readonly context: OpenContext, private readonly httpCache: RequestCache,
  ) {}

  /** `lazily`: only requests the file's version, and connects at the first read. */
  static async open(spec: UrlSpec, context: OpenContext, lazily: boolean, httpCache: RequestCache = "no-store"): Promise<UrlFile> {
    const file = new UrlFile(spec, context, httpCache);
    try {
      await file.#claim();
      const hasDigest = spec.sha256 !== undefined || spec.git !== undefined;
      if (context.peek !== true && hasDigest && (spec.isPinned === true || !file.#isComplete)) {
        file.#digest ??= context.newDigest();
        file.#gitDigest = spec.git && new GitDigest(spec.git.size);
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

  /** Reads a small file now, so that it needs no connection later. */
  async readWhole(): Promise<this> {
    try {
      this.#whole = await readAll(this, SMALL_FILE_BYTES);
      return this;
    } catch (error) {
      await this.close(isUseless(error));
      throw error;
    }
  }

  get name(): string {
    return this.spec.name;
  }

  get url(): string {
    return this.spec.url;
  }

  get isKept(): boolean {
    return this.#isComplete;
  }

  get isLocal(): boolean {
    return this.context.store !== undefined;
  }

  get phase(): "cache" | "download" {
    return this.#position < this.#kept.size || this.#isComplete ? "cache" : "download";
  }

  get size(): number | undefined {
    return this.#whole?.length ?? (this.#isComplete ? this.#kept.size : this.#download?.version.size);
  }

  async read(offset: number): Promise<Uint8Array | undefined> {
    if (this.#whole !== undefined) {
      return offset < this.#whole.length ? this.#whole.subarray(offset, offset + CHUNK_BYTES) : undefined;
    }
    if (offset >= this.#lastOffset && offset < this.#lastOffset + this.#last.length) {
      return this.#last.subarray(offset - this.#lastOffset);
    }
    if (offset < this.#position || (this.#isComplete && this.#digest === undefined) || this.#inPieces) {
      this.#position = offset;
    }
    // Bytes that the engine skips are stored and digested too.
    for (;;) {
      const chunk = await this.#readChunk();
      if (chunk === undefined || offset < this.#position) {
        return chunk?.subarray(offset - this.#lastOffset);
      }
    }
  }

  async bytes(offset: number, length: number): Promise<Uint8Array> {
    return this.#whole?.subarray(offset, offset + length) ?? readBlob(this.url, this.#kept, offset, length);
  }

  async finish(): Promise<void> {
    if (this.#isComplete && this.#digest === undefined) {
      this.arrived = this.#kept.size;
      return;
    }
    this.#position = Math.max(this.#position, this.#digested);
    // Each chunk is stored and digested as it is read.
    while (await this.#readChunk() !== undefined);
    const sha256 = this.#digest?.hex();
    if (sha256 !== undefined && this.spec.sha256 !== undefined && sha256 !== this.spec.sha256) {
      throw this.#isComplete
        ? new TilewrightError("storage", `the cached copy of ${this.url} is damaged: its SHA-256 is ${sha256}, expected ${this.spec.sha256}`)
        : otherDigest(this.url, sha256, this.spec.sha256);
    }
    if (this.#isComplete) {
      return;
    }
    const sha1 = this.#gitDigest?.hex();
    this.#gitDigest = undefined;
    ensure(sha1 === undefined || sha1 === this.spec.git?.sha1,
      "digest", `${this.url}: it has the Git digest ${sha1}, expected ${this.spec.git?.sha1}`);
    await this.#storing(async (stored) => {
      const writer = await this.#openWriter(stored);
      const size = await writer.flush(true);
      await stored.save({ ...this.#newRecord(stored, size), size, complete: true, ...defined({ sha256 }) });
      writer.close();
      this.#writer = undefined;
      this.context.onStored(size);
      await this.context.onKept?.();
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

  get #inPieces(): boolean {
    return this.context.peek === true && !/\.(json|jinja)$/.test(this.name);
  }

  get #downloadOptions(): DownloadOptions {
    const { fetch, signal, notify } = this.context;
    const onReconnect = (message: string): void => notify({ code: "reconnected", message });
    return { ...defined({ fetch, headers: this.spec.headers }), signal, httpCache: this.httpCache, inPieces: this.#inPieces, onReconnect };
  }

  /** Claims the cached copy, if there is one. */
  async #claim(): Promise<void> {
    const { store, newDigest, notify, onCopy, signal, peek, mustKeep } = this.context;
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
        onCopy(new StoredCopy(this.url, store, whole, bytes, newDigest));
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
        notify({ code: "not_cached", message: `${this.url} is being loaded in another tab as well; this tab does not cache it` });
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
      this.context.signal.throwIfAborted();
      await this.#giveUpStoring(error);
    }
  }

  /** The bytes of a complete copy, unless some are missing. */
  async #bytesOf(stored: StoredFile, whole: StoredRecord): Promise<Blob | undefined> {
    try {
      return await stored.bytes(whole);
    } catch (error) {
      this.context.notify(damaged(this.url, messageOf(error)));
      return undefined;
    }
  }

  /** Asks the server whether a copy is current. Without a response, it counts as current. */
  async #isCurrent(record: StoredRecord): Promise<boolean> {
    const known = this.spec.sha256 !== undefined && record.sha256 !== undefined;
    const version = known ? {} : await fetchVersion(this.url, this.context.signal, this.#downloadOptions);
    if (version === undefined) {
      this.context.notify({ code: "not_revalidated", message: `${this.url} could not be checked for a newer version; the cached copy is used` });
      return true;
    }
    const current = known ? record.sha256 === this.spec.sha256 : !differs(record, version);
    if (!current) {
      this.context.notify({ code: "cache_outdated", message: `${this.url} is newer on the server than the cached copy; it is downloaded again` });
    }
    return current;
  }

  /** Continues an interrupted download, if the server still has the same file. */
  async #resume(options: DownloadOptions): Promise<Download | undefined> {
    if (this.#stored === undefined || this.#record === undefined) {
      return undefined;
    }
    const { size, etag, lastModified } = this.#record;
    const download = await Download.resume(this.url, this.#kept.size, defined({ size, etag, lastModified }), options);
    if (download === undefined) {
      this.context.notify({ code: "cache_outdated", message: `${this.url} was replaced since its download was interrupted; the download starts over` });
      this.#kept = new Blob();
      this.#record = undefined;
    }
    return download;
  }

  #newRecord({ address }: StoredFile, stored: number): StoredRecord {
    return { ...this.#download?.version, url: address, stored, complete: false, date: Date.now() };
  }

  /** Opened at the first new byte: browsers cannot read a file while it is written. */
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
      await this.context.onKept?.();
    } else {
      await stored.removePart();
    }
  }

  /** About a mebibyte from the position, stored and digested. */
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
    // Pieces are not read ahead: the first may suffice.
    while (length < CHUNK_BYTES && (length === 0 || !this.#inPieces || download.isOpen)) {
      const piece = await download.next();
      if (piece === undefined) {
        break;
      }
      pieces.push(piece);
      length += piece.length;
      this.arrived = Math.max(this.arrived, download.position);
      this.context.onBytes(this);
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

  /** Uses the storage, if the file is stored. If that fails, the load continues without it. */
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
    const isFull = codeOf(error) === "quota";
    if (this.context.mustKeep === true) {
      if (this.#stored !== undefined) {
        await this.#drop();
      }
      throw error instanceof TilewrightError ? error
        : new TilewrightError(isFull ? "quota" : "storage", `${this.url} cannot be stored: ${messageOf(error)}`, { cause: error });
    }
    const why = isFull ? `the browser's storage for this page is full (${messageOf(error)})`
      : `the browser's storage failed (${messageOf(error)})`;
    this.context.notify({ code: "not_cached", message: `${this.url} will not be cached: ${why}` });
    if (this.#position < this.#kept.size) {
      // No stored byte was returned yet, so the download can start anew.
      this.#kept = new Blob();
      this.#record = undefined;
    }
    await this.#drop();
  }

  /** Deletes what is stored of the file, and stores nothing more. */
  async #drop(): Promise<void> {
    this.#writer?.close();
    this.#writer = undefined;
    this.#stored?.release();
    this.#stored = undefined;
    let owned: StoredFile | undefined;
    try {
      owned = await this.context.store?.claim(this.url, "exclusive");
      await owned?.removePart();
    } catch (error) {
      this.context.notify({ code: "not_cached", message: `the stored part of ${this.url} could not be deleted (${messageOf(error)})` });
    } finally {
      owned?.release();
    }
  }
}

export function damaged(url: string, why: string): Notice {
  return { code: "cache_damaged", message: `the cached copy of ${url} is damaged (${why}); it is downloaded again` };
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
