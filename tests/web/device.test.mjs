// Devices in a browser: selection and its reason, tiers, lost devices, invalid shaders, crashing workers.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { bigModel } from "./big-model.mjs";
import { openBrowser } from "./browser.mjs";
import { oneOf } from "./drawn.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";

const { ids: prompt, greedy_ids: expected } =
  JSON.parse(readFileSync(join(repository, "tests/data/builtin/reference.json"), "utf8")).cases[0];
const limited = { timeout: 180_000 };

// Runs in the package's worker before the package: keeps devices reachable, and injects faults.
const SPY = `
const requestDevice = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (...given) {
  const device = await requestDevice.apply(this, given);
  (self.devices ??= []).push(device);
  return device;
};
const requestAdapter = GPU.prototype.requestAdapter;
GPU.prototype.requestAdapter = function (...given) {
  return self.noAdapter ? Promise.resolve(null) : requestAdapter.apply(this, given);
};
const submit = GPUQueue.prototype.submit;
GPUQueue.prototype.submit = function (...given) {
  submit.apply(this, given);
  self.submissions += 1;
  if (self.submissions === self.loseAt) {
    self.noAdapter = self.loseForGood;
    self.devices.at(-1).destroy();
  }
};
// A GPU whose memory is full after a few megabytes, and that does not report itself as software.
if (name === "full") {
  for (const [key, value] of Object.entries({ vendor: "test", architecture: "test", description: "Test GPU", isFallbackAdapter: false })) {
    Object.defineProperty(GPUAdapterInfo.prototype, key, { get: () => value });
  }
  const createBuffer = GPUDevice.prototype.createBuffer;
  let bytes = 0;
  GPUDevice.prototype.createBuffer = function (descriptor) {
    const buffer = createBuffer.call(this, descriptor);
    bytes += descriptor.size;
    if (bytes > 16 << 20) this.destroy();
    return buffer;
  };
}
const createShaderModule = GPUDevice.prototype.createShaderModule;
GPUDevice.prototype.createShaderModule = function (descriptor) {
  (self.shaders ??= []).push(descriptor.label);
  const spoilt = name === "spoil shaders" ? descriptor.code.replace(/fn /, "fn 1") : descriptor.code;
  return createShaderModule.call(this, { ...descriptor, code: spoilt });
};
`;

let server;
let chromium;
before(async () => {
  server = await startServer();
  const script = (text) => bytesInMemory(Buffer.from(text), "text/javascript");
  server.files.set("spy.js", script(SPY));
  // Modules are evaluated in import order.
  server.files.set("worker.js", script('import "/files/spy.js"; import "/npm/worker.js";'));
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
});

/** A page with the spy in its workers. The spy reads the worker's `name`. */
async function spiedPage(name = "") {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate((name) => {
    const Original = Worker;
    globalThis.spied = [];
    globalThis.Worker = class extends Original {
      constructor(_, options) {
        super("/files/worker.js", { ...options, type: "module", name });
        spied.push(this);
      }
    };
  }, name);
  return page;
}

/** Runs in a page: loads the story model as `model`, with its notices. */
async function loadStories(options) {
  const { Model } = await import("/npm/index.js");
  globalThis.notices = [];
  globalThis.phases = [];
  globalThis.model = await Model.builtin({
    ...options, onNotice: (notice) => notices.push(notice), onProgress: ({ phase }) => phases.push(phase),
  });
  return model.device;
}

/** Runs in a page: a greedy continuation. Sets the global `reached` after `signalAt` tokens. */
async function continueStory({ prompt, count, signalAt }) {
  const ids = [];
  for await (const { id } of model.generate(prompt, { maxTokens: count, ignoreEos: true })) {
    ids.push(id);
    if (ids.length === signalAt) globalThis.reached = true;
  }
  return ids;
}

const story = { prompt, count: expected.length, signalAt: 5 };

