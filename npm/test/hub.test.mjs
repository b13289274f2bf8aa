// Addresses of a hub: which files they name, what the hub is asked and told, and what becomes of a hub that lies or does not answer.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer } from "node:http";
import { after, before, beforeEach, test } from "node:test";

import { GitDigest } from "../build/git.js";
import { openFiles, readAll } from "../build/source.js";
import { keptAs, specOf } from "../build/spec.js";
import { Store } from "../build/store.js";
import { MemoryBackend } from "./memory-backend.mjs";

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");
const gitSha1 = (bytes) => createHash("sha1").update(`blob ${bytes.length}\0`).update(bytes).digest("hex");
const noise = (length, seed) => Buffer.from(Array.from({ length }, (_, i) => ((i + seed) * 2654435761) >>> 24));
const isLfs = (path) => /\.(gguf|safetensors)$/.test(path);
const LIST = "/api/models/owner/name/revision/main?blobs=true";

/** Contents by path. */
let files;
/** Answers in place of the usual ones, where it gives something. */
let replace;
let requests;
let hub;
let store;
let endpoint;

/** A server whose requests are noted, with the host that they came to. */
async function serve(host, answer) {
  const server = createServer((request, response) => {
    requests.push({ host, method: request.method, url: request.url, headers: request.headers });
    if (!replace(request, response, host)) answer(request, response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return server;
}

const originOf = (server) => `http://127.0.0.1:${server.address().port}`;

function send(request, response, bytes, headers = {}) {
  const start = Number(/^bytes=(\d+)-$/.exec(request.headers.range ?? "")?.[1] ?? 0);
  const part = bytes.subarray(start);
  const range = start > 0 ? { "content-range": `bytes ${start}-${bytes.length - 1}/${bytes.length}` } : {};
  response.writeHead(start > 0 ? 206 : 200, { "content-length": part.length, ...range, ...headers });
  response.end(request.method === "HEAD" ? undefined : part);
}

before(async () => {
  hub = await serve("hub", (request, response) => {
    if (request.url.startsWith("/api/models/owner/name/revision/")) {
      const siblings = [...files].map(([path, bytes]) => ({
        rfilename: path, size: bytes.length, blobId: isLfs(path) ? "0".repeat(40) : gitSha1(bytes), ...(isLfs(path) ? { lfs: { sha256: sha256(bytes), size: bytes.length } } : {}),
      }));
      return send(request, response, Buffer.from(JSON.stringify({ sha: "0".repeat(40), siblings })));
    }
    const bytes = files.get(decodeURIComponent(request.url.replace(/^\/owner\/name\/resolve\/[^/]+\//, "")));
    if (bytes === undefined) return response.writeHead(404).end();
    if (!isLfs(request.url)) return send(request, response, bytes, { etag: `"${sha256(bytes)}"` });
    response.writeHead(302, { location: `${originOf(store)}/${sha256(bytes)}` }).end();
  });
  store = await serve("store", (request, response) => {
    const bytes = [...files.values()].find((content) => request.url === `/${sha256(content)}`);
    return bytes === undefined ? response.writeHead(404).end() : send(request, response, bytes, { etag: `"${sha256(bytes)}"` });
  });
  endpoint = originOf(hub);
});
after(() => {
  for (const server of [hub, store]) {
    server.closeAllConnections();
    server.close();
  }
});
beforeEach(() => {
  files = new Map([["m-Q4_0.gguf", noise(300_000, 1)], ["m-Q8_0.gguf", noise(500_000, 2)], ["README.md", noise(10, 3)]]);
  requests = [];
  replace = () => false;
});

const named = async (address, options) => (await specOf(address, undefined, { endpoint, ...options })).files.map(({ name }) => name);

/** Opens the files of an address as the worker does, reads them to their ends and keeps them. */
async function load(address, { options, kept } = {}) {
  const spec = await specOf(address, undefined, { endpoint, ...options });
  const opened = await openFiles(spec, {
    signal: new AbortController().signal,
    store: kept,
    extras: [],
    newDigest() {
      const hash = createHash("sha256");
      return { update: (bytes) => hash.update(bytes), hex: () => hash.copy().digest("hex"), free() {} };
    },
    notify() {},
    onBytes() {},
    onCopy() {},
    onStored() {},
  });
  try {
    const contents = {};
    for (const file of opened) {
      contents[file.name] = Buffer.from(await readAll(file));
      await file.finish();
    }
    return contents;
  } finally {
    await Promise.all(opened.map((file) => file.close(false)));
  }
}

test("an address names the usual quantisation, another one, a file or a folder", async () => {
  assert.deepEqual(await named("hf:owner/name"), ["m-Q4_0.gguf"]);
  assert.deepEqual(await named("hf:owner/name:q8_0"), ["m-Q8_0.gguf"]);
  assert.deepEqual(await named("hf:owner/name/m-Q8_0.gguf"), ["m-Q8_0.gguf"]);
  files.set("f16/m-F16-00002-of-00002.gguf", noise(10, 4)).set("f16/m-F16-00001-of-00002.gguf", noise(10, 5));
  files.set("mmproj-m-F16.gguf", noise(10, 6)).set("half-Q5_0-00001-of-00002.gguf", noise(10, 7));
  const shards = ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"];
  assert.deepEqual(await named("hf:owner/name:fp16"), shards);
  assert.deepEqual(await named("hf:owner/name/f16/m-F16-00002-of-00002.gguf"), shards);
  await assert.rejects(named("hf:owner/name:Q5_0"), { code: "option", message: /no Q5_0; there: F16, Q4_0, Q8_0/ });
  files.set("other-Q8_0.gguf", noise(10, 8));
  await assert.rejects(named("hf:owner/name:Q8_0"), { code: "option", message: /several files.*m-Q8_0\.gguf, other-Q8_0\.gguf/ });

  files = new Map([["config.json", Buffer.from("{}")], ["tokenizer.json", Buffer.from("{ }")], ["model.safetensors", noise(10, 1)], ["pytorch_model.bin", noise(10, 2)]]);
  files.set("1_Pooling/config.json", Buffer.from("{  }"));
  const spec = await specOf("hf:owner/name", undefined, { endpoint });
  assert.deepEqual(spec.files.map(({ name }) => name), ["config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"]);
  assert.equal(spec.name, "name");
  files.delete("tokenizer.json");
  await assert.rejects(named("hf:owner/name"), { code: "option", message: /neither a GGUF file nor/ });
});

test("an address of a speech model names a folder, or a file of whisper.cpp", async () => {
  const of = async (address, wanted = "speech") => (await specOf(address, undefined, { endpoint }, wanted)).files.map(({ name }) => name);
  files = new Map(["config.json", "tokenizer.json", "model.safetensors", "ggml-tiny.bin"].map((name, i) => [name, noise(10, i)]));
  assert.deepEqual(await of("hf:owner/name"), ["config.json", "tokenizer.json", "model.safetensors"]);
  assert.deepEqual(await of("hf:owner/name/ggml-tiny.bin"), ["ggml-tiny.bin"]);
  await assert.rejects(of("hf:owner/name/ggml-base.bin"), { code: "option" });
  await assert.rejects(of("hf:owner/name/ggml-tiny.bin", "model"), { code: "option", message: /is no GGUF file/ });
});

test("an address of a mixture names a file in safetensors", async () => {
  const of = async (address) => (await specOf(address, undefined, { endpoint }, "file")).files.map(({ name, sha256 }) => [name, sha256 !== undefined]);
  await assert.rejects(of("hf:owner/name"), { code: "option", message: /one file by its path; there: nothing/ });
  files.set("mol/rails.safetensors", noise(10, 4));
  assert.deepEqual(await of("hf:owner/name"), [["rails.safetensors", true]]);
  files.set("other.safetensors", noise(10, 5));
  assert.deepEqual(await of("hf:owner/name/mol/rails.safetensors"), [["rails.safetensors", true]]);
  await assert.rejects(of("hf:owner/name"), { code: "option", message: /one file by its path; there: mol\/rails\.safetensors, other\.safetensors/ });
  await assert.rejects(of("hf:owner/name:Q8_0"), { code: "option" });
});

test("what is no address is refused, and options of a hub are for its addresses", async () => {
  for (const address of ["hf:", "hf:a", "hf:a/..", "hf:../b", "hf:a/b/../c", "hf:a/b:", "hf:a/b@", "hf:a/b@../c", "hf:a--b/c"]) {
    await assert.rejects(named(address), { code: "option", message: /expected hf:owner\/repo/ }, address);
  }
  await assert.rejects(specOf("https://example.org/m.gguf", undefined, { token: "x" }), { code: "option", message: /^token is for addresses of a hub/ });
  await assert.rejects(named("hf:owner/name@a", { revision: "b" }), { code: "option", message: /revision is "b", and the address says "a"/ });
  assert.equal(requests.length, 0);
  await named("hf:owner/name", { revision: "refs/pr/1" });
  await named("hf:owner/name@refs/pr/1");
  assert.deepEqual(requests.map(({ url }) => url), Array(2).fill(LIST.replace("main", "refs%2Fpr%2F1")));
});

test("the token and headers go to the hub, and the token to nobody else", async () => {
  const contents = await load("hf:owner/name", { options: { token: "hf_secret\n", headers: { "x-test": "yes" } } });
  assert.ok(files.get("m-Q4_0.gguf").equals(contents["m-Q4_0.gguf"]));
  assert.ok(requests.some(({ host }) => host === "store"));
  for (const { host, headers } of requests) {
    assert.equal(headers.authorization, host === "hub" ? "Bearer hf_secret" : undefined);
    if (host === "hub") assert.equal(headers["x-test"], "yes");
  }
  const error = await named("hf:owner/name", { token: "hf_secret\nx" }).catch((thrown) => thrown);
  assert.equal(error.code, "option");
  assert.doesNotMatch(error.message, /secret/);
});

test("a download goes on where it was cut", async () => {
  const whole = files.get("m-Q4_0.gguf");
  for (let round = 0; round < 20; round++) {
    const cut = 1 + (round * 7919 * 31) % (whole.length - 1);
    let isFirst = true;
    requests = [];
    replace = (request, response, host) => {
      if (host !== "store" || !isFirst) return false;
      isFirst = false;
      response.writeHead(200, { "content-length": whole.length, etag: `"${sha256(whole)}"` });
      response.write(whole.subarray(0, cut), () => response.destroy());
      return true;
    };
    const contents = await load("hf:owner/name");
    assert.ok(whole.equals(contents["m-Q4_0.gguf"]), `cut at ${cut}`);
    // What was on its way when the line broke may be lost.
    const second = requests.filter(({ host }) => host === "store")[1];
    assert.ok(Number(/^bytes=(\d+)-$/.exec(second.headers.range ?? "bytes=0-")[1]) <= cut);
  }
});

test("a file with another digest is refused and not kept", async () => {
  const whole = files.get("m-Q4_0.gguf");
  const other = Buffer.from(whole);
  other[200_000] ^= 1;
  const kept = new Store(new MemoryBackend());
  replace = (request, response, host) => host === "store" && (send(request, response, other, { etag: '"x"' }), true);
  for (const store of [undefined, kept]) {
    await assert.rejects(load("hf:owner/name", { kept: store }), (error) => {
      assert.equal(error.code, "digest");
      assert.ok(error.message.includes(sha256(whole)) && error.message.includes(sha256(other)), error.message);
      return true;
    });
  }
  assert.ok((await kept.list()).every(({ complete }) => !complete));
});

test("a Git digest is that of node:crypto, however its bytes are cut", () => {
  for (const length of [0, 1, 47, 48, 55, 56, 63, 64, 65, 1000, 70_000]) {
    const bytes = noise(length, 3);
    for (const cut of [1, 13, 64, 1 << 20]) {
      const digest = new GitDigest(length);
      for (let at = 0; at < length; at += cut) digest.update(bytes.subarray(at, at + cut));
      assert.equal(digest.hex(), gitSha1(bytes), `${length} bytes by ${cut}`);
    }
  }
});

test("files that are not in LFS are compared by their Git digests", async () => {
  files = new Map([["config.json", Buffer.from('{"a":1}')], ["tokenizer.json", noise(70_000, 1)], ["model.safetensors", noise(1000, 2)]]);
  const loaded = await load("hf:owner/name");
  assert.ok(files.get("tokenizer.json").equals(loaded["tokenizer.json"]));
  for (const name of ["config.json", "tokenizer.json"]) {
    const right = files.get(name);
    const other = Buffer.from(right);
    other[right.length - 2] ^= 1;
    replace = (request, response) => request.url.endsWith(`/${name}`) && (send(request, response, other), true);
    const kept = new Store(new MemoryBackend());
    for (const store of [undefined, kept]) {
      await assert.rejects(load("hf:owner/name", { kept: store }), (error) => {
        assert.equal(error.code, "digest");
        assert.ok(error.message.includes(gitSha1(right)) && error.message.includes(gitSha1(other)), error.message);
        return true;
      });
    }
    assert.ok((await kept.list()).every(({ url, complete }) => !complete || !url.endsWith(name)));
  }
});

test("the token does not follow a redirect to another origin, whatever the engine's fetch does", async (t) => {
  const real = globalThis.fetch;
  t.after(() => { globalThis.fetch = real; });
  // As engines did before 2023.
  globalThis.fetch = async (url, init = {}) => {
    if (init.redirect === "manual") return real(url, init);
    for (let at = url; ;) {
      const response = await real(at, { ...init, redirect: "manual" });
      const location = response.headers.get("location");
      if (location === null) return response;
      at = new URL(location, at).href;
    }
  };
  await load("hf:owner/name", { options: { token: "hf_secret", headers: { "x-test": "yes" } } });
  const asked = requests.filter(({ host }) => host === "store");
  assert.ok(asked.length > 0);
  for (const { headers } of asked) {
    assert.equal(headers.authorization, undefined);
    assert.equal(headers["x-test"], "yes");
  }
  // Within the hub it does, as where a repository has another name.
  requests = [];
  replace = (request, response, host) => host === "hub" && !request.url.includes("moved")
    && (response.writeHead(307, { location: `${request.url}&moved` }).end(), true);
  await named("hf:owner/name", { token: "hf_secret" });
  assert.deepEqual(requests.map(({ headers }) => headers.authorization), Array(2).fill("Bearer hf_secret"));
});

test("redirects are followed with bounds, and by a browser where it shows none", async (t) => {
  const real = globalThis.fetch;
  t.after(() => { globalThis.fetch = real; });
  const { ownFetch } = await import("../build/fetching.js?browser");
  const headers = { authorization: "Bearer x" };
  globalThis.fetch = async () => new Response(null, { status: 302, headers: { location: "http://hub.example/" } });
  await assert.rejects(ownFetch("https://hub.example/", { headers }), { name: "TypeError", message: /from https: to http:/ });
  await assert.rejects(ownFetch("http://hub.example/", { headers }), { name: "TypeError", message: /more than 10 redirects/ });
  const asked = [];
  globalThis.fetch = async (url, init) => {
    asked.push(init.redirect ?? "follow");
    return init.redirect === "manual" ? { type: "opaqueredirect", status: 0, headers: new Headers() } : new Response("content");
  };
  for (let round = 0; round < 2; round += 1) {
    assert.equal(await (await ownFetch("https://hub.example/", { headers })).text(), "content");
  }
  assert.deepEqual(asked, ["manual", "follow", "follow"]);
});

test("what is kept is used as long as the hub names the same digest", async () => {
  const kept = new Store(new MemoryBackend());
  await load("hf:owner/name", { kept });
  requests = [];
  const contents = await load("hf:owner/name", { kept });
  assert.ok(files.get("m-Q4_0.gguf").equals(contents["m-Q4_0.gguf"]));
  assert.deepEqual(requests.map(({ url }) => url), [LIST]);
  files.set("m-Q4_0.gguf", noise(1000, 9));
  assert.equal((await load("hf:owner/name", { kept }))["m-Q4_0.gguf"].length, 1000);
});

test("each status of the hub is told", async () => {
  for (const [status, message] of [[401, /valid token/], [403, /how to get access/], [404, /no such repository/], [418, /refuses/]]) {
    requests = [];
    replace = (request, response) => (response.writeHead(status).end(), true);
    await assert.rejects(named("hf:owner/name"), { code: "http", status, message });
    assert.equal(requests.length, 1);
  }
  let n = 0;
  replace = (request, response) => n++ < 3 && (response.writeHead(429, { "retry-after": "0" }).end(), true);
  assert.deepEqual(await named("hf:owner/name"), ["m-Q4_0.gguf"]);
  replace = (request, response) => (response.writeHead(429, { "retry-after": "3600" }).end(), true);
  requests = [];
  await assert.rejects(named("hf:owner/name"), { code: "http", status: 429 });
  assert.equal(requests.length, 1, "nobody waits for an hour");

  n = 0;
  replace = (request, response, host) => host === "store" && n++ < 2 && (response.writeHead(429, { "retry-after": "0" }).end(), true);
  assert.equal((await load("hf:owner/name"))["m-Q4_0.gguf"].length, 300_000);
  replace = (request, response, host) => host === "store" && (response.writeHead(429, { "retry-after": "3600" }).end(), true);
  requests = [];
  await assert.rejects(load("hf:owner/name"), { code: "http", status: 429 });
  assert.equal(requests.filter(({ host }) => host === "store").length, 1);
});

test("a list that is none is refused", async () => {
  const answers = (json) => {
    replace = (request, response) => (response.writeHead(200).end(typeof json === "string" ? json : JSON.stringify(json)), true);
    return assert.rejects(named("hf:owner/name"), { code: "format" }, JSON.stringify(json));
  };
  await answers("<html>");
  await answers("null");
  await answers({ siblings: {} });
  await answers({ siblings: [null] });
  for (const rfilename of ["../m.gguf", "a/../../m.gguf", "/m.gguf", "..\\m.gguf", "a//m.gguf", "", 1]) await answers({ siblings: [{ rfilename }] });
  await answers({ siblings: [{ rfilename: "m.gguf", lfs: { sha256: "../m" } }] });
});

test("a fetch of the caller's own asks for the list", async () => {
  const asked = [];
  const own = (url, init) => {
    asked.push(url);
    return fetch(url.replace("https://hub.example", endpoint), init);
  };
  assert.deepEqual(await named("hf:owner/name", { endpoint: "https://hub.example/", fetch: own }), ["m-Q4_0.gguf"]);
  assert.deepEqual(asked, [`https://hub.example${LIST}`]);
});

test("a signal ends the request for the list", async () => {
  const controller = new AbortController();
  replace = () => (controller.abort(new Error("enough")), true);
  await assert.rejects(specOf("hf:owner/name", controller.signal, { endpoint }), { message: "enough" });
});

test("the licence is what the model card says, or its tag; nonsense is none", async () => {
  const siblings = [{ rfilename: "m-Q4_0.gguf" }];
  const cases = [
    [{ cardData: { license: "apache-2.0" }, tags: ["license:mit"] }, "apache-2.0"], [{ cardData: null, tags: ["gguf", "license:mit"] }, "mit"],
    [{ cardData: { license: ["mit"] }, tags: "license:mit" }, undefined], [{ tags: [5, null] }, undefined], [{ cardData: "x" }, undefined],
  ];
  for (const [said, licence] of cases) {
    replace = (request, response, host) => host === "hub" && (send(request, response, Buffer.from(JSON.stringify({ siblings, ...said }))), true);
    assert.equal((await specOf("hf:owner/name", undefined, { endpoint })).licence, licence);
  }
});

test("a copy is remembered by its address, with the revision and a hub of its own", async () => {
  const given = async (address, options = {}) => (await specOf(address, undefined, { endpoint, ...options })).given;
  assert.deepEqual(await given("hf:owner/name"), { source: "hf:owner/name", endpoint });
  assert.deepEqual(await given("hf:owner/name", { revision: "v2" }), { source: "hf:owner/name@v2", endpoint });
  assert.deepEqual(await keptAs("hf:owner/name:Q4_0@v2", { revision: "v2", endpoint: `${endpoint}/` }), { source: "hf:owner/name:Q4_0@v2", endpoint });
  assert.deepEqual(await keptAs("hf:owner/name", { endpoint: "https://huggingface.co/" }), { source: "hf:owner/name" });
});
