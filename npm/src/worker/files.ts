/** Files of a load, and the stored copies of earlier loads. */

import { Sha256, type Header, type Loader } from "../classes.js";
import { codeOf, ensure, messageOf, TilewrightError } from "../errors.js";
import { isNode } from "../platform.js";
import type { CallName, Calls, LoadRequest } from "../protocol.js";
import {
  CHAT_FILES, damaged, isUseless, openFiles, readAll, SENTENCE_FILES, type StoredCopy, type ModelFile, type OpenContext,
} from "../source.js";
import { openStore, type Store } from "../store.js";
import type { FileInfo } from "../tilewright.js";
import { engineModule } from "../wasm.js";
import type { CallContext, Caller } from "./port.js";
import { ProgressMeter } from "./progress.js";

/** Files to read, and whether copies of them are stored. */
export type FilesRequest = Pick<LoadRequest, "source" | "cache" | "ownFetch">;

export type Requester = Pick<CallContext<CallName>, "caller" | "signal">;

interface Opening extends Pick<OpenContext, "mustKeep" | "peek"> {
  extras?: readonly string[];
  copies?: StoredCopy[];
  meter?: ProgressMeter;
}

async function open(
  request: FilesRequest, { caller, signal }: Requester, { extras = [], copies, meter, ...manner }: Opening,
): Promise<ModelFile[]> {
  return openFiles(request.source, {
    signal, extras, ...manner,
    ...(request.ownFetch === true ? { fetch: caller.fetch } : {}),
    onBytes: (file) => meter?.report(file.phase, false),
    onCopy: (copy) => copies?.push(copy),
    onStored: (bytes) => caller.send({ type: "stored", bytes }),
    store: !request.cache || request.source.kind === "builtin" ? undefined
      : manner.mustKeep === true ? await openStore() : await openStoreIfAny(request, caller),
    newDigest: () => new Sha256(),
    notify: (notice) => caller.send({ type: "notice", notice }),
  });
}

/** Opens files for `work`, and closes them after it. */
export async function withFiles<R>(
  request: FilesRequest, requester: Requester, opening: Opening, work: (files: ModelFile[]) => R | Promise<R>,
): Promise<R> {
  const files = await open(request, requester, opening);
  const { meter, peek } = opening;
  let useless = false;
  try {
    if (meter !== undefined) {
      meter.files = files;
      meter.report(files[0]?.phase ?? "file", true);
    }
    return await work(files);
  } catch (error) {
    useless = peek !== true && isUseless(error);
    throw error;
  } finally {
    await Promise.all(files.map((file) => file.close(useless)));
  }
}

/** A reader of files that chooses what to read next. */
type Reader = Pick<Header | Loader<unknown>, "want" | "push" | "end">;

/** Passes a reader the bytes that it wants. Returns the file that was read last. */
export async function feed(
  reader: Reader, files: readonly ModelFile[], signal: AbortSignal, meter?: ProgressMeter,
): Promise<ModelFile | undefined> {
  let current: ModelFile | undefined;
  for (let wanted; (wanted = reader.want()) !== undefined;) {
    signal.throwIfAborted();
    const file = files[wanted.file];
    ensure(file !== undefined, "internal", `the engine wants file ${wanted.file} of ${files.length}`);
    if (file !== current) {
      current?.pause();
      current = file;
    }
    const chunk = await file.read(wanted.offset);
    if (chunk === undefined) {
      reader.end();
    } else {
      meter?.report(file.phase, false);
      await reader.push(chunk);
    }
  }
  return current;
}

export async function finish(files: readonly ModelFile[], signal: AbortSignal): Promise<void> {
  for (const file of files) {
    signal.throwIfAborted();
    await file.finish();
  }
}

/** Most bytes per read during a pass: WASM's memory holds a copy. */
const READ_BYTES = 4 << 20;

/** A model's files, reopened to read weights that do not fit in memory. Open stored copies cannot be deleted. */
export class ReopenedFiles {
  readonly #request: FilesRequest;
  readonly #freed = new AbortController();
  #files: readonly ModelFile[] = [];

  constructor(
    request: FilesRequest, private readonly extras: readonly string[], private readonly caller: Caller,
    private readonly loaded: readonly ModelFile[],
  ) {
    const { pins: _, ...source } = request.source;
    this.#request = { ...request, source };
  }