test("`auto` prefers the CPU to a software adapter, and says so", limited, async () => {
  const page = await chromium.open(`${server.origin}/blank.html`);
  const device = await page.evaluate(loadStories, { device: "auto" });
  assert.equal(device.backend, "cpu");
  assert.match(device.reason, /software/i);
  const notices = await page.evaluate(() => notices);
  assert.deepEqual(notices.map((notice) => notice.code), ["cpu_fallback"]);
  assert.match(notices[0].message, /CPU/);
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  const devices = await page.evaluate(async () => (await import("/npm/index.js")).devices());
  assert.deepEqual(devices.map((it) => [it.choice, it.isSoftware]).sort(), [["cpu", false], ["gpu", true]]);
  await page.close();
});

test("without an adapter `auto` runs on the CPU and says so, and `gpu` is an error", limited, async () => {
  const without = await openBrowser({ gpu: false });
  try {
    const page = await without.open(`${server.origin}/blank.html`);
    const device = await page.evaluate(loadStories, { device: "auto" });
    assert.equal(device.backend, "cpu");
    assert.deepEqual(await page.evaluate(() => notices.map((notice) => notice.code)), ["cpu_fallback"]);
    assert.deepEqual(await page.evaluate(continueStory, story), expected);
    const code = await page.evaluate(async () => {
      const { Model } = await import("/npm/index.js");
      return Model.builtin({ device: "gpu" }).then(() => "worked", (error) => error.code);
    });
    assert.equal(code, "webgpu_unavailable");
    assert.deepEqual((await page.evaluate(async () => (await import("/npm/index.js")).devices())).map((it) => it.choice), ["cpu"]);
  } finally {
    await without.close();
  }
});

// The default is `scalar` on software adapters. Kernel tests run in each tier. Others are slow there.
for (const name of oneOf(["of its own choice", "subgroups", "baseline", "scalar"])) {
  const tier = name === "of its own choice" ? undefined : name;
  test(`WebGPU in tier ${name} gives the reference's tokens, one submission each`, limited, async (t) => {
    const count = tier && !process.env.TILEWRIGHT_FULL ? 12 : story.count;
    const page = await chromium.open(`${server.origin}/blank.html`);
    const device = await page.evaluate(loadStories, { device: "gpu", tier });
    assert.equal(device.backend, "webgpu");
    if (tier) assert.equal(device.tier, tier);
    t.diagnostic(`${device.name}, tier ${device.tier}: ${device.reason}`);
    assert.deepEqual(await page.evaluate(continueStory, { ...story, count }), expected.slice(0, count));
    const [before, after] = await page.evaluate(async ({ prompt, count }) => {
      const before = await model.counters();
      await model.generate(prompt, { maxTokens: count, ignoreEos: true }).text();
      return [before, await model.counters()];
    }, { ...story, count });
    assert.equal(after.buffersCreated, before.buffersCreated);
    assert.equal(after.bindGroupsCreated, before.bindGroupsCreated);
    assert.equal(after.pipelinesCreated, before.pipelinesCreated);
    // One for the prompt, one per token, and a few in flight at the end.
    assert.ok(after.submits - before.submits <= count + 8, `${after.submits - before.submits} submissions`);
    const [together, submits] = await page.evaluate(async ({ prompt, count }) => {
      const before = await model.counters();
      const ids = [];
      const options = { maxTokens: count, ignoreEos: true, tokensPerSubmit: 4 };
      for await (const { id } of model.generate(prompt, options)) ids.push(id);
      return [ids, (await model.counters()).submits - before.submits];
    }, { ...story, count });
    assert.deepEqual(together, expected.slice(0, count));
    // One for the prompt, whose pass chooses the first token, and one per four further tokens.
    assert.ok(submits <= 1 + Math.ceil((count - 1) / 4), `${submits} submissions`);
    await page.close();
  });
}

/** Runs in the worker: loses the newest device, as a driver reset does. */
const destroyDevice = () => self.devices.at(-1).destroy();

/** Runs in the worker: the same during the next generation, which makes a submission per token. */
const destroyLater = (forGood) => Object.assign(self, { submissions: 0, loseAt: 8, loseForGood: forGood });

