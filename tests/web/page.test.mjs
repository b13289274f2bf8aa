// The demo page in use: by mouse, by keyboard, by dropped files, offline, on a phone.
//
// Screenshots go to the folder TILEWRIGHT_SCREENSHOTS, or to a temporary one that is printed.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { bigModel } from "./big-model.mjs";
import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";

const limited = { timeout: 120_000 };
const stories = readFileSync(join(repository, "assets/stories.gguf"));
const reference = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS ?? mkdtempSync(join(tmpdir(), "tilewright-screenshots-"));
mkdirSync(screenshots, { recursive: true });

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.files.set("zeros.gguf", bigModel(1));
  // A header that declares more tensors and keys than fit in a file.
  server.files.set("broken.gguf", bytesInMemory(Buffer.concat([Buffer.from("GGUF\u0003\0\0\0"), Buffer.alloc(5000, 255)])));
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  console.log(`screenshots are in ${screenshots}`);
});

const state = (page) => page.evaluate(() => document.documentElement.dataset.state);
const waitFor = (page, wanted) =>
  page.waitForFunction((wanted) => document.documentElement.dataset.state === wanted, wanted);
const answers = (page) => page.locator("#output .message[data-role=assistant]");

/** Runs in a page before its scripts: records all its states, however short. */
function recordStates() {
  globalThis.states = [];
  new MutationObserver(() => states.push(document.documentElement.dataset.state)).observe(document, {
    subtree: true, attributes: true, attributeFilter: ["data-state"],
  });
}

/**
 * Runs in a page before its scripts: records work that only the worker may do: compiling, computing and downloading.
 */
function recordHeavyWork() {
  globalThis.heavyWork = [];
  const watch = (holder, name) => {
    holder[name] = new Proxy(holder[name], {
      apply: (target, self, given) => (heavyWork.push(`${name} ${given[0]}`), Reflect.apply(target, self, given)),
      construct: (target, given) => (heavyWork.push(`new ${name}`), Reflect.construct(target, given)),
    });
  };
  for (const name of ["compile", "compileStreaming", "instantiate", "instantiateStreaming", "Module", "Instance"]) watch(WebAssembly, name);
  watch(GPU.prototype, "requestAdapter");
  watch(globalThis, "fetch");
}

/** Runs in a page: counts its frames, and from then on the updates and characters drawn in messages. */
function countDrawing() {
  globalThis.drawing = { frames: 0, draws: 0, characters: 0 };
  const frame = () => {
    drawing.frames += 1;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  new MutationObserver((records) => {
    drawing.draws += 1;
    for (const { type, addedNodes, target, oldValue } of records) {
      if (type === "characterData") drawing.characters += target.data.length - (target.data.startsWith(oldValue) ? oldValue.length : 0);
      for (const node of addedNodes) drawing.characters += node.textContent.length;
    }
  }).observe(document.getElementById("output"), { subtree: true, childList: true, characterData: true, characterDataOldValue: true });
}

/** Performs an action, and waits until the page has passed through the first state and stays in the last. */
async function through(page, first, last, action) {
  await page.evaluate(() => (states.length = 0));
  await action();
  await page.waitForFunction(([first, last]) => {
    const at = states.indexOf(first);
    return states.at(-1) === "error" || (at >= 0 && at < states.length - 1 && states.at(-1) === last);
  }, [first, last]);
  assert.equal(await state(page), last, await page.locator("#error-text").textContent());
}

/**
 * Opens the page, with functions that run before its scripts, and waits for the built-in model: there is no last
 * model.
 */
async function openDemo(browser = chromium, ...scripts) {
  const page = await browser.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.removeItem("tilewright.last"));
  for (const script of [recordStates, ...scripts]) await page.addInitScript(script);
  await page.goto(`${server.origin}/www/`);
  page.on("console", (message) => {
    // The browser itself logs missing files.
    if (message.type() === "error" && !/Failed to load resource|ERR_/.test(message.text())) page.problems.push(message.text());
  });
  await waitFor(page, "ready");
  return page;
}

