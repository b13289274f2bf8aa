/** A file on a server as one sequential stream over any number of connections. */

import { ensure, messageOf, TilewrightError } from "./errors.js";
import { ownFetch, type Fetch } from "./fetching.js";
import { defined, delay } from "./helpers.js";

export interface FileVersion {
  size?: number;
  etag?: string;
  lastModified?: string;
}

export interface RequestSettings {
  headers?: Record<string, string>;
  fetch?: Fetch;
}

export interface DownloadOptions extends RequestSettings {
  signal: AbortSignal;
  httpCache: RequestCache;
  /** Only requests the file's version; the first read opens the connection. */
  lazily?: boolean;
  /** Requests a piece at a time, for a small part of the file; each is as large as all before it, within bounds. */
  inPieces?: boolean;
  /** Called before a broken connection is opened again. */
  onReconnect(message: string): void;
}

/** Waits before attempts without progress. */
const BACKOFF_MS = [100, 500, 2000];
/** A connection that is silent for this long counts as broken. */
const SILENCE_MS = 30_000;
/** Longest wait that a server may ask for. */
export const LONGEST_WAIT_MS = 60_000;
/** Bytes of the first and of the largest piece. */
const PIECE_BYTES = { first: 64 << 10, largest: 1 << 20 };
const TRANSIENT = new Set([408, 425, 429, 500, 502, 503, 504]);

class RetryableError extends Error {
  /** `waitMs`: how long to wait, as the server asks. */
  constructor(readonly final: TilewrightError, readonly waitMs?: number) {
    super(final.message);
  }
}

/** The file is another version. */
class Changed extends Error {}

/** A web page in place of a file, as some servers send for absent files. */
export class WebPage extends TilewrightError {
  constructor(url: string) {
    super("not_a_model", `${url} holds a web page, not a model file`);
  }
}

export class Download {
  version: FileVersion = {};
  /** Offset of the next bytes. */
  position = 0;
  #failures = 0;
  #body: ReadableStreamDefaultReader<Uint8Array> | undefined;
  /** Bytes to skip, from a server that ignores ranges. */
  #skip = 0;
  #connection = new AbortController();
  /** End of the current piece, and bytes of pieces since the last seek. */
  #pieceEnd = Infinity;
  #inPieces = 0;

  private constructor(private readonly url: string, private readonly options: DownloadOptions) {}

  static open(url: string, options: DownloadOptions): Promise<Download> {
    return new Download(url, options).#begin(false);
  }

  /** Continues an earlier download at `offset`; `undefined` if the file has changed. */
  static async resume(url: string, offset: number, version: FileVersion, options: DownloadOptions): Promise<Download | undefined> {
    const download = new Download(url, options);
    download.version = { ...version };
    download.position = offset;
    try {
      return await download.#begin(true);
    } catch (error) {
      if (error instanceof Changed) {
        return undefined;
      }
      throw error;
    }
  }

