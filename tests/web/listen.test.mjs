// The page's view “Listen”: a file and the microphone, which is Chromium's fake one and hears a file; subtitles, errors, screenshots.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { pageModule } from "./page-module.mjs";
import { bytesInMemory, dataPath, lacksData, repository, startServer } from "./server.mjs";

const limited = { timeout: 120_000 };
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS ?? mkdtempSync(join(tmpdir(), "tilewright-screenshots-"));
mkdirSync(screenshots, { recursive: true });
const folder = join(repository, "tests/data/tiny-random-sound");
const chirp = join(folder, "chirp.wav");

let server;
let chromium;
before(async () => {
  server = await startServer();
  for (const name of readdirSync(folder)) server.files.set(`tiny/${name}`, bytesInMemory(readFileSync(join(folder, name))));
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block", microphone: dataPath("speech/bridge.wav") });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  console.log(`screenshots are in ${screenshots}`);
});

const waitFor = (page, wanted) => page.waitForFunction((wanted) => document.documentElement.dataset.listen === wanted, wanted);
const texts = (page) => page.locator("#listen-segments .text").allInnerTexts();

async function openListen(address) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.clear());
  await page.goto(`${server.origin}/www/#listen`);
  page.on("console", (message) => {
    if (message.type() === "error" && !/Failed to load resource|ERR_/.test(message.text())) page.problems.push(message.text());
  });
  await page.waitForFunction(() => document.documentElement.dataset.state === "ready");
  await waitFor(page, "empty");
  if (address !== undefined) {
    await page.fill("#model-url", address);
    await page.click("#model-url-load");
    await waitFor(page, "ready");
  }
  return page;
}

async function close(page) {
  assert.deepEqual(page.problems, [], "errors in the page's console");
  await page.close();
}

/** The text of a file that a click downloads. */
async function downloaded(page, button) {
  const [file] = await Promise.all([page.waitForEvent("download"), page.click(button)]);
  return { name: file.suggestedFilename(), text: readFileSync(await file.path(), "utf8") };
}

test("a file becomes segments with times, to copy and to save; a language is chosen, and what is no sound is refused", limited, async () => {
  const page = await openListen(`${server.origin}/files/tiny/`);
  assert.equal(await page.innerText("#speech-name"), "tiny");
  assert.match(await page.innerText("#listen-device"), /CPU/);
  assert.deepEqual(await page.locator("#listen-language option").allInnerTexts(), ["Detected", "English", "German"]);
  await page.selectOption("#listen-language", "en");
  await page.setInputFiles("#listen-file", chirp);
  await page.waitForFunction(() => /heard in/.test(document.querySelector("#listen-note").textContent));
  await waitFor(page, "ready");
  const segments = await texts(page);
  assert.ok(segments.length > 0 && segments.every((text) => text !== ""), segments.join("|"));
  assert.match(await page.innerText("#listen-segments li >> nth=0 >> time"), /^0:0\d$/);
  assert.match(await page.innerText("#listen-note"), /^3\.0 s heard in .* · English$/);
  const srt = await downloaded(page, "#listen-srt");
  assert.equal(srt.name, "chirp.srt");
  assert.equal(srt.text.match(/ --> /g).length, segments.length);
  assert.match((await downloaded(page, "#listen-vtt")).text, /^WEBVTT\n/);
  const squeezed = (text) => text.replace(/\s+/g, " ").trim();
  assert.equal(squeezed((await downloaded(page, "#listen-txt")).text), squeezed(segments.join(" ")));

  await page.setInputFiles("#listen-file", { name: "words.wav", mimeType: "audio/wav", buffer: Buffer.from("words") });
  await page.waitForSelector("#error[data-code=not_a_sound]");
  assert.match(await page.innerText("#error-text"), /no format of sound/);
  await page.click("#error-close");
  await waitFor(page, "ready");
  assert.equal(await page.evaluate(() => document.activeElement.id), "listen-record");
  await close(page);
});

test("speaking in the chat without a speech model leads to the view that loads one", limited, async () => {
  const page = await openListen();
  await page.click("#tab-chat");
  await page.click("#dictate");
  await page.waitForFunction(() => document.documentElement.dataset.view === "listen");
  assert.match(await page.innerText(".notice[data-code=microphone]"), /load one/);
  await close(page);
});

test("a file that is dropped before there is a model is heard when there is one", limited, async () => {
  const page = await openListen();
  await page.setInputFiles("#listen-file", chirp);
  assert.match(await page.innerText("#listen-note"), /chirp\.wav is heard as soon as there is a model/);
  await page.fill("#model-url", `${server.origin}/files/tiny/`);
  await page.click("#model-url-load");
  await page.waitForFunction(() => /heard in/.test(document.querySelector("#listen-note").textContent));
  await close(page);
});

