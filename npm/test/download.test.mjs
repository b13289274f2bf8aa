// Downloads from a server that misbehaves: what is put together is the file, or the error says what was wrong.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, beforeEach, test } from "node:test";

import { describeImpostor, differs, Download } from "../build/download.js";

const FILE = Buffer.from(Array.from({ length: 300_000 }, (_, i) => (i * 2654435761) >>> 24));

/** What the server does with the next requests, one after the other; the last answer serves for all that follow. */
let answers;
let requests;
let server;
let url;

before(async () => {
  server = createServer((request, response) => {
    requests.push({ range: request.headers.range, ifRange: request.headers["if-range"] });
    const answer = answers.length > 1 ? answers.shift() : answers[0];
    answer(request, response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  url = `http://127.0.0.1:${server.address().port}/model.gguf`;
});
after(() => {
  server.closeAllConnections();
  server.close();
});
beforeEach(() => {
  requests = [];
});

/** Serves the file as a good server does, and breaks the connection after `cut` bytes. `headers` replaces what it says. */
const serve = ({ cut = Infinity, etag = '"one"', ranges = true, headers = {} } = {}) => (request, response) => {
  const from = ranges && request.headers.range ? Number(/^bytes=(\d+)-$/.exec(request.headers.range)[1]) : 0;
  const partial = from > 0;
  const body = FILE.subarray(from);
  response.writeHead(partial ? 206 : 200, {
    "content-length": body.length,
    ...(etag === null ? {} : { etag }),
    ...(partial ? { "content-range": `bytes ${from}-${FILE.length - 1}/${FILE.length}` } : {}),
    ...headers,
  });
  if (cut >= body.length) {
    response.end(body);
  } else {
    response.write(body.subarray(0, cut), () => setTimeout(() => response.destroy(), 20));
  }
};
const status = (code) => (_, response) => {
  response.writeHead(code);
  response.end();
};

const notices = [];
const options = { signal: new AbortController().signal, httpCache: "no-store", onReconnect: (message) => notices.push(message) };

async function readAll(download) {
  const pieces = [];
  for (let piece; (piece = await download.next()) !== undefined;) {
    pieces.push(piece);
  }
  return Buffer.concat(pieces);
}

test("a good server is asked once", async () => {
  answers = [serve()];
  const download = await Download.open(url, options);
  assert.deepEqual(download.version, { size: FILE.length, etag: '"one"' });
  assert.ok(FILE.equals(await readAll(download)));
  assert.deepEqual(requests, [{ range: undefined, ifRange: undefined }]);
});

test("broken connections are taken up where they broke, any number of times as long as bytes come", async () => {
  answers = [...Array(6).fill(serve({ cut: 45_000 })), serve()];
  notices.length = 0;
  assert.ok(FILE.equals(await readAll(await Download.open(url, options))));
  assert.equal(requests.length, 7);
  assert.deepEqual(requests.slice(1).map(({ ifRange }) => ifRange), Array(6).fill('"one"'));
  assert.equal(notices.length, 6);
});

test("a server without ranges sends from the start, and nothing comes twice", async () => {
  answers = [serve({ cut: 100_000 }), serve({ ranges: false })];
  assert.ok(FILE.equals(await readAll(await Download.open(url, options))));
});

test("a connection that brings nothing is tried four times in all", async () => {
  answers = [serve({ cut: 10_000 }), serve({ cut: 0 })];
  await assert.rejects(async () => readAll(await Download.open(url, options)), { name: "TilewrightError", code: "network" });
  assert.equal(requests.length, 4);
});

test("a range that begins elsewhere is refused", async () => {
  const wrong = serve({ headers: { "content-range": `bytes 99999-${FILE.length - 1}/${FILE.length}` } });
  answers = [serve({ cut: 100_000 }), wrong];
  await assert.rejects(async () => readAll(await Download.open(url, options)), { code: "range" });
});

test("a file that changes in the middle is refused, by its tag or by its size", async () => {
  answers = [serve({ cut: 100_000 }), serve({ etag: '"two"' })];
  await assert.rejects(async () => readAll(await Download.open(url, options)), { code: "range", message: /replaced/ });
  const longer = serve({ etag: null, headers: { "content-range": `bytes 100000-${FILE.length}/${FILE.length + 1}` } });
  answers = [serve({ cut: 100_000, etag: null }), longer];
  await assert.rejects(async () => readAll(await Download.open(url, options)), { code: "range", message: /replaced/ });
});

test("an interrupted download goes on, unless the file is another one by now", async () => {
  answers = [serve()];
  const rest = await Download.resume(url, 123_456, { size: FILE.length, etag: '"one"' }, options);
  assert.ok(FILE.subarray(123_456).equals(await readAll(rest)));
  assert.equal(requests[0].range, "bytes=123456-");
  assert.equal(await Download.resume(url, 123_456, { size: FILE.length, etag: '"zero"' }, options), undefined);
  answers = [status(416)];
  assert.equal(await Download.resume(url, 400_000, { size: 500_000 }, options), undefined);
});

test("going back reads the same bytes again", async () => {
  answers = [serve()];
  const download = await Download.open(url, options);
  await download.next();
  download.seek(7);
  assert.ok(FILE.subarray(7).equals(await readAll(download)));
});

test("a size that is not announced is the length of what comes", async () => {
  answers = [(_, response) => {
    response.writeHead(200);
    response.write(FILE.subarray(0, 1000));
    response.end(FILE.subarray(1000));
  }];
  const download = await Download.open(url, options);
  assert.equal(download.version.size, undefined);
  assert.ok(FILE.equals(await readAll(download)));
  assert.equal(download.version.size, FILE.length);
});

test("an error status names itself; one that may pass is tried again", async () => {
  answers = [status(404)];
  await assert.rejects(Download.open(url, options), { code: "http", message: /no such file.*404/ });
  assert.equal(requests.length, 1);
  answers = [status(503), serve()];
  assert.ok(FILE.equals(await readAll(await Download.open(url, options))));
});

test("a web page is no model", async () => {
  answers = [serve({ headers: { "content-type": "text/html; charset=utf-8" } })];
  await assert.rejects(Download.open(url, options), { code: "not_a_model" });
});

test("nobody there is a network error", async () => {
  await assert.rejects(Download.open("http://127.0.0.1:1/model.gguf", options), { code: "network", message: /cannot be reached/ });
});

test("an abort ends the reading, and the waiting between attempts, with its reason", async () => {
  const controller = new AbortController();
  answers = [serve({ cut: 1000 }), status(503)];
  const download = await Download.open(url, { ...options, signal: controller.signal });
  setTimeout(() => controller.abort(new Error("enough")), 200);
  await assert.rejects(readAll(download), { message: "enough" });
});

test("versions differ by tag, else by what both say", () => {
  assert.equal(differs({ etag: '"a"', size: 1 }, { etag: 'W/"a"', size: 2 }), false);
  assert.equal(differs({ etag: '"a"' }, { etag: '"b"' }), true);
  assert.equal(differs({ size: 1 }, { etag: '"b"', size: 2 }), true);
  assert.equal(differs({ size: 1, lastModified: "x" }, { size: 1, lastModified: "y" }), true);
  assert.equal(differs({}, { etag: '"b"', size: 2 }), false);
});

test("what is no model is recognised by its first bytes, and models are not taken for it", () => {
  const start = (text) => describeImpostor(new TextEncoder().encode(text));
  assert.match(start("\n <!DOCTYPE html><html>"), /web page/);
  assert.match(start('<?xml version="1.0"?><Error>'), /XML/);
  assert.match(start("version https://git-lfs.github.com/spec/v1\noid sha256:0"), /LFS/);
  assert.equal(start("GGUF\u0003\0\0\0"), undefined);
  // A safetensors header whose length begins with the byte of `<`.
  assert.equal(start('<\0\0\0\0\0\0\0{"__metadata__":{}}'), undefined);
});

/** Serves pieces as they are asked for. `hides`: what another origin's page does not see of the answer. */
const servePieces = ({ hides = false } = {}) => (request, response) => {
  const [, from, to] = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range).map(Number);
  if (from >= FILE.length) return response.writeHead(416).end();
  const body = FILE.subarray(from, to + 1);
  response.writeHead(206, {
    "content-length": body.length, etag: '"one"', ...(hides ? {} : { "content-range": `bytes ${from}-${from + body.length - 1}/${FILE.length}` }),
  }).end(body);
};
const inPieces = { ...options, inPieces: true };
const first = 64 << 10;

test("in pieces, no more is asked for than is read, each piece as large as all before it", async () => {
  for (const hides of [false, true]) {
    answers = [servePieces({ hides })];
    requests = [];
    const download = await Download.open(url, inPieces);
    let length = 0;
    while (length < first + 1) length += (await download.next()).length;
    assert.deepEqual(requests.map(({ range }) => range), [`bytes=0-${first - 1}`, `bytes=${first}-${2 * first - 1}`]);
    // Elsewhere it begins small again; whether a size was announced or not, the end is found.
    download.seek(FILE.length - 2 * first - 10);
    assert.ok(FILE.subarray(-2 * first - 10).equals(await readAll(download)));
    assert.equal(requests[2].range, `bytes=${FILE.length - 2 * first - 10}-${FILE.length - first - 11}`);
    assert.ok(requests.length <= 6, JSON.stringify(requests));
  }
});

test("in pieces, a server without ranges is read once, and a break or another version is told as ever", async () => {
  answers = [serve({ ranges: false })];
  assert.ok(FILE.equals(await readAll(await Download.open(url, inPieces))));
  assert.equal(requests.length, 1);
  answers = [servePieces(), (_, response) => response.destroy(), servePieces()];
  assert.ok(FILE.equals(await readAll(await Download.open(url, inPieces))));
  answers = [servePieces(), serve({ etag: '"two"', ranges: false })];
  await assert.rejects(async () => readAll(await Download.open(url, inPieces)), { code: "range", message: /replaced/ });
});