async function close(page) {
  assert.deepEqual(page.problems, [], "errors in the page's console");
  await page.close();
}

const openSettings = (page) => page.locator("#settings").evaluate((details) => (details.open = true));

async function resetSettings(page) {
  await openSettings(page);
  await page.click("#settings-reset");
}

async function set(page, name, value) {
  await openSettings(page);
  const field = page.locator(`#setting-${name}`);
  if ((await field.evaluate((it) => it.tagName)) === "SELECT") await field.selectOption(value);
  else await field.fill(value);
  await field.blur();
}

async function send(page, text) {
  await page.fill("#prompt", text);
  await page.click("#send");
}

/** The page's text about a stored download. */
const storedRow = (page, url) => page.locator(`#cache-list li[title="${url}"]`);

/** Sends a prompt and waits for the whole answer. */
const ask = (page, text) => through(page, "generating", "ready", () => send(page, text));

/** Loads the model on the software adapter, which is slow enough for a keypress meanwhile. */
async function slowDown(page) {
  await set(page, "maxTokens", "450");
  await set(page, "device", "gpu");
  await through(page, "loading", "ready", () => page.click("#settings-reload"));
  assert.match(await page.innerText("#status-device"), /SwiftShader/i);
}

test("the built-in model is there at once and answers; device, speed and memory are shown", limited, async () => {
  const page = await openDemo();
  await ask(page, "Once upon a time");
  assert.ok((await answers(page).last().innerText()).length > 20);
  assert.match(await page.innerText("#status-device"), /CPU|WebGPU|SwiftShader/i);
  assert.match(await page.innerText("#status-speed"), /\d/);
  assert.match(await page.innerText("#status-memory"), /\d.*B/);
  await close(page);
});

test("at temperature 0 it tells the reference's story, and settings are remembered", limited, async () => {
  const page = await openDemo();
  await set(page, "temperature", "0");
  await set(page, "maxTokens", "40");
  await page.reload();
  await waitFor(page, "ready");
  assert.equal(await page.inputValue("#setting-temperature"), "0");
  assert.equal(await page.inputValue("#setting-maxTokens"), "40");
  await ask(page, reference.prompt);
  const text = (await answers(page).last().innerText()).replaceAll(/\s+/g, " ");
  assert.ok(text.includes("a silly boy named Ben lived in a small house"), text);
  await resetSettings(page);
  await page.reload();
  await waitFor(page, "ready");
  assert.notEqual(await page.inputValue("#setting-temperature"), "0");
  await close(page);
});

test("the stop button stops, and the text stays", limited, async () => {
  const page = await openDemo();
  await slowDown(page);
  await send(page, "Once upon a time");
  await page.waitForFunction(() => document.querySelector("#output .message[data-role=assistant]")?.textContent.length > 20);
  await page.click("#stop");
  await waitFor(page, "ready");
  const text = await answers(page).last().innerText();
  await page.waitForTimeout(300);
  assert.equal(await answers(page).last().innerText(), text);
  assert.ok(text.length > 10);
  await resetSettings(page);
  await close(page);
});

test("by keyboard alone: Tab reaches everything, Enter sends, Escape stops", limited, async () => {
  const page = await openDemo();
  await slowDown(page);
  await page.evaluate(() => document.activeElement?.blur());
  const reached = new Set();
  for (let i = 0; i < 80; i++) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => document.activeElement.id));
  }
  for (const id of ["theme", "prompt", "model-builtin", "model-file", "model-url", "model-url-load"]) assert.ok(reached.has(id), `Tab does not reach #${id}`);
  await page.focus("#prompt");
  await page.keyboard.type("One day");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#output .message[data-role=assistant]")?.textContent.length > 10);
  await page.keyboard.press("Escape");
  await waitFor(page, "ready");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt", "the focus is where one goes on");
  await resetSettings(page);
  await close(page);
});

