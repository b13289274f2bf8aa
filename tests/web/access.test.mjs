// Accessibility of the demo page: axe on each view, light and dark, on desktop and phone; no layout shifts while a
// model loads and an answer streams; the view “Inside” by keyboard.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { repository, startServer } from "./server.mjs";

const limited = { timeout: 90_000 };
const axe = readFileSync(createRequire(join(repository, "npm/package.json")).resolve("axe-core/axe.min.js"), "utf8");
const SCREENS = { desk: [1280, 800], phone: [360, 740] };

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.besidePage.set("mol.safetensors", null);
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

const ready = (page) => page.waitForFunction(() => document.documentElement.dataset.state === "ready");

async function open(...scripts) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.clear());
  for (const script of scripts) await page.addInitScript(script);
  await page.goto(`${server.origin}/www/`);
  await ready(page);
  return page;
}

async function ask(page, text, maxTokens = "40") {
  await page.evaluate((maxTokens) => {
    document.querySelector("#settings").open = true;
    const field = document.querySelector("#setting-maxTokens");
    field.value = maxTokens;
    field.dispatchEvent(new Event("change", { bubbles: true }));
    document.querySelector("#settings").open = false;
  }, maxTokens);
  await page.fill("#prompt", text);
  await page.click("#send");
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready" && document.querySelector("#output .message[data-role=assistant]")?.textContent.length > 10);
}

/** axe's findings: `rule: target`. The driver evaluates it, exempt from the page's policy. */
async function violations(page) {
  await page.evaluate(axe);
  const { violations, incomplete } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations", "incomplete"] }));
  const listed = (all) => all.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target.join(" ")}: ${failureSummary.split("\n")[1]?.trim()}`));
  return { wrong: listed(violations), unsure: listed(incomplete) };
}

/** Fills each view before it is checked. */
const STATES = {
  start: () => {},
  chat: (page) => ask(page, "Once upon a time"),
  search: async (page) => {
    await page.click("#tab-search");
    await page.click("#texts-sample");
    await page.evaluate(() => (document.querySelector("#texts").open = true));
  },
  listen: async (page) => {
    await page.click("#tab-listen");
    await page.waitForSelector("#listen-models button");
  },
  kernels: async (page) => {
    await page.click("#tab-kernels");
    await page.waitForFunction(() => document.documentElement.dataset.bench === "idle");
  },
  inside: async (page) => {
    await page.evaluate(() => document.querySelector("#setting-probabilities").click());
    await page.click("#tab-chat");
    await ask(page, "One day");
    await page.click("#tab-inside");
    await page.locator(".token").first().hover();
    await page.locator("#inside-token li").first().waitFor();
  },
};

test("axe finds nothing wrong in any view, light and dark, on a desk and a phone", limited, async (t) => {
  const page = await open();
  let nLooks = 0;
  for (const [view, show] of Object.entries(STATES)) {
    await page.setViewportSize({ width: SCREENS.desk[0], height: SCREENS.desk[1] });
    await show(page);
    // Half of the combinations: each view in both themes and on both screens.
    const combinations = process.env.TILEWRIGHT_FULL ? ["desk light", "desk dark", "phone light", "phone dark"] : ["desk light", "phone dark"];
    for (const combination of combinations) {
      const [screen, colorScheme] = combination.split(" ");
      const [width, height] = SCREENS[screen];
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
      const { wrong } = await violations(page);
      assert.deepEqual(wrong, [], `${view}, ${combination}`);
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${view}, ${combination}: ${overflow} pixels too wide`);
      nLooks += 1;
    }
  }
  // The panel, which covers the view on a phone.
  await page.setViewportSize({ width: SCREENS.phone[0], height: SCREENS.phone[1] });
  await page.click("#panel-toggle");
  await page.evaluate(() => document.querySelectorAll("#panel details").forEach((it) => (it.open = true)));
  assert.deepEqual((await violations(page)).wrong, [], "panel");
  t.diagnostic(`axe-core looked ${nLooks + 1} times`);
  // Verifies that faults are found.
  await page.evaluate(() => document.querySelector("#theme").removeAttribute("aria-label"));
  await page.evaluate(() => document.querySelector("#theme").removeAttribute("title"));
  await page.evaluate(() => document.querySelector("#panel-close").click());
  assert.ok((await violations(page)).wrong.some((it) => it.startsWith("button-name: #theme")));
});

/**
 * Runs in a page before its scripts: records unexpected layout shifts. The cursor after streaming text moves as
 * intended; it is not an element and has no node.
 */
