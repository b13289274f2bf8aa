// The dashboard, with data written by `tilewright bench` (tests/data/dashboard) and metrics of a server.
//
// Screenshots go to the folder TILEWRIGHT_SCREENSHOTS, if set. `scripts/serve-clients` tests it with a running server.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";

const limited = { timeout: 180_000 };
const PANELS = ["summary", "roofline", "intensity", "bandwidth", "throughput", "flop-share", "utilisation", "tokens", "memory", "scaling",
  "waiting", "mol-time", "mol-flop", "recall", "tuner"];
const recorded = readFileSync(join(repository, "tests/data/dashboard/llvmpipe.json"), "utf8");
const data = JSON.parse(recorded);
const part = (bench) => data.parts.find((part) => part.bench === bench);

const axe = readFileSync(createRequire(join(repository, "npm/package.json")).resolve("axe-core/axe.min.js"), "utf8");

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.besidePage.set("recorded.json", recorded);
  server.besidePage.set("metrics", null);
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

async function shot(page, name) {
  const folder = process.env.TILEWRIGHT_SCREENSHOTS;
  if (!folder) return;
  mkdirSync(folder, { recursive: true });
  await page.screenshot({ path: join(folder, `dashboard-${name}.png`), fullPage: true });
}

/** Opens an address and adds violations of the page's policy to its problems. */
async function open(url) {
  const page = await chromium.open("about:blank");
  page.on("console", (message) => {
    if (message.type() === "error" && /Content Security Policy/.test(message.text())) page.problems.push(message.text());
  });
  await page.goto(url);
  return page;
}

/** axe's findings. The driver evaluates it, exempt from the page's policy. */
async function violations(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  return violations.flatMap(({ id, nodes }) => nodes.map(({ target }) => `${id}: ${target.join(" ")}`));
}

const states = (page) => page.evaluate((ids) => ids.map((id) => document.getElementById(`panel-${id}`).dataset.state), PANELS);
const openFile = (page, name, text) => page.setInputFiles("#open", { name, mimeType: "application/json", buffer: Buffer.from(text) });

test("recorded data fills every panel, with the numbers that it has", limited, async () => {
  const page = await open(`${server.origin}/www/dashboard.html?data=recorded.json`);
  await page.waitForSelector("#panel-summary[data-state=shown]");
  assert.deepEqual(await states(page), PANELS.map(() => "shown"));
  assert.equal(await page.isHidden("#error"), true);
  // A number of each kind of panel, computed here from the file.
  const text = (id) => page.textContent(`#panel-${id}`);
  const kernels = part("kernels");
  const ridge = kernels.probes.flop_per_second / kernels.probes.copy_bytes_per_second;
  assert.ok((await text("intensity")).includes(`ridge, ${ridge.toLocaleString("en", { maximumSignificantDigits: 3 })} operations`));
  assert.equal(await page.locator("#panel-roofline svg .point").count(), kernels.rows.filter(({ flop }) => flop > 0).length);
  assert.equal(await page.locator("#panel-bandwidth .bars li").count(), 4);
  assert.equal(await page.locator("#panel-recall svg .point").count(), part("mol").searches.trials.length);
  assert.equal(await page.locator("#panel-tokens .strip span").count(), part("model").timeline.dispatches.length);
  assert.equal(await page.locator("#panel-waiting .scroll tbody tr").count(), part("serve").rows.length);
  const largest = part("memory").rows.at(-1);
  assert.ok((await text("memory")).includes(`${largest.model}, ${largest.weights}`));
  const tuned = part("tune").rows.map(({ usual, best }) => usual.seconds / best.seconds);
  assert.ok((await text("tuner")).includes(`${Math.max(...tuned).toLocaleString("en", { maximumSignificantDigits: 3 })}×`));
  const verdicts = await page.locator("#panel-summary .verdict").allTextContents();
  assert.ok(verdicts.length === 10 && verdicts.includes("met") && !verdicts.includes(""), verdicts);
  // Lines are drawn.
  assert.ok(await page.locator("#panel-scaling .uplot canvas").count() > 0);
  assert.deepEqual(page.problems, []);
  assert.deepEqual(await violations(page), []);
  await shot(page, "light");
  await page.emulateMedia({ colorScheme: "dark" });
  await page.setViewportSize({ width: 390, height: 800 });
  await page.waitForFunction(() => document.documentElement.scrollWidth <= innerWidth);
  assert.deepEqual(await violations(page), []);
  await shot(page, "dark-narrow");
});

