// The search view of the demo page: tabs, pasted, picked and dropped texts, progress and Stop, results while typing.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { bytesInMemory, dataPath, lacksData, repository, startServer } from "./server.mjs";
import { safetensors, uniform } from "./tensors.mjs";

const limited = { timeout: 120_000 };
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS ?? mkdtempSync(join(tmpdir(), "tilewright-screenshots-"));
mkdirSync(screenshots, { recursive: true });

let server;
let chromium;
before(async () => {
  server = await startServer();
  // The page's built-in weights need an encoder that tests may lack.
  server.besidePage.set("mol.safetensors", null);
  // Without WebGPU the page uses the CPU, the fastest device here. Files beside the page change from test to test.
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  console.log(`screenshots are in ${screenshots}`);
});

/** A test that needs MiniLM, or a skipped one. */
function withEncoder(name, run) {
  test(name, { ...limited, skip: lacksData("minilm-l6-v2") }, run);
}

/** Opens the search: as on a first visit, or with saved data. */
async function openSearch({ isFirstVisit = true } = {}) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  if (isFirstVisit) await forget(page);
  await page.goto(`${server.origin}/www/#search`);
  page.on("console", (message) => {
    if (message.type() === "error" && !/Failed to load resource|ERR_/.test(message.text())) page.problems.push(message.text());
  });
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  return page;
}

/** Deletes the page's data except models. */
const forget = (page) => page.evaluate(() => new Promise((resolve, reject) => {
  localStorage.clear();
  const request = indexedDB.deleteDatabase("tilewright-search");
  request.onsuccess = resolve;
  request.onerror = reject;
}));

async function close(page) {
  assert.deepEqual(page.problems, [], "errors in the page's console");
  await page.close();
}

const waitFor = (page, wanted) => page.waitForFunction((wanted) => document.documentElement.dataset.search === wanted, wanted);

async function loadEncoder(page) {
  await page.fill("#model-url", `${server.origin}/data/minilm-l6-v2/`);
  await page.click("#model-url-load");
  await page.waitForFunction(() => /minilm/.test(document.querySelector("#encoder-name").textContent));
  await page.waitForFunction(() => document.documentElement.dataset.search !== "loading");
}

/** Types a query and waits for complete results. */
async function search(page, query) {
  await page.fill("#query", query);
  await page.waitForFunction((query) => document.querySelector("#results").dataset.query === query, query);
  return page.locator(".result .passage").allInnerTexts();
}

const TEXT = `# Cats

The cat slept on the warm sofa all afternoon.

Share prices fell sharply after the bank raised its rates.

Boil the noodles for nine minutes in salted water.`;

/** A text with distinct passages. */
const manyPassages = (n) => Array.from({ length: n }, (_, i) => `Passage number ${i} is about ${i * 37} things that happened on one day, one after the other.`).join("\n\n");