  /** Opens the files, after the last write to the stored copies. */
  async open(): Promise<void> {
    const requester = { caller: this.caller, signal: this.#freed.signal };
    this.#files = await open(this.#request, requester, { extras: this.extras, peek: true });
    const isSame = ({ name, size, url, isKept }: ModelFile, i: number): boolean =>
      name === this.loaded[i]?.name && size === this.loaded[i]?.size && (url === undefined || isKept === true);
    const changed = this.#files.find((file, i) => !isSame(file, i));
    if (changed !== undefined || this.#files.length !== this.loaded.length) {
      this.close();
      throw new TilewrightError("storage", `${changed?.name ?? "a file"} has changed or is no longer stored; weights that do not fit in memory are read from it`);
    }
  }

  readonly read = async (file: number, offset: number, length: number): Promise<Uint8Array | undefined> =>
    this.#files[file]?.bytes(offset, Math.min(length, READ_BYTES));

  close(): void {
    this.#freed.abort();
    this.#files.forEach((file) => void file.close(false));
  }
}

/** A file as the engine sees it. Servers may compress JSON, so its announced size cannot be trusted. */
export function describe({ name, size }: ModelFile): FileInfo {
  return size === undefined || name.endsWith(".json") ? { name } : { name, size };
}

/** Calls `work` with a list for the copies that it reads. If a damaged copy fails it, deletes that and retries. */
export async function withCopies<R>(requester: Requester, work: (copies: StoredCopy[]) => Promise<R>): Promise<R> {
  const copies: StoredCopy[] = [];
  try {
    return await work(copies);
  } catch (error) {
    // An unsupported file was readable.
    if (!isUseless(error) || codeOf(error) === "unsupported" || !await deleteDamaged(copies, requester, async () => requester.signal.throwIfAborted(), true)) {
      throw error;
    }
    return await work([]);
  }
}

/** Calls `work` with the contents of small files. Copies are checked first, because `work` cannot be undone. */
export function withContents<R>(
  request: FilesRequest, requester: Requester, work: (files: { name: string; bytes: Uint8Array }[]) => R,
): Promise<R> {
  return withCopies(requester, (copies) => withFiles(request, requester, { copies }, async (files) => {
    const contents: { name: string; bytes: Uint8Array }[] = [];
    for (const file of files) {
      contents.push({ name: file.name, bytes: await readAll(file) });
      await file.finish();
    }
    await checkCopies(copies, requester);
    return work(contents);
  }));
}

/** Throws `storage` if a copy differs from the download. */
export async function checkCopies(copies: StoredCopy[], { signal }: Requester): Promise<void> {
  for (const copy of copies) {
    ensure(await copy.check(async () => signal.throwIfAborted()) === "good",
      "storage", `the cached copy of ${copy.url} is damaged`);
  }
}

/** Deletes copies that differ from their downloads. Returns whether there were any. */
export async function deleteDamaged(
  copies: StoredCopy[], { caller, signal }: Requester, turn: () => Promise<void>, unreadable: boolean,
): Promise<boolean> {
  let found = false;
  for (const copy of copies) {
    const state = await copy.check(turn);
    if (state === "damaged" || (state === "unreadable" && unreadable)) {
      found = true;
      await copy.delete(signal);
      caller.send({ type: "notice", notice: damaged(copy.url, state === "damaged" ? "its SHA-256 is another one" : "it cannot be read") });
    }
  }
  return found;
}

/** The storage for downloads, if there is anything to download. */
async function openStoreIfAny({ source }: FilesRequest, caller: Caller): Promise<Store | undefined> {
  const remote = source.kind === "folder" || (source.kind === "files" && source.files.some((file) => file.kind === "url" && file.url.startsWith("http")));
  if (!remote || isNode) {
    return undefined;
  }
  try {
    return await openStore();
  } catch (error) {
    caller.notify("not_cached", `the model will not be cached: ${messageOf(error)}`);
    return undefined;
  }
}

/** Stores all files of a model, for a later load. */
export async function prefetch(request: Calls["prefetch"]["args"], requester: Requester): Promise<void> {
  await engineModule.start();
  return withCopies(requester, (copies) => {
    const meter = new ProgressMeter(requester.caller);
    // The kind of model is unknown.
    const opening = { extras: [...CHAT_FILES, ...SENTENCE_FILES], copies, meter, mustKeep: true };
    return withFiles({ ...request, cache: true }, requester, opening, async (files) => {
      await finish(files, requester.signal);
      meter.report(files.at(-1)?.phase ?? "download", true);
    });
  });
}
