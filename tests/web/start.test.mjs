// Start of the demo page: the first screen, links, the last visit's model, saved and corrupted data, the manifest, and
// how much the page loads.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { once } from "node:events";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { gzipSync } from "node:zlib";

import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { repository, startServer } from "./server.mjs";
import { typeOf } from "../../scripts/static-server.mjs";

const limited = { timeout: 120_000 };
const stories = readFileSync(join(repository, "assets/stories.gguf"));

let server;
let chromium;
before(async () => {
  server = await startServer();
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

const ready = (page) => page.waitForFunction(() => document.documentElement.dataset.state === "ready");

/** Opens the page as on a first visit, with functions that run before its scripts. */
async function open(search = "", ...scripts) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.clear());
  for (const [script, given] of scripts) await page.addInitScript(script, given);
  await page.goto(`${server.origin}/www/${search}`);
  return page;
}

/** Responses for Hugging Face: one repository with the story model, and nothing else. */
async function routeHub(page) {
  const asked = [];
  await page.context().route("https://huggingface.co/**", (route) => {
    const { pathname } = new URL(route.request().url());
    asked.push(pathname);
    const headers = { "access-control-allow-origin": "*" };
    if (pathname === "/api/models/o/stories/revision/main") return route.fulfill({ headers, json: { siblings: [{ rfilename: "stories-Q4_0.gguf" }] } });
    if (pathname === "/o/stories/resolve/main/stories-Q4_0.gguf") return route.fulfill({ headers, body: stories });
    return route.fulfill({ status: 404, headers });
  });
  return asked;
}

test("which models are offered follows from what the browser tells of the device", async () => {
  const { offers } = await pageModule("start/fits");
  const chat = (name, sizeBytes) => ({ name, use: "chat", sizeBytes, cacheBytesPerToken: 10_000 });
  const vectors = { name: "vectors", use: "embed", sizeBytes: 1e8, cacheBytesPerToken: null };
  const models = [chat("3 GB", 3e9), chat("0.4 GB", 4e8), vectors, chat("0.6 GB", 6e8), chat("0.8 GB", 8e8), chat("2 GB", 2e9)];
  const names = (told) => offers(models, { isPhone: false, ...told }).map(({ model, fits }) => `${model.name}: ${fits}`);
  const GIB = 2 ** 30;
  assert.deepEqual(names({ memoryBytes: 8 * GIB }), ["0.4 GB: yes", "0.8 GB: yes", "3 GB: yes"]);
  assert.deepEqual(names({ memoryBytes: 2 * GIB }), ["0.4 GB: yes", "0.6 GB: yes", "0.8 GB: yes"]);
  assert.deepEqual(names({ memoryBytes: GIB }), ["0.4 GB: yes", "0.6 GB: no", "0.8 GB: no"]);
  assert.deepEqual(names({}), ["0.4 GB: unknown", "0.6 GB: unknown", "0.8 GB: unknown"]);
  // The memory need is that of the weights and 4096 tokens of keys and values; times follow from a measured rate only.
  const [{ needsBytes, seconds }] = offers(models, { isPhone: false, measuredRate: 1e7 });
  assert.deepEqual([needsBytes, seconds], [4e8 + 40_960_000, 40]);
  assert.equal(offers(models, { isPhone: false })[0].seconds, undefined);

  // The real list has three models for each device, also for a phone's page of 1 GB.
  const listed = JSON.parse(readFileSync(join(repository, "assets/models.json"), "utf8")).models
    .map(({ size_bytes: sizeBytes, cache_bytes_per_token: cacheBytesPerToken, ...model }) => ({ ...model, sizeBytes, cacheBytesPerToken }));
  const few = [{ isPhone: true }, { maxBufferBytes: 2 ** 28 }];
  for (const told of [...few, { memoryBytes: 2 * GIB }, { memoryBytes: 8 * GIB }, { memoryBytes: 32 * GIB }]) {
    const found = offers(listed, { isPhone: false, ...told });
    assert.deepEqual(found.map(({ fits, model }) => `${model.use}: ${fits}`), ["chat: yes", "chat: yes", "chat: yes"]);
    assert.ok(!few.includes(told) || found.every(({ needsBytes }) => needsBytes <= 1e9));
  }
});

