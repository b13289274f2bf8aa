// Screenshots of the demo page for the README and docs/demo.md, from real runs: each view with contents.
//
//     scripts/build-web && node scripts/pictures.mjs [FOLDER] [--all]
//
// FOLDER defaults to assets/pictures. `--all` captures each view light and dark, on desktop and phone; without it only
// those that the documents show. The search needs MiniLM, which scripts/test-data fetches. A picture of more than 200
// KB is an error.

import { mkdirSync, statSync } from "node:fs";
import { join } from "node:path";

import { openBrowser } from "../tests/web/browser.mjs";
import { dataPath, repository, startServer } from "../tests/web/server.mjs";

const MAX_BYTES = 200_000;
const all = process.argv.includes("--all");
const folder = process.argv.slice(2).find((it) => !it.startsWith("-")) ?? join(repository, "assets/pictures");
const SHOWN = ["start-desk-light", "chat-desk-dark", "search-desk-light", "kernels-desk-light", "inside-desk-light", "chat-phone-light"];

mkdirSync(folder, { recursive: true });
if (!dataPath("minilm-l6-v2")) throw new Error("the search needs MiniLM: run scripts/test-data");

const server = await startServer();
const browser = await openBrowser({ gpu: false, serviceWorkers: "block" });
const page = await browser.open(`${server.origin}/blank.html`);
// Reports a typical browser's memory, and no connection rate.
await page.addInitScript(() => {
  Object.defineProperty(navigator, "deviceMemory", { value: 8 });
  Object.defineProperty(navigator, "connection", { value: undefined });
});
await page.goto(`${server.origin}/www/`);

const ready = () => page.waitForFunction(() => document.documentElement.dataset.state === "ready");

async function ask(prompt, seed) {
  await page.evaluate(([seed]) => {
    const field = document.querySelector("#setting-seed");
    field.value = seed;
    field.dispatchEvent(new Event("change", { bubbles: true }));
  }, [seed]);
  await page.click("#tab-chat");
  await page.fill("#prompt", prompt);
  await page.click("#send");
  await page.waitForFunction(() => document.documentElement.dataset.state === "generating");
  await ready();
}

const VIEWS = {
  start: ready,
  chat: () => ask("Once upon a time", "7"),
  search: async () => {
    await page.click("#tab-search");
    await page.fill("#model-url", `${server.origin}/data/minilm-l6-v2/`);
    await page.click("#model-url-load");
    await page.waitForFunction(() => document.documentElement.dataset.search === "ready");
    await page.click("#texts-sample");
    await page.waitForFunction(() => document.querySelector("#texts-summary").textContent === "16 passages of 1 text");
    await page.fill("#query", "my bike has a puncture");
    await page.waitForFunction(() => document.querySelector("#results").dataset.query === "my bike has a puncture");
  },
  kernels: async () => {
    await page.click("#tab-kernels");
    await page.check("#bench-quick");
    await page.waitForSelector("#bench-no-webgpu:not([hidden])");
    await page.click("#bench-run");
    await page.waitForFunction(() => document.documentElement.dataset.bench === "done", undefined, { timeout: 300_000 });
    await page.evaluate(() => document.querySelector("#bench-results").scrollIntoView());
  },
  inside: async () => {
    await page.evaluate(() => document.querySelector("#setting-probabilities").click());
    await ask("One day, a little fox", "3");
    await page.click("#tab-inside");
    await page.locator(".token").nth(8).hover();
  },
};

try {
  for (const [view, show] of Object.entries(VIEWS)) {
    await page.setViewportSize({ width: 1280, height: 800 });
    await show();
    for (const [screen, width, height] of [["desk", 1280, 800], ["phone", 390, 844]]) {
      for (const colorScheme of ["light", "dark"]) {
        const name = `${view}-${screen}-${colorScheme}`;
        if (!all && !SHOWN.includes(name)) continue;
        await page.setViewportSize({ width, height });
        await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
        await page.evaluate(() => document.activeElement?.blur());
        await page.waitForTimeout(200);
        const path = join(folder, `${name}.png`);
        await page.screenshot({ path });
        const { size } = statSync(path);
        console.log(`${path}: ${size} bytes`);
        if (size > MAX_BYTES) throw new Error(`${path} has ${size} bytes, expected at most ${MAX_BYTES}`);
      }
    }
  }
} finally {
  await browser.close();
  await server.stop();
}
