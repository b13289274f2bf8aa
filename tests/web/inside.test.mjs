// Inspection of a model: kernel times of a pass and attention weights, by the package and in the demo page.
// tests/model/inside.rs compares weights of other layers, and on GPUs, with their definition.

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
  assert.equal(after, untouched, "inspection changes nothing");
  assert.ok(after.startsWith(first));
  // The pass's kernels: embedding, identical layers, head, and token choice.
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
  // The last generated token had no keys, and its pass is the timed one.
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
      assert.ok(weights.slice(row * columns + own + 1, (row + 1) * columns).every((weight) => weight === 0), "attention is causal");
    }
  }
  const patterns = [
    /^option: timeline is about what was generated/, /^option: attention is about/, /^option: .*layer/, /^option: .*head/, /^option: .*lastQueries/, /^option: layer is -1/,
    /^TypeError: Model\.attention: there is no option `heads`; did you mean `head`/,
  ];
  refused.forEach((message, at) => assert.match(message, patterns[at]));
  assert.equal(refused.length, patterns.length);
}

everywhere("kernels are timed and heads are shown on the CPU, and the text goes on as if nobody had asked", look, (got) => check(got, ["cpu"]), { ids, device: "cpu" });

/** Numbers of an F16 tensor of a safetensors file, by name. */
function halves(file) {
  const length = Number(file.readBigUInt64LE());
  const header = JSON.parse(file.subarray(8, 8 + length));
  const half = (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    return (bits >> 15 ? -1 : 1) * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
  };
  const known = new Map();
  return (name) => {
    const [first, end] = header[name]?.data_offsets ?? [0, 0];
    if (!known.has(name)) known.set(name, Array.from({ length: (end - first) / 2 }, (_, at) => half(file.readUInt16LE(8 + length + first + 2 * at))));
    return known.get(name);
  };
}

/**
 * Attention weights of a head in a tiny model's first layer, `[T, T]`, by definition: 64 columns, heads of 16 with
 * half-style RoPE.
 */
function defined({ theta, scale, cap, window, one, factor }, tensor, ids, head) {
  const of = (name) => tensor(`model.layers.0.${name}`);
  const [embedding, norm] = [tensor("model.embed_tokens.weight"), of("input_layernorm.weight")];
  const turned = (which, head) => {
    const [matrix, bias] = [of(`self_attn.${which}_proj.weight`), of(`self_attn.${which}_proj.bias`)];
    return Array.from(ids, (id, position) => {
      const h = embedding.slice(64 * id, 64 * id + 64).map((value) => value * factor);
      const size = Math.sqrt(h.reduce((sum, value) => sum + value * value, 0) / 64 + 1e-6);
      const x = h.map((value, c) => value / size * (one + norm[c]));
      const y = Array.from({ length: 16 }, (_, i) => x.reduce((sum, value, c) => sum + value * matrix[(16 * head + i) * 64 + c], bias[16 * head + i] ?? 0));
      return y.map((value, i) => {
        const angle = position * theta ** -((i % 8) / 8);
        return value * Math.cos(angle) + (i < 8 ? -y[i + 8] : y[i - 8]) * Math.sin(angle);
      });
    });
  };
  // Two heads share a key.
  const [queries, keys] = [turned("q", head), turned("k", head >> 1)];
  return queries.map((query, t) => {
    const powers = keys.map((key, s) => {
      const score = scale * query.reduce((sum, value, i) => sum + value * key[i], 0);
      return s > t || t - s >= window ? 0 : Math.exp(cap === undefined ? score : cap * Math.tanh(score / cap));
    });
    const sum = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / sum);
  });
}

test("Node: weights of heads are the softmax of their scores, with windows, caps and caches that round", { timeout: 60_000 }, async () => {
  const { default: init, Device, Loader, Pictures } = await import("../../pkg/tilewright.js");
  await init({ module_or_path: readFileSync(join(repository, "pkg/tilewright_bg.wasm")) });
  const device = await Device.open("cpu", undefined);
  const models = {
    "mistral-sliding": { theta: 1e4, scale: 0.25, window: 8, one: 0, factor: 1 },
    qwen2: { theta: 1e6, scale: 0.25, window: Infinity, one: 0, factor: 1 },
    gemma2: { theta: 1e4, scale: 24 ** -0.5, cap: 2, window: 8, one: 1, factor: 8 },
  };
  for (const [name, shape] of Object.entries(models)) {
    const files = ["config.json", "model.safetensors"].map((file) => ({ name: file, bytes: readFileSync(join(repository, "tests/data/tiny-random", name, file)) }));
    const tensor = halves(files[1].bytes);
    for (const [kvType, tolerance] of [["f32", 1e-5], ["f16", 2e-3], ["q8_0", 0.03]]) {
      const loader = Loader.model(device, files.map(({ name, bytes }) => ({ name, size: bytes.length })), { kvType, contextLength: 64 });
      for (let want; (want = loader.want()) !== undefined;) await loader.push(new Uint8Array(files[want.file].bytes.subarray(want.offset)));
      loader.end();
      const session = (await loader.finish()).session();
      const prompt = Uint32Array.from({ length: 27 }, (_, at) => 3 + 7 * at);
      await session.generate(prompt, new Pictures(), { maxTokens: 14, temperature: 0, ignoreEos: true }, undefined, () => {}, async () => true, () => {});
      const ids = session.tokens();
      for (const [head, lastQueries] of [[0, 1], [1, 5], [2, 19], [3, 100]]) {
        const want = defined(shape, tensor, ids, head).slice(-lastQueries);
        const got = await session.headWeights(0, head, lastQueries);
        assert.equal(got.length, want.length * ids.length);
        const worst = Math.max(...want.flat().map((weight, at) => Math.abs(weight - got[at])));
        assert.ok(worst < tolerance, `${name}, ${kvType}, head ${head}: ${worst}`);
        assert.ok(want.flat().every((weight, at) => weight > 0 || got[at] === 0));
      }
    }
  }
});

// A software adapter is slow.
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
  // Something is drawn, in the theme's colours.
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