/** Runs in a page: reads the data in IndexedDB, after replacing it with `text` if given. */
async function keptTunings(text) {
  const settled = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const database = await settled(indexedDB.open("tilewright"));
  const store = database.transaction("tunings", "readwrite").objectStore("tunings");
  const keys = await settled(store.getAllKeys());
  if (text !== undefined) await settled(store.put(text, keys[0]));
  const texts = await settled(store.getAll());
  database.close();
  return texts;
}

test("what is measured is kept and followed, and changes no token", limited, async (t) => {
  const page = await spiedPage();
  const begin = performance.now();
  await page.evaluate(loadStories, { device: "gpu", tune: true });
  t.diagnostic(`loaded and tuned in ${Math.round(performance.now() - begin)} ms`);
  assert.deepEqual(await page.evaluate(() => notices), []);
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  const [text, ...others] = await page.evaluate(keptTunings);
  assert.deepEqual(others, []);
  const tuning = JSON.parse(text);
  t.diagnostic(`choices: ${JSON.stringify(tuning.choices)}`);
  assert.equal(tuning.backend, "webgpu");

  // A choice that only a saved tuning makes.
  tuning.choices = [];
  for (const kernel of ["matvec", "gate_up"]) {
    for (let log = 0; log < 200; log++) {
      tuning.choices.push({ kernel, weight: "Q8_0", rows: 2 ** (log % 20), blocks: 2 ** Math.floor(log / 20), tokens: 1, tier: "baseline", size: 2 });
    }
  }
  await page.evaluate(keptTunings, JSON.stringify(tuning));
  await page.evaluate(loadStories, { device: "gpu" });
  assert.deepEqual(await page.evaluate(() => notices), []);
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  const shaders = await page.workers().at(-1).evaluate(() => self.shaders);
  assert.ok(shaders.includes("matvec.Q8_0.t0") && !shaders.includes("matvec.Q8_0.scalar"), shaders.join(", "));

  // The library's own tests cover other refusals. By default one is tested in a page, which takes seconds to load.
  const spoils = [[JSON.stringify({ ...tuning, adapter: "another" }), "another"], ["not a tuning", "not JSON"]];
  for (const [spoilt, why] of process.env.TILEWRIGHT_FULL ? spoils : spoils.slice(0, 1)) {
    await page.evaluate(keptTunings, spoilt);
    await page.evaluate(loadStories, { device: "gpu" });
    const [notice, ...rest] = await page.evaluate(() => notices);
    assert.deepEqual([notice.code, rest], ["tuning_ignored", []]);
    assert.ok(notice.message.includes(why), notice.message);
    assert.deepEqual(await page.evaluate(continueStory, story), expected);
  }
  await page.close();
});

// In sequence in one page: software compiles a model's pipelines for seconds each time.
test("a device that is lost is rebuilt, and the stream goes on with the same tokens; one that is lost for good is replaced by the CPU", limited, async () => {
  const page = await spiedPage();
  await page.evaluate(loadStories, { device: "gpu" });
  await page.workers()[0].evaluate(destroyLater, false);
  const phasesOfLoad = await page.evaluate(() => phases.splice(0));
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  // The reload reports progress like the load.
  assert.deepEqual([...new Set(await page.evaluate(() => phases))], [...new Set(phasesOfLoad)]);
  assert.ok(phasesOfLoad.includes("prepare"));
  assert.ok((await page.evaluate(() => notices.map((notice) => notice.code))).includes("device_rebuilt"));
  assert.equal(await page.workers()[0].evaluate(() => self.devices.length), 2);
  assert.equal(await page.evaluate(() => model.device.backend), "webgpu");
  assert.deepEqual(await page.evaluate(continueStory, story), expected);

  // Between two generations.
  await page.evaluate(() => notices.splice(0));
  await page.workers()[0].evaluate(destroyDevice);
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  assert.ok((await page.evaluate(() => notices.map((notice) => notice.code))).includes("device_rebuilt"));
  assert.equal(await page.workers()[0].evaluate(() => self.devices.length), 3);

  // Permanently: the CPU takes over.
  await page.workers()[0].evaluate(destroyLater, true);
  assert.deepEqual(await page.evaluate(continueStory, story), expected);
  assert.equal(await page.evaluate(() => model.device.backend), "cpu");
  const [taken, exact, rounded] = await page.evaluate(async (prompt) => {
    const { Model } = await import("/npm/index.js");
    const others = await Promise.all([true, false].map((exact) => Model.builtin({ device: "cpu", exact })));
    const texts = [];
    for (const each of [model, ...others]) texts.push(await each.generate(prompt, { temperature: 0, maxTokens: 250, ignoreEos: true }).text());
    return texts;
  }, prompt);
  assert.equal(taken, exact);
  assert.notEqual(taken, rounded, "the text shows whether activations were rounded");
  await page.close();
});

