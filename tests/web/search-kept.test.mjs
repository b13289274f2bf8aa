// The search of the demo page: data saved between visits and its corruption, folders, a cross-encoder's order, and the
// chat model's answers with citations.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { pathToFileURL } from "node:url";

import { parrot } from "./big-model.mjs";
import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";
import { tinyEncoder } from "./tensors.mjs";

const limited = { timeout: 120_000 };
const folder = mkdtempSync(join(tmpdir(), "tilewright-texts-"));

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.besidePage.set("mol.safetensors", null);
  for (const name of ["nomic", "bert-reranker"]) {
    for (const [file, content] of Object.entries(tinyEncoder(name).files)) server.files.set(`${name}/${file}`, bytesInMemory(content));
  }
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  rmSync(folder, { recursive: true, force: true });
});

const waitFor = (page, wanted) => page.waitForFunction((wanted) => document.documentElement.dataset.search === wanted, wanted);

/** Records the states of the search. */
function recordStates() {
  globalThis.states = [];
  new MutationObserver(() => states.push(document.documentElement.dataset.search)).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-search"] });
}

/** Runs in a page: changes a saved record. */
async function change([key, what]) {
  const database = await new Promise((resolve, reject) => {
    const request = indexedDB.open("tilewright-search");
    request.onsuccess = () => resolve(request.result);
    request.onerror = reject;
  });
  const transaction = database.transaction("kept", "readwrite");
  const committed = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = reject;
  });
  const store = transaction.objectStore("kept");
  const read = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = reject;
  });
  const record = await read(store.get(key));
  if (what === "half") record.bytes = record.bytes.slice(0, record.bytes.size / 2);
  if (what === "older") record.version = 0;
  if (what === "nonsense") await read(store.put({ version: 1, nTexts: "two", passages: [{ text: 5 }] }, key));
  else if (what !== undefined) await read(store.put(record, key));
  // A page that is left before has not changed anything.
  await committed;
  database.close();
  return record === undefined ? undefined : { version: record.version, nDone: record.nDone, nTexts: record.nTexts };
}

async function openSearch() {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => new Promise((resolve) => {
    localStorage.clear();
    indexedDB.deleteDatabase("tilewright-search").onsuccess = resolve;
  }));
  await page.addInitScript(recordStates);
  await page.goto(`${server.origin}/www/#search`);
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  return page;
}

async function loadEncoder(page, name = "nomic") {
  await page.fill("#model-url", `${server.origin}/files/${name}/`);
  await page.click("#model-url-load");
  await page.waitForFunction((name) => document.querySelector("#encoder-name").textContent === name, name);
  await page.waitForFunction(() => document.documentElement.dataset.search !== "loading");
}

/** Loads the chat model again, in its view. */
async function reloadChatModel(page) {
  await page.evaluate(() => new Promise((resolve) => {
    const seen = [];
    new MutationObserver(() => {
      seen.push(document.documentElement.dataset.state);
      if (seen.includes("loading") && seen.at(-1) === "ready") resolve();
    }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-state"] });
    addEventListener("hashchange", () => document.querySelector("#model-builtin").click(), { once: true });
    location.hash = "#chat";
  }));
  await page.evaluate(() => (location.hash = "#search"));
  await waitFor(page, "ready");
}

async function search(page, query) {
  await page.fill("#query", query);
  await page.waitForFunction((query) => document.querySelector("#results").dataset.query === query, query);
  return page.locator("#results .result .passage").allInnerTexts();
}

const PASSAGES = ["The cat slept on the warm sofa.", "Share prices fell sharply.", "Boil the noodles in salted water.", "The moon pulls at the sea."];

async function addTexts(page, texts = PASSAGES) {
  await page.fill("#texts-input", texts.join("\n\n"));
  await page.click("#texts-add");
  await waitFor(page, "ready");
  await page.waitForFunction(() => !/searchable|none/.test(document.querySelector("#texts-summary").textContent));
}

/** Waits until the vectors of this many passages are saved. */
async function untilKept(page, nDone) {
  for (;;) {
    const record = await page.evaluate(change, ["vectors", undefined]).catch(() => undefined);
    if (record?.nDone === nDone) return;
    await page.waitForTimeout(50);
  }
}

/** Reopens the page, and waits for its encoder and texts. */
async function again(page) {
  await page.reload();
  await waitFor(page, "ready");
}

const summary = (page) => page.textContent("#texts-summary");

test("texts and vectors are there again on the next visit, until they are cleared", limited, async () => {
  const page = await openSearch();
  await loadEncoder(page);
  await addTexts(page);
  const found = await search(page, "warm");
  await untilKept(page, 4);
  await again(page);
  assert.equal(await summary(page), "4 passages of 1 text");
  assert.ok(!(await page.evaluate(() => states)).includes("indexing"), "no vector is made anew");
  assert.deepEqual(await search(page, "warm"), found);
  // Later additions extend the existing texts.
  await page.evaluate(() => (document.querySelector("#texts").open = true));
  await addTexts(page, ["A fifth one."]);
  assert.equal(await summary(page), "5 passages of 2 texts");
  await untilKept(page, 5);
  await again(page);
  assert.equal(await summary(page), "5 passages of 2 texts");
  await page.evaluate(() => (document.querySelector("#texts").open = true));
  await page.click("#texts-clear");
  await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "none yet");
  assert.equal(await page.evaluate(change, ["texts", undefined]), undefined);
  await again(page);
  assert.equal(await summary(page), "none yet");
  assert.deepEqual(page.problems, []);
});

