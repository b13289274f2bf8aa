// Chromium for tests: with WebGPU on its software adapter or without, with persistent profiles.

import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { chromium } = createRequire(new URL("../../npm/package.json", import.meta.url))("playwright-core");

const EXECUTABLE = process.env.CHROMIUM ?? "/usr/bin/chromium";
const FLAGS = [
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--host-resolver-rules=MAP insecure.test 127.0.0.1",
  // Background pages must not be throttled.
  "--disable-background-timer-throttling",
  "--disable-backgrounding-occluded-windows",
  "--disable-renderer-backgrounding",
  // Lets tests collect garbage.
  "--js-flags=--expose-gc",
];
// Chrome dropped the flag for loading an extension, but allows it over the protocol.
const EXTENSION_FLAGS = ["--enable-unsafe-extension-debugging"];
const microphoneFlags = (file) =>
  ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", `--use-file-for-fake-audio-capture=${file}%noloop`];
const GPU_FLAGS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"];

/**
 * A browser with its own profile, which `close` deletes. With `gpu: false` WebGPU exists but finds no adapter; with
 * `serviceWorkers: "block"` pages cannot register any, and see the server's current files. With `extensions`,
 * `loadExtension` works. `microphone`: a WAV file that the fake microphone plays once, then silence; pages need not ask.
 */
export async function openBrowser({ gpu = true, serviceWorkers = "allow", extensions = false, microphone } = {}) {
  const profile = await mkdtemp(join(tmpdir(), "tilewright-chromium-"));
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("VK_")));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: EXECUTABLE,
    args: [...FLAGS, ...(gpu ? GPU_FLAGS : ["--disable-gpu", "--disable-features=WebGPU"]), ...(extensions ? EXTENSION_FLAGS : []), ...(microphone ? microphoneFlags(microphone) : [])],
    ignoreDefaultArgs: extensions ? ["--disable-extensions"] : [],
    env,
    serviceWorkers,
  });
  // Less than a test's own timeout, so that the error names the awaited condition.
  context.setDefaultTimeout(90_000);
  const pages = new Set();
  context.on("page", (page) => {
    pages.add(page);
    page.on("close", () => pages.delete(page));
  });
  return {
    context,
    /** Loads an extension from a folder. Returns the address of its pages. */
    async loadExtension(folder) {
      const session = await context.browser().newBrowserCDPSession();
      const { id } = await session.send("Extensions.loadUnpacked", { path: folder });
      return `chrome-extension://${id}/`;
    },
    async close() {
      await context.close();
      await rm(profile, { recursive: true, force: true });
    },
    /** Crashes the process that does the GPU work of all pages. */
    async crashGpu() {
      const session = await context.browser().newBrowserCDPSession();
      await session.send("Browser.crashGpuProcess");
    },
    /** Opens an address; uncaught problems of the page are added to `page.problems`. */
    async open(url) {
      const page = await context.newPage();
      page.problems = [];
      page.on("pageerror", (error) => page.problems.push(error.message));
      await page.goto(url);
      return page;
    },
    /** Closes pages left open by a failed or timed-out test, with their workers and locks. */
    async closePages() {
      await Promise.all([...pages].map((page) => page.close()));
    },
  };
}

/** Limits an origin's storage to this many bytes; undefined removes the limit. */
export async function limitStorage(page, origin, bytes) {
  const session = await page.context().newCDPSession(page);
  await session.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: bytes });
}