test("a GPU process that crashes in the middle changes no token", limited, async () => {
  // A separate browser: the crash affects the GPU of all its pages.
  const own = await openBrowser();
  try {
    const page = await own.open(`${server.origin}/blank.html`);
    await page.evaluate(loadStories, { device: "gpu" });
    // Long enough to be running at the crash.
    const long = { ...story, count: 200 };
    const undisturbed = await page.evaluate(continueStory, long);
    await page.evaluate(() => (globalThis.reached = false));
    const tokens = page.evaluate(continueStory, long);
    await page.waitForFunction(() => globalThis.reached);
    await own.crashGpu();
    assert.deepEqual(await tokens, undisturbed);
    assert.ok((await page.evaluate(() => notices.map((notice) => notice.code))).includes("device_rebuilt"));
  } finally {
    await own.close();
  }
});

test("a model that neither the GPU nor the CPU can hold is refused before it is read", limited, async () => {
  server.files.set("huge.gguf", bigModel(6e9));
  server.files.set("large.gguf", bigModel(100e6));
  const page = await spiedPage("full");
  const load = (url) => page.evaluate(async (url) => {
    const { Model } = await import("/npm/index.js");
    const notices = [];
    const seen = await Model.load(url, { cache: false, onNotice: ({ message }) => notices.push(message) }).then(
      (model) => {
        model.free();
        return { backend: model.device.backend };
      },
      ({ code, message }) => ({ code, message }),
    );
    return { ...seen, notices };
  }, url);
  const large = server.url("files/large.gguf");
  assert.equal((await load(large)).backend, "cpu");
  const huge = server.url("files/huge.gguf");
  const { code, message } = await load(huge);
  assert.equal(code, "memory", message);
  assert.match(message, /the GPU failed .* the CPU cannot hold it either: .* bytes needed .* the limit is/);
  assert.ok(server.sent(huge) < 200e6, `${server.sent(huge)} bytes were sent`);
  await page.close();
});

test("an invalid shader is an error, not zeros", limited, async () => {
  const page = await spiedPage("spoil shaders");
  const outcome = await page.evaluate(async (story) => {
    const { Model } = await import("/npm/index.js");
    try {
      const model = await Model.builtin({ device: "gpu" });
      return { text: await model.generate(story.prompt, { maxTokens: 4 }).text() };
    } catch (error) {
      return { code: error.code, message: error.message };
    }
  }, story);
  assert.equal(outcome.code, "gpu", JSON.stringify(outcome));
  assert.match(outcome.message, /\w+/);
  await page.close();
});

test("a worker that is gone ends what was going on and what comes after with `worker_crashed`", limited, async () => {
  const page = await spiedPage();
  await page.evaluate(loadStories, { device: "cpu" });
  const codes = await page.evaluate(async (prompt) => {
    const code = (promise) => promise.then(() => "worked", (error) => error.code);
    const going = code(model.generate(prompt, { ignoreEos: true }).text());
    const queued = code(model.generate(prompt, { maxTokens: 3 }).text());
    await new Promise((resolve) => setTimeout(resolve, 20));
    spied[0].terminate();
    const codes = [await going, await queued, await code(model.tokenize("a"))];
    model.free();
    return codes;
  }, prompt);
  assert.deepEqual(codes, ["worker_crashed", "worker_crashed", "worker_crashed"]);
  await page.close();
});
