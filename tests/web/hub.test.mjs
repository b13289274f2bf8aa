// Hub addresses in a browser: a hub and a content host on other origins than the page, with all their failures.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer } from "node:http";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, beforeEach, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";

const bytes = readFileSync(join(repository, "assets/stories.gguf"));
const digest = createHash("sha256").update(bytes).digest("hex");
const { ids: prompt, greedy_ids: expected } =
  JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];
const ADDRESS = "hf:owner/stories:Q8_0";
const LIST = "/api/models/owner/stories/revision/main?blobs=true";
const limited = { timeout: 120_000 };

let server;
let chromium;
let hub;
let store;
/** Overrides the usual responses, if it returns one. */
let replace;
let requests;

const CORS = { "access-control-allow-origin": "*", "access-control-allow-headers": "authorization, range", "access-control-expose-headers": "*" };

/** A server that every page may read; preflights are not recorded. */
async function serve(host, answer) {
  const started = createServer((request, response) => {
    for (const [name, value] of Object.entries(CORS)) response.setHeader(name, value);
    if (request.method === "OPTIONS") return response.writeHead(204).end();
    requests.push({ host, url: request.url, range: request.headers.range, authorization: request.headers.authorization });
    if (!replace(request, response, host)) answer(request, response);
  });
  await new Promise((resolve) => started.listen(0, "127.0.0.1", resolve));
  return started;
}

const originOf = (started) => `http://127.0.0.1:${started.address().port}`;

function send(request, response, content) {
  const start = Number(/^bytes=(\d+)-$/.exec(request.headers.range ?? "")?.[1] ?? 0);
  const part = content.subarray(start);
  const range = start > 0 ? { "content-range": `bytes ${start}-${content.length - 1}/${content.length}` } : {};
  response.writeHead(start > 0 ? 206 : 200, { "content-length": part.length, etag: `"${digest}"`, ...range });
  response.end(request.method === "HEAD" ? undefined : part);
}

before(async () => {
  server = await startServer();
  chromium = await openBrowser();
  hub = await serve("hub", (request, response) => {
    if (request.url === LIST) {
      const siblings = [{ rfilename: "stories-Q8_0.gguf", size: bytes.length, lfs: { sha256: digest, size: bytes.length } }];
      return response.writeHead(200).end(JSON.stringify({ sha: "0".repeat(40), siblings }));
    }
    if (request.url !== "/owner/stories/resolve/main/stories-Q8_0.gguf") return response.writeHead(404).end();
    response.writeHead(302, { location: `${originOf(store)}/${digest}` }).end();
  });
  store = await serve("store", (request, response) => send(request, response, bytes));
});
beforeEach(() => {
  replace = () => false;
  requests = [];
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  for (const started of [hub, store]) {
    started?.closeAllConnections();
    started?.close();
  }
});

/** Runs in a page: loads, and generates a little. `ownFetch`: with a custom fetch function. */
async function loadHere({ address, options, prompt, ownFetch }) {
  const { Model, cache } = await import("/npm/index.js");
  const seen = { tokens: [], fetched: [], notices: [] };
  if (ownFetch) {
    options.fetch = (url, init) => {
      seen.fetched.push(url);
      return fetch(url, init);
    };
  }
  try {
    const model = await Model.load(address, { device: "cpu", onNotice: ({ code }) => seen.notices.push(code), ...options });
    for await (const { id } of model.generate(prompt, { maxTokens: 16, ignoreEos: true })) seen.tokens.push(id);
    model.free();
  } catch (error) {
    seen.error = { name: error.name, code: error.code, status: error.status, message: error.message };
  }
  seen.cached = await cache.list();
  return seen;
}

/** Loads in a new page that shares storage with the previous ones. */
async function load(options = {}, address = ADDRESS, ownFetch = false) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  try {
    return await page.evaluate(loadHere, { address, options: { endpoint: originOf(hub), ...options }, prompt, ownFetch });
  } finally {
    await page.close();
  }
}

async function clear() {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(async () => (await import("/npm/index.js")).cache.clear());
  await page.close();
}

function assertLoaded(seen) {
  assert.equal(seen.error, undefined);
  assert.deepEqual(seen.tokens, expected.slice(0, 16));
}

