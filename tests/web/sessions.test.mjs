// Sessions in the browser's storage: a conversation resumes in another page as if uninterrupted.

import assert from "node:assert/strict";
import { test } from "node:test";

import { places } from "./places.mjs";
import { withTemplate } from "./template.mjs";

const file = withTemplate("{% for m in messages %}{{ m.content }} {% endfor %}");
const MESSAGES = [{ role: "user", content: "Once upon a time there was a small dragon who lived in a house. One day, he went to the market and saw a red toy car." }];

/** The same with other weights. */
function otherModel() {
  const other = Buffer.from(file);
  // Tensors begin at multiples of 32, with a number's lowest bits.
  for (let at = 32 * Math.ceil(other.length / 64); at < other.length; at += 32) other[at] ^= 1;
  return other;
}

/** Runs in a page: a conversation's result, and the data saved afterwards. */
async function converse({ Model, sessions }, { file, messages, load, options, save, clear }) {
  if (clear) await sessions.clear();
  const notices = [];
  const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu", exact: true, onNotice: (notice) => notices.push(notice), ...load });
  const generation = model.chat(messages, { temperature: 0, maxTokens: 24, ignoreEos: true, ...options });
  const text = await generation.text();
  const { promptTokens, cachedTokens } = await generation.result;
  const saved = save === undefined ? undefined : await model.saveSession(save).catch(({ code, message }) => `${code}: ${message}`);
  model.free();
  return { text, promptTokens, cachedTokens, saved, notices, kept: await sessions.list() };
}

const inNewPage = (given) => places.Chromium(converse, { file: file.toString("base64"), messages: MESSAGES, ...given });

/** Runs in a page: replaces the bytes and the record of the only saved session. */
async function harm(_, { bytes, sha256 }) {
  const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("tilewright-sessions");
  for await (const [name, handle] of folder.entries()) {
    const write = async (content) => {
      const stream = await handle.createWritable();
      await stream.write(content);
      await stream.close();
    };
    if (name.endsWith(".bin")) {
      const old = new Uint8Array(await (await handle.getFile()).arrayBuffer());
      old[old.length >> 1] ^= 1;
      await write(bytes === undefined ? old : Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0)));
    } else if (sha256 !== undefined) {
      const record = JSON.parse(await (await handle.getFile()).text());
      await write(JSON.stringify({ ...record, sha256, stored: atob(bytes).length, size: atob(bytes).length }));
    }
  }
}

test("Chromium: a conversation that was kept goes on in a new page, with nothing computed again", { timeout: 120_000 }, async () => {
  const names = (at) => places.Chromium(async (_, { at }) => {
    let folder = await navigator.storage.getDirectory();
    if (at !== undefined) folder = await folder.getDirectoryHandle(at);
    const names = [];
    for await (const name of folder.keys()) names.push(name);
    return names;
  }, { at });
  await inNewPage({ clear: true });
  assert.deepEqual((await names()).filter((name) => name.includes("sessions")), [], "what only looks for sessions leaves nothing");
  const first = await inNewPage({ clear: true, save: {} });
  assert.deepEqual((await names("tilewright-sessions")).map((name) => name.replace(/^[0-9a-f]{64}(-2)?/, "")).sort(), [".bin", ".json"]);
  assert.equal(first.cachedTokens, 0);
  assert.ok(first.promptTokens > 20);
  assert.deepEqual(first.kept, [first.saved]);
  // The last generated token is not cached yet.
  assert.equal(first.saved.nTokens, first.promptTokens + 23);
  const again = await inNewPage({});
  assert.deepEqual([again.text, again.promptTokens - again.cachedTokens], [first.text, 1]);
  const next = [...MESSAGES, { role: "assistant", content: first.text.trim() }, { role: "user", content: "The end. Then he" }];
  const computed = await inNewPage({ messages: next, load: { cache: false } });
  const reopened = await inNewPage({ messages: next });
  assert.equal(reopened.text, computed.text);
  assert.equal(computed.cachedTokens, 0);
  assert.ok(reopened.cachedTokens >= first.promptTokens, JSON.stringify(reopened));
  // Other beginnings, and disabled lookups.
  const other = await inNewPage({ messages: [{ role: "user", content: "A red cat and a black dog were friends. They liked to play with a ball in the garden all day." }] });
  assert.equal(other.cachedTokens, 0);
  assert.deepEqual([again, computed, reopened, other].flatMap(({ notices }) => notices), []);
  assert.equal(other.kept[0].id, first.saved.id);
  assert.ok(other.kept[0].date > first.saved.date);
});