  async #begin(again: boolean): Promise<this> {
    await this.#retrying(() => this.options.lazily === true ? this.#checkVersion() : this.#connect(again));
    return this;
  }

  get isOpen(): boolean {
    return this.#body !== undefined;
  }

  /** The next bytes, or `undefined` at the end of the file. */
  async next(): Promise<Uint8Array | undefined> {
    try {
      return await this.#retrying(() => this.#read());
    } catch (error) {
      if (error instanceof Changed) {
        throw new TilewrightError("range", `${this.url} was replaced on the server during the download; load it again`);
      }
      throw error;
    }
  }

  /** The next read opens a connection at this offset. */
  seek(offset: number): void {
    this.close();
    this.position = offset;
    this.#inPieces = 0;
  }

  /** Closes the connection. A later read opens it again. */
  close(): void {
    this.#connection.abort();
    this.#body = undefined;
  }

  async #retrying<T>(attempt: () => Promise<T>): Promise<T> {
    for (;;) {
      this.options.signal.throwIfAborted();
      try {
        const value = await attempt();
        this.#failures = 0;
        return value;
      } catch (error) {
        this.close();
        this.options.signal.throwIfAborted();
        if (!(error instanceof RetryableError)) {
          throw error;
        }
        const usual = BACKOFF_MS[this.#failures];
        const wait = error.waitMs ?? usual;
        this.#failures += 1;
        if (usual === undefined || wait === undefined || wait > LONGEST_WAIT_MS) {
          throw error.final;
        }
        this.options.onReconnect(`${error.message}; trying again at byte ${this.position}`);
        await delay(wait, this.options.signal);
      }
    }
  }

  async #read(): Promise<Uint8Array | undefined> {
    const { size } = this.version;
    if (size !== undefined && this.position === size) {
      this.close();
      return undefined;
    }
    if (this.#body === undefined) {
      await this.#connect(true);
      if (this.#body === undefined) {
        // Without an announced size, the last piece shows the end.
        return undefined;
      }
    }
    for (;;) {
      const chunk = await this.#readBody();
      if (chunk === undefined) {
        if (size !== undefined && this.position < size) {
          throw new RetryableError(new TilewrightError("truncated", `${this.url} ended after ${this.position} of ${size} bytes`));
        }
        // Without an announced size, the end of the body is the end of the file.
        this.version.size = this.position;
        return undefined;
      }
      const bytes = chunk.subarray(Math.min(this.#skip, chunk.length));
      this.#skip -= chunk.length - bytes.length;
      if (bytes.length > 0) {
        this.position += bytes.length;
        this.#inPieces += bytes.length;
        if (this.position >= this.#pieceEnd) {
          this.close();
        }
        if (size !== undefined && this.position > size) {
          // The announced size was that of a compressed response.
          delete this.version.size;
        }
        return bytes;
      }
    }
  }

  async #readBody(): Promise<Uint8Array | undefined> {
    try {
      return (await this.#unlessSilent(async () => this.#body?.read()))?.value;
    } catch (error) {
      throw new RetryableError(broken(this.url, error));
    }
  }

  async #unlessSilent<T>(work: () => Promise<T>): Promise<T> {
    const silence = setTimeout(() => this.#connection.abort(), SILENCE_MS);
    try {
      return await work();
    } finally {
      clearTimeout(silence);
    }
  }

  async #checkVersion(): Promise<void> {
    const found = await requestVersion(this.url, this.options.signal, this.options);
    if (differs(this.version, found)) {
      throw new Changed();
    }
    this.version = { ...found, ...this.version };
  }

  /** Opens a connection at the position. `again`: another version of the file is refused. */
  async #connect(again: boolean): Promise<void> {
    const offset = this.position;
    const response = await this.#fetch(offset, again);
    const isPiece = this.options.inPieces === true;
    const found = versionOf(response, offset, isPiece);
    const expected = this.version;
    if (isPiece && response.status === 416 && expected.size === undefined) {
      this.version = { ...expected, size: offset };
      return;
    }
    if (again && (response.status === 416 || differs(expected, found))) {
      throw new Changed();
    }
    checkResponse(this.url, response);
    if (response.status === 206 && !startsAt(response, offset, isPiece || (found.size !== undefined && found.size === expected.size))) {
      throw new TilewrightError("range",
        `${this.url}: the server was asked for the bytes from ${offset} on and sent ${response.headers.get("content-range") ?? "others"}`);
    }
    this.#skip = response.status === 206 ? 0 : offset;
    this.#pieceEnd = isPiece && response.status === 206 ? offset + this.#pieceBytes : Infinity;
    this.version = { ...found, ...expected };
    this.#body = response.body?.getReader();
    ensure(this.#body !== undefined, "network", `${this.url}: the server sent no bytes`);
  }

  get #pieceBytes(): number {
    return Math.min(Math.max(this.#inPieces, PIECE_BYTES.first), PIECE_BYTES.largest);
  }

  async #fetch(offset: number, again: boolean): Promise<Response> {
    this.#connection = new AbortController();
    const signal = AbortSignal.any([this.options.signal, this.#connection.signal]);
    const headers = new Headers(this.options.headers);
    if (this.options.inPieces === true) {
      headers.set("range", `bytes=${offset}-${offset + this.#pieceBytes - 1}`);
    } else if (offset > 0) {
      headers.set("range", `bytes=${offset}-`);
    }
    if (offset > 0) {
      const validator = strongValidator(this.version);
      // Across origins this header needs the server's permission; there the versions are compared afterwards.
      if (validator !== undefined && !crossesOrigin(this.url)) {
        headers.set("if-range", validator);
      }
    }
    const { fetch = ownFetch, httpCache: cache } = this.options;
    try {
      return await this.#unlessSilent(() => fetch(this.url, { headers, signal, cache }));
    } catch (error) {
      throw again ? new RetryableError(broken(this.url, error)) : unreachable(this.url, error);
    }
  }
}

/** A file's version on the server, or `undefined` without a response. */
export async function fetchVersion(url: string, signal: AbortSignal, settings: RequestSettings = {}): Promise<FileVersion | undefined> {
  try {
    return await requestVersion(url, AbortSignal.any([signal, AbortSignal.timeout(5000)]), settings);
  } catch {
    signal.throwIfAborted();
    return undefined;
  }
}

/** A file's version on the server. Throws as opening the file would. */
async function requestVersion(url: string, signal: AbortSignal, settings: RequestSettings): Promise<FileVersion> {
  const ask = async ({ headers, ...init }: { method?: string; headers?: Record<string, string> }): Promise<Response> => {
    const response = await (settings.fetch ?? ownFetch)(url, { ...init, headers: { ...settings.headers, ...headers }, cache: "no-store", signal: AbortSignal.any([signal, AbortSignal.timeout(SILENCE_MS)]) });
    // A server that ignores ranges sends the whole file.
    response.body?.cancel().catch(() => {});
    return response;
  };
  const head = await ask({ method: "HEAD" }).catch(() => undefined);
  if (head?.ok === true) {
    checkResponse(url, head);
    const version = versionOf(head, 0);
    if (version.size !== undefined) {
      return version;
    }
  }
  signal.throwIfAborted();
  // Signed addresses and some servers allow GET only, and some report no size for HEAD, so one byte is requested.
  let response: Response;
  try {
    response = await ask({ headers: { range: "bytes=0-0" } });
  } catch (error) {
    throw unreachable(url, error);
  }
  // An empty file has no such range.
  const isEmpty = response.status === 416;
  if (!isEmpty) {
    checkResponse(url, response);
  }
  const { size, ...version } = versionOf(response, 0);
  const isWhole = response.status === 200 || /\/\d+$/.test(response.headers.get("content-range") ?? "");
  return isEmpty ? { ...version, size: 0 } : isWhole && size !== undefined ? { ...version, size } : version;
}

/** Milliseconds of `Retry-After`, unless it is a date. */
export function retryAfter(response: Response): number | undefined {
  const seconds = integer(response.headers.get("retry-after"));
  return seconds === undefined ? undefined : seconds * 1000;
}

function checkResponse(url: string, response: Response): void {
  if (!response.ok) {
    const error = httpError(url, response.status, "the server", MEANINGS);
    throw TRANSIENT.has(response.status) ? new RetryableError(error, retryAfter(response)) : error;
  }
  if (/^(text\/html|application\/xhtml)/.test(response.headers.get("content-type") ?? "")) {
    throw new WebPage(url);
  }
}

/** Whether two versions differ in what both of them state. */
export function differs(a: FileVersion, b: FileVersion): boolean {
  // Servers that compress mark the same tag as weak.
  const tag = (version: FileVersion): string | undefined => version.etag?.replace(/^W\//, "");
  if (tag(a) !== undefined && tag(b) !== undefined) {
    return tag(a) !== tag(b);
  }
  return (a.size !== undefined && b.size !== undefined && a.size !== b.size)
    || (a.lastModified !== undefined && b.lastModified !== undefined && a.lastModified !== b.lastModified);
}

export const A_WEB_PAGE = "a web page";

/** What these bytes begin like, if not like a model. */
export function describeImpostor(start: Uint8Array): string | undefined {
  const text = new TextDecoder("latin1").decode(start.subarray(0, 64)).trimStart().toLowerCase();
  if (/^<(!doctype|html|head|body)/.test(text)) {
    return A_WEB_PAGE;
  }
  if (/^<\?xml|^<error/.test(text)) {
    return "an XML document, often a server's error message";
  }
  if (text.startsWith("version https://git-lfs")) {
    return "a Git LFS pointer; the address of the file itself is another one";
  }
  return undefined;
}

/** `isPiece`: the response may end before the file. */
function versionOf(response: Response, offset: number, isPiece = false): FileVersion {
  const length = integer(response.headers.get("content-length"));
  const encoding = response.headers.get("content-encoding") ?? "identity";
  const total = integer(/\/(\d+)$/.exec(response.headers.get("content-range") ?? "")?.[1]);
  const isSize = length !== undefined && encoding === "identity" && !(isPiece && response.status === 206);
  const size = total ?? (isSize ? (response.status === 206 ? offset + length : length) : undefined);
  return defined({ size, etag: response.headers.get("etag") ?? undefined, lastModified: response.headers.get("last-modified") ?? undefined });
}

/** Whether a partial response begins at the offset. `isLikely` decides where another origin hides the header. */
function startsAt(response: Response, offset: number, isLikely: boolean): boolean {
  const range = /^bytes (\d+)-\d+\/(?:\d+|\*)$/.exec(response.headers.get("content-range") ?? "");
  return range === null ? !response.headers.has("content-range") && isLikely : Number(range[1]) === offset;
}

function strongValidator(version: FileVersion): string | undefined {
  return version.etag !== undefined && !version.etag.startsWith("W/") ? version.etag : version.lastModified;
}

function integer(text: string | null | undefined): number | undefined {
  return text !== null && text !== undefined && /^\d+$/.test(text) ? Number(text) : undefined;
}

function crossesOrigin(url: string): boolean {
  const own = globalThis.location?.origin;
  return own !== undefined && new URL(url).origin !== own;
}

function broken(url: string, cause: unknown): TilewrightError {
  return new TilewrightError("network", `the connection to ${url} broke (${messageOf(cause)})`, { cause });
}

/** The error for a request without a response. Browsers hide the reason, so the message names both. */
function unreachable(url: string, cause: unknown): TilewrightError {
  const reasons = crossesOrigin(url)
    ? "the server cannot be reached, or it does not let other sites' pages read its files (CORS)"
    : "the server cannot be reached";
  return new TilewrightError("network", `${url} could not be fetched: ${reasons} (${messageOf(cause)})`, { cause });
}

const MEANINGS = {
  401: "the server does not give it to everyone", 403: "the server does not give it to everyone",
  404: "there is no such file", 410: "there is no such file",
};

export function httpError(
  url: string, status: number, who: string, meanings: Readonly<Record<number, string>>,
): TilewrightError {
  const meaning = meanings[status]
    ?? (status === 429 ? `${who} asks for fewer requests` : status >= 500 ? `${who} has a problem` : `${who} refuses`);
  return new TilewrightError("http", `${url} could not be fetched: ${meaning} (HTTP status ${status})`, { status });
}
