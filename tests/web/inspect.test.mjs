// Inspection before loading, in Chromium and in Node: header contents, fetching only headers, and the later load's
// report; prefetched models, listing and deletion; digests given by callers.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { bigModel } from "./big-model.mjs";
import { everywhere, places, server } from "./places.mjs";
import { bytesInMemory, repository } from "./server.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));
const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");
const digest = sha256(stories);
const unlicensed = Buffer.from(stories);
unlicensed.write("general.licence", unlicensed.indexOf("general.license"));
const limited = { timeout: 120_000 };
/** By place: a large file with its address, and the address of a model with a missing adapter. */
const bigs = {};
const adapterless = {};
const inChromium = (name, run, given, check) => test(`Chromium: ${name}`, limited, async () => check(await places.Chromium(run, given())));

/** Device and context of all loads. */
const SOURCES = () => {
  const at = (path) => server.url(path);
  return [
    { type: "Model", source: at("assets/stories.gguf"), contextLength: 200 },
    { type: "Model", source: at("data/tiny-random/llama3-rope/model-f16.gguf") },
    { type: "Model", source: ["config.json", "model.safetensors"].map((name) => at(`data/tiny-random/gpt-oss/${name}`)), kvType: "q8_0" },
    { type: "Embedder", source: `${server.origin}/data/encoders/qwen3-embedding/` },
    { type: "Embedder", source: at("data/encoders/nomic/model.gguf") },
    { type: "Reranker", source: `${server.origin}/data/encoders/bert-reranker/` },
  ];
};

everywhere(
  "headers say what a load says: what it is, its size, its memory",
  async (tilewright, { sources }) => {
    const told = [];
    const on = await tilewright.Model.builtin({ device: "cpu" });
    for (const { type, source, contextLength, kvType } of sources) {
      const own = { ...contextLength === undefined ? {} : { contextLength }, ...kvType === undefined ? {} : { kvType } };
      const report = await tilewright.Model.inspect(source, {
        device: "cpu", cache: false, on, ...own, ...contextLength === undefined ? {} : { contextLengths: [contextLength] },
      });
      const loaded = await tilewright[type].load(source, { on, cache: false, ...own });
      told.push({ report, info: loaded.info, memory: await loaded.memory() });
      loaded.free();
    }
    on.free();
    return told;
  },
  (told) => {
    const kinds = { Model: "model", Embedder: "embedder", Reranker: "reranker" };
    SOURCES().forEach(({ type }, i) => {
      const { report, info, memory } = told[i];
      assert.deepEqual(
        [report.kind, report.name, report.architecture, report.sizeBytes, report.maxContextLength, report.problem],
        [kinds[type], info.name, info.architecture, info.fileBytes, info.maxContextLength ?? info.maxTokens, undefined]);
      assert.deepEqual(report.weights.map((share) => share.type), info.weightTypes);
      assert.equal(report.parameters, report.weights.reduce((sum, share) => sum + share.parameters, 0));
      if (type === "Model") assert.equal(report.hasChatTemplate, info.chatTemplate !== "none");
      assert.equal(report.fits.cpu, true);
      const { contexts, weightsBytes } = report.memory.cpu;
      assert.equal(weightsBytes, memory.weightsBytes);
      const context = contexts.find((one) => one.contextLength === (info.contextLength ?? info.maxTokens));
      assert.deepEqual(context, {
        contextLength: info.contextLength ?? info.maxTokens, cacheBytes: memory.cacheBytes, activationsBytes: memory.activationsBytes, totalBytes: memory.totalBytes,
      });
    });
    // A token's share is the context's, divided.
    const { cpu } = told[0].report.memory;
    assert.ok(cpu.cacheBytesPerToken > 0 && Math.abs(cpu.cacheBytesPerToken * 200 - cpu.contexts[0].cacheBytes) <= 200, JSON.stringify(cpu));
    assert.ok(told[3].report.files.some(({ name, sizeBytes }) => name === "tokenizer.json" && sizeBytes > 0), "what is not read is counted");
  },
  () => ({ sources: SOURCES() }),
);

