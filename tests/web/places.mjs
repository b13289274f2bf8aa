// Runs the same test code in a Chromium page and in Node. Importing this opens a server and a browser for the file's
// tests.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { pathToFileURL } from "node:url";

import { openBrowser } from "./browser.mjs";
import { bytesInMemory, repository, startServer } from "./server.mjs";

export let server;
export let chromium;
before(async () => {
  server = await startServer();
  chromium = await openBrowser();
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  await server?.stop();
  folders.forEach((at) => rmSync(at, { recursive: true, force: true }));
});

const folders = [];

/** A folder of these files, by name, in a form that a place can load. Its name is `name`. */
export function published(place, name, files) {
  if (place === "Chromium") {
    for (const [file, content] of Object.entries(files)) server.files.set(`${name}/${file}`, bytesInMemory(Buffer.from(content)));
    return `${server.origin}/files/${name}/`;
  }
  const at = mkdtempSync(join(tmpdir(), "tilewright-folder-"));
  folders.push(at);
  for (const [file, content] of Object.entries(files)) {
    mkdirSync(dirname(join(at, name, file)), { recursive: true });
    writeFileSync(join(at, name, file), content);
  }
  return `${join(at, name)}/`;
}

/**
 * Devices that a test of encoders uses in a place. The CPU module is the same in both places. With an empty cache,
 * Mesa's driver takes two minutes of CPU time to compile an encoder's shaders from Dawn. So both are for full runs.
 */
export const devicesIn = (place) =>
  process.env.TILEWRIGHT_FULL ? ["cpu", "gpu"] : [{ Chromium: "gpu", Node: "cpu" }[place]];

/** By place: runs a function there with the package and its argument, and returns plain data. */
export const places = {
  async Chromium(run, given) {
    const page = await chromium.open(`${server.origin}/blank.html`);
    try {
      const call = ([source, given]) => import("/npm/index.js").then((package_) => new Function(`return ${source}`)()(package_, given));
      const result = await page.evaluate(call, [run.toString(), given]);
      assert.deepEqual(page.problems, []);
      return result;
    } finally {
      await page.close();
    }
  },
  async Node(run, given) {
    const result = await run(await import(pathToFileURL(join(repository, "npm/dist/index.js"))), given);
    // Results of a page have passed through JSON.
    return JSON.parse(JSON.stringify(result ?? null));
  },
};

/**
 * One test per place: `run` executes there with `given`, or with its result for the place, and returns plain data;
 * `check` checks it here.
 */
export function everywhere(name, run, check, given = {}) {
  for (const [place, execute] of Object.entries(places)) {
    test(`${place}: ${name}`, { timeout: 120_000 }, async () => check(await execute(run, typeof given === "function" ? given(place) : given), place));
  }
}