test("the Enter that chooses a word of an input method sends nothing, in Safari neither", limited, async () => {
  const page = await openDemo();
  await page.fill("#prompt", "One day");
  // Chromium and Firefox send it while composing, Safari afterwards, with this code.
  const ended = await page.locator("#prompt").evaluate((prompt) => [{ isComposing: true, keyCode: 229 }, { isComposing: false, keyCode: 229 }].map((kind) => {
    const event = new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true, ...kind });
    prompt.dispatchEvent(event);
    return event.defaultPrevented;
  }));
  assert.deepEqual(ended, [false, false]);
  assert.equal(await page.inputValue("#prompt"), "One day");
  await through(page, "generating", "ready", () => page.press("#prompt", "Enter"));
  assert.equal(await page.inputValue("#prompt"), "");
  await close(page);
});

/** Runs in a page before its scripts: records when workers start and end. */
function recordWorkers() {
  globalThis.workers = [];
  globalThis.Worker = class extends Worker {
    constructor(...given) {
      super(...given);
      workers.push("begins");
    }
    terminate() {
      super.terminate();
      workers.push("ends");
    }
  };
}

test("a model is gone, with all its memory, before the next one is loaded", limited, async () => {
  const page = await openDemo(chromium, recordWorkers);
  for (let i = 0; i < 2; i++) await through(page, "loading", "ready", () => page.click("#model-builtin"));
  assert.deepEqual(await page.evaluate(() => workers), ["begins", "ends", "begins", "ends", "begins"]);
  await close(page);
});

test("every control has a name for screen readers", limited, async () => {
  const page = await openDemo();
  await openSettings(page);
  const unnamed = await page.evaluate(() => {
    const isNamed = (it) => it.getAttribute("aria-label") || it.getAttribute("aria-labelledby") || it.labels?.length || it.title || it.textContent.trim();
    return [...document.querySelectorAll("button, input, select, textarea, a, progress, summary")].filter((it) => !isNamed(it)).map((it) => it.outerHTML);
  });
  assert.deepEqual(unnamed, []);
  for (const [selector, role] of [["main", null], ["#announce", "polite"], ["#error", "alert"], ["#notice", "status"]]) {
    const found = page.locator(selector);
    assert.equal(await found.count(), 1, selector);
    if (role) assert.ok([await found.getAttribute("role"), await found.getAttribute("aria-live")].includes(role), selector);
  }
  await close(page);
});

/** Drops files on the page, as the browser does. */
async function drop(page, files) {
  const transfer = await page.evaluateHandle(async (files) => {
    const transfer = new DataTransfer();
    for (const { name, url } of files) transfer.items.add(new File([await (await fetch(url)).arrayBuffer()], name));
    return transfer;
  }, files);
  await page.dispatchEvent("body", "dragenter", { dataTransfer: transfer });
  await page.locator("#drop").waitFor({ state: "visible" });
  await page.dispatchEvent("body", "dragover", { dataTransfer: transfer });
  await page.dispatchEvent("body", "drop", { dataTransfer: transfer });
  await page.locator("#drop").waitFor({ state: "hidden" });
}

test("a GGUF file that is dropped is loaded; a broken one is an error in a sentence", limited, async () => {
  const page = await openDemo();
  await drop(page, [{ name: "broken.gguf", url: "/files/broken.gguf" }]);
  await waitFor(page, "error");
  assert.equal(await page.getAttribute("#error", "data-code"), "format");
  assert.match(await page.innerText("#error-text"), /[A-Z].* \w+ .*\./s);
  await through(page, "loading", "ready", () => drop(page, [{ name: "zeros.gguf", url: "/files/zeros.gguf" }]));
  assert.match(await page.innerText("#model-name"), /zeros/);
  assert.ok(await page.locator("#error").isHidden());
  await close(page);
});

test("the file picker loads a GGUF file", limited, async () => {
  const page = await openDemo();
  const file = { name: "mine.gguf", mimeType: "application/octet-stream", buffer: stories };
  await through(page, "loading", "ready", () => page.setInputFiles("#model-file", file));
  await ask(page, "Once upon a time");
  await close(page);
});

