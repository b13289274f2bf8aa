// The benchmark tab, and the checker of its reports.
//
// Screenshots go to the folder TILEWRIGHT_SCREENSHOTS, or to a temporary one that is printed.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readdirSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { badName, problems, SCHEMA } from "../../benches/record/community/check.mjs";
import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";

const limited = { timeout: 180_000 };
const REPOSITORY = "https://github.com/owner/repository";
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS ?? mkdtempSync(join(tmpdir(), "tilewright-screenshots-"));
mkdirSync(screenshots, { recursive: true });

let server;
let chromium;
before(async () => {
  server = await startServer();
  const built = readFileSync(join(repository, "www/dist/index.html"), "utf8");
  server.besidePage.set("", built.replace(/(name="repository" content=")[^"]*/, `$1${REPOSITORY}`));
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  console.log(`screenshots are in ${screenshots}`);
});

const inState = (page, wanted, timeout = 150_000) =>
  page.waitForFunction((wanted) => wanted.includes(document.documentElement.dataset.bench), wanted, { timeout });

/** The page's report, set by the first test. */
let report;

test("the page measures what Chromium has, and its report is as it should be", limited, async (t) => {
  // The published address from before there were tabs.
  const page = await chromium.open(`${server.origin}/www/bench.html`);
  await page.waitForURL(/\/www\/#kernels$/);
  await inState(page, ["idle"]);
  await page.check("#bench-quick");
  await page.keyboard.press("Enter");
  await inState(page, ["running"]);
  assert.ok(await page.isDisabled("#bench-run") && await page.isVisible("#bench-stop") && await page.isDisabled("#bench-quick"));
  const begun = performance.now();
  await inState(page, ["done", "error"]);
  t.diagnostic(`measured in ${((performance.now() - begun) / 1000).toFixed(1)} s`);
  assert.equal(await page.innerText("#bench-error"), "");
  const json = await page.inputValue("#bench-json");
  assert.deepEqual(problems(json), []);
  report = JSON.parse(json);

  assert.equal(report.source, "web");
  assert.ok(report.settings.quick && report.device.is_software && report.device.backend === "webgpu");
  assert.match(report.host.browser, /Chrome/);
  assert.ok(report.adapter.limits.maxStorageBufferBindingSize >= 1 << 27 && report.adapter.kind === "software");
  const hasHalf = report.adapter.features.includes("shader-f16");
  assert.equal(report.probes.some(({ probe }) => probe === "fma_f16"), hasHalf);
  for (const kernel of ["embed", "rms_norm", "matvec.Q4_0", "gate_up.Q4_0", "matmul.Q4_0", "attention_decode", "attention_prefill", "candidates"]) {
    assert.ok(report.kernels.some((row) => row.kernel.startsWith(kernel)), kernel);
  }
  const [model] = report.models;
  assert.deepEqual(model.tests.map(({ phase }) => phase), ["prefill", "decode"]);

  for (const [table, rows] of [["probes", report.probes], ["kernels", report.kernels], ["models", model.tests]]) {
    assert.equal(await page.locator(`#bench-${table} tbody tr`).count(), rows.length, table);
  }
  const address = new URL(await page.getAttribute("#bench-issue", "href"));
  assert.equal(address.origin + address.pathname, `${REPOSITORY}/issues/new`);
  assert.ok(address.href.length < 8000);
  assert.ok(address.searchParams.get("title").includes(report.device.name));
  assert.match(address.searchParams.get("body"), /copy: [\d.,]+ GB\/s\n[^]*fma_f32: [\d.,]+ GFLOP\/s\n[^]*tg\d+: [\d.,]+ tokens\/s\n[^]*```json/);

  await page.context().grantPermissions(["clipboard-read", "clipboard-write"], { origin: server.origin });
  await page.click("#bench-copy");
  await page.waitForFunction(() => document.querySelector("#bench-copied").textContent !== "");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), json);

  for (const [device, width, height] of [["desk", 1280, 900], ["phone", 390, 844]]) {
    for (const colorScheme of ["light", "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme });
      await page.screenshot({ path: join(screenshots, `bench-${device}-${colorScheme}.png`), fullPage: true });
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${device}: ${overflow} pixels too wide`);
    }
  }
  // Every control has a name.
  const nameless = await page.evaluate(() => [...document.querySelectorAll("#view-kernels :is(button, input, textarea, a, progress, table)")]
    .filter((it) => !(it.labels?.length || it.getAttribute("aria-label") || it.getAttribute("aria-labelledby") || it.textContent.trim()))
    .map((it) => it.outerHTML));
  assert.deepEqual(nameless, []);
  assert.deepEqual(page.problems, []);
});

