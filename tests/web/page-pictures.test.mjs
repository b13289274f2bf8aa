// Pictures in the demo page's chat: pasted, dropped and attached, kept with the conversation, refused in a sentence.
//
// Screenshots go to the folder TILEWRIGHT_SCREENSHOTS, if set.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { pictureModel } from "./picture-model.mjs";
import { repository, startServer } from "./server.mjs";
import { withTemplate } from "./template.mjs";

const limited = { timeout: 120_000 };
const axe = readFileSync(createRequire(join(repository, "npm/package.json")).resolve("axe-core/axe.min.js"), "utf8");
const picture = (name) => readFileSync(join(repository, "tests/data/pictures", name));
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS;
if (screenshots) mkdirSync(screenshots, { recursive: true });

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

const files = Object.entries(pictureModel("qwen3-vl")).map(([name, buffer]) => ({ name, mimeType: "application/octet-stream", buffer }));
const blind = [{ name: "blind.gguf", mimeType: "application/octet-stream", buffer: withTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]") }];

async function load(page, chosen) {
  await page.setInputFiles("#model-file", chosen);
  await page.waitForFunction(() => document.documentElement.dataset.state === "loading");
  await page.waitForFunction(() => ["ready", "error"].includes(document.documentElement.dataset.state));
  assert.equal(await page.evaluate(() => document.documentElement.dataset.state), "ready", await page.innerText("#error"));
}

async function open(chosen) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.setItem("tilewright.settings", JSON.stringify({ temperature: 0, maxTokens: 8 })));
  await page.goto(`${server.origin}/www/`);
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  await load(page, chosen);
  return page;
}

/** Runs in a page: gives a file to it, as pasting and dropping do. */
function give({ how, name, type, text }) {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
  const event = how === "paste" ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.querySelector("#prompt").dispatchEvent(event);
  return event.defaultPrevented;
}

const given = (how, name, type = "image/png", bytes = picture(name)) => ({ how, name, type, text: bytes.toString("base64") });
const attached = (page, n) => page.waitForFunction((n) => document.querySelectorAll("#attachments .picture img").length === n, n);

async function ask(page, text) {
  const n = await page.locator("#output .turn").count();
  await page.fill("#prompt", text);
  await page.click("#send");
  await page.waitForFunction((n) => document.querySelectorAll("#output .turn").length > n && document.documentElement.dataset.state !== "generating", n);
  assert.equal(await page.evaluate(() => document.documentElement.dataset.state), "ready", await page.innerText("#error"));
}