/** Types an address and loads it. */
async function loadAddress(page, url) {
  await page.fill("#model-url", url);
  await page.click("#model-url-load");
}

test("an address is loaded with progress, can be cancelled, is kept, and can be deleted", limited, async () => {
  const page = await openDemo();
  const slow = server.url("files/zeros.gguf", { fault: "slow", rate: 4 << 20 });
  await loadAddress(page, slow);
  await page.locator("#progress").waitFor({ state: "visible" });
  await page.waitForFunction(() => /\d.*B/.test(document.querySelector("#progress-text").textContent));
  await page.waitForFunction(() => document.querySelector("#progress-bar").value > 0);
  await page.click("#cancel-load");
  await page.waitForFunction(() => document.documentElement.dataset.state !== "loading");
  assert.notEqual(await state(page), "error", "a cancelled load is no error");
  assert.ok(await page.locator("#progress").isHidden());

  const url = server.url("files/zeros.gguf");
  await through(page, "loading", "ready", () => loadAddress(page, url));
  assert.match(await page.innerText("#model-name"), /zeros/);
  const row = storedRow(page, url);
  await row.filter({ hasNotText: "so far" }).getByRole("button", { name: /Delete/ }).click();
  await row.waitFor({ state: "detached" });
  // The other download was cancelled, and its bytes are kept.
  await storedRow(page, slow).filter({ hasText: "so far" }).waitFor();
  await close(page);
});

test("a name of Hugging Face leads to the repository's folder, or to one of its GGUF files", limited, async () => {
  const { choiceOfAddress, located } = await pageModule("sources");
  const hub = `${server.origin}/files`;
  const publish = (name, paths, revision = "main") => {
    const answer = JSON.stringify({ id: name, siblings: paths.map((rfilename) => ({ rfilename })) });
    server.files.set(`api/models/${name}/revision/${revision}`, bytesInMemory(Buffer.from(answer), "application/json"));
  };
  const find = (typed) => located(choiceOfAddress(typed, "http://localhost/"), new AbortController().signal, hub);
  publish("o/quants", ["README.md", "mmproj-F32.gguf", "a-F16.gguf", "a-Q8_0.gguf", "a.Q4_K_M.gguf", "a-IQ2_XS.gguf"]);
  publish("o/parts", ["Q6_K/b-Q6_K-00001-of-00002.gguf", "Q6_K/b-Q6_K-00002-of-00002.gguf"]);
  publish("o/odd", ["stories 1.gguf"]);
  publish("o/both", ["config.json", "model.safetensors", "c-Q8_0.gguf"]);
  publish("o/tensors", ["config.json", "model.safetensors"], "v2");
  const at = (path) => `${hub}/${path}`;
  const vision = at("o/quants/resolve/main/mmproj-F32.gguf");
  assert.deepEqual(await find(" o/quants "), { label: "a.Q4_K_M.gguf", source: at("o/quants/resolve/main/a.Q4_K_M.gguf"), vision });
  assert.deepEqual(await find("o/quants:q8_0"), { label: "a-Q8_0.gguf", source: at("o/quants/resolve/main/a-Q8_0.gguf"), vision });
  assert.deepEqual((await find("https://huggingface.co/o/parts")).source, [1, 2].map((i) => at(`o/parts/resolve/main/Q6_K/b-Q6_K-0000${i}-of-00002.gguf`)));
  assert.deepEqual((await find("o/odd")).source, at("o/odd/resolve/main/stories%201.gguf"));
  assert.deepEqual(await find("o/both"), { label: "both", source: at("o/both/resolve/main/") });
  assert.deepEqual((await find("o/both:Q8_0")).source, at("o/both/resolve/main/c-Q8_0.gguf"));
  assert.deepEqual(await find("https://huggingface.co/o/tensors/tree/v2"), { label: "tensors", source: at("o/tensors/resolve/v2/") });
  assert.deepEqual((await find("o/unknown")).source, at("o/unknown/resolve/main/"), "without an answer");
  await assert.rejects(find("o/quants:Q5_K"), { code: "http", message: /no GGUF file of Q5_K; it has F16, Q8_0, Q4_K_M, IQ2_XS/ });
  // A file's address is kept as it is.
  assert.equal((await find("https://huggingface.co/o/quants/blob/main/a-F16.gguf?x=1")).source, "https://huggingface.co/o/quants/resolve/main/a-F16.gguf?x=1");

  // And in the page, with stubbed hub responses.
  const page = await openDemo();
  await page.context().route("https://huggingface.co/**", (route) => {
    const { pathname } = new URL(route.request().url());
    const headers = { "access-control-allow-origin": "*" };
    if (pathname === "/api/models/o/stories/revision/main") return route.fulfill({ headers, json: { siblings: [{ rfilename: "stories-Q4_0.gguf" }] } });
    if (pathname === "/o/stories/resolve/main/stories-Q4_0.gguf") return route.fulfill({ headers, body: stories });
    return route.fulfill({ status: 404, headers });
  });
  try {
    await through(page, "loading", "ready", () => loadAddress(page, "o/stories"));
    assert.ok(await page.locator("#error").isHidden());
  } finally {
    await page.context().unroute("https://huggingface.co/**");
  }
  await close(page);
});