test("the first screen says what this is, offers three models, and names what runs them; a click loads one", limited, async () => {
  /** Runs in a page before its scripts. */
  const pretend = ({ memory, mobile }) => {
    const has = (name, value) => Object.defineProperty(navigator, name, { value, configurable: true });
    has("deviceMemory", memory);
    has("userAgentData", { mobile });
  };
  const page = await open("", [pretend, { memory: 8, mobile: false }]);
  await ready(page);
  assert.match(await page.innerText("#start-what"), /runs language models in this browser/);
  const cards = page.locator(".start-model");
  assert.deepEqual(await cards.evaluateAll((all) => all.map((it) => it.dataset.fits)), ["yes", "yes", "yes"]);
  assert.match(await page.innerText("#start-device"), /^No GPU is used: .*WebGPU/);
  // Nothing was downloaded yet, so no time is shown.
  assert.equal(await cards.first().locator("span").first().innerText(), "379 MB · LFM Open 1.0");
  const asked = await routeHub(page);
  await cards.first().click();
  await page.waitForFunction(() => document.documentElement.dataset.state === "error");
  assert.ok(asked.includes("/api/models/LiquidAI/LFM2.5-350M-GGUF/revision/main"), asked.join());
  await page.context().unroute("https://huggingface.co/**");

  const phone = await open("", [pretend, { memory: 0.5, mobile: true }]);
  await ready(phone);
  const first = phone.locator(".start-model").first();
  assert.equal(await first.getAttribute("data-fits"), "no");
  assert.match(await first.innerText(), /379 MB · LFM Open 1\.0[^]*may be too large: needs 0\.4 GB of memory, and this device has 0\.5 GB/);
});

test("a link chooses a model and fills the prompt in; a bad one is told in a sentence, and asks nothing of anybody", limited, async () => {
  const hub = await chromium.open(`${server.origin}/blank.html`);
  const asked = await routeHub(hub);
  const page = await open(`?${new URLSearchParams({ model: "hf:o/stories:Q4_0", prompt: "Once upon <b>a</b> time" })}`);
  await ready(page);
  assert.deepEqual(asked, [], "no download before the user agrees");
  assert.equal(await page.innerText("#model-name"), "Story model");
  assert.match(await page.innerText(".notice[data-code=link]"), /asks for the model “stories” of Hugging Face/);
  await page.click(".notice[data-code=link] button >> text=Load it");
  await page.waitForFunction(() => document.querySelector("#model-name").textContent !== "Story model");
  await ready(page);
  assert.ok(asked.includes("/o/stories/resolve/main/stories-Q4_0.gguf"), asked.join());
  assert.equal(await page.inputValue("#prompt"), "Once upon <b>a</b> time");
  assert.equal(await page.locator("#output .message").count(), 0, "nothing is sent without the user");
  assert.ok(await page.isEnabled("#send"));
  await page.context().unroute("https://huggingface.co/**");

  const secret = server.url("files/secret.gguf", {}, server.corsOrigin);
  const { readLink } = await pageModule("start/link");
  const read = (model) => readLink(`?${new URLSearchParams({ model })}`, "http://localhost/");
  const addresses = ["not a model", "javascript:alert(1)", "hf:o", "x".repeat(5000), "stories.gguf", "file:///etc/passwd"];
  for (const model of addresses) {
    const { choice, address, problem } = read(model);
    assert.deepEqual([choice, address], [undefined, undefined], model);
    assert.match(problem, /^The link names the model “[^]{1,101}”, which is no address of one\./);
  }
  assert.equal(read("builtin").choice.source, "builtin");
  assert.deepEqual(read("hf:o/m:Q8_0@v2").choice, { label: "m", source: { repository: "o/m", revision: "v2", quantisation: "Q8_0" } });
  assert.equal(read("").problem, undefined);
  for (const [model, told] of [
    ["<img src=x onerror=alert(1)>", /“<img src=x onerror=alert\(1\)>”, which is no address/],
    [secret, /names a model on localhost:\d+\. Nothing was asked of it/],
  ]) {
    const bad = await open(`?${new URLSearchParams({ model })}`);
    await ready(bad);
    assert.match(await bad.innerText(".notice[data-code=start]"), told);
    assert.equal(await bad.innerText("#model-name"), "Story model");
    assert.equal(await bad.locator(".notice img").count(), 0);
    if (model === secret) assert.equal(await bad.inputValue("#model-url"), secret);
    assert.deepEqual(bad.problems, []);
    await bad.close();
  }
  assert.deepEqual(server.requests(secret), []);
});

/** Types an address, and waits until it has loaded. */
async function load(page, url) {
  await page.fill("#model-url", url);
  await page.click("#model-url-load");
  await page.locator("#progress").waitFor({ state: "visible" });
  await page.locator("#progress").waitFor({ state: "hidden" });
  await ready(page);
}

const nameOf = (page) => page.innerText("#model-name");

