// The same greedy tokens everywhere: in Chromium on WebGPU and the CPU, in Node on Dawn and the CPU, and in the
// references of the test data. Prints a table. With TILEWRIGHT_FULL also natively, where Rust's model tests use the
// same references, in Firefox, WebKit and Deno; without it, WebGPU runs shortened texts, and each lane but the first
// has a time limit for models in random order.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";

import { openBrowser } from "./browser.mjs";
import { missingDeno, runInDeno } from "./deno.mjs";
import { drawn } from "./drawn.mjs";
import { missingFirefox, openFirefox } from "./firefox.mjs";
import { dataPath, repository, startServer } from "./server.mjs";
import { tensors } from "./tensors.mjs";
import { missingWebKit, openWebKit } from "./webkit.mjs";

// With a smaller margin between the top two logits, F32 arithmetic may choose differently from the reference: twice
// the tolerance derived in the data's README.
const CERTAIN = 2e-3;

// On software WebGPU, whole texts take minutes, and so does compiling each model's pipelines.
const SHORTENED = ["Chromium, WebGPU", "Node, Dawn"];
const SHORT = 12;

// Time limit of a lane that does not run all models. One model takes up to half a minute on software WebGPU.
const SECONDS = 30;

/** Number of tokens that a lane generates for a text of this length. */
const countIn = (lane, length) => (SHORTENED.includes(lane) && !process.env.TILEWRIGHT_FULL ? Math.min(length, SHORT) : length);

const json = (...path) => JSON.parse(readFileSync(join(...path), "utf8"));

/** A model's files as the package loads them: a GGUF file alone, or a folder's weights and other files. */
function filesOf(folder, weights) {
  const beside = ["config.json", "tokenizer.json", "tokenizer_config.json"].map((name) => join(folder, name));
  const path = join(folder, weights);
  return weights.endsWith(".gguf") ? [path] : [...beside.filter(existsSync), path];
}

/**
 * All models with a reference: `{ name, room, folder, files, native, cases: [{ name, prompt, ids, margins }] }`. The
 * first one runs everywhere.
 */
function allModels() {
  const builtin = json(repository, "tests/data/builtin/reference.json");
  const models = [{
    name: "built-in",
    room: "assets",
    folder: join(repository, "assets"),
    files: [join(repository, "assets", builtin.model)],
    native: join(repository, "assets", builtin.model),
    cases: builtin.cases.map((it) => ({ name: it.prompt, prompt: it.ids, ids: it.greedy_ids, margins: it.greedy_margins })),
  }];
  const add = (name, set, weights, cases) => {
    const folder = dataPath(set);
    models.push({
      name, cases, room: `data/${set}`, folder, files: filesOf(folder, weights),
      native: weights.endsWith(".gguf") ? join(folder, weights) : folder,
    });
  };
  for (const name of ["stories260k", "stories260k-wide", "tinystories656k"]) {
    const folder = dataPath(name);
    if (!folder) continue;
    const { files, cases } = json(folder, "cases.json");
    const ofVariant = (variant) =>
      cases.map((it) => ({ name: it.name, prompt: it.ids, ids: it.greedy[variant].ids, margins: it.greedy[variant].margins }));
    for (const [variant, weights] of Object.entries(files)) {
      add(`${name} ${variant}`, name, weights, ofVariant(variant));
    }
    if (name === "stories260k") add(`${name} safetensors`, name, "model.safetensors", ofVariant("f32"));
  }
  // Plain models, head norms, experts, sinks, convolutions, the delta rule, latent attention, Mamba 2 beside attention
  // and alone, experts beside dense halves.
  const tiny = [
    "llama-mha-bias", "llama3-rope", "mistral-sliding", "qwen3", "qwen3-moe", "gpt-oss", "lfm2", "qwen35", "deepseek-v2",
    "falcon-h1", "gemma4-moe", "glm4-moe-lite", "lfm3", "mamba2", "nemotron-h-moe", "olmo-hybrid", "qwen3-next",
  ];
  for (const name of tiny) {
    const set = `tiny-random/${name}`;
    const folder = dataPath(set);
    const tensor = tensors(join(folder, "refs.safetensors"));
    const reference = {
      name: "greedy", prompt: tensor("greedy.prompt"), ids: tensor("greedy.ids"), margins: tensor("greedy.margins"),
    };
    add(`${name} model.safetensors`, set, "model.safetensors", [reference]);
    if (existsSync(join(folder, "model-f16.gguf"))) {
      add(`${name} model-f16.gguf`, set, "model-f16.gguf", [reference]);
    }
  }
  return models;
}