test("what goes wrong with an address is told in a sentence", limited, async () => {
  const page = await openDemo();
  const addresses = {
    http: server.url("assets/none.gguf"),
    not_a_model: server.url("assets/stories.gguf", { fault: "html" }),
    // A Content-Length shorter than the file's own header also causes it.
    format: server.url("assets/stories.gguf", { fault: "short", size: 100_000 }),
    network: server.url("assets/stories.gguf", {}, server.otherOrigin),
  };
  for (const [code, url] of Object.entries(addresses)) {
    await loadAddress(page, url);
    await page.waitForFunction((code) => document.querySelector("#error").dataset.code === code && !document.querySelector("#error").hidden, code);
    const text = await page.innerText("#error-text");
    assert.match(text, /^[A-Z].*\.$/s, text);
    assert.ok(!/undefined|TypeError|\[object|_/.test(text), text);
    await page.click("#error-close");
  }
  await through(page, "loading", "ready", () => page.click("#model-builtin"));
  await close(page);
});

test("after one visit the page, its model and a kept model work without a network", limited, async () => {
  const page = await openDemo();
  await page.evaluate(() => navigator.serviceWorker.ready);
  const url = server.url("assets/stories.gguf");
  await through(page, "loading", "ready", () => loadAddress(page, url));
  // The service worker does not control the first visit; it does after a reload.
  await page.reload();
  await waitFor(page, "ready");
  await page.waitForFunction(() => navigator.serviceWorker.controller !== null);
  await chromium.context.setOffline(true);
  server.isDown = true;
  try {
    await page.reload();
    await waitFor(page, "ready");
    await ask(page, "Once upon a time");
    await through(page, "loading", "ready", () => storedRow(page, url).getByRole("button").first().click());
    // Resources loaded on demand are cached too.
    await page.click("#tab-kernels");
    await page.waitForFunction(() => document.documentElement.dataset.bench === "idle");
    await page.click("#tab-inside");
    await page.waitForFunction(() => document.querySelectorAll("#inside-memory dt").length > 0);
  } finally {
    await chromium.context.setOffline(false);
    server.isDown = false;
  }
  await page.close();
});

const built = (name) => readFileSync(join(repository, "www/dist", name), "utf8");

/** Scripts of the page that identify their version. */
const MARKED = ["main.js", "tilewright/index.js", /from"\.\/(chunk-[^"]+)"/.exec(built("main.js"))[1]];