test("the last model is opened again if all of it is kept, unless that is turned off or ended the page before", limited, async () => {
  const page = await open();
  await ready(page);
  const builtin = await nameOf(page);
  const url = server.url("assets/stories.gguf");
  await load(page, url);
  const own = await nameOf(page);
  assert.notEqual(own, builtin);
  const again = async () => {
    await page.reload();
    await ready(page);
    return nameOf(page);
  };
  assert.equal(await again(), own);
  assert.equal(server.requests(url).filter(({ sent }) => sent > 0).length, 1, "from the cache");

  // As left by a page that is closed while loading. This page must have removed its own mark, shortly after it is
  // ready.
  await page.waitForFunction(() => localStorage.getItem("tilewright.opening") === null);
  const source = JSON.parse(await page.evaluate(() => localStorage.getItem("tilewright.last"))).source;
  await page.evaluate((source) => localStorage.setItem("tilewright.opening", JSON.stringify(JSON.stringify(source))), source);
  assert.equal(await again(), builtin);
  assert.match(await page.innerText(".notice[data-code=start]"), /is not reopened, because the page ended while it was loaded/);

  await load(page, url);
  // Another tab that is opening it holds the lock.
  const tab = await chromium.open(`${server.origin}/blank.html`);
  await tab.evaluate((source) => new Promise((held) => {
    localStorage.setItem("tilewright.opening", JSON.stringify(JSON.stringify(source)));
    navigator.locks.request("tilewright.opening", { mode: "shared" }, () => {
      held();
      return new Promise(() => {});
    });
  }), source);
  assert.equal(await again(), own, "the other tab has not crashed");
  await tab.close();

  await page.locator("#settings").evaluate((details) => (details.open = true));
  await page.uncheck("#setting-reopen");
  assert.equal(await again(), builtin);
  await page.locator("#settings").evaluate((details) => (details.open = true));
  await page.check("#setting-reopen");

  await load(page, url);
  await page.evaluate(() => localStorage.setItem("tilewright.last", "{half"));
  assert.equal(await again(), builtin, "invalid JSON is ignored");
  await page.evaluate(() => localStorage.setItem("tilewright.last", JSON.stringify({ label: 5, source: ["javascript:alert(1)"] })));
  assert.equal(await again(), builtin);
  assert.match(await page.innerText(".notice[data-code=start]"), /remembered of the last model is damaged/);
  assert.deepEqual(page.problems, []);
});

test("a model that is chosen while the last one is opened again is the one that comes", limited, async () => {
  const page = await open();
  await ready(page);
  await load(page, server.url("assets/stories.gguf"));
  const [own, other] = [await nameOf(page), server.url("assets/stories.gguf")];
  await page.addInitScript((other) => {
    const watch = new MutationObserver(() => {
      if (document.documentElement.dataset.state !== "loading" || localStorage.getItem("tilewright.opening") === null) return;
      watch.disconnect();
      document.querySelector("#model-url").value = other;
      document.querySelector("#model-url-load").click();
    });
    watch.observe(document, { subtree: true, attributes: true, attributeFilter: ["data-state"] });
  }, other);
  await page.reload();
  await ready(page);
  assert.deepEqual([await nameOf(page), await page.evaluate(() => JSON.parse(localStorage.getItem("tilewright.last")).source)], [own, other]);
  assert.deepEqual(await page.locator(".notice[data-code=start]").allInnerTexts(), []);
  assert.deepEqual(page.problems, []);
});

test("a kept file that was cut in half is told of, and what else is kept stays", limited, async () => {
  const page = await open();
  await ready(page);
  const [other, url] = [server.url("assets/stories.gguf"), server.url("assets/stories.gguf")];
  await load(page, other);
  await load(page, url);
  await page.goto(`${server.origin}/blank.html`);
  // Truncates the newest stored file by half.
  const cut = await page.evaluate(async (url) => {
    const walk = async (folder, found = []) => {
      for await (const handle of folder.values()) {
        if (handle.kind === "directory") await walk(handle, found);
        else found.push(handle);
      }
      return found;
    };
    const files = await walk(await navigator.storage.getDirectory());
    const sized = await Promise.all(files.map(async (handle) => ({ handle, file: await handle.getFile() })));
    const newest = sized.filter(({ file }) => file.size > 1e6).sort((a, b) => b.file.lastModified - a.file.lastModified)[0];
    const writable = await newest.handle.createWritable({ keepExistingData: true });
    await writable.truncate(Math.trunc(newest.file.size / 2));
    await writable.close();
    return newest.file.size;
  }, url);
  assert.equal(cut, stories.length);
  await page.goto(`${server.origin}/www/`);
  await ready(page);
  const told = `${await page.innerText("#notice")} ${await page.innerText("#error")}`;
  assert.match(told, /^The cached copy of .* is damaged .* it is downloaded again\./);
  await page.locator(`#cache-list li[title="${other}"]`).waitFor();
  assert.deepEqual(page.problems, []);
});