async function look(page, name) {
  // Half of the combinations, as in access.test.mjs.
  const isFull = screenshots !== undefined || process.env.TILEWRIGHT_FULL !== undefined;
  for (const [screen, width, height] of [["desk", 1280, 800], ["phone", 360, 740]]) {
    for (const colorScheme of isFull ? ["light", "dark"] : [screen === "desk" ? "light" : "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes[0].target}`), [], `${name}, ${screen} ${colorScheme}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${name}, ${screen}: too wide`);
      if (screenshots) await page.screenshot({ path: join(screenshots, `pictures-${name}-${screen}-${colorScheme}.png`) });
    }
  }
  await page.setViewportSize({ width: 1280, height: 800 });
}

test("pictures are pasted, dropped and attached, answered as by the package, and kept", limited, async () => {
  const page = await open(files);
  assert.ok(await page.evaluate(() => document.documentElement.hasAttribute("data-images")));
  assert.match(await page.innerText(".intro"), /It takes pictures/);
  assert.equal(await page.getAttribute("#attach", "aria-label"), "Attach pictures and text files");
  assert.ok(await page.locator("#camera").isHidden(), "a desk has no camera button");
  assert.ok(await page.evaluate(give, given("paste", "a.png")));
  await attached(page, 1);
  assert.match(await page.innerText("#attachments"), /a\.png\s*12 tokens, \d+ % of the context/);
  await page.click("#attachments [aria-label='Remove a.png']");
  await attached(page, 0);
  // A text with a picture of it, as from a spreadsheet, is a text.
  assert.equal(await page.evaluate(() => {
    const transfer = new DataTransfer();
    transfer.items.add(new File(["x"], "cells.png", { type: "image/png" }));
    transfer.setData("text/plain", "cells");
    const event = new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
    document.querySelector("#prompt").dispatchEvent(event);
    return event.defaultPrevented;
  }), false);
  await page.evaluate(give, given("paste", "a.png"));
  await attached(page, 1);
  await page.evaluate(give, given("drop", "turned.jpg", "image/jpeg"));
  await attached(page, 2);
  await look(page, "composer");
  await ask(page, "what");
  const answer = () => page.locator("#output .message[data-role=assistant]").last().innerText();
  const first = await answer();
  assert.notEqual(first, "");
  assert.deepEqual(await page.locator(".turn .picture img").evaluateAll((all) => all.map(({ alt, naturalWidth }) => [alt, naturalWidth])), [["Picture a.png", 61], ["Picture turned.jpg", 48]]);
  await look(page, "answered");

  // The same by the package.
  const expected = await page.evaluate(async ({ files, images }) => {
    const { Model } = await import("./tilewright/index.js");
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const model = await Model.load(files.map(([name, text]) => new File([bytes(text)], name)), { device: "cpu", vision: true });
    const content = [...images.map((text) => ({ type: "image", image: new Blob([bytes(text)]) })), { type: "text", text: "what" }];
    const text = await model.chat([{ role: "user", content }], { maxTokens: 8 }).text();
    model.free();
    return text;
  }, { files: files.map(({ name, buffer }) => [name, buffer.toString("base64")]), images: ["a.png", "turned.jpg"].map((name) => picture(name).toString("base64")) });
  assert.equal(first.trim(), expected.trim());

  // The pictures are part of the next prompt, and of the conversation after a reload.
  await ask(page, "and");
  assert.match(await page.locator("#output .note").last().innerText(), /kept \d+ of \d+ prompt tokens/);
  await page.reload();
  await page.waitForFunction(() => document.querySelectorAll(".turn .picture img").length === 2);
  assert.deepEqual(page.problems, []);
});

test("a model without an encoder, and files that are no pictures, are answered in a sentence", limited, async () => {
  const page = await open(blind);
  const notice = () => page.locator(".notice[data-code=attachment] p").last().innerText();
  assert.equal(await page.getAttribute("#attach", "aria-label"), "Attach text files");
  await page.evaluate(give, given("paste", "a.png"));
  await page.locator(".notice[data-code=attachment]").waitFor();
  assert.match(await notice(), /^A\.png was not attached: this model takes no pictures; a model with a vision encoder does, such as \S+\/\S+ as the model address\.$/i);
  assert.equal(await page.locator("#attachments .picture").count(), 0);
  await load(page, files);
  await page.evaluate(give, given("paste", "broken.png", "image/png", Buffer.from("nothing")));
  await page.waitForFunction(() => /broken\.png was not attached: it cannot be decoded/i.test(document.querySelector("#notice").textContent));
  await page.evaluate(give, given("drop", "drawing.svg", "image/svg+xml", Buffer.from("<svg/>")));
  await page.waitForFunction(() => /drawing\.svg was not attached: it is of the type image\/svg\+xml; PNG, JPEG, WebP and GIF are read/i.test(document.querySelector("#notice").textContent));
  assert.deepEqual(page.problems, []);
});

test("encoders are found beside models: in repositories, among files, and in the storage", async () => {
  const { choiceOfFiles, located, storedModels } = await pageModule("sources");
  const listings = {
    "/api/models/o/gguf/revision/main": ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "sub/mmproj-F16.gguf"],
    "/api/models/o/folder/revision/main": ["config.json", "model.safetensors", "preprocessor_config.json"],
    "/api/models/o/text/revision/main": ["config.json", "model.safetensors"],
  };
  const fetchOf = globalThis.fetch;
  globalThis.fetch = async (url) => new Response(JSON.stringify({ siblings: listings[new URL(url).pathname].map((rfilename) => ({ rfilename })) }));
  try {
    const at = async (repository) => (await located({ label: "m", source: { repository, revision: "main" } }, new AbortController().signal, "https://hub.test")).vision;
    assert.equal(await at("o/gguf"), "https://hub.test/o/gguf/resolve/main/mmproj-F16.gguf");
    assert.equal(await at("o/folder"), true);
    assert.equal(await at("o/text"), undefined);
  } finally {
    globalThis.fetch = fetchOf;
  }
  const file = (name) => Object.assign(new File(["x"], name), { webkitRelativePath: "" });
  const [model, encoder] = [file("m.gguf"), file("m-mmproj-F16.gguf")];
  assert.deepEqual(choiceOfFiles([encoder, model]), { label: "m.gguf", source: model, vision: encoder });
  assert.equal(choiceOfFiles([model]).vision, undefined);
  assert.equal(choiceOfFiles(["config.json", "model.safetensors", "processor_config.json"].map(file)).vision, true);
  const entry = (url, complete = true) => ({ url, stored: 1, complete, date: 0 });
  const stored = storedModels([entry("https://h/o/mmproj-F16.gguf"), entry("https://h/o/m-Q4_0.gguf"), entry("https://h/p/mmproj.gguf"), entry("https://h/q/m.gguf")]);
  assert.deepEqual(stored.map(({ source, vision, storedBytes }) => [source, vision, storedBytes]), [
    ["https://h/o/m-Q4_0.gguf", "https://h/o/mmproj-F16.gguf", 2], ["https://h/q/m.gguf", undefined, 1], ["https://h/p/mmproj.gguf", undefined, 1],
  ].sort(([a], [b]) => (a < b ? -1 : 1)).sort((a, b) => labelOf(a) < labelOf(b) ? -1 : 1));
});

const labelOf = ([source]) => source.split("/").at(-1);