test("damaged texts and vectors, or ones of another version, are named in a notice; the rest is used", { timeout: 240_000 }, async () => {
  const page = await openSearch();
  await loadEncoder(page);
  await addTexts(page);
  const found = await search(page, "warm");
  for (const what of ["half", "older"]) {
    await untilKept(page, 4);
    await page.evaluate(change, ["vectors", what]);
    await again(page);
    assert.match(await page.innerText(".notice[data-code=kept]"), /^The vectors that were kept for the search are not used, because they are .*\. They are made anew\./);
    await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "4 passages of 1 text");
    assert.deepEqual(await search(page, "warm"), found, what);
  }
  for (const [what, message] of [
    ["older", /^The texts that are kept for the search are not used, because they are of another version .*\. They stay as they are, and texts that are added here are not kept\./],
    ["nonsense", /^The texts that were kept for the search are not used, because they are damaged\. The texts have to be added again\./],
  ]) {
    const kept = await page.evaluate(change, ["texts", what]);
    await again(page);
    // It is about the texts, whatever model answers.
    if (what === "nonsense") await reloadChatModel(page);
    assert.match(await page.innerText(".notice[data-code=kept]"), message);
    assert.equal(await summary(page), "none yet");
    assert.ok(await page.locator("#error").isHidden());
    await page.evaluate(() => (document.querySelector("#texts").open = true));
    await addTexts(page);
    assert.deepEqual(await search(page, "warm"), found, what);
    if (what !== "older") {
      await untilKept(page, 4);
      continue;
    }
    // Data of another version: neither these texts nor their absence overwrites it.
    await page.evaluate(() => (document.querySelector("#texts").open = true));
    await page.click("#texts-clear");
    await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "none yet");
    await again(page);
    assert.deepEqual(await page.evaluate(change, ["texts", undefined]), kept);
  }
  assert.deepEqual(page.problems, []);
});

test("what one tab keeps is neither overwritten nor cleared by another that has not seen it", limited, async () => {
  const page = await openSearch();
  const add = async (tab, text) => {
    await tab.evaluate(() => (document.querySelector("#texts").open = true));
    await tab.fill("#texts-input", text);
    await tab.click("#texts-add");
  };
  const kept = () => page.evaluate(change, ["texts", undefined]).catch(() => undefined);
  const untilTexts = async (nTexts) => {
    while ((await kept())?.nTexts !== nTexts) await page.waitForTimeout(50);
  };
  await add(page, "One.");
  await untilTexts(1);
  const other = await chromium.open(`${server.origin}/www/#search`);
  await other.waitForFunction(() => document.querySelector("#texts-summary").textContent.startsWith("1 passage of 1 text"));
  await add(page, "Two.");
  await untilTexts(2);
  await add(other, "Three.");
  await other.locator(".notice", { hasText: "will not be here on the next visit: another tab has changed the texts" }).waitFor();
  await other.evaluate(() => (document.querySelector("#texts").open = true));
  await other.click("#texts-clear");
  await other.locator(".notice", { hasText: "was not cleared: another tab has changed the texts" }).waitFor();
  assert.equal((await kept()).nTexts, 2);
  await other.reload();
  await other.waitForFunction(() => document.querySelector("#texts-summary").textContent.startsWith("2 passages of 2 texts"));
  // A tab that still shows cleared texts does not restore them.
  await page.evaluate(() => (document.querySelector("#texts").open = true));
  await page.click("#texts-clear");
  await untilTexts(undefined);
  await add(other, "Four.");
  await other.locator(".notice", { hasText: "another tab has changed the texts" }).waitFor();
  assert.equal(await kept(), undefined);
  await add(page, "Five.");
  await untilTexts(1);
  assert.deepEqual([...page.problems, ...other.problems], []);
});