/** Puts another version of the page on the server. */
function publishVersion(version) {
  server.besidePage.set("", built("index.html").replace(/data-version="[^"]*"/, `data-version="${version}"`));
  for (const name of MARKED) server.besidePage.set(name, `(globalThis.versions ??= {})["${name}"] = "${version}";\n${built(name)}`);
}

/** The page's version, and its scripts'. */
const versionsOf = (page) => page.evaluate((marked) => [document.documentElement.dataset.version, ...marked.map((name) => globalThis.versions?.[name])], MARKED);

/** Waits until an async function in the page resolves to a truthy value; `waitForFunction` does not await promises. */
async function until(page, condition, given) {
  while (!await page.evaluate(condition, given)) await page.waitForTimeout(50);
}

/** Waits until the service worker has cached a complete version. */
const waitUntilKept = (page, version) => until(page, async (version) =>
  await (await caches.match(new URL("./newest", location.href).href, { cacheName: "tilewright-versions" }))?.text() === version, version);

test("without a network the page is of one version, also if another one came in part", limited, async () => {
  const browser = await openBrowser({ gpu: false });
  try {
    publishVersion("a");
    const page = await openDemo(browser);
    await page.evaluate(() => navigator.serviceWorker.ready);
    await page.reload();
    await waitFor(page, "ready");
    await page.waitForFunction(() => navigator.serviceWorker.controller !== null);

    publishVersion("b");
    const broke = new Promise((resolve) => server.besidePage.set("tilewright/index.js", (request) => resolve(request.socket.destroy())));
    const visit = async (isOffline) => {
      await browser.context.setOffline(isOffline);
      await page.reload();
      await waitFor(page, "ready");
      return versionsOf(page);
    };
    // The connection breaks while the new version loads.
    await page.reload();
    await broke;
    assert.deepEqual(await visit(true), ["a", "a", "a", "a"]);

    publishVersion("b");
    assert.deepEqual(await visit(false), ["b", "b", "b", "b"], "a new version is seen at once");
    await waitUntilKept(page, "b");
    assert.deepEqual(await visit(true), ["b", "b", "b", "b"]);
    // Unused caches are deleted.
    await until(page, async () => !(await caches.keys()).includes("tilewright-pagea"));
  } finally {
    server.besidePage.clear();
    await browser.close();
  }
});

test("a server that takes the request for the page and never answers does not keep it from opening", limited, async () => {
  const browser = await openBrowser({ gpu: false });
  try {
    const page = await openDemo(browser);
    await page.evaluate(() => navigator.serviceWorker.ready);
    server.besidePage.set("", () => {});
    await page.reload({ timeout: 30_000 });
    await waitFor(page, "ready");
    await ask(page, "Once upon a time");
    await close(page);
  } finally {
    server.besidePage.clear();
    await browser.close();
  }
});

test("loading and generating leave the main thread what is to be drawn, once a frame", limited, async (t) => {
  const page = await openDemo(chromium, recordHeavyWork);
  await through(page, "loading", "ready", () => loadAddress(page, server.url("files/zeros.gguf")));
  await through(page, "loading", "ready", () => page.click("#model-builtin"));
  await set(page, "maxTokens", "400");
  await page.evaluate(countDrawing);
  await ask(page, "Once upon a time");
  assert.deepEqual(await page.evaluate(() => heavyWork), []);
  // Verifies that a violation is detected.
  assert.equal(await page.evaluate(async () => (await WebAssembly.compile(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0])), heavyWork.length)), 1);

  const { frames, draws, characters } = await page.evaluate(() => drawing);
  const shown = (await page.locator("#output").textContent()).length;
  t.diagnostic(`${draws} draws in ${frames} frames, ${characters} characters drawn for ${shown}`);
  assert.ok(shown > 500 && draws > 1);
  // The beginning and end of an answer are drawn at once.
  assert.ok(draws <= frames + 4);
  assert.ok(characters <= 2 * shown);
  await resetSettings(page);
  await close(page);
});

test("screenshots on a desk and a phone, light and dark; nothing is wider than the screen", limited, async () => {
  const page = await openDemo();
  await ask(page, "Once upon a time");
  for (const [device, width, height] of [["desk", 1280, 800], ["phone", 390, 844]]) {
    for (const colorScheme of ["light", "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme });
      await page.screenshot({ path: join(screenshots, `${device}-${colorScheme}.png`) });
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${device}: ${overflow} pixels too wide`);
    }
  }
  await close(page);
});
