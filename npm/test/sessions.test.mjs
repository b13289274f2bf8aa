// Kept sessions, in memory: which one a prompt goes on with, which one goes when there is no room, and that damaged ones are not used.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { Sessions, sessions } from "../build/sessions.js";
import { Store } from "../build/store.js";
import { MemoryBackend } from "./memory-backend.mjs";

const MODEL = "0123456789abcdef-f16";
const range = (from, to) => Uint32Array.from({ length: to - from }, (_, i) => from + i);
/** What a model gives: a file of so many bytes, in pieces. */
const bytes = (n, fill) => () => {
  const pieces = Array.from({ length: Math.ceil(n / 40) }, (_, i) => new Uint8Array(Math.min(40, n - 40 * i)).fill(fill));
  return { size: () => n, next: async () => pieces.shift(), free() {} };
};
function newDigest() {
  const hash = createHash("sha256");
  return { update: (bytes) => hash.update(bytes), hex: () => hash.digest("hex"), free() {} };
}
/** Keeps sessions, and says what a prompt goes on with: the first byte, and how many there are. */
class Kept extends Sessions {
  save(model, tokens, content, maxBytes) {
    return super.save(model, tokens, content, maxBytes, newDigest);
  }

  async find(model, ids, nKnown, limits, onDamaged) {
    const found = await super.find(model, ids, nKnown, limits, newDigest, onDamaged);
    if (found === undefined) return undefined;
    const bytes = await found.read(0);
    assert.equal(bytes.length, found.size);
    found.close();
    return { bytes };
  }
}
const UNLIMITED = { mostTokens: 1000, mostBack: Infinity };
const ignored = () => assert.fail("nothing is damaged");
let clock = Date.now();

/** Sessions whose times are in order, however fast they come. */
function kept() {
  const backend = new MemoryBackend();
  const store = new Store(backend);
  const all = new Kept(store);
  const tick = (t) => t.mock.method(Date, "now", () => clock += 1000);
  return { all, backend, store, tick, again: () => new Kept(new Store(backend)) };
}

test("a prompt goes on with the session that has most of it, of its own model, if that is worth reading", async (t) => {
  const { all, tick } = kept();
  tick(t);
  await all.save(MODEL, range(0, 40), bytes(100, 1), 1e6);
  await all.save(MODEL, range(0, 60), bytes(200, 2), 1e6);
  await all.save("other-f16", range(0, 90), bytes(300, 3), 1e6);
  const find = async (ids, nKnown = 0, most = 1000, mostBack = Infinity) => (await all.find(MODEL, ids, nKnown, { mostTokens: most, mostBack }, ignored))?.bytes[0];
  // The shorter one has gone when the longer one came, which begins with it.
  assert.deepEqual((await all.list()).map(({ model, nTokens, sizeBytes }) => [model, nTokens, sizeBytes]), [["other-f16", 90, 300], [MODEL, 60, 200]]);
  assert.equal(await find(range(0, 100)), 2);
  assert.equal(await find(range(0, 30)), 2);
  assert.equal(await find(range(0, 100), 60), undefined);
  assert.equal(await find(range(0, 100), 50), undefined, "ten tokens are not worth sixty");
  assert.equal(await find(range(0, 10)), undefined, "a few tokens are computed sooner");
  assert.equal(await find(range(1, 100)), undefined);
  assert.equal(await find(range(0, 100), 0, 59), undefined, "the context has no room");
  assert.equal(await find([...range(0, 57), ...range(500, 600)], 0, 1000, 3), 2);
  assert.equal(await find([...range(0, 56), ...range(500, 600)], 0, 1000, 3), undefined, "the model cannot go back so far");
  assert.equal(await find([0, 1, ...range(500, 600)]), undefined, "most sequences begin alike");
});

test("what was not used for longest goes first, and what is too large by itself is refused", async (t) => {
  const { all, tick, again } = kept();
  tick(t);
  for (const at of [1, 2, 3]) await all.save(MODEL, range(at * 100, at * 100 + 50), bytes(100, at), 350);
  assert.equal((await all.find(MODEL, range(100, 190), 0, UNLIMITED, ignored)).bytes[0], 1);
  await all.save(MODEL, range(400, 450), bytes(100, 4), 350);
  const first = async (store) => Promise.all([1, 2, 3, 4].map(async (at) => (await store.find(MODEL, range(at * 100, at * 100 + 90), 0, UNLIMITED, ignored))?.bytes[0]));
  assert.deepEqual(await first(all), [1, undefined, 3, 4]);
  assert.deepEqual(await first(again()), [1, undefined, 3, 4]);
  await assert.rejects(all.save(MODEL, range(0, 50), bytes(351, 5), 350), { code: "quota", message: /351 bytes.*350/ });
  assert.equal((await all.list()).length, 3);
  await all.save(MODEL, range(0, 50), bytes(350, 5), 350);
  assert.deepEqual((await all.list()).map(({ sizeBytes }) => sizeBytes), [350]);
});

test("the same session again takes the place of the first, and one can be deleted", async (t) => {
  const { all, tick } = kept();
  tick(t);
  const { id } = await all.save(MODEL, range(0, 50), bytes(100, 1), 1000);
  const again = await all.save(MODEL, range(0, 50), bytes(100, 2), 1000);
  assert.equal(again.id, id);
  assert.deepEqual((await all.list()).map((session) => session.id), [id]);
  assert.equal((await all.find(MODEL, range(0, 90), 0, UNLIMITED, ignored)).bytes[0], 2);
  assert.deepEqual([await all.delete(id), await all.delete(id)], [true, false]);
  await all.save(MODEL, range(0, 50), bytes(100, 1), 1000);
  await all.clear();
  assert.deepEqual(await all.list(), []);
});

