// The dashboard with a running server at SERVER, and written to a file by the program in PROGRAM:
// `scripts/serve-clients` starts both.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { promisify } from "node:util";

import { openBrowser } from "../web/browser.mjs";

const KEY = "a key";
const run = (...args) => promisify(execFile)(process.env.PROGRAM, args, { env: { ...process.env, TILEWRIGHT_CACHE_DIR: "", TILEWRIGHT_DEVICE: "cpu" } });

let chromium;
let folder;
before(async () => {
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
  folder = await mkdtemp(join(tmpdir(), "tilewright-report-"));
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await rm(folder, { recursive: true, force: true });
});

/** Opens an address and records violations of the page's policy. */
async function open(url) {
  const page = await chromium.open("about:blank");
  page.on("console", (message) => {
    if (/Content Security Policy/.test(message.text())) page.problems.push(message.text());
  });
  await page.goto(url);
  return page;
}

const shown = (page) => page.locator('#panels [data-state="shown"]').evaluateAll((panels) => panels.map(({ id }) => id.replace("panel-", "")));
const facts = (page) => page.locator("#live .scroll tbody tr").evaluateAll((rows) => Object.fromEntries(rows.map((row) => [...row.cells].map((cell) => cell.textContent))));

test("the page shows what a server under load measures, to those who have its key", { timeout: 120_000 }, async () => {
  const page = await open(`${process.env.SERVER}/dashboard.html`);
  await page.waitForFunction(() => document.documentElement.dataset.live === "locked");
  await page.fill("#key", KEY);
  await page.click("#key-form button");
  await page.waitForFunction(() => document.documentElement.dataset.live === "live");
  const before = Number((await facts(page))["Answers with status 200"]?.replaceAll(",", "") ?? 0);
  const { stdout } = await run("bench", "serve", "--url", `${process.env.SERVER}/v1`, "--model", "story", "--api-key", KEY,
    "--concurrency", "1,4", "--requests", "8", "-p", "16", "-n", "8", "--json");
  const load = JSON.parse(stdout);
  assert.deepEqual(load.rows.map(({ n_answered }) => n_answered), [8, 8]);
  // Two requests determine the length of prompts; the page's own readings count too.
  await page.waitForFunction((least) => {
    const row = [...document.querySelectorAll("#live .scroll tbody tr")].find(({ cells }) => cells[0].textContent === "Answers with status 200");
    return Number(row?.cells[1].textContent.replaceAll(",", "") ?? 0) >= least;
  }, before + 18);
  assert.match((await facts(page))["Between tokens, p50 / p95 / p99 of the last minute"], /s \/ .*s \/ .*s/);
  await page.setInputFiles("#open", { name: "serve.json", mimeType: "application/json", buffer: Buffer.from(stdout) });
  await page.waitForSelector("#panel-waiting[data-state=shown]");
  assert.ok((await page.textContent("#panel-waiting")).includes("4 at once"));
  assert.deepEqual(page.problems, []);
});

test("a report is one file, and only its own script runs", { timeout: 240_000 }, async () => {
  const [report, memory] = [join(folder, "report.html"), join(folder, "memory.json")];
  await writeFile(memory, (await run("bench", "memory", "--ctx", "2048", "--json")).stdout);
  await run("bench", "-p", "8", "-n", "4", "-r", "1", "--quick", "--html", report, "--with", memory);
  const page = await open(pathToFileURL(report).href);
  await page.waitForSelector("#panel-summary[data-state=shown]");
  assert.deepEqual(await shown(page), ["summary", "roofline", "intensity", "bandwidth", "throughput", "flop-share", "utilisation", "tokens", "memory"]);
  // The given file is used, not the default table.
  assert.match(await page.textContent("#panel-memory"), /One session of 2,048 tokens/);
  assert.ok(await page.locator("#panel-tokens .uplot canvas").count() > 0);
  assert.deepEqual(page.problems, []);
  const html = await readFile(report, "utf8");
  assert.ok(!/src=|href="[^#d]/.test(html.slice(0, html.indexOf("<style>"))));
  const changed = join(folder, "changed.html");
  await writeFile(changed, html.replace('<script type="module">', '<script type="module">document.title = "changed";'));
  const refused = await open(pathToFileURL(changed).href);
  assert.notEqual(await refused.title(), "changed");
  assert.ok(refused.problems.some((problem) => /script-src/.test(problem)), refused.problems);
  await assert.rejects(run("bench", "--html", join(folder, "page.html"), "--page", folder), /--page is .* expected the folder that scripts\/build-web makes/);
});
