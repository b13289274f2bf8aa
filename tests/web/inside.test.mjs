// What goes on inside a model: the times of a pass's kernels and what a head looks at, by the package and in the demo page. That weights are
// those of the definition tests/model/inside.rs shows.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { chromium, everywhere, places, server } from "./places.mjs";
import { repository } from "./server.mjs";

const { ids } = JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];

/** Runs in a page or in Node. */
async function look({ Model }, { ids, device, heads }) {
  const model = await Model.builtin({ device });
  const said = ({ code, name, message }) => `${code ?? name}: ${message}`;
  const refused = [
    await model.timeline().catch(said),
    await model.attention({ layer: 0, head: 0 }).catch(said),
  ];
  const options = { temperature: 0, ignoreEos: true };
  const first = await model.generate(ids, { ...options, maxTokens: 12 }).text();
  await model.timeline();
  const dispatches = async (run) => {
    const before = (await model.counters()).dispatches;
    return [await run(), (await model.counters()).dispatches - before];
  };
  const [timeline, nTimed] = await dispatches(() => model.timeline());
  const { nLayers, nHeads } = model.info;
  const attention = [];
  for (const [layer, head, lastQueries] of heads ?? [[0, 0], [nLayers - 1, nHeads - 1, 5], [1, 1, 1]]) {
    const { tokens, weights, rows, columns } = await model.attention({ layer, head, ...(lastQueries === undefined ? {} : { lastQueries }) });
    attention.push({ tokens, weights: Array.from(weights), rows, columns, isFloats: weights instanceof Float32Array });
  }
  for (const wrong of [{ layer: nLayers, head: 0 }, { layer: 0, head: nHeads }, { layer: 0, head: 0, lastQueries: 0 }, { layer: -1, head: 0 }, { layer: 0, head: 0, heads: 1 }]) {
    refused.push(await model.attention(wrong).catch(said));
  }
  // One pass over the prompt's last token, which chooses the next one.
  const [, nStep] = await dispatches(() => model.generate(ids, { ...options, maxTokens: 1 }).text());
  const after = await model.generate(ids, { ...options, maxTokens: 16 }).text();
  model.free();
  const plain = await Model.builtin({ device });
  const untouched = await plain.generate(ids, { ...options, maxTokens: 16 }).text();
  plain.free();
  return { refused, timeline, nTimed, nStep, attention, first, after, untouched, nLayers, nHeads };
}

function check({ refused, timeline, nTimed, nStep, attention, first, after, untouched, nLayers }, clocks) {
  assert.equal(after, untouched, "whoever asks changes nothing");
  assert.ok(after.startsWith(first));
  // Kernels are those of the pass: embedding, layers that are all alike, head, and the choice of a token.
  const { dispatches } = timeline;
  assert.deepEqual([nTimed, nStep], [dispatches.length, dispatches.length]);
  assert.ok(clocks.includes(timeline.clock), timeline.clock);
  assert.deepEqual([dispatches[0].kernel, dispatches.at(-1).kernel], ["embed", "advance"]);
  const layers = Array.from({ length: nLayers }, (_, layer) => dispatches.filter((it) => it.layer === layer).map(({ kernel }) => kernel));
  assert.ok(layers[0].includes("attention_decode") && layers[0].includes("matvec"), layers[0].join());
  for (const layer of layers) assert.deepEqual(layer, layers[0]);
  assert.ok(dispatches.every(({ kernel, variant, grid, micros }) => variant.startsWith(kernel) && grid.length === 3 && grid.every((n) => n > 0) && micros >= 0));
  assert.ok(Math.abs(dispatches.reduce((sum, { micros }) => sum + micros, 0) - timeline.micros) < 1e-3 * timeline.micros + 1e-6);
  const n = ids.length + 12;
  // The last token that was generated had no keys, and is the one whose pass is timed.
  assert.equal(timeline.position, n - 1);
  assert.deepEqual(attention.map(({ rows, columns }) => [rows, columns]), [[n, n], [5, n], [1, n]]);
  for (const { tokens, weights, rows, columns, isFloats } of attention) {
    assert.deepEqual([weights.length, tokens.length, isFloats], [rows * columns, n, true]);
    assert.ok(tokens.join("").includes(first.trim()), tokens.join("|"));
    for (let row = 0; row < rows; row += 1) {
      const own = n - rows + row;
      const seen = weights.slice(row * columns, row * columns + own + 1);
      assert.ok(Math.abs(seen.reduce((sum, weight) => sum + weight, 0) - 1) < 1e-4);
      assert.ok(seen.every((weight) => weight >= 0));
      assert.ok(weights.slice(row * columns + own + 1, (row + 1) * columns).every((weight) => weight === 0), "no token sees a later one");
    }
  }
  const patterns = [
    /^option: timeline is about what was generated/, /^option: attention is about/, /^option: .*layer/, /^option: .*head/, /^option: .*last_queries/, /^option: layer is -1/,
    /^TypeError: Model\.attention: there is no option `heads`; did you mean `head`/,
  ];
  refused.forEach((message, at) => assert.match(message, patterns[at]));
  assert.equal(refused.length, patterns.length);
}