everywhere(
  "of a large model the headers alone are sent, and why it does not fit is said",
  ({ Model }, { url }) => Model.inspect(url, { device: "cpu", cache: false }),
  (report, place) => {
    const [file, url] = bigs[place];
    const header = file.headerBytes;
    const sent = server.sent(url);
    assert.ok(sent >= header && sent <= 2 * header + (64 << 10), `${sent} bytes were sent of a header of ${header}`);
    assert.equal(report.sizeBytes, file.size);
    assert.ok(report.parameters > 8e9 && report.weights[0].type === "Q8_0");
    assert.match(report.fits.cpu, /bytes.*32-bit addresses/);
    assert.equal(report.fits.gpu, undefined);
    // The plan is reported anyway.
    assert.ok(report.memory.cpu.weightsBytes > 8e9);
    assert.deepEqual(report.memory.cpu.contexts.map(({ contextLength }) => contextLength), [512]);
  },
  (place) => {
    const file = bigModel(9e9);
    server.files.set(`big-${place}.gguf`, file);
    bigs[place] = [file, server.url(`files/big-${place}.gguf`)];
    return { url: bigs[place][1] };
  },
);

/** A GGUF file of another architecture. */
const unknown = () => {
  const copy = Buffer.from(stories);
  copy.write("xlama", copy.indexOf("llama", copy.indexOf("general.architecture")));
  return copy;
};

everywhere(
  "what is broken is an error, what is of another kind has a report",
  async ({ Model }, { url, broken, unknown, adapter }) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const told = {};
    const on = await Model.builtin({ device: "cpu" });
    const sources = { ...Object.fromEntries(Object.entries(broken).map(([name, text]) => [name, bytes(text)])), missing: url.missing, page: url.page, long: url.long };
    for (const [name, source] of Object.entries(sources)) {
      told[name] = await Model.inspect(source, { on, device: "cpu", cache: false }).then(() => "no error", ({ code }) => code);
    }
    told.aborted = await Model.inspect(url.good, { signal: AbortSignal.abort("enough") }).catch((reason) => reason);
    told.option = await Model.inspect(url.good, { on, device: "cpu", contextLength: 1e6 }).catch(({ code, message }) => [code, message]);
    told.unknown = await Model.inspect(bytes(unknown), { on, device: "cpu" });
    told.adapter = await Model.inspect(url.adapter, { on, device: "cpu", cache: false });
    on.free();
    return told;
  },
  ({ unknown, adapter, option, ...codes }) => {
    assert.deepEqual(codes, {
      empty: "format", cut: "format", magic: "format", counts: "format", missing: "http", page: "not_a_model", long: "format", aborted: "enough",
    });
    assert.deepEqual(option, ["option", "option contextLength is 1000000, expected 1 to the model's 512"]);
    assert.deepEqual([unknown.kind, unknown.architecture, unknown.maxContextLength], ["other", "xlama", undefined]);
    assert.match(unknown.problem, /xlama/);
    assert.equal(unknown.fits.cpu, unknown.problem);
    assert.ok(unknown.parameters > 600_000);
    assert.deepEqual([adapter.kind, adapter.memory], ["other", {}]);
    assert.match(adapter.problem, /general.type is adapter|adapter/);
  },
  (place) => {
    const counts = Buffer.from(stories.subarray(0, 4096));
    counts.writeBigUInt64LE(1n << 60n, 8);
    // A header with a declared length beyond the limit.
    const long = Buffer.alloc(1 << 20);
    long.writeBigUInt64LE(1n << 50n, 0);
    server.files.set(`${place}/model.safetensors`, bytesInMemory(long));
    server.files.set(`${place}/config.json`, bytesInMemory(Buffer.from("{}"), "application/json"));
    const base64 = (bytes) => Buffer.from(bytes).toString("base64");
    return {
      url: {
        missing: server.url("files/none.gguf"), page: server.url("assets/stories.gguf", { fault: "html" }), good: server.url("assets/stories.gguf"),
        long: ["config.json", "model.safetensors"].map((name) => server.url(`files/${place}/${name}`)),
        adapter: server.url("data/tiny-random-lora/llama3-rope.gguf"),
      },
      broken: { empty: "", cut: base64(stories.subarray(0, 3000)), magic: base64(Buffer.from("GGML".repeat(100))), counts: base64(counts) },
      unknown: base64(unknown()),
    };
  },
);