test("what two runs agree on is settled, but never the last segment", async () => {
  const { LiveTranscript } = await pageModule("listen/live");
  const live = new LiveTranscript();
  const said = (...texts) => texts.map((text, i) => ({ start: i, end: i + 1, text: ` ${text}` }));
  live.add(said("One", "too"), 2);
  assert.deepEqual([live.settled.length, live.tail.length, live.heardUntil, live.prompt], [0, 2, 0, ""]);
  live.add(said("one.", "two", "thre"), 3);
  assert.deepEqual([live.settled.map(({ text }) => text), live.heardUntil, live.prompt], [[" one."], 1, "one."]);
  // From second 1 on: times begin there.
  live.add(said("two", "three"), 4);
  assert.deepEqual(live.segments.map(({ start, text }) => [start, text]), [[0, " one."], [1, " two"], [2, " three"]]);
  assert.equal(live.heardUntil, 2);
  // A rest longer than a window is settled but for its last segment.
  live.add(said("three", "four", "fife"), 33);
  assert.deepEqual([live.settled.length, live.heardUntil], [4, 4]);
  live.end(said("five"));
  assert.deepEqual([live.segments.at(-1), live.tail], [{ start: 4, end: 5, text: " five" }, []]);
  // Silence is not heard again and again.
  live.add([], 40);
  assert.equal(live.heardUntil, 39);
});

test("the microphone is written down while it hears, and what is said stays after it stops", { timeout: 240_000, skip: lacksData("whisper-tiny.en", "speech") }, async () => {
  const page = await openListen(`${server.origin}/data/whisper-tiny.en/`);
  await page.click("#listen-record");
  await waitFor(page, "recording");
  assert.equal(await page.innerText("#listen-record"), "Stop");
  await page.waitForFunction(() => /bridge/i.test(document.querySelector("#listen-segments").textContent));
  await page.screenshot({ path: join(screenshots, "listen-recording.png") });
  await page.click("#listen-record");
  await waitFor(page, "ready");
  assert.equal(await page.locator("#listen-segments .tail").count(), 0);
  assert.match((await texts(page)).join(" "), /the old bridge crosses the river/i);
  assert.match(await page.innerText("#listen-note"), /heard in/);
  assert.match((await downloaded(page, "#listen-srt")).name, /^recording .*\.srt$/);

  // The chat's prompt is spoken with the same model.
  await page.click("#tab-chat");
  await page.fill("#prompt", "Continue:");
  await page.click("#dictate");
  await page.waitForSelector("#dictate[aria-pressed=true]");
  await page.waitForFunction(() => /river/i.test(document.querySelector("#listen-segments").textContent));
  await page.screenshot({ path: join(screenshots, "listen-dictate.png") });
  await page.click("#dictate");
  await page.waitForFunction(() => /^Continue: .*the river/i.test(document.querySelector("#prompt").value));
  await page.waitForSelector("#dictate[aria-pressed=false]");
  await close(page);
});

test("files of speech are kept when they are first used, and then work without a network", limited, async () => {
  const browser = await openBrowser({ gpu: false });
  try {
    const page = await browser.open(`${server.origin}/www/#listen`);
    const kept = () => page.evaluate(async () => {
      const versions = (await caches.keys()).filter((name) => /page[0-9a-f]+$/.test(name));
      const requests = await Promise.all(versions.map(async (name) => (await caches.open(name)).keys()));
      return requests.flat().map(({ url }) => url.replace(/^.*\//, ""));
    });
    await page.evaluate(() => navigator.serviceWorker.ready);
    assert.ok((await kept()).includes("worker.js"));
    // The service worker does not control the first visit; it does after a reload.
    await page.reload();
    await page.waitForFunction(() => navigator.serviceWorker.controller !== null);
    await waitFor(page, "empty");
    assert.deepEqual((await kept()).filter((name) => /speech/.test(name)), []);
    await page.fill("#model-url", `${server.origin}/files/tiny/`);
    await page.click("#model-url-load");
    await waitFor(page, "ready");
    await page.waitForFunction(async () => (await caches.match("tilewright/tilewright_speech_bg.wasm")) !== undefined && (await caches.match("tilewright/speech-worker.js")) !== undefined);
    server.isDown = true;
    await page.reload();
    // The last model is opened again.
    await waitFor(page, "ready");
    await page.setInputFiles("#listen-file", chirp);
    await page.waitForFunction(() => /heard in/.test(document.querySelector("#listen-note").textContent));
  } finally {
    server.isDown = false;
    await browser.close();
  }
});

test("screenshots on a desk and a phone, light and dark; nothing is wider than the screen", limited, async () => {
  const page = await openListen();
  const look = async (what) => {
    for (const [device, [width, height]] of Object.entries({ desk: [1280, 800], phone: [360, 740] })) {
      for (const colorScheme of ["light", "dark"]) {
        await page.setViewportSize({ width, height });
        await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
        await page.screenshot({ path: join(screenshots, `listen-${what}-${device}-${colorScheme}.png`) });
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${what} on a ${device}`);
      }
    }
    await page.setViewportSize({ width: 1280, height: 800 });
  };
  await look("empty");
  const address = dataPath("whisper-tiny.en") ? `${server.origin}/data/whisper-tiny.en/` : `${server.origin}/files/tiny/`;
  await page.fill("#model-url", address);
  await page.click("#model-url-load");
  await waitFor(page, "ready");
  await page.setInputFiles("#listen-file", dataPath("speech/bridge.wav"));
  await page.waitForFunction(() => /heard in/.test(document.querySelector("#listen-note").textContent));
  await look("file");
  await close(page);
});