everywhere("kernels are timed and heads are shown on the CPU, and the text goes on as if nobody had asked", look, (got) => check(got, ["cpu"]), { ids, device: "cpu" });

// A software adapter takes its time.
if (process.env.TILEWRIGHT_FULL) {
  test("Chromium: the same on WebGPU", { timeout: 300_000 }, async () => {
    check(await places.Chromium(look, { ids, device: "gpu" }), ["gpu", "roundTrip"]);
  });
}

test("page: the view “Inside” times the kernels and draws a head, for pointer, keyboard and screen reader", { timeout: 60_000 }, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  page.on("console", (message) => {
    if (message.type() === "error" && !/Failed to load resource|ERR_/.test(message.text())) page.problems.push(message.text());
  });
  await page.addInitScript(() => localStorage.clear());
  await page.goto(`${server.origin}/www/`);
  const ready = () => page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  await ready();
  await page.click("#tab-inside");
  const [timeline, attention] = ["#inside-timeline", "#inside-attention"];
  await page.click(`${timeline} button`);
  await page.waitForFunction(() => /nothing was so far/.test(document.querySelector("#inside-timeline .help").textContent));
  await page.click("#tab-chat");
  await page.fill("#prompt", "Once upon a time");
  await page.click("#send");
  await page.waitForFunction(() => document.documentElement.dataset.state === "generating");
  await ready();
  await page.click("#tab-inside");
  await page.click(`${timeline} button`);
  await page.waitForSelector(`${timeline} tbody tr`);
  const note = await page.innerText(`${timeline} .help`);
  const [, nDispatches] = /^([\d,]+) dispatches for token [\d,]+ take [\d.,]+ .s, /.exec(note) ?? assert.fail(note);
  const calls = await page.locator(`${timeline} tbody tr td:nth-child(2)`).allInnerTexts();
  assert.equal(calls.reduce((sum, text) => sum + Number(text), 0), Number(nDispatches));
  assert.equal(await page.locator(`${timeline} svg rect`).count(), Number(nDispatches));
  const strip = page.locator(`${timeline} [role=slider]`);
  await strip.focus();
  await page.keyboard.press("End");
  assert.match(await strip.getAttribute("aria-valuetext"), new RegExp(`^Dispatch ${nDispatches} of ${nDispatches}: advance .*outside of the layers`));
  await page.keyboard.press("ArrowLeft");
  assert.match(await page.innerText(`${timeline} .detail`), new RegExp(`^Dispatch ${nDispatches - 1} of`));
  assert.equal(await page.locator(`${timeline} .marked`).count(), 1);

  await page.selectOption(`${attention} label:nth-of-type(2) select`, "1");
  await page.click(`${attention} button`);
  await page.waitForSelector(`${attention} canvas`);
  const picture = page.locator(`${attention} [role=slider]`);
  const last = await picture.getAttribute("aria-valuetext");
  assert.match(last, /^Token [\d,]+, “.*”, takes from .*\d %/);
  await picture.focus();
  await page.keyboard.press("Home");
  const row = await page.innerText(`${attention} .detail`);
  assert.notEqual(row, last);
  // Something is drawn, in the colours of the theme.
  const colours = () => page.locator(`${attention} canvas`).evaluate((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
  assert.ok(await colours() > 8);
  const box = await page.locator(`${attention} canvas`).boundingBox();
  await page.mouse.move(box.x + 5, box.y + box.height - 2);
  await page.waitForFunction((told) => document.querySelector("#inside-attention .detail").textContent === told, last);
  // In a narrow window nothing is wider than the screen.
  await page.setViewportSize({ width: 360, height: 740 });
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth) <= 360);
  await page.evaluate(readFileSync(join(repository, "npm/node_modules/axe-core/axe.min.js"), "utf8"));
  const { violations } = await page.evaluate(() => axe.run("#view-inside"));
  assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join()}`), []);
  if (process.env.TILEWRIGHT_SCREENSHOTS) {
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await page.setViewportSize({ width: 1100, height: 1400 });
      await page.screenshot({ path: join(process.env.TILEWRIGHT_SCREENSHOTS, `inside-${scheme}.png`) });
    }
  }
  assert.deepEqual(page.problems, []);
});
