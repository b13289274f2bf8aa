// Serves a folder over HTTP like a plain web server: MIME types, ETags, byte ranges; nothing outside the folder. A
// page's embedded Content Security Policy is also sent as a header.
//
//     node scripts/static-server.mjs FOLDER [PORT]

import { createReadStream } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, resolve, sep } from "node:path";
import { pipeline } from "node:stream/promises";
import { pathToFileURL } from "node:url";

const TYPES = {
  ".css": "text/css; charset=utf-8",
  ".html": "text/html; charset=utf-8",
  ".ico": "image/x-icon",
  ".js": "text/javascript; charset=utf-8",
  ".json": "application/json; charset=utf-8",
  ".map": "application/json; charset=utf-8",
  ".mjs": "text/javascript; charset=utf-8",
  ".png": "image/png",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
  ".webmanifest": "application/manifest+json; charset=utf-8",
};

/** MIME type for a file name. */
export function typeOf(name) {
  return TYPES[extname(name)] ?? "application/octet-stream";
}

/** The inclusive byte range of a request; undefined for the whole file, null if out of range. */
export function requestedRange(header, size) {
  const match = /^bytes=(\d*)-(\d*)$/.exec(header ?? "");
  if (!match || (match[1] === "" && match[2] === "")) return undefined;
  const start = match[1] === "" ? Math.max(0, size - Number(match[2])) : Number(match[1]);
  const end = match[1] === "" || match[2] === "" ? size - 1 : Math.min(Number(match[2]), size - 1);
  return start <= end ? { start, end } : null;
}

/** The path on disk for a URL's path, or undefined if it leads out of the folder. */
function pathInside(folder, pathname) {
  let decoded;
  try {
    decoded = decodeURIComponent(pathname);
  } catch {
    return undefined;
  }
  const path = resolve(join(folder, decoded));
  return decoded.includes("\0") || (path !== folder && !path.startsWith(folder + sep)) ? undefined : path;
}

/** The Content Security Policy in a page. */
async function policyOf(path) {
  if (extname(path) !== ".html") return undefined;
  return /<meta http-equiv="Content-Security-Policy" content="([^"]*)"/.exec(await readFile(path, "utf8"))?.[1];
}

function refuse(response, status, text) {
  response.writeHead(status, { "content-type": "text/plain; charset=utf-8" }).end(`${text}\n`);
}

/** Responds to a request with a file of the folder, at the URL path `pathname`. */
export async function serveFile(folder, pathname, request, response) {
  if (request.method !== "GET" && request.method !== "HEAD") return refuse(response, 405, "only GET and HEAD");
  let path = pathInside(resolve(folder), pathname);
  let info = path && (await stat(path).catch(() => undefined));
  if (info?.isDirectory() && pathname.endsWith("/")) {
    path = join(path, "index.html");
    info = await stat(path).catch(() => undefined);
  }
  if (!info?.isFile()) return refuse(response, 404, "not found");

  const etag = `"${info.size.toString(16)}-${Math.trunc(info.mtimeMs).toString(16)}"`;
  const headers = {
    "accept-ranges": "bytes",
    // The browser may cache a file, but revalidates it each time.
    "cache-control": "no-cache",
    "content-type": typeOf(path),
    etag,
    "last-modified": info.mtime.toUTCString(),
  };
  const policy = await policyOf(path);
  if (policy !== undefined) headers["content-security-policy"] = policy;
  if (request.headers["if-none-match"] === etag) return response.writeHead(304, headers).end();
  const sameFile = (request.headers["if-range"] ?? etag) === etag;
  const range = sameFile ? requestedRange(request.headers.range, info.size) : undefined;
  if (range === null) {
    return response.writeHead(416, { ...headers, "content-range": `bytes */${info.size}` }).end();
  }
  headers["content-length"] = range ? range.end - range.start + 1 : info.size;
  if (range) headers["content-range"] = `bytes ${range.start}-${range.end}/${info.size}`;
  response.writeHead(range ? 206 : 200, headers);
  if (request.method === "HEAD" || info.size === 0) return response.end();
  try {
    await pipeline(createReadStream(path, range), response);
  } catch (error) {
    // A client that disconnected is not a server error.
    if (error.code !== "ERR_STREAM_PREMATURE_CLOSE" && error.code !== "ECONNRESET") throw error;
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [folder, port = "8080"] = process.argv.slice(2);
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    serveFile(folder, pathname, request, response).catch((error) => {
      console.error(`${request.url}: ${error.message}`);
      response.destroy();
    });
  });
  server.on("error", (error) => {
    console.error(error.code === "EADDRINUSE" ? `port ${port} is in use: choose another one` : error.message);
    process.exitCode = 1;
  });
  server.listen(Number(port), "127.0.0.1", () => console.log(`http://localhost:${server.address().port}/`));
}
