// What is kept of downloads, and under which address: signed addresses, a newer file beside the older one, damage.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer } from "node:http";
import { after, before, beforeEach, test } from "node:test";

import { openFiles, readAll } from "../build/source.js";
import { specOf } from "../build/spec.js";
import { Store } from "../build/store.js";
import { MemoryBackend } from "./memory-backend.mjs";

const OLD = Buffer.alloc(2_000_000, 1);
const NEW = Buffer.from(Array.from({ length: 3_000_000 }, (_, i) => i % 251));

let file;
let cutAt;
let requests;
let server;
let origin;
let backend;
let store;

before(async () => {
  server = createServer((request, response) => {
    requests.push(`${request.method} ${request.url}`);
    // As S3 does: the signature is for GET.
    if (request.method === "HEAD" && request.url.includes("X-Amz-Signature")) return response.writeHead(403).end();
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "");
    const [start, end] = range === null ? [0, file.length] : [Number(range[1]), range[2] === "" ? file.length : Number(range[2]) + 1];
    response.writeHead(range === null ? 200 : 206, {
      "content-length": end - start,
      etag: `"${createHash("md5").update(file).digest("hex")}"`,
      ...(range === null ? {} : { "content-range": `bytes ${start}-${end - 1}/${file.length}` }),
    });
    if (request.method === "HEAD") return response.end();
    if (end - start < cutAt) return response.end(file.subarray(start, end));
    response.write(file.subarray(start, start + cutAt), () => setTimeout(() => response.destroy(), 20));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  origin = `http://127.0.0.1:${server.address().port}`;
});
after(() => {
  server.closeAllConnections();
  server.close();
});
beforeEach(() => {
  [file, cutAt, requests] = [OLD, Infinity, []];
  backend = new MemoryBackend();
  store = new Store(backend);
});

/** Loads an address as the worker does. `stopAt`: gives up after so many bytes; `more`: what else is said of the source. */
async function load(url, { stopAt = Infinity, more = {}, from = { kind: "url", url } } = {}) {
  const notices = [];
  const copies = [];
  const [opened] = await openFiles({ kind: "files", files: [{ name: "model.gguf", ...from }], ...more }, {
    signal: new AbortController().signal,
    store,
    extras: [],
    newDigest() {
      const hash = createHash("sha256");
      return { update: (bytes) => hash.update(bytes), hex: () => hash.copy().digest("hex"), free() {} };
    },
    notify: (notice) => notices.push(notice.code),
    onBytes() {},
    onCopy: (copy) => copies.push(copy),
    onStored() {},
  });
  let bytes;
  try {
    if (stopAt < Infinity) {
      for (let at = 0; at < stopAt;) at += (await opened.read(at)).length;
    } else {
      bytes = Buffer.from(await readAll(opened));
      await opened.finish();
    }
  } finally {
    await opened.close(false);
  }
  return { bytes, notices, copies };
}

test("a signed address is kept without its signature, whoever signed it and when", async () => {
  const signed = (signature, date) =>
    `${origin}/bucket/model.gguf?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=${date}&X-Amz-Expires=900&X-Amz-Signature=${signature}&versionId=7`;
  await load(signed("first", 1));
  requests = [];
  const { bytes, notices } = await load(signed("second", 2));
  assert.ok(OLD.equals(bytes));
  assert.deepEqual(notices, []);
  // Whether it is the newest is asked with one byte, because the signature is for GET alone.
  assert.equal(requests.length, 2, requests.join("\n"));
  assert.deepEqual((await store.list()).map((entry) => entry.url), [`${origin}/bucket/model.gguf?versionId=7`]);
  assert.ok(!JSON.stringify([...backend.records.values()]).includes("first"), "a signature was written down");
  assert.equal(await store.delete(signed("third", 3)), true);
  assert.deepEqual(await store.list(), []);
});

test("other signatures are known as well, and other queries are part of the address", async () => {
  const kept = async (query) => {
    await store.clear();
    await load(`${origin}/m.gguf?${query}`);
    return (await store.list())[0].url.slice(`${origin}/m.gguf`.length);
  };
  assert.equal(await kept("Expires=1&Signature=abc&Key-Pair-Id=K&Policy=p"), "");
  assert.equal(await kept("GoogleAccessId=a&Expires=1&Signature=abc"), "");
  assert.equal(await kept("X-Goog-Algorithm=a&X-Goog-Signature=b&response-content-type=c"), "");
  assert.equal(await kept("sv=2024-01-01&se=2030&sr=b&sp=r&sig=abc%3D"), "");
  assert.equal(await kept("alt=media&token=abc"), "?alt=media");
  assert.equal(await kept("file=model-a&sig=abc"), "?file=model-a");
  assert.equal(await kept("file=a&expires=1"), "?file=a&expires=1");
});

test("the old copy stays until the new one is whole", async () => {
  const url = `${origin}/model.gguf`;
  await load(url);
  file = NEW;
  const given = await load(url, { stopAt: 1_500_000 });
  assert.ok(given.notices.includes("cache_outdated"));
  // Interrupted: there is the old one as a whole, and a part of the new one.
  assert.deepEqual((await store.list()).map(({ stored, complete }) => [stored, complete]), [[OLD.length, true]]);
  const claimed = await store.claim(url, "shared", new AbortController().signal);
  assert.equal(claimed.part.complete, false);
  assert.ok(claimed.part.stored >= 1_500_000);
  assert.ok(OLD.equals(Buffer.from(await (await claimed.bytes(claimed.whole)).arrayBuffer())));
  claimed.release();
  // The next load goes on, and the old one goes when the new one is there.
  requests = [];
  const { bytes } = await load(url);
  assert.ok(NEW.equals(bytes));
  assert.equal(requests.filter((request) => request.startsWith("GET")).length, 1);
  assert.deepEqual((await store.list()).map(({ stored, complete }) => [stored, complete]), [[NEW.length, true]]);
  assert.equal(backend.bytes.size, 1, "files that are left");
  // And it is this one that is read.
  assert.ok(NEW.equals((await load(url)).bytes));
  await store.clear();
  assert.equal(backend.records.size + backend.bytes.size, 0);
});

test("room is asked for before a download is written; the old copy makes room only where there is none for both", async (t) => {
  const storage = { quota: 0, estimate: async () => ({ quota: storage.quota, usage: [...backend.bytes.values()].reduce((sum, it) => sum + it.length, 0) }) };
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  Object.defineProperty(globalThis, "navigator", { value: { storage }, configurable: true });
  t.after(() => before === undefined ? delete globalThis.navigator : Object.defineProperty(globalThis, "navigator", before));
  const url = `${origin}/model.gguf`;
  storage.quota = OLD.length - 1;
  const full = await load(url);
  assert.ok(OLD.equals(full.bytes));
  assert.deepEqual(full.notices, ["not_cached"]);
  assert.equal(backend.bytes.size, 0, "something was written");

  storage.quota = OLD.length + NEW.length - 1;
  await load(url);
  file = NEW;
  assert.ok(NEW.equals((await load(url)).bytes));
  assert.deepEqual((await store.list()).map(({ stored, complete }) => [stored, complete]), [[NEW.length, true]]);

  // Neither beside the old one nor in its place: the old one stays.
  file = Buffer.concat([NEW, NEW]);
  const larger = await load(url);
  assert.ok(larger.notices.includes("not_cached"));
  assert.deepEqual((await store.list()).map(({ stored, complete }) => [stored, complete]), [[NEW.length, true]]);
});

test("a warm file is not hashed on its way; asked for it, its copy knows that it is damaged, and goes", async () => {
  const url = `${origin}/model.gguf`;
  await load(url);
  const [key] = backend.bytes.keys();
  const good = await load(url);
  assert.deepEqual(await good.copies[0].check(async () => {}), "good");
  const damaged = Buffer.from(OLD);
  damaged[1_000_000] ^= 1;
  backend.bytes.set(key, damaged);
  const { bytes, copies: [copy] } = await load(url);
  assert.ok(damaged.equals(bytes), "it was read as it is");
  let turns = 0;
  assert.equal(await copy.check(async () => void (turns += 1)), "damaged");
  assert.ok(turns > 4, "it gave others a turn");
  await copy.delete(new AbortController().signal);
  assert.deepEqual(await store.list(), []);
  assert.ok(OLD.equals((await load(url)).bytes));
});

test("a copy that lacks bytes is downloaded again", async () => {
  const url = `${origin}/model.gguf`;
  await load(url);
  const [key] = backend.bytes.keys();
  backend.bytes.set(key, OLD.subarray(0, 1000));
  const { bytes, notices } = await load(url);
  assert.ok(OLD.equals(bytes));
  assert.deepEqual(notices, ["cache_damaged"]);
  assert.deepEqual((await store.list()).map(({ stored, complete }) => [stored, complete]), [[OLD.length, true]]);
  assert.ok(OLD.equals((await load(url)).bytes));
});

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

test("a digest that the caller names is compared, of downloads, kept copies, and files here", async () => {
  const url = `${origin}/m.gguf`;
  const wrong = { code: "digest", message: new RegExp(`${sha256(OLD)}, expected ${sha256(NEW)}`) };
  await assert.rejects(load(url, { more: { pins: sha256(NEW) } }), wrong);
  await load(url, { more: { pins: { "model.gguf": sha256(OLD) } } });
  requests = [];
  // The kept copy is known by its digest; nobody is asked.
  assert.ok(OLD.equals((await load(url, { more: { pins: sha256(OLD) } })).bytes));
  assert.deepEqual(requests, []);
  const [key] = backend.bytes.keys();
  backend.bytes.get(key)[1_500_000] ^= 1;
  await assert.rejects(load(url, { more: { pins: sha256(OLD) } }), { code: "storage", message: /damaged: its SHA-256 is/ });
  const blob = { kind: "blob", blob: new Blob([OLD]) };
  assert.ok(OLD.equals((await load("", { from: blob, more: { pins: sha256(OLD) } })).bytes));
  await assert.rejects(load("", { from: blob, more: { pins: sha256(NEW) } }), wrong);
});

test("digests for files that are not there, and one for many, are refused", async () => {
  const pinned = (pins) => load(`${origin}/m.gguf`, { more: { pins } });
  await assert.rejects(pinned({ "other.gguf": sha256(OLD) }), { code: "option", message: /"other.gguf", and the model has the files model.gguf/ });
  const two = ["a", "b"].map((name) => ({ kind: "url", name, url: `${origin}/${name}` }));
  await assert.rejects(openFiles({ kind: "files", files: two, pins: sha256(OLD) }, {}), { code: "option", message: /one digest, and the model has the files a, b/ });
  await assert.rejects(openFiles({ kind: "folder", url: `${origin}/f/`, pins: sha256(OLD) }, {}), { code: "option", message: /the source is a folder/ });
  await assert.rejects(specOf("https://example.org/m.gguf", undefined, { sha256: "abc" }), { code: "option", message: /sha256 is "abc", expected 64 hexadecimal/ });
  await assert.rejects(specOf("https://example.org/m.gguf", undefined, { sha256: { a: 5 } }), { code: "option", message: /sha256\["a"\] is 5/ });
  assert.equal((await specOf("https://example.org/m.gguf", undefined, { sha256: sha256(OLD).toUpperCase() })).pins, sha256(OLD));
});

test("which files are a model's is remembered, without what signs them, and is none of the downloads", async () => {
  const url = `${origin}/m.gguf?X-Amz-Signature=secret`;
  const spec = await specOf(url, undefined);
  await load(url, { more: { given: spec.given } });
  assert.deepEqual((await store.models()).map(({ source, files }) => [source, files]), [[`${origin}/m.gguf`, [`${origin}/m.gguf`]]]);
  assert.equal((await store.list()).length, 1);
  await store.setModel({ source: "hf:owner/name", endpoint: "https://hub.example", files: [url] });
  assert.equal((await store.models()).length, 2);
  await store.removeModel({ source: "hf:owner/name", endpoint: "https://hub.example" });
  // What anybody else wrote there is none.
  await backend.writeRecord("other", { url: "x", stored: 0, complete: false, date: 1, model: { source: 5, files: "x" } });
  assert.equal((await store.models()).length, 1);
  assert.ok(!JSON.stringify([...backend.records.values()]).includes("secret"));
  for (const source of [new Blob([OLD]), "/nowhere/model.gguf", [`${origin}/a`, new Blob([OLD])]]) {
    assert.equal((await specOf(source, undefined)).given, undefined);
  }
  assert.deepEqual((await specOf([`${origin}/a`, `${origin}/b`], undefined)).given, { source: [`${origin}/a`, `${origin}/b`] });
});