test("the manifest and its icons make the page installable", limited, async () => {
  const page = await open();
  await ready(page);
  const session = await page.context().newCDPSession(page);
  const { url, errors, data } = await session.send("Page.getAppManifest");
  assert.match(url, /\/www\/manifest\.webmanifest$/);
  assert.deepEqual(errors, []);
  const { icons, start_url: start } = JSON.parse(data);
  assert.equal(start, "./");
  for (const { src, sizes, type } of icons) {
    const response = await fetch(`${server.origin}/www/${src}`);
    assert.equal(response.headers.get("content-type"), type, src);
    const bytes = Buffer.from(await response.arrayBuffer());
    if (type !== "image/png") continue;
    assert.equal(`${bytes.readUInt32BE(16)}x${bytes.readUInt32BE(20)}`, sizes, src);
  }
  const { installabilityErrors } = await session.send("Page.getInstallabilityErrors");
  assert.deepEqual(installabilityErrors.map(({ errorId }) => errorId).filter((id) => id !== "in-incognito"), []);
});

test("each view says what it is for, and what to do, before a model is loaded", limited, async () => {
  const page = await open();
  await ready(page);
  const [chat, search, inside] = ["#output .intro", "#search-intro", "#inside-intro"].map((intro) => page.locator(intro));
  const memory = page.locator("#inside-memory");
  // A load that takes long leaves them readable, without what cannot be chosen meanwhile.
  await page.fill("#model-url", server.url("assets/stories.gguf", { fault: "slow", rate: 50_000 }));
  await page.click("#model-url-load");
  await page.waitForFunction(() => document.documentElement.dataset.state === "loading");
  assert.ok(await chat.isHidden(), "a short load shows nothing that goes at once");
  await chat.getByText("Talk to a model").waitFor();
  assert.ok(await page.locator("#start").isHidden());
  await page.click("#tab-search");
  await search.getByText("Search by meaning").waitFor();
  assert.ok(await page.locator("#search-intro-hub").isVisible());
  await page.click("#tab-inside");
  await inside.getByText("Load a model, and ask it something in the chat").waitFor();
  assert.ok(await page.locator("#inside-intro-builtin").isHidden() && await memory.isHidden());
  await page.click("#tab-kernels");
  assert.ok(await page.getByText("This runs small probes").isVisible() && await page.locator("#bench-run").isVisible());
  await page.click("#tab-chat");
  await page.click("#cancel-load");
  await page.waitForFunction(() => document.documentElement.dataset.state === "empty");
  assert.ok(await chat.getByRole("button", { name: "Load the story model" }).isVisible() && await page.locator("#start").isVisible());
  await page.click("#tab-inside");
  await page.click("#inside-intro-builtin");
  await ready(page);
  await memory.locator("dt").first().waitFor();
  assert.ok(await inside.isHidden());
  assert.deepEqual(page.problems, []);
});

test("the first load without a model, on a page without a GPU, is 1.66 MB at most, and the second module is not part of it", limited, async (t) => {
  const sent = new Map();
  // As a static host sends it: gzipped.
  const host = createServer((request, response) => {
    const name = new URL(request.url, "http://localhost").pathname.replace(/^\/$/, "/index.html");
    let bytes;
    try {
      bytes = gzipSync(readFileSync(join(repository, "www/dist", name)));
    } catch {
      return response.writeHead(404).end();
    }
    sent.set(name, bytes.length);
    response.writeHead(200, { "content-type": typeOf(name), "content-encoding": "gzip" }).end(bytes);
  });
  host.listen(0, "127.0.0.1");
  await once(host, "listening");
  try {
    const page = await chromium.open(`http://localhost:${host.address().port}/`);
    await ready(page);
    const names = [...sent.keys()];
    const model = sent.get("/tilewright/stories.gguf");
    assert.ok(model > 0, "the built-in model loads too");
    const total = [...sent.values()].reduce((sum, size) => sum + size, 0) - model;
    t.diagnostic(`${total} bytes in ${names.length - 1} files, and ${model} of the built-in model: ${[...sent].map(([name, size]) => `${name} ${size}`).join(", ")}`);
    assert.ok(total <= 1_660_000, `${total} bytes`);
    assert.ok(!names.some((name) => /tilewright_text|speech|listen|kernels|inside|mol\.safetensors/.test(name)), names.join());
  } finally {
    host.closeAllConnections();
    host.close();
  }
});