inChromium("a software adapter is none for `auto`, and can be planned for", async ({ Model }, { url }) => ({
  auto: await Model.inspect(url), gpu: await Model.inspect(url, { device: "gpu" }),
}), () => ({ url: server.url("assets/stories.gguf") }), ({ auto, gpu }) => {
  assert.match(auto.fits.gpu, /only adapter is software/);
  assert.deepEqual(Object.keys(auto.memory), ["cpu"]);
  assert.equal(gpu.fits.gpu, true);
  assert.ok(gpu.memory.gpu.weightsBytes > 0 && gpu.fits.cpu === undefined);
  assert.equal(auto.fits.storage, true);
});

everywhere(
  "a digest that the caller names is compared before anything runs, and what an adapter lacks is said before the model is sent",
  async ({ Model }, { url, digest, none }) => {
    const refused = (options) => Model.load(url, { device: "cpu", ...options }).then((model) => model.free() ?? "loaded", ({ code }) => code);
    const told = [await refused({ sha256: "0".repeat(64) }), await refused({ sha256: { "stories.gguf": digest } }), await refused({ sha256: digest })];
    const adapter = await Model.load(none.url, { device: "cpu", adapter: { source: none.adapter } }).catch(({ code, status }) => [code, status]);
    const token = await Model.load(none.url, { device: "cpu", adapter: { source: none.adapter, token: "x" } }).catch(({ code, message }) => [code, message]);
    return { told, adapter, token, cached: (await Model.cached()).map(({ complete }) => complete) };
  },
  ({ told, adapter, token, cached }, place) => {
    assert.deepEqual(told, ["digest", "loaded", "loaded"]);
    assert.deepEqual(adapter, ["http", 404]);
    assert.equal(server.sent(adapterless[place]), 0, "the model was sent");
    assert.deepEqual([token[0], /token is for addresses of a hub/.test(token[1])], ["option", true], token[1]);
    assert.deepEqual(cached, place === "Chromium" ? [true] : []);
  },
  (place) => {
    adapterless[place] = server.url("assets/stories.gguf");
    return { url: server.url("assets/stories.gguf"), digest, none: { url: adapterless[place], adapter: server.url("files/none.gguf") } };
  },
);

test("Node: without a storage nothing is kept, and asking is no error", limited, async () => {
  const told = await places.Node(async ({ Model }, { url }) => ({
    cached: await Model.cached(), removed: await Model.remove(url),
    prefetch: await Model.prefetch(url).catch(({ code }) => code), blob: await Model.prefetch(new Uint8Array(8)).catch(({ code }) => code),
  }), { url: server.url("assets/stories.gguf") });
  assert.deepEqual(told, { cached: [], removed: false, prefetch: "storage", blob: "option" });
});

/** A hub on the tests' server. Its file does not state its licence. */
function publish() {
  const stories = Buffer.from(unlicensed);
  const digest = sha256(stories);
  const list = { siblings: [{ rfilename: "stories-Q8_0.gguf", lfs: { sha256: digest, size: stories.length } }], cardData: { license: "mit" }, tags: [] };
  const asked = [];
  server.besidePage.set("/api/models/owner/stories/revision/main", (request, response) => {
    asked.push(request.headers.authorization);
    response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(list));
  });
  server.besidePage.set("/owner/stories/resolve/main/stories-Q8_0.gguf", (request, response) => {
    const [, from = "0", to = ""] = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "") ?? [];
    const part = stories.subarray(Number(from), to === "" ? undefined : Number(to) + 1);
    const range = request.headers.range === undefined ? {} : { "content-range": `bytes ${from}-${Number(from) + part.length - 1}/${stories.length}` };
    response.writeHead(request.headers.range === undefined ? 200 : 206, { "content-length": part.length, etag: `"${digest}"`, ...range });
    response.end(request.method === "HEAD" ? undefined : part);
    if (request.method === "GET") sentByHub.push(part.length);
  });
  return asked;
}
const sentByHub = [];