test("a folder's texts are read, with those of the folders in it, and nothing else", limited, async () => {
  mkdirSync(join(folder, "deep/deeper"), { recursive: true });
  for (const [name, text] of [["a.md", "First."], ["deep/b.txt", "Second."], ["deep/deeper/c.txt", "Third."], ["deep/photo.png", "\x89PNG"]]) writeFileSync(join(folder, name), text);
  const page = await openSearch();
  await page.evaluate(() => {
    const { put } = IDBObjectStore.prototype;
    globalThis.kept = [];
    IDBObjectStore.prototype.put = function (value, key) {
      if (key === "texts") kept.push(value.nTexts);
      return put.call(this, value, key);
    };
  });
  await page.setInputFiles("#texts-folder", folder);
  await page.waitForFunction(() => /^3 passages of 3 texts/.test(document.querySelector("#texts-summary").textContent));
  assert.deepEqual(await page.locator("#notice .notice").allInnerTexts(), []);
  await page.waitForFunction(() => kept.includes(3));
  assert.deepEqual(await page.evaluate(() => kept), [3], "written once");
  await page.evaluate(() => (document.querySelector("#texts").open = true));
  await page.click("#texts-clear");
  // The same by dropping.
  const session = await page.context().newCDPSession(page);
  const data = { items: [], files: [folder], dragOperationsMask: 1 };
  for (const type of ["dragEnter", "dragOver", "drop"]) await session.send("Input.dispatchDragEvent", { type, x: 300, y: 300, data });
  await page.waitForFunction(() => /^3 passages of 3 texts/.test(document.querySelector("#texts-summary").textContent));
  await loadEncoder(page);
  await waitFor(page, "ready");
  await search(page, "third");
  assert.match(await page.innerText("#results"), /tilewright-texts-\w+\/deep\/deeper\/c\.txt, passage 1/);
});

test("a cross-encoder puts the passages in its own order; one that is none is told of", limited, async () => {
  const { Reranker } = await import(pathToFileURL(join(repository, "npm/dist/index.js")));
  const at = mkdtempSync(join(tmpdir(), "tilewright-reranker-"));
  for (const [name, content] of Object.entries(tinyEncoder("bert-reranker").files)) {
    mkdirSync(join(at, name, ".."), { recursive: true });
    writeFileSync(join(at, name), content);
  }
  const reranker = await Reranker.load(`${at}/`, { device: "cpu" });
  const wanted = (await reranker.rerank("warm water", PASSAGES)).map(({ index, score }) => [PASSAGES[index], score.toFixed(2)]);
  reranker.free();
  rmSync(at, { recursive: true, force: true });

  const page = await openSearch();
  await loadEncoder(page);
  await addTexts(page);
  const byCosine = await search(page, "warm water");
  await page.evaluate(() => (document.querySelector("#rerank").open = true));
  await page.fill("#rerank-url", `${server.origin}/files/bert-reranker/`);
  await page.check("#rerank-on");
  await page.waitForFunction(() => document.querySelector("#results").dataset.reranked === "true");
  const rows = await page.locator("#results .result").evaluateAll((all) => all.map((row) => [row.querySelector(".passage").textContent, row.querySelector(".score").textContent]));
  assert.deepEqual(rows, wanted);
  const ranks = await page.locator("#results .rank").allInnerTexts();
  assert.deepEqual(ranks, wanted.map(([text]) => `number ${byCosine.indexOf(text) + 1} by cosine`));
  await page.uncheck("#rerank-on");
  await page.waitForFunction(() => document.querySelector("#results").dataset.reranked === "false");
  assert.deepEqual(await page.locator("#results .passage").allInnerTexts(), byCosine);
  // Turning it off while it loads cancels nothing else.
  await page.check("#rerank-on");
  await page.waitForFunction(() => document.querySelector("#results").dataset.reranked === "true");
  await page.evaluate(() => {
    const { postMessage } = Worker.prototype;
    Worker.prototype.postMessage = function (message, ...more) {
      postMessage.call(this, message, ...more);
      if (message.name !== "rerank") return;
      Worker.prototype.postMessage = postMessage;
      globalThis.turnedOff = true;
      document.querySelector("#rerank-on").click();
    };
  });
  await search(page, "cold water");
  await page.waitForFunction(() => globalThis.turnedOff === true && document.querySelector("#rerank-note").textContent === "");
  await search(page, "warm water");
  assert.deepEqual(await page.locator("#results .passage").allInnerTexts(), byCosine);
  assert.ok(await page.locator("#error").isHidden());
  assert.equal(await page.textContent("#encoder-name"), "nomic");
  await page.fill("#rerank-url", `${server.origin}/files/nomic/`);
  await page.check("#rerank-on");
  await page.waitForFunction(() => /cannot be used: /.test(document.querySelector("#rerank-note").textContent));
  assert.ok(!(await page.isChecked("#rerank-on")));
  assert.deepEqual(page.problems, []);
});