test("half a session, and one whose bytes are others, are never used", async () => {
  for (const harm of [
    (content) => content.subarray(0, 60),
    (content) => Buffer.concat([content.subarray(0, 60), Buffer.from([9]), content.subarray(61)]),
    () => Buffer.alloc(0),
  ]) {
    const { all, backend, again } = kept();
    await all.save(MODEL, range(0, 50), bytes(100, 1), 1000);
    const [[key, content]] = backend.bytes;
    backend.bytes.set(key, harm(content));
    let damaged = 0;
    assert.equal(await again().find(MODEL, range(0, 90), 0, UNLIMITED, () => damaged += 1), undefined);
    assert.equal(damaged, 1);
    assert.deepEqual([await again().list(), backend.bytes.size], [[], 0]);
  }
  // A tab was closed while it wrote.
  const { all, backend, again } = kept();
  const whole = backend.writeRecord;
  backend.writeRecord = (key, record) => record.complete ? Promise.reject(new Error("closed")) : whole.call(backend, key, record);
  await assert.rejects(all.save(MODEL, range(0, 50), bytes(100, 1), 1000), /closed/);
  backend.writeRecord = whole;
  assert.deepEqual(await again().list(), []);
  assert.equal(await again().find(MODEL, range(0, 90), 0, UNLIMITED, ignored), undefined);
  await all.save(MODEL, range(200, 250), bytes(100, 2), 1000);
  assert.equal(backend.bytes.size, 1, "half a session is deleted when another one is kept");
  await all.save(MODEL, range(0, 50), bytes(100, 1), 1000);
  assert.equal((await again().find(MODEL, range(0, 90), 0, UNLIMITED, ignored)).bytes.length, 100);
});

test("what is too large is refused before anything goes; one that finds no room while it is written makes some, and is written again", async (t) => {
  const { all, backend, tick, again } = kept();
  tick(t);
  for (const at of [1, 2]) await all.save(MODEL, range(at * 100, at * 100 + 50), bytes(100, at), 1000);
  const unread = () => ({ ...bytes(1001, 5)(), next: () => assert.fail("it was read") });
  await assert.rejects(all.save(MODEL, range(0, 50), unread, 1000), { code: "quota", message: /1001 bytes.*1000/ });
  assert.equal((await all.list()).length, 2);
  const { openWriter } = backend;
  backend.openWriter = async (key, at) => {
    const writer = await openWriter.call(backend, key, at);
    let nWritten = 0;
    return { ...writer, write: async (piece) => {
      nWritten += 1;
      if (nWritten === 2 && backend.bytes.size > 1) throw new DOMException("full", "QuotaExceededError");
      return writer.write(piece);
    } };
  };
  await all.save(MODEL, range(0, 50), bytes(100, 3), 1000);
  assert.deepEqual((await again().list()).map(({ nTokens, sizeBytes }) => [nTokens, sizeBytes]), [[50, 100], [50, 100]]);
  const first = async (from) => (await again().find(MODEL, range(from, from + 90), 0, UNLIMITED, ignored))?.bytes[0];
  assert.deepEqual([await first(0), await first(100), await first(200)], [3, undefined, 2]);
});

test("bytes that no record tells of are deleted when a session is kept", async () => {
  const { all, backend } = kept();
  backend.bytes.set("of a tab that was closed", Buffer.alloc(7));
  await all.save(MODEL, range(0, 50), bytes(100, 1), 1000);
  assert.equal(backend.bytes.size, 1);
});

test("another tab's sessions are found once it has told of them", async () => {
  const { backend, store } = kept();
  const [mine, theirs] = [new Kept(store), new Kept(new Store(backend), () => mine.forget())];
  assert.equal(await mine.find(MODEL, range(0, 90), 0, UNLIMITED, ignored), undefined);
  const { id } = await theirs.save(MODEL, range(0, 50), bytes(100, 1), 1000);
  assert.equal((await mine.find(MODEL, range(0, 90), 0, UNLIMITED, ignored)).bytes[0], 1);
  await theirs.delete(id);
  assert.equal(await mine.find(MODEL, range(0, 90), 0, UNLIMITED, ignored), undefined);
});

test("one that another tab is writing is passed over for the next best, without a wait", async (t) => {
  const { all, store, tick } = kept();
  tick(t);
  await all.save(MODEL, [...range(0, 60), ...range(500, 501)], bytes(100, 1), 1000);
  await all.save(MODEL, [...range(0, 50), ...range(600, 601)], bytes(100, 2), 1000);
  const best = (await all.list()).find(({ nTokens }) => nTokens === 61);
  const find = async () => (await all.find(MODEL, range(0, 90), 0, UNLIMITED, ignored)).bytes[0];
  assert.equal(await find(), 1);
  const claim = store.claim.bind(store);
  // As Web Locks answer.
  store.claim = async (url, mode, signal, wait) => {
    assert.equal(wait, false);
    return url.endsWith(best.id) ? undefined : claim(url, mode, signal, wait);
  };
  assert.equal(await find(), 2);
});

test("without a browser's storage there are none", async () => {
  assert.deepEqual([await sessions.list(), await sessions.delete("a"), await sessions.clear()], [[], false, undefined]);
});