withEncoder("pasted text is found by meaning as one types, with scores, context and marked words", async () => {
  const page = await openSearch();
  await loadEncoder(page);
  assert.match(await page.innerText("#search-device"), /CPU/);
  await page.fill("#texts-input", TEXT);
  await page.click("#texts-add");
  await waitFor(page, "ready");
  assert.match(await page.textContent("#texts-summary"), /^3 passages of 1 text$/);
  const found = await search(page, "how to cook pasta");
  assert.equal(found.length, 3);
  assert.match(found[0], /^Boil the noodles/);
  const scores = (await page.locator(".result .score").allInnerTexts()).map(Number);
  assert.deepEqual(scores, scores.toSorted((a, b) => b - a));
  assert.ok(scores[0] > 0.4 && scores[0] < 1, `score ${scores[0]}`);
  assert.match(await page.innerText(".result >> nth=0"), /Pasted text 1, passage 3/);
  assert.match(await page.innerText("#results-note"), /The best 3 of 3 passages · \d+(\.\d)? m?s/);
  await page.click(".result >> nth=0 >> summary");
  assert.match(await page.innerText(".result >> nth=0 >> details"), /Share prices fell/);

  // A heading stays with its paragraph.
  assert.match((await search(page, "sleeping pets"))[0], /^# Cats The cat slept/);
  await search(page, "the cat's sofa");
  assert.deepEqual(await page.locator(".result >> nth=0 >> .passage mark").allInnerTexts(), ["Cats", "cat", "sofa"]);

  // Letters in quick succession: only the last search counts.
  await page.fill("#query", "");
  await page.locator("#query").pressSequentially("stock market", { delay: 15 });
  await page.waitForFunction(() => document.querySelector("#results").dataset.query === "stock market");
  assert.match((await page.locator(".result .passage").allInnerTexts())[0], /^Share prices/);
  await page.fill("#query", "");
  await page.waitForFunction(() => document.querySelectorAll(".result").length === 0);
  await close(page);
});

withEncoder("picked files are read by their kind, and all of them can be cleared", async () => {
  const page = await openSearch();
  await loadEncoder(page);
  const file = (name, text) => ({ name, mimeType: "text/plain", buffer: Buffer.from(text) });
  await page.setInputFiles("#texts-file", [
    file("birds.csv", 'name,note\nPenguin,"It swims, and cannot fly"\nOwl,It hunts at night\n'),
    file("facts.jsonl", '{"id":1,"text":"Mount Everest is the highest mountain."}\n"Rivers flow to the sea."\n'),
    file("broken.jsonl", '{"text":"fine"}\nnot json\n'),
    file("empty.txt", " \n "),
  ]);
  await page.waitForFunction(() => /^4 passages of 2 texts$/.test(document.querySelector("#texts-summary").textContent));
  const notices = await page.innerText("#notice");
  assert.match(notices, /broken.jsonl: line 2 is no JSON\./);
  assert.match(notices, /empty.txt holds no text\./i);
  assert.equal((await search(page, "a bird that is awake when it is dark"))[0], "Owl · It hunts at night");
  assert.equal((await search(page, "peaks"))[0], "Mount Everest is the highest mountain.");
  await page.locator("#texts summary").click();
  await page.click("#texts-clear");
  await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "none yet");
  assert.equal(await page.locator(".result").count(), 0);
  await page.click("#texts-sample");
  await waitFor(page, "ready");
  assert.match((await search(page, "how do I repair my bike's wheel"))[0], /^To mend a flat tyre/);
  await close(page);
});

withEncoder("texts that are dropped wait for an encoder; Stop keeps what is done, and it goes on from there", async () => {
  server.files.set("many.txt", bytesInMemory(Buffer.from(manyPassages(300)), "text/plain"));
  const page = await openSearch();
  await page.click("#tab-chat");
  const transfer = await page.evaluateHandle(async () => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([await (await fetch("/files/many.txt")).arrayBuffer()], "many.txt"));
    return transfer;
  });
  await page.dispatchEvent("body", "drop", { dataTransfer: transfer });
  await page.waitForFunction(() => /^300 passages of 1 text, 0 searchable$/.test(document.querySelector("#texts-summary").textContent));
  assert.equal(await page.evaluate(() => document.documentElement.dataset.view), "search", "texts are searched");
  await loadEncoder(page);
  await waitFor(page, "indexing");
  await page.waitForFunction(() => /[1-9]\d* of 300 · .* passages\/s/.test(document.querySelector("#search-progress-text").textContent));
  assert.ok(await page.locator("#search-progress").isVisible());
  // Embedded texts are searchable while the others are being embedded.
  await page.waitForFunction(() => / [1-9]\d* searchable/.test(document.querySelector("#texts-summary").textContent));
  assert.ok((await search(page, "passage number 3")).length > 0);
  await page.click("#search-progress-stop");
  await waitFor(page, "ready");
  const [, stopped] = /, (\d+) searchable/.exec(await page.textContent("#texts-summary"));
  assert.ok(stopped > 0 && stopped < 300, `${stopped} passages`);
  await page.locator("#texts summary").click();
  await page.click("#texts-go-on");
  await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "300 passages of 1 text");
  await waitFor(page, "ready");
  assert.match((await search(page, "Passage number 299 is about 11063 things")).join("\n"), /number 299/);
  await close(page);
});

test("a file of a hundred thousand and more passages is taken as a whole", limited, async () => {
  const page = await openSearch();
  const lines = Buffer.from(Array.from({ length: 200_000 }, (_, i) => `Line ${i}.`).join("\n"));
  await page.setInputFiles("#texts-file", [{ name: "lines.txt", mimeType: "text/plain", buffer: lines }]);
  await page.waitForFunction(() => document.querySelector("#texts-summary").textContent !== "none yet" || document.querySelector(".notice[data-code=text]") !== null);
  assert.deepEqual(await page.locator(".notice[data-code=text]").allInnerTexts(), []);
  assert.match(await page.textContent("#texts-summary"), /^200,000 passages of 1 text/);
  await close(page);
});

