// Loading in a browser: all failures of servers, connections and storage, resuming, the cache, memory.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { bigModel } from "./big-model.mjs";
import { limitStorage, openBrowser } from "./browser.mjs";
import { bytesInMemory, dataPath, repository, startServer } from "./server.mjs";
import { tensors } from "./tensors.mjs";

const STORIES = "assets/stories.gguf";
const bytes = readFileSync(join(repository, STORIES));
const { ids: prompt, greedy_ids: expected } =
  JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];
const MIB = 1 << 20;
const limited = { timeout: 120_000 };

let server;
let chromium;
before(async () => {
  server = await startServer();
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

/** Runs in a page: loads, generates a little, and returns all observations. */
async function loadHere({ source, options, abortAtBytes, prompt, count }) {
  const { Model, cache } = await import("/npm/index.js");
  const seen = { progress: [], notices: [], tokens: [] };
  const controller = new AbortController();
  try {
    const model = await Model.load(source, {
      ...options,
      signal: controller.signal,
      onProgress(progress) {
        seen.progress.push(progress);
        if (progress.loaded >= abortAtBytes) controller.abort();
      },
      onNotice: (notice) => seen.notices.push(notice),
    });
    seen.info = model.info;
    seen.device = model.device;
    for await (const { id } of model.generate(prompt, { maxTokens: count, ignoreEos: true })) seen.tokens.push(id);
    seen.memory = await model.memory();
    model.free();
  } catch (error) {
    seen.error = { name: error.name, code: error.code, message: error.message };
  }
  seen.cached = await cache.list();
  return seen;
}

const argumentsFor = (source, options, extra) => ({
  source, options: { device: "cpu", ...options }, abortAtBytes: Infinity, prompt, count: 16, ...extra,
});

// Token ids in every vocabulary.
const anyPrompt = { prompt: [1], count: 2 };

/** Loads in a fresh page. */
async function load(source, options = {}, extra = {}, { origin = server.origin } = {}) {
  const page = await chromium.open(`${origin}/blank.html`);
  try {
    const seen = await page.evaluate(loadHere, argumentsFor(source, options, extra));
    assert.deepEqual(page.problems, []);
    return seen;
  } finally {
    await page.close();
  }
}

const noticeCodes = (seen) => seen.notices.map((notice) => notice.code);
const entryOf = (seen, url) => seen.cached.find((entry) => entry.url === url);

function assertLoaded(seen) {
  assert.equal(seen.error, undefined);
  assert.deepEqual(seen.tokens, expected.slice(0, 16));
}

/** Checks that the load failed with this code and a one-sentence message, and left nothing behind. */
function assertRefused(seen, code, url) {
  assert.equal(seen.error?.code, code, JSON.stringify(seen.error));
  assert.equal(seen.error.name, "TilewrightError");
  assert.match(seen.error.message, /\w+ \w+ \w+/);
  assert.equal(entryOf(seen, url), undefined, "the cache kept an entry");
}

test("progress only grows, and ends at the file's size", limited, async () => {
  const seen = await load(server.url(STORIES, { fault: "slow", rate: 500_000 }));
  assertLoaded(seen);
  const downloads = seen.progress.filter((it) => it.phase === "download");
  assert.ok(downloads.length >= 10, `${downloads.length} reports`);
  for (let i = 1; i < downloads.length; i++) assert.ok(downloads[i].loaded >= downloads[i - 1].loaded);
  assert.equal(downloads.at(-1).loaded, bytes.length);
  assert.equal(downloads.at(-1).total, bytes.length);
  const middle = downloads[Math.trunc(downloads.length / 2)];
  assert.ok(middle.bytesPerSecond > 100_000 && middle.bytesPerSecond < 2e6, `${middle.bytesPerSecond} B/s`);
  assert.ok(middle.secondsLeft >= 0 && middle.secondsLeft < 10, `${middle.secondsLeft} s left`);
});

test("a server without ETag is fine", limited, async () => {
  assertLoaded(await load(server.url(STORIES, { fault: "no-etag" })));
});

test("a server with a new ETag each time is fine", limited, async () => {
  assertLoaded(await load(server.url(STORIES, { fault: "new-etag" })));
});

test("a broken connection is taken up where it broke", limited, async () => {
  const url = server.url(STORIES, { after: 500_000 });
  const seen = await load(url);
  assertLoaded(seen);
  const [first, second, ...others] = server.requests(url);
  assert.equal(first.sent, 500_000);
  assert.equal(second.status, 206);
  assert.match(second.range, /^bytes=\d+-/);
  assert.ok(server.sent(url) <= bytes.length + 64 * 1024, `${server.sent(url)} bytes were sent for ${bytes.length}`);
  assert.deepEqual(others, []);
  assert.ok(noticeCodes(seen).includes("reconnected"), noticeCodes(seen).join());
});

test("a server that ignores ranges is read again from the start, without mixing", limited, async () => {
  const url = server.url(STORIES, { fault: "ignore-range", after: 500_000 });
  assertLoaded(await load(url));
  assert.deepEqual(server.requests(url).map((entry) => entry.status), [200, 200]);
});

test("a range that begins elsewhere is an error, and nothing stays", limited, async () => {
  const url = server.url(STORIES, { fault: "wrong-range", after: 500_000 });
  assertRefused(await load(url), "range", url);
});

test("a file that changes during the download is an error, and nothing stays", limited, async () => {
  const url = server.url(STORIES, { fault: "new-etag", after: 500_000 });
  assertRefused(await load(url), "range", url);
});

test("a line that always breaks is an error", limited, async () => {
  const url = server.url(STORIES, { after: 0, times: 1000 });
  const seen = await load(url);
  assert.equal(seen.error?.code, "network", JSON.stringify(seen.error));
  assert.ok(server.requests(url).length <= 10, `${server.requests(url).length} attempts`);
});

test("a file that ends too early is an error, and nothing stays", limited, async () => {
  for (const size of [0, 3, 100, 5000, 600_000, bytes.length - 1]) {
    const url = server.url(STORIES, { fault: "short", size });
    const seen = await load(url);
    // If Content-Length shows that the file is shorter than its header declares, the header is at fault.
    assert.ok(["truncated", "format"].includes(seen.error?.code), `${size} bytes: ${JSON.stringify(seen.error)}`);
    assertRefused(seen, seen.error.code, url);
  }
});

test("an error status is an error that names it", limited, async () => {
  for (const code of [404, 403, 500]) {
    const url = server.url(STORIES, { fault: "status", code });
    const seen = await load(url);
    assertRefused(seen, "http", url);
    assert.match(seen.error.message, new RegExp(code));
  }
});

test("a web page is not a model", limited, async () => {
  const url = server.url(STORIES, { fault: "html" });
  assertRefused(await load(url), "not_a_model", url);
});

test("another origin needs CORS headers, and the error says so", limited, async () => {
  const refused = server.url(STORIES, {}, server.otherOrigin);
  const seen = await load(refused);
  assertRefused(seen, "network", refused);
  assert.match(seen.error.message, /CORS/);
  assertLoaded(await load(server.url(STORIES, {}, server.corsOrigin)));
});

test("hostile files are errors, and nothing stays", limited, async () => {
  const withCounts = (tensors, keys) => {
    const file = Buffer.from(bytes);
    file.writeBigUInt64LE(tensors, 8);
    file.writeBigUInt64LE(keys, 16);
    return file;
  };
  const noise = Buffer.alloc(100_000, "GGUF\u0003\0\0\0\u00ff\u0007abcdefg");
  const files = {
    "counts.gguf": withCounts(2n ** 63n, 2n ** 63n), "keys.gguf": withCounts(1n, 2n ** 40n), "noise.gguf": noise,
    "magic.gguf": Buffer.concat([Buffer.from("GGML"), bytes.subarray(4)]),
  };
  for (const [name, content] of Object.entries(files)) {
    server.files.set(name, bytesInMemory(content));
    const url = server.url(`files/${name}`);
    const seen = await load(url);
    assert.ok(["format", "truncated", "not_a_model"].includes(seen.error?.code), `${name}: ${JSON.stringify(seen.error)}`);
    assertRefused(seen, seen.error.code, url);
  }
});

test("an aborted load throws AbortError and ends its worker", limited, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const url = server.url(STORIES, { fault: "slow", rate: 200_000 });
  const seen = await page.evaluate(loadHere, argumentsFor(url, {}, { abortAtBytes: 1 }));
  assert.equal(seen.error.name, "AbortError");
  for (let i = 0; i < 50 && page.workers().length > 0; i++) await sleep(100);
  assert.equal(page.workers().length, 0, "remaining workers");
  const sent = server.sent(url);
  await sleep(500);
  assert.equal(server.sent(url), sent, "the download continued");
  await page.close();
});

test("a download that was aborted goes on where it stopped", limited, async () => {
  server.files.set("resume.gguf", bigModel(60 * MIB));
  const { size } = server.files.get("resume.gguf");
  const url = server.url("files/resume.gguf");
  const aborted = await load(url, {}, { abortAtBytes: 40 * MIB });
  assert.equal(aborted.error.name, "AbortError");
  assert.equal(entryOf(aborted, url)?.complete, false, "the stored part");
  const sentBefore = server.sent(url);
  const seen = await load(url, {}, anyPrompt);
  assert.equal(seen.error, undefined);
  assert.ok(server.sent(url) - sentBefore <= size - 30 * MIB, `${server.sent(url) - sentBefore} bytes in the second load`);
  assert.equal(entryOf(seen, url)?.complete, true);
  // The result of two downloads equals the file.
  const hash = createHash("sha256");
  for await (const part of server.files.get("resume.gguf").read(0, size)) hash.update(part);
  assert.equal(entryOf(seen, url).sha256, hash.digest("hex"));
});

test("the second load comes from the cache, also without a network", limited, async () => {
  const url = server.url(STORIES);
  const first = await load(url);
  assertLoaded(first);
  const entry = entryOf(first, url);
  assert.equal(entry.complete, true);
  assert.equal(entry.size, bytes.length);
  assert.equal(entry.sha256, createHash("sha256").update(bytes).digest("hex"));

  const second = await load(url);
  assertLoaded(second);
  assert.equal(server.sent(url), bytes.length, "bytes sent for two loads");
  assert.ok(second.progress.some((it) => it.phase === "cache"));
  assert.ok(second.progress.every((it) => it.phase !== "download"));

  server.isDown = true;
  try {
    const offline = await load(url);
    assertLoaded(offline);
    assert.ok(noticeCodes(offline).includes("not_revalidated"), noticeCodes(offline).join());
  } finally {
    server.isDown = false;
  }
});

test("`cache: false` keeps nothing", limited, async () => {
  const url = server.url(STORIES);
  const seen = await load(url, { cache: false });
  assertLoaded(seen);
  assert.equal(entryOf(seen, url), undefined);
});

test("a new file on the server replaces the kept one", limited, async () => {
  server.files.set("news.gguf", bigModel(1));
  const url = server.url("files/news.gguf");
  assert.equal((await load(url, {}, anyPrompt)).info.name, "zeros");
  server.files.set("news.gguf", bytesInMemory(bytes));
  const seen = await load(url);
  assertLoaded(seen);
  assert.ok(noticeCodes(seen).includes("cache_outdated"), noticeCodes(seen).join());
  assert.equal(entryOf(seen, url).size, bytes.length);
});

/** Runs in a page: changes bytes at this offset in every complete file in the cache. */
async function damageCache(share) {
  const root = await (await navigator.storage.getDirectory()).getDirectoryHandle("tilewright");
  let damaged = 0;
  for await (const [name, handle] of root.entries()) {
    if (!name.endsWith(".bin")) continue;
    const position = Math.trunc((await handle.getFile()).size * share);
    const writable = await handle.createWritable({ keepExistingData: true });
    await writable.write({ type: "write", position, data: new Uint8Array(64).fill(0xaa) });
    await writable.close();
    damaged++;
  }
  return damaged;
}

async function damage(share) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  assert.ok((await page.evaluate(damageCache, share)) > 0);
  await page.close();
}

