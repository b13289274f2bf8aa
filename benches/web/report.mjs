// What the demo page's tab “Kernels” measures in Chromium, as a file: the report that it gives to copy.
//
//     scripts/build-web && node benches/web/report.mjs cpu|gpu [--quick]

import { openBrowser } from "../../tests/web/browser.mjs";
import { startServer } from "../../tests/web/server.mjs";

const [device = "cpu"] = process.argv.slice(2);
const server = await startServer();
const browser = await openBrowser({ gpu: device === "gpu" });
try {
  const page = await browser.open(`${server.origin}/www/#kernels`);
  await page.waitForFunction(() => document.documentElement.dataset.bench === "idle" && document.documentElement.dataset.state === "ready");
  await page.check(`#bench-device-${device}`);
  if (process.argv.includes("--quick")) await page.check("#bench-quick");
  await page.click("#bench-run");
  await page.waitForFunction(() => ["done", "error"].includes(document.documentElement.dataset.bench), undefined, { timeout: 1_200_000 });
  const [json, error] = [await page.inputValue("#bench-json"), await page.innerText("#bench-error")];
  if (json === "") throw new Error(error);
  process.stdout.write(json);
} finally {
  await browser.close();
  await server.stop();
}