withEncoder("what is no encoder is an error in a sentence, and a load can be cancelled", async () => {
  const page = await openSearch();
  await page.fill("#model-url", server.url("assets/stories.gguf"));
  await page.click("#model-url-load");
  await page.waitForFunction(() => document.querySelector("#error").dataset.code === "unsupported");
  assert.match(await page.innerText("#error-text"), /encoders/);
  await page.click("#error-close");
  await waitFor(page, "empty");
  await page.fill("#model-url", server.url("assets/stories.gguf", { fault: "slow", rate: 20_000 }));
  await page.click("#model-url-load");
  await page.locator("#search-load").waitFor({ state: "visible" });
  await page.click("#search-load-stop");
  await waitFor(page, "empty");
  assert.ok(await page.locator("#search-load").isHidden());
  assert.ok(await page.locator("#error").isHidden(), "a cancelled load is no error");
  await close(page);
});

withEncoder("an encoder's folder can be dropped and picked, with the folders of its modules", async () => {
  const page = await openSearch();
  // The data folder contains more than the model's own files, vocab.txt among them.
  const folder = dataPath("minilm-l6-v2");
  const session = await page.context().newCDPSession(page);
  const data = { items: [], files: [folder], dragOperationsMask: 1 };
  for (const type of ["dragEnter", "dragOver", "drop"]) await session.send("Input.dispatchDragEvent", { type, x: 300, y: 300, data });
  const facts = () => page.textContent("#search-facts-list");
  await page.waitForFunction(() => document.querySelector("#search-facts-list").textContent.includes("Poolingmean"));
  assert.match(await facts(), /Modelminilm-l6-v2.*Width384.*Reads256 tokens/);
  assert.equal(await page.textContent("#texts-summary"), "none yet");
  await page.setInputFiles("#model-folder", folder);
  await waitFor(page, "loading");
  await page.waitForFunction(() => document.querySelector("#search-facts-list").textContent.includes("Modelminilm-l6-v2"));
  assert.ok(await page.locator("#error").isHidden());
  await close(page);
});

/** A random mixture of logits over vectors of MiniLM's length: two components of eight numbers each, and a gate. */
function randomMixture(metadata, dims = 384) {
  const [components, size, hidden] = [2, 8, 4];
  const pairs = components ** 2;
  let seed = 0;
  const layer = (name, [rows, columns], scale) => ({
    [`${name}.weight`]: { shape: [rows, columns], values: uniform(rows * columns, ++seed).map((x) => x * scale) },
    [`${name}.bias`]: { shape: [rows], values: uniform(rows, ++seed).map((x) => x / 10) },
  });
  return safetensors({
    ...layer("_query_embeddings_fn._query_emb_proj_module.1", [components * size, dims], 1),
    ...layer("_item_embeddings_fn._item_emb_proj_module.1", [components * size, dims], 1),
    ...layer("_gating_fn._query_only_partial_module.0", [hidden, dims], 1),
    ...layer("_gating_fn._query_only_partial_module.2", [pairs, hidden], 1),
    ...layer("_gating_fn._item_only_partial_module.1", [hidden, dims], 1),
    ...layer("_gating_fn._item_only_partial_module.3", [pairs, hidden], 1),
    ...layer("_gating_fn._qi_partial_module.1", [hidden, pairs], 1),
    ...layer("_gating_fn._qi_partial_module.3", [pairs, hidden], 1),
  }, { "mol.query_components": "2", "mol.item_components": "2", "mol.temperature": "0.1", ...metadata });
}