test("a kept file that is damaged is noticed after the load, and the model is loaded from a new one by itself", limited, async () => {
  const url = server.url(STORIES);
  assertLoaded(await load(url));
  await damage(0.7);
  const page = await chromium.open(`${server.origin}/blank.html`);
  const seen = await page.evaluate(async ({ url, prompt }) => {
    const { Model, cache } = await import("/npm/index.js");
    const seen = { notices: [], phases: [], tokens: [] };
    const noticed = new Promise((resolve) => {
      seen.load = async () => {
        const model = await Model.load(url, {
          device: "cpu",
          onProgress: ({ phase }) => seen.phases.push(phase),
          onNotice(notice) {
            seen.notices.push(notice.code);
            if (notice.code === "cache_damaged") resolve();
          },
        });
        seen.phasesOfLoad = [...seen.phases];
        return model;
      };
    });
    const model = await seen.load();
    await noticed;
    for await (const { id } of model.generate(prompt, { maxTokens: 16, ignoreEos: true })) seen.tokens.push(id);
    seen.info = { bytes: model.info.fileBytes, tokens: [...await model.tokenize("Once")].length };
    model.free();
    seen.cached = await cache.list();
    delete seen.load;
    return seen;
  }, { url, prompt });
  await page.close();
  assert.ok(!seen.phasesOfLoad.includes("download"), seen.phasesOfLoad.join());
  assert.ok(seen.phases.slice(seen.phasesOfLoad.length).includes("download"), "the second load tells its progress");
  assert.deepEqual(seen.notices, ["cache_damaged"]);
  assert.deepEqual(seen.tokens, expected.slice(0, 16));
  assert.equal(server.requests(url).length, 2);
  assert.equal(entryOf(seen, url).sha256, createHash("sha256").update(bytes).digest("hex"));
});