test("panels without data name the command, and files that are wrong are told by their field", limited, async () => {
  const page = await open(`${server.origin}/www/dashboard.html`);
  await page.waitForFunction(() => document.documentElement.dataset.live === "none");
  assert.deepEqual(await states(page), PANELS.map(() => "empty"));
  assert.match(await page.textContent("#panel-roofline"), /tilewright bench kernels --json/);
  assert.ok(await page.isVisible("#live-none"));
  await openFile(page, "kernels.json", JSON.stringify(part("kernels")));
  await page.waitForSelector("#panel-roofline[data-state=shown]");
  assert.equal(await page.getAttribute("#panel-recall", "data-state"), "empty");
  const wrong = structuredClone(part("serve"));
  wrong.rows[0].tokens_per_second = "<img src=x onerror=alert(1)>";
  for (const [text, says] of [
    ["{", /wrong\.json: it is not JSON/], ["[]", /wrong\.json: bench: .*undefined/], [JSON.stringify({ bench: "other" }), /wrong\.json: bench: /],
    [JSON.stringify(wrong), /wrong\.json: rows\.0\.tokens_per_second: .*number/],
  ]) {
    await openFile(page, "wrong.json", text);
    await page.waitForFunction((says) => new RegExp(says).test(document.getElementById("error").textContent), says.source);
  }
  assert.equal(await page.locator("img").count(), 0);
  // The previous content stays.
  assert.equal(await page.getAttribute("#panel-roofline", "data-state"), "shown");
  await page.goto(`${server.origin}/www/dashboard.html?data=${encodeURIComponent(`${server.otherOrigin}/recorded.json`)}`);
  await page.waitForFunction(() => /is not an address of this server/.test(document.getElementById("error").textContent));
  await page.goto(`${server.origin}/www/dashboard.html?data=nothing.json`);
  await page.waitForFunction(() => /nothing\.json: status 404/.test(document.getElementById("error").textContent));
  assert.deepEqual(page.problems, []);
});

test("a report with its data in it shows that and asks nobody", limited, async () => {
  const html = readFileSync(join(repository, "www/dist/dashboard.html"), "utf8");
  const block = `<script type="application/json" id="data">${recorded.replaceAll("<", "\\u003c")}</script>`;
  server.besidePage.set("report.html", html.replace("<script", `${block}\n<script`));
  const page = await open(`${server.origin}/www/report.html`);
  await page.waitForSelector("#panel-summary[data-state=shown]");
  assert.deepEqual(await states(page), PANELS.map(() => "shown"));
  assert.equal(await page.locator("#panel-live").count(), 0);
  assert.deepEqual(page.problems, []);
});

/** Metrics of a server after this many requests of ten tokens, 20 ms apart. */
const measures = (n) => `# TYPE tilewright_requests_running gauge
tilewright_requests_running{model="a \\"b\\""} 3
tilewright_requests_queued{model="a \\"b\\""} 2
tilewright_engine_generated_tokens_total{model="a \\"b\\""} ${10 * n}
tilewright_engine_prompt_tokens_total{model="a \\"b\\""} ${30 * n}
tilewright_engine_cached_tokens_total{model="a \\"b\\""} ${10 * n}
tilewright_engine_decode_passes_total{model="a \\"b\\""} ${4 * n}
tilewright_time_between_tokens_seconds_bucket{le="0.01",model="m"} 0
tilewright_time_between_tokens_seconds_bucket{le="0.025",model="m"} ${9 * n}
tilewright_time_between_tokens_seconds_bucket{le="+Inf",model="m"} ${9 * n}
tilewright_engine_busy_seconds_total{model="m"} 3
tilewright_cache_pages{model="m"} 100
tilewright_cache_free_pages{model="m"} 60
tilewright_cache_kept_pages{model="m"} 15
tilewright_memory_bytes{model="m",kind="weights"} 1500000000
tilewright_http_requests_total{endpoint="/v1/completions",status="200"} ${n}
tilewright_http_requests_total{endpoint="/v1/completions",status="429"} 7
tilewright_connections 4
# EOF
`;

test("measures of a server are read again and again, with a key where it asks for one", limited, async () => {
  let n = 0;
  server.besidePage.set("metrics", (request, response) => {
    const isKnown = request.headers.authorization === "Bearer open";
    response.writeHead(isKnown ? 200 : 401, { "content-type": "text/plain" }).end(isKnown ? measures(n += 10) : "");
  });
  const page = await open(`${server.origin}/www/dashboard.html`);
  await page.waitForFunction(() => document.documentElement.dataset.live === "locked");
  await page.fill("#key", "open");
  await page.click("#key-form button");
  await page.waitForFunction(() => document.documentElement.dataset.live === "live");
  while (n < 30) await page.waitForTimeout(200);
  const facts = Object.fromEntries(await page.locator("#live .scroll tbody tr").evaluateAll((rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))));
  assert.equal(facts["Sequences of a pass, on average"], "2.5");
  assert.equal(facts["Pages of the cache in use"], "25 % of 100");
  assert.equal(facts["Prompt tokens that were computed before"], "25 %");
  assert.equal(facts["Answers with status 429"], "7");
  assert.equal(facts["Time that engines computed, last minute"], "0 %");
  assert.equal(facts["Memory, weights"], "1.5 GB");
  assert.equal(await page.locator("#live .uplot").count(), 4);
  // All tokens arrived 10 to 25 ms after the previous one.
  assert.equal(facts["Between tokens, p50 / p95 / p99 of the last minute"], "17.5 ms / 24.3 ms / 24.9 ms");
  assert.equal("First token, p50 / p95 / p99 of the last minute" in facts, false);
  await shot(page, "live");
  server.besidePage.set("metrics", null);
  await page.reload();
  await page.waitForFunction(() => document.documentElement.dataset.live === "none");
  // Missing metrics are reported in the page, and by the browser.
  assert.deepEqual(page.problems, []);
});