test("the checker refuses what is no good report", () => {
  assert.ok(report !== undefined, "the page returned none");
  const refused = (break_, message) => {
    const broken = structuredClone(report);
    const given = break_(broken);
    const found = problems(typeof given === "string" ? given : JSON.stringify(broken));
    assert.ok(found.length > 0 && found.some((problem) => message.test(problem)), `${message} is not among ${JSON.stringify(found)}`);
  };
  refused(() => "{", /no JSON/);
  refused(() => "null", /schema is undefined/);
  refused(() => JSON.stringify({ ...report, padding: "x".repeat(300_000) }), /bytes, expected at most/);
  refused((it) => { it.schema = "tilewright-bench/0"; }, /schema is "tilewright-bench\/0"/);
  refused((it) => { delete it.device; }, /report\.device is missing/);
  refused((it) => { it.device.owner = "me"; }, /report\.device\.owner is not a field/);
  refused((it) => { it.device.name = "a\nb"; }, /report\.device\.name/);
  refused((it) => { it.device.tier = "t9"; }, /report\.device\.tier/);
  refused((it) => { it.unix_time = "now"; }, /report\.unix_time/);
  refused((it) => { it.adapter = null; }, /report\.adapter is missing/);
  refused((it) => { it.adapter.limits.maxBufferSize = -1; }, /limits\.maxBufferSize/);
  refused((it) => { it.host.browser = null; }, /host\.browser/);
  refused((it) => { it.probes[0].seconds = 0; }, /probes\[0\]\.seconds/);
  refused((it) => { it.probes[0].seconds = null; }, /probes\[0\]\.seconds/);
  refused((it) => { it.probes = it.probes.filter(({ probe }) => probe !== "reduce"); }, /probes is|lacks reduce/);
  refused((it) => { it.probes[1] = it.probes[0]; }, /copy twice|lacks/);
  refused((it) => { it.probes[0].bytes_per_second *= 2; }, /probes\[0\]\.bytes_per_second/);
  refused((it) => { it.kernels[0].bytes *= 2; }, /kernels\[0\]\.bytes_per_second/);
  refused((it) => { it.kernels[2].copy_share *= 1.01; }, /kernels\[2\]\.copy_share/);
  refused((it) => { it.kernels.push(it.kernels[0]); }, /kernels has .* twice/);
  refused((it) => { it.models[0].tests[0].tokens_per_second.lowest *= 1000; }, /not in order/);
  refused((it) => { it.models[0].tests[1].n_tokens += 1; }, /test is tg/);
  refused((it) => { const row = it.probes[0]; row.seconds /= 1e9; row.bytes_per_second *= 1e9; }, /bytes_per_second/);
  assert.deepEqual(problems(JSON.stringify(report)), [], "the unmodified report is valid");
  assert.equal(report.schema, SCHEMA);
});

test("the reports that were sent are as they should be", () => {
  const folder = join(repository, "benches/record/community");
  for (const name of readdirSync(folder).filter((name) => name.endsWith(".json"))) {
    assert.deepEqual([badName(name), ...problems(readFileSync(join(folder, name), "utf8"))].filter(Boolean), [], name);
  }
  assert.ok(badName("Report.json") && badName("2026-11-24-a b.json") && !badName("2026-11-24-radeon-rx-7900-xtx.json"));
});

test("a measurement can be stopped, and begun again", limited, async () => {
  const page = await chromium.open(`${server.origin}/www/#kernels`);
  await inState(page, ["idle"]);
  await page.click("#bench-run");
  await page.waitForFunction(() => document.querySelector("#bench-probes tbody").rows.length > 0);
  await page.click("#bench-stop");
  await inState(page, ["stopped"], 5000);
  assert.ok(await page.isHidden("#bench-report") && await page.isEnabled("#bench-run") && await page.isHidden("#bench-progress"));
  await page.click("#bench-run");
  await inState(page, ["running"]);
  assert.equal(await page.locator("#bench-probes tbody tr").count(), 0);
  assert.deepEqual(page.problems, []);
});

test("without WebGPU the page says so and measures the CPU", limited, async () => {
  const browser = await openBrowser({ gpu: false });
  try {
    for (const origin of [server.origin, server.insecureOrigin]) {
      const page = await browser.open(`${origin}/www/#kernels`);
      await page.waitForSelector("#bench-no-webgpu:not([hidden])");
      assert.match(await page.innerText("#bench-no-webgpu"), /WebGPU/);
      assert.ok(await page.isChecked("#bench-device-cpu") && await page.isDisabled("#bench-device-gpu"));
    }
    const page = await browser.open(`${server.origin}/www/#kernels`);
    await page.waitForSelector("#bench-no-webgpu:not([hidden])");
    await page.check("#bench-quick");
    await page.check("#bench-run-form input[name=model][value=none]");
    await page.click("#bench-run");
    await inState(page, ["done", "error"]);
    const json = await page.inputValue("#bench-json");
    assert.deepEqual(problems(json), []);
    const { device, adapter, models } = JSON.parse(json);
    assert.deepEqual([device.backend, adapter, models], ["cpu", null, []]);
  } finally {
    await browser.close();
  }
});