test("a kept file that is too damaged to be loaded is downloaded again by itself", limited, async () => {
  const url = server.url(STORIES);
  assertLoaded(await load(url));
  await damage(0);
  const seen = await load(url);
  assertLoaded(seen);
  assert.deepEqual(noticeCodes(seen), ["cache_damaged"]);
  assert.equal(server.requests(url).length, 2);
  assertLoaded(await load(url));
  assert.equal(server.requests(url).length, 2, "the new copy is kept");
});

test("a file's lock that another tab is just releasing is waited for", limited, async () => {
  const url = server.url(STORIES);
  const page = await chromium.open(`${server.origin}/blank.html`);
  const seen = await page.evaluate(async ({ url }) => {
    const { Model, cache } = await import("/npm/index.js");
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url)));
    const name = `tilewright/${Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    const release = await new Promise((resolve) => void navigator.locks.request(name, () => new Promise((done) => resolve(done))));
    const notices = [];
    let isOver = false;
    const loading = Model.load(url, { device: "cpu", onNotice: (notice) => notices.push(notice.code) }).finally(() => (isOver = true));
    let hasWaited = false;
    while (!hasWaited && !isOver) {
      hasWaited = (await navigator.locks.query()).pending.some((lock) => lock.name === name);
    }
    release();
    (await loading).free();
    return { hasWaited, notices, cached: await cache.list() };
  }, { url });
  await page.close();
  assert.equal(seen.hasWaited, true);
  assert.deepEqual(seen.notices, []);
  assert.equal(entryOf(seen, url)?.complete, true);
});

/** Runs in a worker before its scripts: collects garbage after each request to open a file, and counts how often. */
function collectWhileOpening() {
  globalThis.collected = 0;
  const { prototype } = FileSystemFileHandle;
  const { createSyncAccessHandle } = prototype;
  prototype.createSyncAccessHandle = function (...given) {
    const opening = Reflect.apply(createSyncAccessHandle, this, given);
    // After this call, which references the handle, and before the browser's answer is handled.
    queueMicrotask(() => {
      gc();
      collected += 1;
    });
    return opening;
  };
}

test("a file is opened to write although memory is collected meanwhile", limited, async () => {
  const script = (text) => bytesInMemory(Buffer.from(text), "text/javascript");
  server.files.set("collect.js", script(`(${collectWhileOpening})();`));
  // Modules are evaluated in import order.
  server.files.set("collecting-worker.js", script('import "/files/collect.js"; import "/npm/worker.js";'));
  const page = await chromium.open(`${server.origin}/blank.html`);
  const url = server.url(STORIES);
  const cached = await page.evaluate(async (url) => {
    const Original = Worker;
    globalThis.Worker = class extends Original {
      constructor(_, options) {
        super("/files/collecting-worker.js", options);
      }
    };
    const { Model, cache } = await import("/npm/index.js");
    globalThis.model = await Model.load(url, { device: "cpu" });
    return cache.list();
  }, url);
  // The record twice, as incomplete and as complete, the bytes, and the model's record.
  assert.equal(await page.workers()[0].evaluate(() => collected), 4);
  assert.equal(entryOf({ cached }, url)?.complete, true);
  await page.close();
});

test("after a large download, and only then, the browser is asked to keep it", limited, async () => {
  server.files.set("keep.gguf", bigModel(60 * MIB));
  const page = await chromium.open(`${server.origin}/blank.html`);
  const asked = await page.evaluate(async ({ small, large }) => {
    let asked = 0;
    navigator.storage.persist = async () => {
      asked += 1;
      return false;
    };
    const { Model } = await import("/npm/index.js");
    const counts = [];
    for (const url of [small, large, large]) {
      (await Model.load(url, { device: "cpu" })).free();
      counts.push(asked);
    }
    return counts;
  }, { small: server.url(STORIES), large: server.url("files/keep.gguf") });
  assert.deepEqual(asked, [0, 1, 1]);
  await page.close();
});

test("cache.list, cache.delete and cache.clear", limited, async () => {
  const urls = [server.url(STORIES), server.url(STORIES)];
  for (const url of urls) await load(url);
  const page = await chromium.open(`${server.origin}/blank.html`);
  const lists = await page.evaluate(async (url) => {
    const { cache } = await import("/npm/index.js");
    const before = await cache.list();
    await cache.delete(url);
    const without = await cache.list();
    await cache.clear();
    return { before, without, cleared: await cache.list(), usage: (await navigator.storage.estimate()).usage };
  }, urls[0]);
  await page.close();
  const addresses = (list) => list.map((entry) => entry.url);
  for (const url of urls) assert.ok(addresses(lists.before).includes(url));
  assert.ok(!addresses(lists.without).includes(urls[0]) && addresses(lists.without).includes(urls[1]));
  assert.deepEqual(lists.cleared, []);
});

test("two tabs may load one address at once; the file is kept once", limited, async () => {
  const url = server.url(STORIES, { fault: "slow", rate: 2 * MIB });
  const seen = await Promise.all([load(url), load(url)]);
  seen.forEach(assertLoaded);
  const later = await load(url);
  assertLoaded(later);
  assert.equal(later.cached.filter((entry) => entry.url === url && entry.complete).length, 1);
  assert.ok(later.progress.every((it) => it.phase !== "download"));
});

test("without room the model loads, is not kept, and a notice says so", limited, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(async () => (await import("/npm/index.js")).cache.clear());
  await limitStorage(page, server.origin, 500_000);
  const url = server.url(STORIES);
  try {
    const seen = await page.evaluate(loadHere, argumentsFor(url));
    assertLoaded(seen);
    assert.ok(noticeCodes(seen).includes("not_cached"), noticeCodes(seen).join());
    assert.equal(entryOf(seen, url), undefined);
    const stored = await page.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      const folder = await root.getDirectoryHandle("tilewright", { create: true });
      const names = [];
      for await (const name of folder.keys()) names.push(name);
      return names;
    });
    assert.deepEqual(stored, [], "files left in the storage");
  } finally {
    await limitStorage(page, server.origin, undefined);
    await page.close();
  }
});

test("an insecure page has no storage, no WebGPU and no locks, and the model runs on the CPU", limited, async () => {
  const url = server.url(STORIES, {}, server.insecureOrigin);
  const seen = await load(url, { device: "auto" }, {}, { origin: server.insecureOrigin });
  assertLoaded(seen);
  assert.equal(seen.device.backend, "cpu");
  assert.match(seen.device.reason, /https|secure|WebGPU/);
  assert.ok(noticeCodes(seen).includes("cpu_fallback"), noticeCodes(seen).join());
  assert.ok(noticeCodes(seen).includes("not_cached"), noticeCodes(seen).join());
  assert.deepEqual(seen.cached, []);
});

test("a File, an address relative to the page, bytes and a Response load as well", limited, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const tokens = await page.evaluate(async ({ path, prompt }) => {
    const { Model } = await import("/npm/index.js");
    const bytes = await (await fetch(path)).arrayBuffer();
    const file = new File([bytes], "stories.gguf");
    const results = [];
    for (const source of [file, path, bytes, new Uint8Array(bytes), await fetch(path)]) {
      const model = await Model.load(source, { device: "cpu", cache: false });
      const ids = [];
      for await (const { id } of model.generate(prompt, { maxTokens: 16 })) ids.push(id);
      results.push(ids);
      model.free();
    }
    return results;
  }, { path: `/${STORIES}`, prompt });
  assert.deepEqual(tokens, Array(5).fill(expected.slice(0, 16)));
  await page.close();
});

test("a page of Electron with Node's `process` is a browser", limited, async () => {
  const page = await chromium.context.newPage();
  await page.addInitScript(() => {
    globalThis.process = { versions: { node: "20.18.0", electron: "33.0.0", chrome: "130.0.0" }, type: "renderer" };
  });
  await page.goto(`${server.origin}/blank.html`);
  const seen = await page.evaluate(loadHere, argumentsFor(server.url(STORIES)));
  assertLoaded(seen);
  assert.equal(seen.cached.length > 0, true, "the browser's storage is used");
  await page.close();
});

test("an address that ends in a slash is a Hugging Face folder", limited, async () => {
  const model = dataPath("tiny-random/llama3-rope");
  const tensor = tensors(join(model, "refs.safetensors"));
  // Such a folder needs a tokenizer; this one is another model's, with the same number of tokens.
  const tokenizer = JSON.parse(readFileSync(join(dataPath("encoders/qwen3-embedding"), "tokenizer.json"), "utf8"));
  for (let id = 267; id < 293; id++) {
    tokenizer.added_tokens.push({
      id, content: `<extra_${id}>`, single_word: false, lstrip: false, rstrip: false, normalized: false, special: false,
    });
  }
  const files = { "tokenizer.json": JSON.stringify(tokenizer) };
  for (const name of ["config.json", "model.safetensors"]) files[name] = readFileSync(join(model, name));
  for (const [name, content] of Object.entries(files)) server.files.set(`llama3-rope/${name}`, bytesInMemory(Buffer.from(content)));
  const seen = await load(`${server.origin}/files/llama3-rope/`, {}, { prompt: tensor("greedy.prompt") });
  assert.equal(seen.error, undefined);
  assert.deepEqual(seen.tokens, tensor("greedy.ids").slice(0, 16));
});

const LARGE = process.env.TILEWRIGHT_FULL ? 1.5e9 : 0.6e9;
test(`WASM memory stays within 256 MiB while ${LARGE / 1e9} GB go to the GPU`, { timeout: 400_000 }, async (t) => {
  server.files.set("large.gguf", bigModel(LARGE));
  const seen = await load(server.url("files/large.gguf"), { device: "gpu", cache: false }, anyPrompt);
  assert.equal(seen.error, undefined);
  assert.equal(seen.device.backend, "webgpu");
  assert.deepEqual(seen.tokens, [0, 0]);
  // WASM memory never shrinks: its final size is its peak.
  t.diagnostic(`WASM memory ${(seen.memory.wasmHeapBytes / MIB).toFixed(1)} MiB, weights ${(seen.memory.weightsBytes / MIB).toFixed(0)} MiB`);
  assert.ok(seen.memory.weightsBytes >= 0.93 * LARGE);
  assert.ok(seen.memory.wasmHeapBytes <= 256 * MIB);
});