test("Chromium: a model of a hub is looked at, fetched, listed, loaded without a network, and deleted", limited, async () => {
  const asked = publish();
  const told = await places.Chromium(async ({ Model, cache, sessions: _ }, { endpoint, slow }) => {
    const address = "hf:owner/stories:Q8_0";
    const hub = { endpoint, token: "secret" };
    await cache.clear();
    const report = await Model.inspect(address, { device: "cpu", ...hub });
    const untouched = await Model.cached();
    const progress = [];
    await Model.prefetch(address, { ...hub, onProgress: ({ phase, loaded, total }) => progress.push([phase, loaded, total]) });
    const cached = await Model.cached();
    const again = await Model.inspect(address, { device: "cpu", ...hub });
    const model = await Model.load(address, { device: "cpu", ...hub });
    const loaded = model.info.fileBytes;
    await model[Symbol.asyncDispose]();
    const files = await cache.list();
    // Resumes an interrupted one.
    const stop = new AbortController();
    const aborted = await Model.prefetch(slow, { signal: stop.signal, onProgress: ({ loaded }) => loaded > 200_000 && stop.abort("enough") }).catch((reason) => reason);
    let part;
    do part = (await Model.cached()).find(({ source }) => source === slow); while (part === undefined);
    const removed = [await Model.remove(address), await Model.remove(address, { endpoint }), await Model.remove(address, { endpoint })];
    return { report, untouched, progress, cached, again, loaded, files, aborted, part, removed, left: (await Model.cached()).map(({ source }) => source) };
  }, { endpoint: server.origin, slow: server.url("assets/stories.gguf", { fault: "slow", rate: "1000000" }) });
  const { report, cached, progress, part } = told;
  assert.deepEqual([report.licence, report.kind, report.sizeBytes], ["mit", "model", stories.length]);
  assert.ok(asked.length > 0 && asked.every((token) => token === "Bearer secret"));
  assert.deepEqual(told.untouched, [], "inspection stores nothing");
  assert.ok(sentByHub.reduce((sum, n) => sum + n) < stories.length * 1.5, `headers, and the file once: ${sentByHub}`);
  assert.deepEqual(progress.at(-1).slice(1), [stories.length, stories.length]);
  assert.equal(cached.length, 1);
  const { date, ...entry } = cached[0];
  assert.deepEqual(entry, {
    source: "hf:owner/stories:Q8_0", endpoint: server.origin, sizeBytes: stories.length, storedBytes: stories.length, complete: true,
  });
  assert.ok(Math.abs(Date.now() - date) < 3_600_000);
  assert.deepEqual({ ...told.again, fits: 0 }, { ...report, fits: 0 });
  assert.deepEqual([told.loaded, told.files.length, told.files[0].sha256], [stories.length, 1, sha256(unlicensed)]);
  assert.deepEqual([told.aborted, part.complete], ["enough", false]);
  assert.deepEqual(told.removed, [false, true, false]);
  assert.equal(told.left.length, 1);
});

inChromium("a fetched file with another digest is not kept, and a broken-off one goes on where it stopped", async ({ Model, cache }, { url, broken, digest }) => {
  await cache.clear();
  const wrong = await Model.prefetch(url, { sha256: "0".repeat(64) }).catch(({ code }) => code);
  const kept = await Model.cached();
  const notices = [];
  await Model.prefetch(broken, { sha256: digest, onNotice: ({ code }) => notices.push(code) });
  const [one] = await Model.cached();
  return { wrong, kept, notices, one, removed: await Model.remove(broken), files: await cache.list() };
}, () => ({ url: server.url("assets/stories.gguf"), broken: server.url("assets/stories.gguf", { after: 500_000 }), digest }), ({ wrong, kept, notices, one, removed, files }) => {
  assert.deepEqual([wrong, kept, notices, one.complete, removed, files], ["digest", [], ["reconnected"], true, true, []]);
});

everywhere("the models that are known have what a first screen needs", ({ Model }) => Model.list(), (models) => {
  for (const { name, parameters, sizeBytes, maxContextLength, licence, quantisation, use, cacheBytesPerToken } of models) {
    // SigLIP reads captions of 64 tokens.
    assert.ok(parameters > 1e7 && maxContextLength >= (use === "embed" ? 64 : 256) && licence !== "" && ["chat", "embed", "rerank", "speech"].includes(use), name);
    // Bits per weight; some files contain the embedding twice.
    const bits = sizeBytes * 8 / parameters;
    const whole = bits < 24 ? [15.5, 16.5] : [31, 33];
    const [least, most] = quantisation === null ? whole : quantisation === "Q8_0" ? [8.2, 9] : [4.5, 8.2];
    assert.ok(bits >= least && bits <= most, `${name}: ${bits} bits a weight`);
    assert.equal(cacheBytesPerToken === null, use !== "chat", name);
  }
});
