// Firefox for tests, headless, with WebGPU on the machine's Vulkan driver. playwright-core supports only its own
// Firefox builds; puppeteer-core drives the installed one.

import { createRequire } from "node:module";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const EXECUTABLE = [process.env.FIREFOX, "/usr/bin/firefox-esr", "/usr/bin/firefox"].find((path) => path && existsSync(path));

const PREFERENCES = {
  "dom.webgpu.enabled": true,
  // Software adapters are blocklisted; the sandboxed GPU process may not open their drivers.
  "gfx.webgpu.ignore-blocklist": true,
  "security.sandbox.gpu.level": 0,
  // No network traffic leaves this machine.
  "app.normandy.enabled": false,
  "app.update.enabled": false,
  "browser.safebrowsing.downloads.enabled": false,
  "datareporting.policy.dataSubmissionEnabled": false,
  "network.connectivity-service.enabled": false,
  "services.settings.server": "http://localhost:1/",
  "toolkit.telemetry.unified": false,
};

/** Why there is no Firefox; undefined if there is one. */
export const missingFirefox = EXECUTABLE === undefined ? "Firefox is not installed (Debian: firefox-esr)" : undefined;

/** A browser with its own profile. `evaluate` runs a function in a new page. */
export async function openFirefox() {
  const { default: puppeteer } = await import(createRequire(new URL("../../npm/package.json", import.meta.url)).resolve("puppeteer-core"));
  const profile = mkdtempSync(join(tmpdir(), "tilewright-firefox-"));
  const browser = await puppeteer.launch({
    browser: "firefox", executablePath: EXECUTABLE, headless: true, userDataDir: profile, extraPrefsFirefox: PREFERENCES, protocolTimeout: 1_200_000,
  });
  return {
    async evaluate(url, run, ...given) {
      const page = await browser.newPage();
      try {
        await page.goto(url);
        return await page.evaluate(run, ...given);
      } finally {
        await page.close();
      }
    },
    async close() {
      await browser.close();
      rmSync(profile, { recursive: true, force: true });
    },
  };
}
