/** The files of what is to be loaded, and the copies that earlier loads have kept of them. */

import { codeOf, messageOf, TilewrightError } from "../errors.js";
import { isNode } from "../platform.js";
import type { CallName, LoadRequest } from "../protocol.js";
import { damaged, isUseless, openFiles, readAll, type KeptCopy, type ModelFile, type OpenContext } from "../source.js";
import { openStore, type Store } from "../store.js";
import { Sha256, type FileInfo } from "../tilewright.js";
import type { CallContext, Caller } from "./port.js";

/** What is to be read, and whether copies are kept of it. */
export type FilesRequest = Pick<LoadRequest, "source" | "cache" | "ownFetch">;

/** Who wants it, and until when. */
export type Asked = Pick<CallContext<CallName>, "caller" | "signal">;

/** Opens what is to be loaded, and notes which copies of earlier loads it is read from. */
export async function open(
  request: FilesRequest, extras: readonly string[], { caller, signal }: Asked, copies: KeptCopy[], onBytes: (file: ModelFile) => void,
  manner: Pick<OpenContext, "mustKeep" | "peek"> = {},
): Promise<ModelFile[]> {
  return openFiles(request.source, {
    signal, extras, onBytes, ...manner,
    ...(request.ownFetch === true ? { fetch: caller.fetch } : {}),
    onCopy: (copy) => copies.push(copy),
    onStored: (bytes) => caller.send({ type: "stored", bytes }),
    store: !request.cache || request.source.kind === "builtin" ? undefined
      : manner.mustKeep === true ? await openStore() : await openStoreIfAny(request, caller),
    newDigest: () => new Sha256(),
    notify: (notice) => caller.send({ type: "notice", notice }),
  });
}

/** What takes the bytes of files as it wants them. */
interface Taker {
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): void | Promise<void>;
  end(): void;
}

/** Gives it what it wants. Returns the file that was read last. */
export async function feed(taker: Taker, files: readonly ModelFile[], signal: AbortSignal, onRead: (file: ModelFile) => void): Promise<ModelFile | undefined> {
  let current: ModelFile | undefined;
  for (let wanted; (wanted = taker.want()) !== undefined;) {
    signal.throwIfAborted();
    const file = files[wanted.file];
    if (file === undefined) {
      throw new TilewrightError("internal", `the engine wants file ${wanted.file} of ${files.length}`);
    }
    if (file !== current) {
      current?.pause();
      current = file;
    }
    const chunk = await file.read(wanted.offset);
    if (chunk === undefined) {
      taker.end();
    } else {
      onRead(file);
      await taker.push(chunk);
    }
  }
  return current;
}

/** Reads what is left of files. */
export async function finish(files: readonly ModelFile[], signal: AbortSignal): Promise<void> {
  for (const file of files) {
    signal.throwIfAborted();
    await file.finish();
  }
}

/** Bytes of a file that are read at a time for a pass: WASM's memory holds a copy meanwhile. */
const READ_BYTES = 4 << 20;

/** The files of a model, opened once more for weights that do not fit in memory. Nothing is downloaded, and kept copies stay while they are open. */
export class FilesAgain {
  readonly #request: FilesRequest;
  readonly #extras: readonly string[];
  readonly #caller: Caller;
  readonly #loaded: readonly ModelFile[];
  readonly #freed = new AbortController();
  #files: readonly ModelFile[] = [];

  /** `loaded`: what the model is loaded from. */
  constructor(request: FilesRequest, extras: readonly string[], caller: Caller, loaded: readonly ModelFile[]) {
    const { pins: _, ...source } = request.source;
    this.#request = { ...request, source };
    this.#extras = extras;
    this.#caller = caller;
    this.#loaded = loaded;
  }

  /** Opens them, once nobody writes to the kept copies any more. */
  async open(): Promise<void> {
    const asked = { caller: this.#caller, signal: this.#freed.signal };
    this.#files = await open(this.#request, this.#extras, asked, [], () => {}, { peek: true });
    const isSame = ({ name, size, url, isKept }: ModelFile, i: number): boolean =>
      name === this.#loaded[i]?.name && size === this.#loaded[i]?.size && (url === undefined || isKept === true);
    const changed = this.#files.find((file, i) => !isSame(file, i));
    if (changed !== undefined || this.#files.length !== this.#loaded.length) {
      this.close();
      throw new TilewrightError("storage", `${changed?.name ?? "a file"} has changed or is no longer stored; weights that do not fit in memory are read from it`);
    }
  }

  /** At most `length` bytes of a file from `offset` on. */
  readonly read = async (file: number, offset: number, length: number): Promise<Uint8Array | undefined> =>
    this.#files[file]?.bytes(offset, Math.min(length, READ_BYTES));

  close(): void {
    this.#freed.abort();
    this.#files.forEach((file) => void file.close(false));
  }
}

/** A file as the engine gets to know it. Servers may compress JSON on the way, so its announced size is not to be trusted. */
export function describe({ name, size }: ModelFile): FileInfo {
  return size === undefined || name.endsWith(".json") ? { name } : { name, size };
}

/**
 * Does something with files, noting the kept copies among them. If it fails because one of them is damaged, that one is deleted, and it is
 * done once more.
 */
export async function withCopies<R>(asked: Asked, work: (copies: KeptCopy[]) => Promise<R>): Promise<R> {
  const copies: KeptCopy[] = [];
  try {
    return await work(copies);
  } catch (error) {
    // What is not supported was read well enough to know that.
    if (!isUseless(error) || codeOf(error) === "unsupported" || !await deleteDamaged(copies, asked, async () => asked.signal.throwIfAborted(), true)) {
      throw error;
    }
    return await work([]);
  }
}

/** Does something with the contents of small files. What is made of them could not be taken back, so copies are checked before. */
export function withContents<R>(
  request: FilesRequest, asked: Asked, work: (files: { name: string; bytes: Uint8Array }[]) => R,
): Promise<R> {
  return withCopies(asked, async (copies) => {
    const files = await open(request, [], asked, copies, () => {});
    let useless = false;
    try {
      const contents: { name: string; bytes: Uint8Array }[] = [];
      for (const file of files) {
        contents.push({ name: file.name, bytes: await readAll(file) });
        await file.finish();
      }
      await checkCopies(copies, asked);
      return work(contents);
    } catch (error) {
      useless = isUseless(error);
      throw error;
    } finally {
      await Promise.all(files.map((file) => file.close(useless)));
    }
  });
}

/** Throws `storage` if a copy is not what was downloaded. */
export async function checkCopies(copies: KeptCopy[], { signal }: Asked): Promise<void> {
  for (const copy of copies) {
    if (await copy.check(async () => signal.throwIfAborted()) !== "good") {
      throw new TilewrightError("storage", `the kept copy of ${copy.url} is damaged`);
    }
  }
}

/** Deletes the copies that are not what was downloaded. Returns whether there were any. */
export async function deleteDamaged(
  copies: KeptCopy[], { caller, signal }: Asked, turn: () => Promise<void>, unreadable: boolean,
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

/** The storage for downloads, when there is something to download. */
async function openStoreIfAny({ source }: FilesRequest, caller: Caller): Promise<Store | undefined> {
  const remote = source.kind === "folder" || (source.kind === "files" && source.files.some((file) => file.kind === "url" && file.url.startsWith("http")));
  if (!remote || isNode) {
    return undefined;
  }
  try {
    return await openStore();
  } catch (error) {
    caller.notify("not_cached", `the model will not be kept for the next time: ${messageOf(error)}`);
    return undefined;
  }
}