/** Runs in a page, in Node and in Deno: all continuations of one model. */
async function continueWith({ Model }, { sources, device, cases }) {
  const model = await Model.load(sources.length === 1 ? sources[0] : sources, { device, cache: false, kvType: "f32", exact: true });
  try {
    const continuations = [];
    for (const { prompt, count } of cases) {
      const ids = [];
      for await (const piece of model.generate(prompt, { maxTokens: count, ignoreEos: true, temperature: 0 })) ids.push(piece.id);
      continuations.push(ids);
    }
    return { on: model.device, continuations };
  } finally {
    model.free();
  }
}

/** Runs in a page: `continueWith`, given its source. */
async function continueInPage(source, given) {
  return new Function(`return ${source}`)()(await import("/npm/index.js"), given);
}

/** The native library, for all models of a lane. */
class Native {
  #child;
  #closed;
  #lines;

  constructor() {
    const program = ["run", "--quiet", "--locked", "--all-features", "--example", "continue_ids"];
    this.#child = spawn("cargo", program, { cwd: repository, stdio: ["pipe", "pipe", "inherit"] });
    this.#closed = once(this.#child, "close");
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
  }

  /** All continuations of one model. */
  async continue({ native, device, cases }) {
    const continuations = [];
    for (const { prompt, count } of cases) {
      this.#child.stdin.write(`${JSON.stringify({ model: native, device, prompt, n_tokens: count })}\n`);
      const { done, value } = await this.#lines.next();
      assert.ok(!done, "the native example failed");
      continuations.push(JSON.parse(value));
    }
    return { on: { name: device, backend: "native" }, continuations };
  }

  async close() {
    this.#child.stdin.end();
    const [code] = await this.#closed;
    assert.equal(code, 0, "the native example failed");
  }
}

const models = allModels();
const byLane = new Map();
let server;
let chromium;
/** Browsers and native programs opened by lanes, by name. */
const opened = new Map();

before(async () => {
  server = await startServer();
  chromium = await openBrowser();
});
after(async () => {
  for (const it of opened.values()) await it.close();
  await chromium?.close();
  await server?.stop();
});

const urlsOf = ({ room, folder, files }) =>
  files.map((path) => `${server.origin}/${room}/${relative(folder, path).split("/").map(encodeURIComponent).join("/")}`);

const packageModule = pathToFileURL(join(repository, "npm/dist/index.js")).href;

/** A lane in Chromium. */
const inChromium = (device) => async (model, cases) => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const given = { sources: urlsOf(model), device, cases };
  const result = await page.evaluate(([source, given]) => import("/npm/index.js").then((module) => new Function(`return ${source}`)()(module, given)),
    [continueWith.toString(), given]);
  await page.close();
  return result;
};

/** A lane in a browser, opened for its first model. */
const inBrowser = (name, open, device) => async (model, cases) => {
  if (!opened.has(name)) opened.set(name, await open());
  return opened.get(name).evaluate(`${server.origin}/blank.html`, continueInPage, continueWith.toString(), { sources: urlsOf(model), device, cases });
};

/** A lane of the native library in one process. */
const inNative = (device) => async (model, cases) => {
  const name = `native ${device}`;
  if (!opened.has(name)) opened.set(name, new Native());
  return opened.get(name).continue({ native: model.native, device, cases });
};

const inNode = (device) => async (model, cases) => continueWith(await import(packageModule), { sources: model.files, device, cases });
const inDeno = (device) => (model, cases) => runInDeno(packageModule, continueWith, { sources: model.files, device, cases });