test("a model is loaded by its address, kept, and used without the hub", limited, async () => {
  assertLoaded(await load({ token: "hf_secret" }));
  for (const { host, authorization } of requests) assert.equal(authorization, host === "hub" ? "Bearer hf_secret" : undefined, host);
  assert.ok(requests.some(({ host }) => host === "store"));
  requests = [];
  assertLoaded(await load());
  assert.deepEqual(requests.map(({ url }) => url), [LIST], "the list alone");
  for (const unanswered of [(response) => response.destroy(), (response) => response.writeHead(429).end()]) {
    replace = (request, response) => (unanswered(response), true);
    const seen = await load();
    assertLoaded(seen);
    assert.ok(seen.notices.includes("not_revalidated"), "that it may be an old copy is told");
  }
  await clear();
});

test("a function of the page's own sends all requests", limited, async () => {
  const seen = await load({ cache: false }, ADDRESS, true);
  assertLoaded(seen);
  const atHub = requests.filter(({ host }) => host === "hub").map(({ url }) => originOf(hub) + url);
  assert.deepEqual(seen.fetched, atHub);
  // A connection that breaks in the page's own fetch resumes like any other.
  let isFirst = true;
  replace = (request, response, host) => {
    if (host !== "store" || !isFirst) return false;
    isFirst = false;
    response.writeHead(200, { "content-length": bytes.length, etag: `"${digest}"` });
    response.write(bytes.subarray(0, 600_000), () => response.destroy());
    return true;
  };
  assertLoaded(await load({ cache: false }, ADDRESS, true));
});

test("a download goes on where it was cut", limited, async () => {
  for (let round = 0; round < 20; round++) {
    const cut = 1 + (round * 7919 * 151) % (bytes.length - 1);
    let isFirst = true;
    requests = [];
    replace = (request, response, host) => {
      if (host !== "store" || !isFirst) return false;
      isFirst = false;
      response.writeHead(200, { "content-length": bytes.length, etag: `"${digest}"` });
      response.write(bytes.subarray(0, cut), () => response.destroy());
      return true;
    };
    assertLoaded(await load());
    assert.ok(requests.filter(({ host }) => host === "store").length > 1, `cut at ${cut}`);
    await clear();
  }
});

test("a hub that refuses or lies is told, and nothing is kept", limited, async () => {
  for (const [status, message] of [[401, /valid token/], [403, /how to get access/], [404, /no such repository/]]) {
    replace = (request, response) => (response.writeHead(status).end(), true);
    const { error } = await load();
    assert.deepEqual([error.name, error.code, error.status], ["TilewrightError", "http", status]);
    assert.match(error.message, message);
  }
  const other = Buffer.from(bytes);
  other[1_000_000] ^= 1;
  replace = (request, response, host) => host === "store" && (send(request, response, other), true);
  const { error, cached } = await load();
  assert.equal(error.code, "digest");
  assert.ok(error.message.includes(digest), error.message);
  assert.deepEqual(cached, []);
  replace = () => false;
  assert.match((await load({}, "hf:owner/stories:Q4_0")).error.message, /no Q4_0; there: Q8_0/);
  assertLoaded(await load());
  await clear();
});

test("a host of contents that refuses is told, and so is a network that is not there", limited, async () => {
  for (const status of [401, 403, 404]) {
    replace = (request, response, host) => host === "store" && (response.writeHead(status).end(), true);
    const { error, cached } = await load();
    assert.deepEqual([error.code, error.status, cached], ["http", status, []]);
  }
  let n = 0;
  replace = (request, response, host) => host === "store" && n++ < 2 && (response.writeHead(429, { "retry-after": "0" }).end(), true);
  assertLoaded(await load());
  await clear();
  replace = (request, response) => (response.destroy(), true);
  const { error } = await load();
  assert.equal(error.code, "network");
});

test("a hub that is overrun is waited for", limited, async () => {
  let n = 0;
  replace = (request, response) => n++ < 2 && (response.writeHead(429, { "retry-after": "0" }).end(), true);
  assertLoaded(await load());
  await clear();
});
