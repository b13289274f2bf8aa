// A caller's own `fetch`: its answers reach the worker whole, piece by piece as they are wanted, and nobody waits for what was given up.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Download } from "../build/download.js";
import { FetchClient, FetchServer } from "../build/fetching.js";

const FILE = Buffer.from(Array.from({ length: 300_000 }, (_, i) => (i * 2654435761) >>> 24));

/** Both ends with a line between them that copies, as between threads. */
function line(fetch) {
  const server = new FetchServer(fetch, (message) => setImmediate(() => client.receive(structuredClone(message))));
  const client = new FetchClient((message) => setImmediate(() => server.receive(structuredClone(message))));
  return { client, server };
}

/** An answer whose pieces are counted when they are read. */
function pieces(bytes, size, read = { n: 0 }) {
  let at = 0;
  return new ReadableStream({
    pull(controller) {
      read.n += 1;
      if (at >= bytes.length) return controller.close();
      controller.enqueue(new Uint8Array(bytes.subarray(at, at += size)));
    },
    cancel() {
      read.cancelled = true;
    },
  }, { highWaterMark: 0 });
}

test("an answer comes whole, with its status and headers", async () => {
  const asked = [];
  const { client } = line(async (url, init) => {
    asked.push({ url, method: init.method, headers: init.headers });
    return new Response(pieces(FILE, 10_000), { status: 206, headers: { "content-range": "bytes 5-9/10" } });
  });
  const response = await client.fetch("https://example.org/m.gguf", { headers: new Headers({ range: "bytes=5-" }) });
  assert.deepEqual([response.status, response.headers.get("content-range")], [206, "bytes 5-9/10"]);
  assert.ok(FILE.equals(Buffer.from(await response.arrayBuffer())));
  assert.deepEqual(asked, [{ url: "https://example.org/m.gguf", method: "GET", headers: { range: "bytes=5-" } }]);
});

test("requests at the same time do not mix", async () => {
  const { client } = line(async (url) => new Response(pieces(Buffer.from(url.repeat(1000)), 100)));
  const texts = await Promise.all(["a", "b", "c"].map(async (url) => (await client.fetch(url)).text()));
  assert.deepEqual(texts, ["a", "b", "c"].map((url) => url.repeat(1000)));
});

test("a piece is read when it is wanted, and the rest is given up", async () => {
  const read = { n: 0 };
  let signal;
  const { client } = line(async (url, init) => {
    signal = init.signal;
    return new Response(pieces(FILE, 1000, read));
  });
  const reader = (await client.fetch("x")).body.getReader();
  await reader.read();
  await reader.read();
  assert.ok(read.n <= 3, `${read.n} pieces were read for two`);
  await reader.cancel();
  await new Promise((resolve) => setImmediate(() => setImmediate(resolve)));
  assert.ok(signal.aborted);
});

test("what fails is said, before the answer and in the middle of it", async () => {
  const refused = line(async () => { throw new Error("no way"); }).client;
  await assert.rejects(refused.fetch("x"), { name: "TypeError", message: "no way" });
  const opaque = line(async () => Response.error()).client;
  await assert.rejects(opaque.fetch("x"));
  const broken = line(async () => new Response(new ReadableStream({ pull(controller) { controller.error(new Error("cut")); } }))).client;
  await assert.rejects((await broken.fetch("x")).text(), { message: "cut" });
  assert.equal((await line(async () => new Response(null, { status: 404 })).client.fetch("x")).status, 404);
});

test("a signal ends a request at once", async () => {
  const { client } = line(() => new Promise(() => {}));
  const controller = new AbortController();
  const waiting = client.fetch("x", { signal: controller.signal });
  controller.abort(new Error("enough"));
  await assert.rejects(waiting, { message: "enough" });
  const { client: slow } = line(async () => new Response(new ReadableStream({ pull: () => new Promise(() => {}) })));
  const second = new AbortController();
  const reading = (await slow.fetch("x", { signal: second.signal })).text();
  second.abort(new Error("enough"));
  await assert.rejects(reading, { message: "enough" });
});

test("a download by it goes on where it was cut", async () => {
  let n = 0;
  const { client } = line(async (url, { headers }) => {
    const start = Number(/^bytes=(\d+)-$/.exec(headers.range ?? "")?.[1] ?? 0);
    const part = FILE.subarray(start);
    const size = { "content-length": String(part.length), etag: '"one"', ...(start > 0 ? { "content-range": `bytes ${start}-${FILE.length - 1}/${FILE.length}` } : {}) };
    const body = n++ === 0 ? pieces(part.subarray(0, 70_000), 9000) : pieces(part, 9000);
    return new Response(body, { status: start > 0 ? 206 : 200, headers: size });
  });
  const download = await Download.open("https://example.org/m.gguf", {
    signal: new AbortController().signal, httpCache: "no-store", fetch: client.fetch, onReconnect() {},
  });
  const got = [];
  for (let piece; (piece = await download.next()) !== undefined;) got.push(piece);
  assert.ok(FILE.equals(Buffer.concat(got)));
  assert.equal(n, 2);
});
