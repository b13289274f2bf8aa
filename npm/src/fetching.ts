/** A caller's own `fetch`: it runs in the caller's thread, and the worker pulls each piece of a response. */

import { messageOf } from "./errors.js";
import { defined } from "./helpers.js";
import type { FetchFromWorker, FetchToWorker } from "./protocol.js";

/** The part of `fetch` that is used. */
export type Fetch = (url: string, init?: RequestInit) => Promise<Response>;

const MOST_REDIRECTS = 10;
/** Whether `fetch` shows redirects: in Node and Deno, and in no browser. */
let seesRedirects = true;

/**
 * `fetch` that does not send `Authorization` to another origin. Older engines do after redirects: where these are
 * visible, they are followed here, and never from HTTPS to HTTP.
 */
export const ownFetch: Fetch = async (url, init = {}) => {
  const headers = new Headers(init.headers);
  if (!headers.has("authorization")) {
    return fetch(url, init);
  }
  let at = url;
  for (let n = 0; seesRedirects && n <= MOST_REDIRECTS; n += 1) {
    const response = await fetch(at, { ...init, headers, redirect: "manual" });
    const location = response.status >= 300 && response.status < 400 ? response.headers.get("location") : null;
    if (response.type === "opaqueredirect" && location === null) {
      seesRedirects = false;
      break;
    }
    if (location === null) {
      return response;
    }
    void response.body?.cancel().catch(() => {});
    const next = new URL(location, at);
    const { origin, protocol } = new URL(at);
    if (next.protocol !== "https:" && next.protocol !== protocol) {
      throw new TypeError(`a redirect leads from ${protocol} to ${next.protocol}`);
    }
    if (next.origin !== origin) {
      headers.delete("authorization");
    }
    at = next.href;
  }
  if (seesRedirects) {
    throw new TypeError(`there are more than ${MOST_REDIRECTS} redirects`);
  }
  return fetch(url, init);
};

interface ActiveRequest {
  stop: AbortController;
  reader?: ReadableStreamDefaultReader<Uint8Array> | undefined;
}

/** The caller's end: runs requests. */
export class FetchServer {
  readonly #requests = new Map<number, ActiveRequest>();

  constructor(private readonly fetch: Fetch, private readonly post: (message: FetchToWorker) => void) {}

  receive(message: FetchFromWorker): void {
    switch (message.type) {
      case "fetch":
        void this.#begin(message);
        break;
      case "fetchMore":
        void this.#more(message.id);
        break;
      case "fetchEnd":
        this.#end(message.id);
        break;
    }
  }

  close(): void {
    this.#requests.forEach((_, id) => this.#end(id));
  }

  async #begin({ id, url, method, headers }: FetchFromWorker & { type: "fetch" }): Promise<void> {
    const request: ActiveRequest = { stop: new AbortController() };
    this.#requests.set(id, request);
    try {
      const fetch = this.fetch;
      const response = await fetch(url, { method, headers, signal: request.stop.signal, cache: "no-store" });
      if (request.stop.signal.aborted) {
        // The function ignored the abort.
        void response.body?.cancel().catch(() => {});
        return;
      }
      request.reader = response.body?.getReader();
      if (request.reader === undefined) {
        this.#requests.delete(id);
      }
      this.post({ type: "fetched", id, status: response.status, headers: Object.fromEntries(response.headers), hasBody: response.body !== null });
    } catch (error) {
      this.#fail(id, error);
    }
  }

  async #more(id: number): Promise<void> {
    try {
      const value = (await this.#requests.get(id)?.reader?.read())?.value;
      if (value === undefined) {
        this.#requests.delete(id);
      }
      this.post({ type: "fetchedPart", id, ...defined({ bytes: value }) });
    } catch (error) {
      this.#fail(id, error);
    }
  }

  #fail(id: number, error: unknown): void {
    this.#requests.delete(id);
    this.post({ type: "fetchFailed", id, message: messageOf(error) });
  }

  #end(id: number): void {
    const request = this.#requests.get(id);
    this.#requests.delete(id);
    request?.stop.abort();
    void request?.reader?.cancel().catch(() => {});
  }
}

/** The worker's end: sends requests. */
export class FetchClient {
  /** Requests that wait for a message, by number. */
  readonly #waiting = new Map<number, { resolve(message: FetchToWorker): void; reject(error: unknown): void }>();
  #nextId = 0;

  constructor(private readonly post: (message: FetchFromWorker) => void) {}

  /** `fetch` with method, headers and signal. */
  readonly fetch: Fetch = async (url, { method = "GET", headers: given, signal } = {}) => {
    signal?.throwIfAborted();
    const id = this.#nextId;
    this.#nextId += 1;
    const abort = (): void => {
      this.post({ type: "fetchEnd", id });
      this.#waiting.get(id)?.reject(signal?.reason);
      over();
    };
    const over = (): void => {
      this.#waiting.delete(id);
      signal?.removeEventListener("abort", abort);
    };
    signal?.addEventListener("abort", abort, { once: true });
    const ask = async <Type extends FetchToWorker["type"]>(message: FetchFromWorker): Promise<FetchToWorker & { type: Type }> => {
      try {
        signal?.throwIfAborted();
        const reply = await new Promise<FetchToWorker>((resolve, reject) => {
          this.#waiting.set(id, { resolve, reject });
          this.post(message);
        });
        if (reply.type === "fetchFailed") {
          throw new TypeError(reply.message);
        }
        return reply as FetchToWorker & { type: Type };
      } catch (error) {
        over();
        throw error;
      }
    };
    const { status, headers, hasBody } = await ask<"fetched">({ type: "fetch", id, url, method, headers: Object.fromEntries(new Headers(given)) });
    if (!hasBody) {
      over();
      return new Response(null, { status, headers });
    }
    return new Response(new ReadableStream<Uint8Array>({
      pull: async (controller) => {
        const { bytes } = await ask<"fetchedPart">({ type: "fetchMore", id });
        if (bytes === undefined) {
          over();
          controller.close();
        } else {
          controller.enqueue(bytes);
        }
      },
      cancel: () => {
        over();
        this.post({ type: "fetchEnd", id });
      },
    }, { highWaterMark: 0 }), { status, headers });
  };

  receive(message: FetchToWorker): void {
    this.#waiting.get(message.id)?.resolve(message);
  }
}
