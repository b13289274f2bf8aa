// Hugging Face folders on servers that answer in every way that servers do for what they do not have; what is asked for, and how often.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer } from "node:http";
import { after, before, beforeEach, test } from "node:test";

import { openFiles, readAll, SENTENCE_FILES } from "../build/source.js";
import { Store } from "../build/store.js";
import { MemoryBackend } from "./memory-backend.mjs";

const HTML = "<!doctype html><html><title>app</title></html>";
/** Answers of hosts for a file that is not there. */
const ABSENT = {
  "404": (response) => response.writeHead(404).end("not found"),
  "403, as S3": (response) => response.writeHead(403, { "content-type": "application/xml" }).end("<Error><Code>AccessDenied</Code></Error>"),
  "401, as a hub": (response) => response.writeHead(401).end(),
  "410": (response) => response.writeHead(410).end(),
  "its start page, as Vite": (response) => response.writeHead(200, { "content-type": "text/html; charset=utf-8" }).end(HTML),
  "its start page without a type": (response) => response.writeHead(200, { "content-type": "application/octet-stream" }).end(HTML),
};

let files;
let absent;
let requests;
/** Requests that have been answered, or whose line was cut. */
let inFlight;
let mostInFlight;
let aborted;
let delay;
let refuseHead;
let isDown;
let server;
let folder;
let folders = 0;