test("the chat's model answers from passages, with links to them; one without a chat template is explained", limited, async () => {
  const template = "{% for message in messages %}{{ message.content }}{% endfor %}";
  server.files.set("parrot.gguf", bytesInMemory(parrot("<b>see</b>[1][9][2, 3]", template)));
  const page = await openSearch();
  await loadEncoder(page);
  await addTexts(page);
  await search(page, "warm water");
  await page.click("#answer-ask");
  assert.match(await page.innerText("#answer-note"), /has no chat template: it continues texts, and cannot answer questions\. Any chat model/);
  await page.click("#answer-note button");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.view), "chat");

  await page.fill("#model-url", `${server.origin}/files/parrot.gguf`);
  await page.click("#model-url-load");
  await page.waitForFunction(() => document.documentElement.dataset.mode === "chat" && document.documentElement.dataset.state === "ready");
  await page.click("#tab-search");
  await page.click("#answer-ask");
  await page.waitForFunction(() => /^From 4 passages, by zeros/.test(document.querySelector("#answer-note").textContent));
  // The model's output is text, and so is a number without a passage.
  const ids = await page.locator("#results .result").evaluateAll((all) => all.map((row) => row.dataset.id));
  const text = await page.innerText("#answer-text");
  assert.ok(text.includes("<b>see</b>[1][9][2][3]<b>see</b>"), text.slice(0, 100));
  assert.equal(await page.locator("#answer-text b").count(), 0);
  const cites = page.locator("#answer-text .cite");
  assert.deepEqual(await cites.evaluateAll((all) => all.slice(0, 4).map((it) => [it.textContent, it.dataset.passage])), [["[1]", ids[0]], ["[2]", ids[1]], ["[3]", ids[2]], ["[1]", ids[0]]]);
  await cites.nth(1).click();
  assert.equal(await page.evaluate(() => document.activeElement.dataset.id), ids[1]);
  assert.equal(await page.evaluate(() => location.hash), "#search");
  // Another query has another answer.
  await search(page, "prices");
  assert.equal(await page.textContent("#answer-text"), "");
  assert.deepEqual(page.problems, []);
});

test("citations are found however an answer is cut into pieces", async () => {
  const { Citations } = await pageModule("search/citations");
  const text = "It is so [1], and [2,3] more. [4] is none, [x] neither, nor is [1 or a [[2]] end [12";
  const read = (pieces) => {
    const citations = new Citations(3);
    const found = [...pieces.flatMap((piece) => citations.append(piece)), ...citations.end()];
    return [found.map((it) => it.text).join(""), found.flatMap(({ cites }) => cites ?? [])];
  };
  const whole = read([text]);
  assert.deepEqual(whole, [text.replace("[2,3]", "[2][3]"), [1, 2, 3, 2]]);
  for (let size = 1; size < 9; size++) {
    assert.deepEqual(read(text.match(new RegExp(`.{1,${size}}`, "g"))), whole, `pieces of ${size}`);
  }
});