withEncoder("a learned similarity beside the page makes a second list, with each passage's rank by cosine", async () => {
  server.besidePage.set("mol.safetensors", randomMixture({ model: "minilm-l6-v2" }));
  const page = await openSearch();
  await loadEncoder(page);
  await page.fill("#texts-input", manyPassages(24));
  await page.click("#texts-add");
  await waitFor(page, "ready");
  const lists = () => page.evaluate(() => ["#results", "#learned-results"].map((list) => [...document.querySelectorAll(`${list} .result`)].map((row) => ({
    id: row.dataset.id, score: Number(row.querySelector(".score").textContent), rank: row.querySelector(".rank")?.textContent,
  }))));
  await search(page, "Passage number 7 is about 259 things");
  const [cosine, learned] = await lists();
  assert.deepEqual([cosine.length, learned.length, cosine[0].id], [10, 10, "7"]);
  for (const [list, name] of [[cosine, "cosine"], [learned, "learned"]]) {
    const scores = list.map(({ score }) => score);
    assert.deepEqual(scores, scores.toSorted((a, b) => b - a), name);
  }
  assert.notDeepEqual(learned.map(({ id }) => id), cosine.map(({ id }) => id));
  const ranks = learned.map(({ rank }) => Number(/^number (\d+) by cosine$/.exec(rank)[1]));
  assert.ok(ranks.every((rank) => rank <= 24) && new Set(ranks).size === ranks.length, ranks.join());
  for (const [i, { id }] of learned.entries()) {
    const at = cosine.findIndex((it) => it.id === id);
    assert.ok(at >= 0 ? ranks[i] === at + 1 : ranks[i] > 10, `passage ${id} is number ${ranks[i]}, found at ${at}`);
  }
  assert.equal(await page.textContent("#learned-note"), "");
  assert.deepEqual(await page.locator("#lists h3:visible").allInnerTexts(), ["By cosine", "By learned similarity"]);

  const boxes = async (width, height) => {
    await page.setViewportSize({ width, height });
    return Promise.all(["#results", "#learned-results"].map((list) => page.locator(list).boundingBox()));
  };
  const [left, right] = await boxes(1440, 900);
  assert.ok(right.x >= left.x + left.width && right.y === left.y, "side by side");
  await page.screenshot({ path: join(screenshots, "search-learned-desk.png") });
  const [above, below] = await boxes(390, 844);
  assert.ok(below.y >= above.y + above.height && below.x === above.x, "one below the other");
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(overflow <= 0, `${overflow} pixels too wide`);
  await page.screenshot({ path: join(screenshots, "search-learned-phone.png") });

  // Cleared texts are gone from both.
  await page.setViewportSize({ width: 1440, height: 900 });
  await page.locator("#texts summary").click();
  await page.click("#texts-clear");
  await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "none yet");
  await page.fill("#texts-input", TEXT);
  await page.click("#texts-add");
  await waitFor(page, "ready");
  await search(page, "pasta");
  await page.waitForFunction(() => document.querySelectorAll("#learned-results .result").length === 3);
  await close(page);
});

withEncoder("without a learned similarity for the encoder there is the list by cosine, and a line that says why", async () => {
  const cases = [
    [null, /^There is no learned similarity \(mol\.safetensors\) beside this page\.$/],
    [randomMixture({ model: "another" }), /is for another, not for minilm-l6-v2\.$/],
    [randomMixture({}), /is for an encoder that it does not name, not for minilm-l6-v2\.$/],
    [randomMixture({ model: "minilm-l6-v2" }, 8), /takes 8 and 8 numbers, and vectors of minilm-l6-v2 have 384\.$/],
    [Buffer.from("nothing of the kind"), /cannot be used: safetensors: /],
  ];
  for (const [file, why] of cases) {
    server.besidePage.set("mol.safetensors", file);
    const page = await openSearch();
    await loadEncoder(page);
    assert.match(await page.innerText("#learned-note"), why);
    if (file === null) {
      await page.fill("#texts-input", TEXT);
      await page.click("#texts-add");
      await waitFor(page, "ready");
      assert.equal((await search(page, "how to cook pasta")).length, 3);
    }
    assert.equal(await page.locator("#lists h3:visible, #learned:visible").count(), 0);
    assert.ok(await page.locator("#error").isHidden());
    await close(page);
  }
  server.besidePage.set("mol.safetensors", null);
});