test("Chromium: a kept session goes on on a GPU", { timeout: 120_000 }, async () => {
  await inNewPage({ clear: true, save: {} });
  const { text, promptTokens, cachedTokens } = await inNewPage({ load: { device: "gpu" }, options: { maxTokens: 6 } });
  const computed = await inNewPage({ load: { cache: false }, options: { maxTokens: 6 } });
  assert.deepEqual([text, promptTokens - cachedTokens], [computed.text, 1]);
});

test("Chromium: a damaged session, and one of another model, are dropped with a notice, and the text is the same", { timeout: 120_000 }, async () => {
  const first = await inNewPage({ clear: true, save: {} });
  await places.Chromium(harm, {});
  const damaged = await inNewPage({});
  assert.deepEqual([damaged.text, damaged.cachedTokens, damaged.kept], [first.text, 0, []]);
  assert.deepEqual(damaged.notices.map(({ code }) => code), ["session_dropped"]);
  assert.match(damaged.notices[0].message, /SHA-256/);
  // Another model ignores it.
  await inNewPage({ save: {} });
  const other = otherModel().toString("base64");
  const elsewhere = await inNewPage({ file: other });
  assert.deepEqual([elsewhere.cachedTokens, elsewhere.notices, elsewhere.kept.length], [0, [], 1]);
  // A file of another model in its place, with a valid digest.
  const bytes = await places.Chromium(async ({ Model, sessions }, { file }) => {
    const before = (await sessions.list()).map(({ id }) => id);
    const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
    await model.generate("Once upon a time", { maxTokens: 4 }).text();
    const { id } = await model.saveSession();
    model.free();
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("tilewright-sessions");
    for await (const [name, handle] of folder.entries()) {
      if (!name.endsWith(".json")) continue;
      const record = JSON.parse(await (await handle.getFile()).text());
      if (!record.url.endsWith(id)) continue;
      const content = new Uint8Array(await (await (await folder.getFileHandle(name.replace("json", "bin"))).getFile()).arrayBuffer());
      await sessions.delete(id);
      return { bytes: btoa(Array.from(content, (byte) => String.fromCharCode(byte)).join("")), sha256: record.sha256, before };
    }
  }, { file: other });
  await places.Chromium(harm, bytes);
  const wrong = await inNewPage({});
  assert.deepEqual([wrong.text, wrong.cachedTokens, wrong.kept], [first.text, 0, []]);
  assert.match(wrong.notices[0].message, /those of `tilewright stories`, [0-9a-f]{16}, expected the weights of `tilewright stories`, [0-9a-f]{16}$/);
  assert.equal(wrong.notices[0].code, "session_dropped");
});

test("Chromium: the session that was not used for longest makes room, and one that has none is refused", { timeout: 120_000 }, async () => {
  const first = await inNewPage({ clear: true, save: {} });
  const messages = [{ role: "user", content: "A red cat and a black dog were friends. They liked to play with a ball in the garden all day." }];
  const maxBytes = first.saved.sizeBytes + 100;
  const second = await inNewPage({ messages, save: { maxBytes } });
  assert.deepEqual(second.kept.map(({ id }) => id), [second.saved.id]);
  assert.notEqual(second.saved.id, first.saved.id);
  const refused = await inNewPage({ save: { maxBytes: 1000 } });
  assert.match(refused.saved, /^quota: .*1000/);
  assert.deepEqual(refused.kept.map(({ id }) => id), [second.saved.id]);
  // A longer conversation replaces the one that it continues.
  const longer = await inNewPage({ messages, options: { maxTokens: 40 }, save: {} });
  assert.deepEqual(longer.kept.map(({ id }) => id), [longer.saved.id]);
});

test("Chromium and Node: what cannot be kept is an error that says why", { timeout: 120_000 }, async () => {
  const refusals = async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const fail = (options) => model.saveSession(options).then(() => "worked", ({ code, message }) => `${code}: ${message}`);
    const told = [await fail(), await fail({ maxBytes: -1 })];
    await model.generate("Once upon a time", { maxTokens: 2 }).text();
    told.push(await fail());
    model.free();
    const uncached = await Model.builtin({ device: "cpu", cache: false });
    await uncached.generate("Once upon a time", { maxTokens: 2 }).text();
    told.push(await uncached.saveSession().then(() => "worked", ({ code, message }) => `${code}: ${message}`));
    uncached.free();
    return told;
  };
  for (const [place, run] of Object.entries(places)) {
    const [early, negative, kept, uncached] = await run(refusals);
    assert.match(early, /^option: .*nothing was/);
    assert.match(negative, /^option: maxBytes is -1/);
    assert.match(kept, place === "Node" ? /^storage: / : /^worked/);
    assert.match(uncached, /^option: .*cache: false/);
  }
});
