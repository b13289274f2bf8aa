// The page's search over pictures: chosen and dropped pictures are found by words, in the order of the package's cosines.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";

const limited = { timeout: 180_000 };
const axe = readFileSync(createRequire(join(repository, "npm/package.json")).resolve("axe-core/axe.min.js"), "utf8");
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS;
if (screenshots) mkdirSync(screenshots, { recursive: true });

const fileOf = (...path) => readFileSync(join(repository, "tests/data", ...path));
const NAMES = ["a.png", "b.png", "c.png", "turned.jpg", "alpha.png", "gray.png"];
const files = NAMES.map((name) => ({ name, mimeType: name.endsWith("jpg") ? "image/jpeg" : "image/png", buffer: fileOf("pictures", name) }));
const broken = { name: "broken.png", mimeType: "image/png", buffer: Buffer.from("no picture") };

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.besidePage.set("mol.safetensors", null);
  const config = JSON.parse(fileOf("tiny-random-pictures/clip/config.json"));
  config.text_config.eos_token_id = 3;
  const model = {
    "config.json": Buffer.from(JSON.stringify(config)),
    "model.safetensors": fileOf("tiny-random-pictures/clip/model.safetensors"),
    "preprocessor_config.json": fileOf("tiny-random-pictures/clip/preprocessor_config.json"),
    "tokenizer.json": fileOf("encoders/nomic/tokenizer.json"),
  };
  for (const [name, content] of Object.entries(model)) {
    server.files.set(`clip/${name}`, bytesInMemory(content));
    // Without the file it embeds texts alone.
    if (name !== "preprocessor_config.json") server.files.set(`texts/${name}`, bytesInMemory(content));
  }
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

async function openSearch() {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.goto(`${server.origin}/www/#search`);
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  return page;
}

async function loadEncoder(page, name) {
  await page.fill("#model-url", `${server.origin}/files/${name}/`);
  await page.click("#model-url-load");
  await page.waitForFunction((name) => document.querySelector("#encoder-name").textContent === name && document.documentElement.dataset.search === "ready", name);
}

const summary = (page, text) => page.waitForFunction((text) => document.querySelector("#pictures-summary").textContent === text && document.documentElement.dataset.search === "ready", text);

/** The names of the pictures that are shown, in their order. */
const shown = (page) => page.locator(".picture-result .source").allInnerTexts();

async function search(page, query) {
  await page.fill("#query", query);
  await page.waitForFunction((query) => document.querySelector("#picture-results").dataset.query === query, query);
  return shown(page);
}

/** Looks at the page on a desk and a phone: nothing is inaccessible or too wide. */
async function look(page, name) {
  for (const [screen, width, height] of [["desk", 1280, 800], ["phone", 360, 740]]) {
    for (const colorScheme of screenshots ? ["light", "dark"] : [screen === "desk" ? "light" : "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes[0].target}`), [], `${name}, ${screen} ${colorScheme}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${name}, ${screen}: too wide`);
      if (screenshots) await page.screenshot({ path: join(screenshots, `search-${name}-${screen}-${colorScheme}.png`) });
    }
  }
  await page.setViewportSize({ width: 1280, height: 800 });
}

test("pictures are embedded once, and ordered by the cosine with a query", limited, async () => {
  const page = await openSearch();
  assert.ok(await page.locator("#pictures").isHidden());
  await loadEncoder(page, "clip");
  assert.ok(await page.locator("#pictures").isVisible());
  assert.equal(await page.getAttribute("#query", "placeholder"), "Add pictures first…");
  await look(page, "no-pictures");
  await page.setInputFiles("#pictures-file", [...files.slice(0, 2), broken, ...files.slice(2)]);
  await summary(page, "6 pictures");
  assert.deepEqual(await shown(page), NAMES);
  assert.match(await page.locator(".notice[data-code=picture] p").innerText(), /^A picture was left out: broken\.png, the file is of an unknown format, expected PNG, JPEG, WebP or GIF\.$/);
  await page.locator(".notice[data-code=picture] button").first().click();

  // The order and the numbers are the package's.
  const queries = ["a quiet river", "the city at night"];
  const expected = await page.evaluate(async ({ origin, files, queries }) => {
    const { Embedder } = await import("./tilewright/index.js");
    const embedder = await Embedder.load(`${origin}/files/clip/`, { device: "cpu" });
    const bytes = (text) => new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]);
    const vectors = [...await embedder.embedImages(files.map(([, text]) => bytes(text)))];
    const ranked = [];
    for (const query of queries) {
      const of = await embedder.embed(query);
      const scores = vectors.map((vector, i) => ({ name: files[i][0], score: vector.reduce((sum, value, k) => sum + value * of[k], 0) }));
      ranked.push(scores.sort((a, b) => b.score - a.score));
    }
    embedder.free();
    return ranked;
  }, { origin: server.origin, files: files.map(({ name, buffer }) => [name, buffer.toString("base64")]), queries });
  assert.notDeepEqual(expected[0].map(({ name }) => name), expected[1].map(({ name }) => name), "the queries tell nothing apart");
  for (const [i, query] of queries.entries()) {
    assert.deepEqual(await search(page, query), expected[i].map(({ name }) => name));
    assert.deepEqual(await page.locator(".picture-result .score").allInnerTexts(), expected[i].map(({ score }) => score.toFixed(2)));
    assert.match(await page.innerText("#results-note"), /^The best 6 of 6 pictures · /);
  }
  await page.waitForFunction(() => [...document.querySelectorAll(".picture-result img")].every(({ naturalWidth }) => naturalWidth > 0));
  await look(page, "pictures");

  // Texts beside them are found, too.
  await page.evaluate(() => (document.querySelector("#texts").open = true));
  await page.fill("#texts-input", "The river is quiet.");
  await page.click("#texts-add");
  await page.locator(".result .passage").waitFor();
  assert.equal((await shown(page)).length, 6);
  await page.fill("#query", "");
  await page.waitForFunction(() => document.querySelector("#picture-results").dataset.query === "");
  assert.deepEqual(await shown(page), NAMES);
  await page.evaluate(() => (document.querySelector("#pictures").open = true));
  await page.click("#pictures-clear");
  await summary(page, "none yet");
  assert.deepEqual(await shown(page), []);
  assert.deepEqual(page.problems, []);
});

test("pictures wait for an encoder that takes them", limited, async () => {
  const page = await openSearch();
  await loadEncoder(page, "texts");
  assert.ok(await page.evaluate(({ name, text }) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type: "image/png" }));
    const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
    document.querySelector("#found").dispatchEvent(event);
    return event.defaultPrevented;
  }, { name: "a.png", text: files[0].buffer.toString("base64") }));
  await page.locator(".notice[data-code=picture]").waitFor();
  assert.match(await page.locator(".notice[data-code=picture] p").innerText(), /can be searched as soon as an encoder for pictures is loaded/);
  assert.equal(await page.textContent("#pictures-summary"), "1 picture, 0 searchable");
  await loadEncoder(page, "clip");
  await summary(page, "1 picture");
  assert.deepEqual(await search(page, "a quiet river"), ["a.png"]);
  await page.setInputFiles("#pictures-file", [{ name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("x") }]);
  await page.waitForFunction(() => [...document.querySelectorAll(".notice[data-code=picture] p")].some((it) => /no picture among these files/.test(it.textContent)));
  assert.deepEqual(page.problems, []);
});