before(async () => {
  server = createServer(async (request, response) => {
    if (isDown) return request.socket.destroy();
    const name = new URL(request.url, "http://localhost").pathname.replace(/^\/\d+\//, "");
    requests.push({ method: request.method, name, range: request.headers.range });
    inFlight += 1;
    mostInFlight = Math.max(mostInFlight, inFlight);
    response.once("close", () => {
      inFlight -= 1;
      if (!response.writableFinished) aborted.push(`${request.method} ${name}`);
    });
    await new Promise((resolve) => setTimeout(resolve, delay));
    const file = files.get(name);
    if (file === undefined) return absent(response);
    if (request.method === "HEAD" && refuseHead) return response.writeHead(403).end();
    const headers = { etag: `"${createHash("md5").update(file).digest("hex")}"`, "accept-ranges": "bytes" };
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "");
    if (range === null) return response.writeHead(200, { ...headers, "content-length": file.length }).end(request.method === "HEAD" ? undefined : file);
    const [start, end] = [Number(range[1]), range[2] === "" ? file.length - 1 : Number(range[2])];
    const part = file.subarray(start, end + 1);
    response.writeHead(206, { ...headers, "content-length": part.length, "content-range": `bytes ${start}-${end}/${file.length}` }).end(part);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
});
after(() => {
  server.closeAllConnections();
  server.close();
});
beforeEach(() => {
  folders += 1;
  folder = `http://127.0.0.1:${server.address().port}/${folders}/`;
  files = new Map([
    ["config.json", Buffer.from('{"model_type":"llama"}')],
    ["tokenizer.json", Buffer.from('{"model":{}}')],
    ["model.safetensors", Buffer.alloc(3_000_000, 7)],
  ]);
  absent = ABSENT["404"];
  [requests, aborted, inFlight, mostInFlight, delay, refuseHead, isDown] = [[], [], 0, 0, 0, false, false];
});

/** Opens the folder as the worker does, hands the files to `use`, reads them to their ends, keeps them. */
async function load({ store, extras = SENTENCE_FILES, use = () => {} } = {}) {
  const notices = [];
  const opened = await openFiles({ kind: "folder", url: folder }, {
    signal: new AbortController().signal,
    store,
    extras,
    newDigest() {
      const hash = createHash("sha256");
      return { update: (bytes) => hash.update(bytes), hex: () => hash.copy().digest("hex"), free() {} };
    },
    notify: (notice) => notices.push(notice.code),
    onBytes() {},
    onCopy() {},
    onStored() {},
  });
  try {
    await use(opened);
    const contents = {};
    for (const file of opened) {
      contents[file.name] = Buffer.from(await readAll(file));
      await file.finish();
    }
    return { names: opened.map((file) => file.name), sizes: opened.map((file) => file.size), contents, notices };
  } finally {
    await Promise.all(opened.map((file) => file.close(false)));
  }
}

const asked = (name) => requests.filter((request) => request.name === name).map(({ method, range }) => range ? `${method} ${range}` : method);

for (const [what, answer] of Object.entries(ABSENT)) {
  test(`optional files may be absent, on a server that answers with ${what}`, async () => {
    absent = answer;
    const { names, contents } = await load();
    assert.deepEqual(names, ["config.json", "tokenizer.json", "model.safetensors"]);
    assert.ok(files.get("model.safetensors").equals(contents["model.safetensors"]));
  });
}

test("a file that is needed must be there, and the error has the status", async () => {
  files.delete("tokenizer.json");
  await assert.rejects(load(), { code: "http", status: 404, message: /tokenizer\.json.*no such file/ });
  absent = ABSENT["403, as S3"];
  await assert.rejects(load(), { code: "http", status: 403, message: /tokenizer\.json/ });
  absent = ABSENT["its start page, as Vite"];
  await assert.rejects(load(), { code: "not_a_model", message: /tokenizer\.json.*web page/ });
  files.set("tokenizer.json", Buffer.from("{}"));
  files.delete("model.safetensors");
  await assert.rejects(load(), { code: "not_a_model", message: /model\.safetensors.*web page/ });
});

test("an optional file that the server fails to give is an error, not absent", async () => {
  absent = (response) => response.writeHead(400).end();
  await assert.rejects(load(), { code: "http", status: 400 });
});

test("all files are asked for at the same time", async () => {
  delay = 50;
  await load({ use: () => assert.ok(mostInFlight >= 7, `${mostInFlight} at the same time`) });
});

test("no answer is thrown away, and each file comes once", async () => {
  files.set("model.safetensors.index.json", Buffer.from(JSON.stringify({ weight_map: { a: "a.safetensors", b: "b.safetensors" } })));
  files.set("a.safetensors", Buffer.alloc(2_500_000, 1));
  files.set("b.safetensors", Buffer.alloc(3_500_000, 2));
  files.delete("model.safetensors");
  const { names, sizes, contents } = await load({ use: () => {
    assert.deepEqual(asked("a.safetensors"), ["HEAD"], "before it is read");
    assert.deepEqual(asked("b.safetensors"), ["HEAD"], "before it is read");
  } });
  assert.deepEqual(names, ["config.json", "tokenizer.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]);
  assert.deepEqual(sizes.slice(-2), [2_500_000, 3_500_000]);
  assert.ok(files.get("b.safetensors").equals(contents["b.safetensors"]));
  assert.deepEqual(aborted, []);
  for (const name of ["config.json", "tokenizer.json", "model.safetensors.index.json"]) assert.deepEqual(asked(name), ["GET"], name);
  for (const name of ["a.safetensors", "b.safetensors"]) assert.deepEqual(asked(name), ["HEAD", "GET"], name);
});

test("a server that knows no HEAD, as for a signed address, is asked for one byte", async () => {
  refuseHead = true;
  const { sizes } = await load();
  assert.equal(sizes.at(-1), 3_000_000);
  assert.deepEqual(asked("model.safetensors"), ["HEAD", "GET bytes=0-0", "GET"]);
  assert.deepEqual(aborted, []);
});

test("what a folder does not have is remembered, until the folder changes or the network is back after a day", async (t) => {
  const store = new Store(new MemoryBackend());
  const first = await load({ store });
  const missing = ["tokenizer_config.json", "generation_config.json", ...SENTENCE_FILES, "model.safetensors.index.json"];
  for (const name of missing) assert.deepEqual(asked(name), ["GET"], name);

  requests = [];
  const second = await load({ store });
  assert.deepEqual(second, first);
  for (const name of missing) assert.deepEqual(asked(name), [], name);
  assert.deepEqual(requests.map(({ method, name }) => `${method} ${name}`).sort(), ["HEAD config.json", "HEAD model.safetensors", "HEAD tokenizer.json"]);

  // Another configuration: another folder.
  files.set("config.json", Buffer.from('{"model_type":"bert"}'));
  files.set("modules.json", Buffer.from("[]"));
  const third = await load({ store });
  assert.ok(third.names.includes("modules.json"), third.names.join());

  // A day later it is looked for again.
  files.set("1_Pooling/config.json", Buffer.from("{}"));
  assert.ok(!(await load({ store })).names.includes("1_Pooling/config.json"));
  const now = Date.now();
  t.mock.method(Date, "now", () => now + 25 * 60 * 60 * 1000);
  const dayLater = await load({ store });
  assert.ok(dayLater.names.includes("1_Pooling/config.json"), dayLater.names.join());

  // With the last of them there, none is remembered.
  for (const name of missing) files.set(name, Buffer.from(name.includes("index") ? '{"weight_map":{"a":"model.safetensors"}}' : "{}"));
  t.mock.method(Date, "now", () => now + 50 * 60 * 60 * 1000);
  const all = await load({ store });
  assert.equal(all.names.length, 3 + missing.length);
  assert.deepEqual((await load({ store })).names, all.names);
  for (const name of missing.slice(1)) files.delete(name);
  await store.clear();
  const later = await load({ store });

  // Offline nothing can be asked, and what was known stays known, however long ago that was.
  t.mock.method(Date, "now", () => now + 100 * 60 * 60 * 1000);
  isDown = true;
  const offline = await load({ store });
  assert.deepEqual(offline.names, later.names);
  assert.ok(offline.notices.includes("not_revalidated"));
});