// The first runs all models; the others are compared with it.
const lanes = {
  "Node, CPU": inNode("cpu"),
  "Chromium, CPU": inChromium("cpu"),
  "Chromium, WebGPU": inChromium("gpu"),
  "Node, Dawn": inNode("gpu"),
  // The tests of each of these browsers include a text of the built-in model.
  ...(process.env.TILEWRIGHT_FULL ? {
    "native, CPU": inNative("cpu"),
    "native, GPU": inNative("gpu"),
    "Firefox, CPU": inBrowser("Firefox", openFirefox, "cpu"),
    "Firefox, WebGPU": inBrowser("Firefox", openFirefox, "gpu"),
    "WebKit, CPU": inBrowser("WebKit", openWebKit, "cpu"),
    "Deno, CPU": inDeno("cpu"),
    "Deno, WebGPU": inDeno("gpu"),
  } : {}),
};
const missing = { Firefox: missingFirefox, WebKit: missingWebKit, Deno: missingDeno };

/** Length of the common prefix of two continuations. */
function common(a, b) {
  const at = a.findIndex((id, i) => id !== b[i]);
  return at < 0 ? a.length : at;
}

for (const [i, [lane, run]] of Object.entries(lanes).entries()) {
  const skip = missing[lane.split(",")[0]] ?? false;
  test(`${lane}: greedy tokens are the reference's up to its first near-tie`, { skip, timeout: 1_800_000 }, async (t) => {
    const results = new Map();
    let tokens = 0;
    for (const model of i === 0 ? models : drawn(t, models, SECONDS)) {
      const cases = model.cases.map(({ prompt, ids }) => ({ prompt, count: countIn(lane, ids.length) }));
      let result;
      try {
        result = await run(model, cases);
      } catch (error) {
        const noAdapter = error.code === "webgpu_unavailable" || error.code === "no_adapter";
        if (!noAdapter || process.env.REQUIRE_ADAPTER) throw new Error(`${model.name}: ${error.message}`, { cause: error });
        return t.skip(error.message);
      }
      assert.equal(result.on.backend, lane.startsWith("native") ? "native" : lane.endsWith("CPU") ? "cpu" : "webgpu");
      if (results.size === 0) t.diagnostic(`${lane} is ${result.on.name} (${result.on.backend})`);
      results.set(model.name, result.continuations);
      model.cases.forEach(({ name, ids, margins }, i) => {
        const got = result.continuations[i];
        const nearTie = margins.findIndex((margin) => margin < CERTAIN);
        const { count } = cases[i];
        const certain = nearTie < 0 ? count : Math.min(nearTie, count);
        assert.equal(got.length, count, `${model.name}, ${name}: number of tokens`);
        assert.deepEqual(got.slice(0, certain), ids.slice(0, certain), `${model.name}, ${name}`);
        tokens += got.length;
      });
    }
    byLane.set(lane, results);
    t.diagnostic(`${lane}: ${results.size} models, ${tokens} tokens`);
  });
}

test("greedy tokens are identical in all of them", (t) => {
  assert.ok(byLane.size >= 2, "fewer than two of them ran");
  const [[firstLane, first], ...others] = byLane;
  t.diagnostic(`leading tokens like the reference's, of those taken, in: ${Object.keys(lanes).join("; ")}`);
  const differences = [];
  for (const model of models) {
    const agreed = Object.keys(lanes).map((lane) => {
      const continuations = byLane.get(lane)?.get(model.name);
      if (!continuations) return "-";
      const like = model.cases.reduce((sum, { ids }, i) => sum + common(ids, continuations[i]), 0);
      return `${like}/${continuations.reduce((sum, ids) => sum + ids.length, 0)}`;
    });
    t.diagnostic(`${model.name}: ${model.cases.length} cases: ${agreed.join(", ")}`);
    for (const [lane, results] of others.filter(([, results]) => results.has(model.name))) {
      model.cases.forEach(({ name, margins }, i) => {
        const [a, b] = [first.get(model.name)[i], results.get(model.name)[i]];
        const at = common(a, b);
        if (at < Math.min(a.length, b.length)) {
          differences.push(`${model.name}, ${name}: ${lane} differs from ${firstLane} at token ${at}, margin ${margins[at]}`);
        }
      });
    }
  }
  assert.deepEqual(differences, []);
});