function recordShifts() {
  globalThis.shifts = [];
  new PerformanceObserver((list) => {
    for (const { value, hadRecentInput, sources } of list.getEntries()) {
      const moved = sources.filter(({ node }) => node !== null);
      if (!hadRecentInput && moved.length > 0) shifts.push({ value, what: moved.map(({ node }) => node.id || node.className || node.nodeName) });
    }
  }).observe({ type: "layout-shift", buffered: true });
}

test("nothing moves while the page is opened, a model is loaded and an answer is written", limited, async () => {
  for (const screen of ["desk", "phone"]) {
    const page = await chromium.open(`${server.origin}/blank.html`);
    await page.setViewportSize({ width: SCREENS[screen][0], height: SCREENS[screen][1] });
    await page.addInitScript(recordShifts);
    await page.goto(`${server.origin}/www/`);
    await ready(page);
    const shifts = () => page.evaluate(() => new Promise((resolve) => setTimeout(() => resolve(shifts.splice(0)), 200)));
    assert.deepEqual(await shifts(), [], `${screen}: opening`);
    await page.evaluate(() => document.querySelector("#model-builtin").click());
    await page.waitForFunction(() => document.documentElement.dataset.state === "loading");
    await ready(page);
    assert.deepEqual(await shifts(), [], `${screen}: loading`);
    // Not by a click, which would hide later layout shifts.
    await page.evaluate(() => {
      const prompt = document.querySelector("#prompt");
      prompt.value = "Once upon a time";
      prompt.dispatchEvent(new Event("input", { bubbles: true }));
      document.querySelector("#send").click();
    });
    await page.waitForFunction(() => document.documentElement.dataset.state === "ready" && document.querySelectorAll("#output .message[data-role=assistant]").length === 1);
    assert.deepEqual(await shifts(), [], `${screen}: writing`);
    // Verifies that shifts are detected.
    await page.evaluate(() => document.querySelector("main").prepend(Object.assign(document.createElement("p"), { textContent: "Something new", style: "height: 200px" })));
    assert.ok((await shifts()).length > 0);
    await page.close();
  }
});

test("tokens say how likely they were, by pointer and by keyboard; memory is told by kind", limited, async () => {
  const page = await open();
  await page.click("#tab-inside");
  await page.waitForFunction(() => /Nothing was written/.test(document.querySelector("#inside-tokens-note").textContent));
  await page.click("#tab-chat");
  await ask(page, "Once upon a time", "12");
  await page.click("#tab-inside");
  assert.match(await page.innerText("#inside-tokens-note"), /turn on “Show probabilities”/);
  const nTokens = await page.locator(".token").count();
  assert.equal(nTokens, 12);
  await page.evaluate(() => document.querySelector("#setting-probabilities").click());
  await page.evaluate(() => {
    const field = document.querySelector("#setting-temperature");
    field.value = "0";
    field.dispatchEvent(new Event("change", { bubbles: true }));
  });
  await page.click("#tab-chat");
  await ask(page, "Once upon a time", "12");
  await page.click("#tab-inside");
  await page.waitForFunction(() => document.querySelectorAll(".token[data-likely]").length === 12);

  // The package's result for the same text.
  const said = await page.evaluate(async () => {
    const { Model } = await import("./tilewright/index.js");
    const model = await Model.builtin({ device: "cpu" });
    const pieces = [];
    for await (const piece of model.generate("Once upon a time", { maxTokens: 12, logprobs: 5, temperature: 0 })) pieces.push(piece);
    model.free();
    return pieces;
  });
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toLocaleString("en", { maximumSignificantDigits: 3 })} %`;
  const shown = () => page.locator("#inside-token .score").allInnerTexts();
  await page.locator(".token").nth(3).hover();
  assert.deepEqual(await shown(), said[3].topLogprobs.map(({ logprob }) => percent(logprob)));
  await page.locator(".token").nth(0).focus();
  assert.deepEqual(await shown(), said[0].topLogprobs.map(({ logprob }) => percent(logprob)));
  await page.keyboard.press("ArrowRight");
  assert.match(await page.innerText("#inside-token"), new RegExp(`^Token 2, .*number ${said[1].id}\\)`));
  assert.deepEqual(await shown(), said[1].topLogprobs.map(({ logprob }) => percent(logprob)));
  await page.keyboard.press("End");
  assert.match(await page.innerText("#inside-token"), /^Token 12,/);
  assert.equal(await page.locator("#inside-tokens [tabindex='0']").count(), 1);

  assert.deepEqual((await page.locator("#inside-memory dt").allInnerTexts()).map((it) => it.replace(/\d[\d,]*/, "N")), ["Weights", "Keys and values of N tokens", "Activations", "WASM heap, which holds all of it"]);
  assert.match(await page.innerText("#inside-facts"), /Device[^]*Architecture/);
  assert.deepEqual(page.problems, []);
});