test("tabs follow the arrow keys, have their roles, and the address names the view", limited, async () => {
  const page = await openSearch();
  const shown = () => page.evaluate(() => [
    document.documentElement.dataset.view, location.hash, document.activeElement.id,
    ...[...document.querySelectorAll("[role=tab]")].map((it) => `${it.ariaSelected} ${it.tabIndex}`),
    ...[...document.querySelectorAll("[role=tabpanel]")].map((it) => it.hidden),
  ]);
  await page.focus("#tab-search");
  assert.deepEqual(await shown(), ["search", "#search", "tab-search", "false -1", "true 0", "false -1", "false -1", "false -1", true, false, true, true, true]);
  await page.keyboard.press("ArrowLeft");
  assert.deepEqual(await shown(), ["chat", "", "tab-chat", "true 0", "false -1", "false -1", "false -1", "false -1", false, true, true, true, true]);
  await page.keyboard.press("ArrowLeft");
  assert.deepEqual((await shown()).slice(0, 3), ["inside", "#inside", "tab-inside"]);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("End");
  assert.equal((await shown())[2], "tab-inside");
  await page.keyboard.press("Home");
  assert.equal((await shown())[2], "tab-chat");
  const relations = await page.evaluate(() => [...document.querySelectorAll("[role=tab]")].map((tab) => {
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    return panel.getAttribute("aria-labelledby") === tab.id && tab.parentElement.getAttribute("role") === "tablist";
  }));
  assert.deepEqual(relations, [true, true, true, true, true]);

  // A typed address, or a step back to one, changes the open page's view; a link within a view does not.
  const go = (hash, view) => page.evaluate((hash) => void (location.hash = hash), hash)
    .then(() => page.waitForFunction((view) => document.documentElement.dataset.view === view, view, { timeout: 10_000 }));
  await go("#search", "search");
  await page.goBack();
  await page.waitForFunction(() => document.documentElement.dataset.view === "chat");
  await go("#search", "search");
  await go("#query", "search");
  await go("#chat", "chat");
  assert.equal(await page.evaluate(() => location.hash), "");
  assert.ok(await page.locator("#prompt").isVisible());
  assert.ok(await page.locator("#query").isHidden());
  await close(page);
});

withEncoder("screenshots of a search on a desk and a phone, light and dark; nothing is wider than the screen", async () => {
  const page = await openSearch();
  await loadEncoder(page);
  await page.click("#texts-sample");
  await waitFor(page, "ready");
  await search(page, "my bike has a puncture");
  for (const [device, width, height] of [["desk", 1280, 800], ["phone", 390, 844]]) {
    for (const colorScheme of ["light", "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
      await page.screenshot({ path: join(screenshots, `search-${device}-${colorScheme}.png`) });
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${device}: ${overflow} pixels too wide`);
    }
  }
  await close(page);
});

test("texts become passages: paragraphs, records, and pieces of what is long", async () => {
  const { passagesOf } = await pageModule("passages");
  assert.deepEqual(passagesOf("a.txt", "One.\r\n\r\n  Two\nlines. \n\n\n"), ["One.", "Two lines."]);
  assert.deepEqual(passagesOf("a.md", "# A\n\n## B\n\nText.\n\n# Last"), ["# A ## B Text.", "# Last"]);
  assert.deepEqual(passagesOf("lines.txt", "A line\nthat goes on.\nAnother one!\nLast"), ["A line that goes on.", "Another one!", "Last"]);
  assert.deepEqual(passagesOf("a.csv", 'x,y\r\n1,"a ""b"", c"\r\n,\r\n2,"two\nlines"'), ['1 · a "b", c', "2 · two lines"]);
  // As spreadsheets in many countries write it, with a leading byte order mark.
  assert.deepEqual(passagesOf("a.csv", '\ufeffname;note\r\nOwl;"It hunts; at night, alone"\r\nHen;"An ""egg"", daily"\r\n'), ["Owl · It hunts; at night, alone", 'Hen · An "egg", daily']);
  assert.deepEqual(passagesOf("a.csv", "name\tnote\nOwl\tIt hunts, at night\n"), ["Owl · It hunts, at night"]);
  assert.throws(() => passagesOf("a.csv", 'x,y\n1,fine\n2,"never closed\n3,4\n'), /a\.csv: record 3 has a quote that nothing closes/);
  assert.deepEqual(passagesOf("a.jsonl", '{"title":"t","text":"x"}\n\n"y"\n{"a":"b","n":1,"c":"d"}\n5'), ["x", "y", "b · d"]);
  assert.throws(() => passagesOf("a.jsonl", "{}\n{"), /a\.jsonl: line 2 is no JSON/);
  assert.deepEqual(passagesOf("a.txt", ""), []);
  const sentence = "These are exactly ten words that end with a stop.";
  const long = passagesOf("a.txt", Array(20).fill(sentence).join(" "));
  assert.deepEqual(long.map((it) => it.split(" ").length), [90, 90, 20]);
  assert.equal(long.join(" "), Array(20).fill(sentence).join(" "));
  const endless = passagesOf("a.txt", Array(200).fill("word").join(" "));
  assert.deepEqual(endless.map((it) => it.split(" ").length), [90, 90, 20]);
  const unspaced = passagesOf("a.txt", "字".repeat(2000));
  assert.ok(unspaced.every((it) => it.length <= 720), unspaced.map((it) => it.length).join());
  assert.equal(unspaced.join(""), "字".repeat(2000));
});
