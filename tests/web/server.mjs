// The tests' web server: the built package and page, test models, and all kinds of failing downloads.
//
// `/npm/`, `/pkg/` and `/www/` are the built folders, `/openai/` is OpenAI's own client, `/blank.html` is an empty
// page; `server.besidePage` adds files to `/www/`, or hides one with `null`. `/data/`, `/assets/` and `/files/` (added
// by a test with `server.files`) are downloads: they are logged, and a `fault` in the query changes the response:
//
//     after=N&times=K              the connection breaks after N bytes of an answer, for the first K answers (K is 1 if absent);
//                                  goes with every fault
//     fault=ignore-range           always the whole file, status 200
//     fault=wrong-range            a range that begins one byte later than asked for
//     fault=short&size=N           the file ends after N bytes, and Content-Length agrees
//     fault=new-etag               another ETag for each answer
//     fault=status&code=N          an error status
//     fault=html                   a web page, status 200
//     fault=slow&rate=N            N bytes a second
//     fault=no-etag                neither ETag nor Last-Modified
//
// The same paths on `server.otherOrigin` are another origin without CORS headers, on `server.corsOrigin` one with
// them, and on `server.isolatedOrigin` one whose pages are isolated from other origins.

import { once } from "node:events";
import { existsSync } from "node:fs";
import { open, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { join, resolve, sep } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import { requestedRange, serveFile, typeOf } from "../../scripts/static-server.mjs";

export const repository = fileURLToPath(new URL("../..", import.meta.url));

/** Folders of test data: committed files, files fetched by `scripts/test-data`, and TILEWRIGHT_DATA. */
const dataRoots = [
  join(repository, "tests/data"), join(repository, "target/test-data"),
  process.env.TILEWRIGHT_DATA ?? join(repository, "../shared/data"),
];

/** Path of a set of test data, or of a file in one, in the first folder that has it; undefined if none has. */
export const dataPath = (name) => dataRoots.map((root) => join(root, name)).find(existsSync);

/** The reason to skip a test without its data, for the option `skip` of `test`: false if all sets are available. */
export function lacksData(...sets) {
  const missing = sets.find((name) => !dataPath(name));
  return missing !== undefined && `no test data ${missing} (scripts/test-data fetches some; TILEWRIGHT_DATA may name a folder)`;
}

const CHUNK = 64 * 1024;
const BLANK = '<!doctype html><html lang="en"><title>blank</title><link rel="icon" href="data:,">';

/** A downloadable file on disk. */
async function fileOnDisk(path) {
  const info = await stat(path).catch(() => undefined);
  if (!info?.isFile()) return undefined;
  return {
    size: info.size,
    etag: `"${info.size}-${Math.trunc(info.mtimeMs)}"`,
    async *read(start, end) {
      const file = await open(path);
      try {
        while (start < end) {
          const { bytesRead, buffer } = await file.read(Buffer.alloc(Math.min(CHUNK, end - start)), { position: start });
          if (bytesRead === 0) return;
          yield buffer.subarray(0, bytesRead);
          start += bytesRead;
        }
      } finally {
        await file.close();
      }
    },
  };
}

/** Downloadable bytes in memory. */
export function bytesInMemory(bytes, type = "application/octet-stream") {
  return {
    size: bytes.length,
    etag: `"memory-${bytes.length}"`,
    type,
    async *read(start, end) {
      for (; start < end; start += CHUNK) yield bytes.subarray(start, Math.min(start + CHUNK, end));
    },
  };
}

/** Waits until a response accepts more data or is closed. */
function drained(response) {
  return new Promise((resolve) => {
    const done = () => {
      response.off("drain", done);
      response.off("close", done);
      resolve();
    };
    response.on("drain", done);
    response.on("close", done);
  });
}

class Server {
  /** Answered downloads: `{ path, method, range, status, sent }`, `path` with its query. */
  log = [];
  /** Contents of `/files/NAME`: `{ size, etag, type, read(start, end) }`. */
  files = new Map();
  /**
   * Contents of `/www/NAME` that replace a built file, with the type of a built file of that name; `null`: absent. A
   * function responds itself: `(request, response) => ..`.
   */
  besidePage = new Map();
  /** While true, downloads fail as if the machine were offline. */
  isDown = false;

  #answers = new Map();
  #servers = [];
  #ids = 0;

  async start() {
    const origins = [];
    for (const [cors, isIsolated] of [[undefined], [undefined], ["*"], [undefined, true]]) {
      const server = createServer((request, response) => {
        if (isIsolated) {
          response.setHeader("cross-origin-opener-policy", "same-origin");
          response.setHeader("cross-origin-embedder-policy", "require-corp");
        }
        this.#answer(request, response, cors).catch((error) => {
          console.error(`test server: ${request.url}: ${error.stack}`);
          response.destroy();
        });
      });
      server.listen(0, "127.0.0.1");
      await once(server, "listening");
      this.#servers.push(server);
      origins.push(`http://localhost:${server.address().port}`);
    }
    [this.origin, this.otherOrigin, this.corsOrigin, this.isolatedOrigin] = origins;
    // The browser resolves this name to the same machine but treats it as insecure: no WebGPU, no storage, no locks,
    // no crypto.subtle.
    this.insecureOrigin = this.origin.replace("localhost", "insecure.test");
    return this;
  }

  async stop() {
    for (const server of this.#servers) {
      server.closeAllConnections();
      server.close();
      await once(server, "close");
    }
  }

  /** The address of a path with a unique query, so that caches and logs are separate. */
  url(path, fault = {}, origin = this.origin) {
    const query = new URLSearchParams({ ...fault, id: String(++this.#ids) });
    return `${origin}/${path}?${query}`;
  }

  /** The logged responses for one address; HEAD requests only on request. */
  requests(url, method = "GET") {
    const { pathname, search } = new URL(url);
    return this.log.filter((entry) => entry.path === pathname + search && entry.method === method);
  }

  /** Bytes sent in responses for one address. */
  sent(url) {
    return this.requests(url).reduce((sum, entry) => sum + entry.sent, 0);
  }

  async #answer(request, response, cors) {
    const { pathname, searchParams } = new URL(request.url, "http://localhost");
    if (cors) {
      response.setHeader("access-control-allow-origin", cors);
      response.setHeader("access-control-allow-headers", "*");
      response.setHeader("access-control-expose-headers", "*");
      if (request.method === "OPTIONS") return response.writeHead(204).end();
    }
    if (pathname === "/blank.html") return response.writeHead(200, { "content-type": "text/html" }).end(BLANK);
    const name = pathname.replace(/^\/www\//, "");
    const beside = this.besidePage.get(name);
    if (typeof beside === "function") return beside(request, response);
    if (beside !== undefined) return beside ? response.writeHead(200, { "content-type": typeOf(name || "index.html") }).end(beside) : response.writeHead(404).end();
    for (const [prefix, folder] of [["/npm/", "npm/dist"], ["/pkg/", "pkg"], ["/www/", "www/dist"], ["/openai/", "npm/node_modules/openai"]]) {
      if (pathname.startsWith(prefix)) {
        return serveFile(join(repository, folder), pathname.slice(prefix.length - 1), request, response);
      }
    }
    if (this.isDown) return request.socket.destroy();
    const entry = {
      path: request.url, method: request.method, range: request.headers.range, status: 0, sent: 0,
    };
    this.log.push(entry);
    const before = this.#answers.get(request.url) ?? 0;
    if (request.method === "GET") this.#answers.set(request.url, before + 1);
    await this.#download(await this.#find(pathname), Object.fromEntries(searchParams), before, request, response, entry);
  }

  async #find(pathname) {
    const [, room, ...rest] = pathname.split("/").map(decodeURIComponent);
    const name = rest.join("/");
    if (room === "files") return this.files.get(name);
    const [set, ...inside] = rest;
    const folder = room === "data" && set ? dataPath(set) : room === "assets" ? join(repository, "assets") : undefined;
    if (!folder) return undefined;
    const path = resolve(folder, room === "data" ? inside.join("/") : name);
    return path.startsWith(resolve(folder) + sep) ? fileOnDisk(path) : undefined;
  }

  async #download(file, fault, before, request, response, entry) {
    const finish = (status, headers, body) => {
      entry.status = status;
      response.writeHead(status, headers).end(body);
    };
    if (fault.fault === "status") return finish(Number(fault.code), {}, "the server does not feel well\n");
    if (fault.fault === "html") return finish(200, { "content-type": "text/html" }, `${BLANK}<p>Please sign in.</p>`);
    if (!file) return finish(404, {}, "not found\n");

    const size = fault.fault === "short" ? Number(fault.size) : file.size;
    let etag = file.etag;
    if (fault.fault === "new-etag") etag = `"${before}"`;
    const headers = { "content-type": file.type ?? "application/octet-stream", "accept-ranges": "bytes" };
    if (fault.fault !== "no-etag") headers.etag = etag;
    if (request.headers["if-none-match"] === etag) return finish(304, headers);

    let range = requestedRange(request.headers.range, size);
    if ((request.headers["if-range"] ?? etag) !== etag) range = undefined;
    if (fault.fault === "ignore-range") {
      range = undefined;
      delete headers["accept-ranges"];
    }
    if (range === null) return finish(416, { ...headers, "content-range": `bytes */${size}` });
    let { start, end } = range ? { start: range.start, end: range.end + 1 } : { start: 0, end: size };
    if (range && fault.fault === "wrong-range") start = Math.min(start + 1, end);
    if (range) headers["content-range"] = `bytes ${start}-${end - 1}/${size}`;
    headers["content-length"] = end - start;
    entry.status = range ? 206 : 200;
    response.writeHead(entry.status, headers);
    if (request.method === "HEAD") return response.end();

    const breaks = fault.after !== undefined && before < Number(fault.times ?? 1);
    const rate = fault.fault === "slow" ? Number(fault.rate) : Infinity;
    const begun = performance.now();
    for await (let chunk of file.read(start, end)) {
      const left = breaks ? Number(fault.after) - entry.sent : Infinity;
      chunk = chunk.subarray(0, Math.min(chunk.length, left));
      // A slow connection sends little and often, never ahead of its rate.
      const step = rate < Infinity ? Math.max(1, Math.trunc(rate / 50)) : chunk.length;
      for (let at = 0; at < chunk.length; at += step) {
        const part = chunk.subarray(at, at + step);
        if (rate < Infinity) await sleep((1000 * entry.sent) / rate - (performance.now() - begun));
        if (response.destroyed) return;
        if (!response.write(part)) await drained(response);
        if (response.destroyed) return;
        entry.sent += part.length;
      }
      if (breaks && entry.sent >= Number(fault.after)) {
        // Written data must arrive before the connection breaks.
        await sleep(50);
        return response.destroy();
      }
    }
    response.end();
  }
}

export const startServer = () => new Server().start();
