// The demo page's main thread in Chromium while a text is streamed: its longest task. Browsers tell of tasks of 50 ms and more
// (PerformanceObserver, `longtask`); the page is to have none of them.
//
//     scripts/build-web && node benches/web/long_tasks.mjs [rounds]
//
// On the CPU and on the software adapter, which works on the same cores. That the page can see such tasks is tried first.

import { openBrowser } from "../../tests/web/browser.mjs";
import { startServer } from "../../tests/web/server.mjs";

const LIMIT_MS = 50;
const rounds = Number(process.argv[2] ?? 5);

/** Runs in a page before its scripts. */
function observe() {
  globalThis.longTasks = [];
  new PerformanceObserver((list) => longTasks.push(...list.getEntries().map(({ duration }) => duration))).observe({ type: "longtask" });
}

const waitFor = (page, wanted) => page.waitForFunction((wanted) => document.documentElement.dataset.state === wanted, wanted);

/** Durations of the long tasks since the last call. */
async function takeLongTasks(page) {
  // They are told of after they have ended.
  await page.evaluate(() => new Promise((resolve) => setTimeout(resolve, 200)));
  return page.evaluate(() => longTasks.splice(0));
}

const server = await startServer();
try {
  for (const device of ["cpu", "gpu"]) {
    const browser = await openBrowser();
    const page = await browser.open(`${server.origin}/blank.html`);
    await page.addInitScript(observe);
    await page.goto(`${server.origin}/www/`);
    await waitFor(page, "ready");
    // A task of the page's own: what a driver evaluates is not always counted as one.
    await page.evaluate(
      () =>
        new Promise((resolve) => {
          setTimeout(() => {
            const end = performance.now() + 80;
            while (performance.now() < end);
            resolve();
          });
        }),
    );
    const tried = await takeLongTasks(page);
    if (!tried.some((ms) => ms >= 80)) throw new Error("this browser does not tell of long tasks");

    await page.locator("#settings").evaluate((details) => (details.open = true));
    await page.selectOption("#setting-device", device);
    await page.fill("#setting-maxTokens", "400");
    await page.click("#settings-reload");
    await page.waitForFunction(() => document.documentElement.dataset.state === "loading");
    await waitFor(page, "ready");
    const loading = await takeLongTasks(page);
    let [tasks, tokens] = [[], 0];
    for (let round = 0; round < rounds; round++) {
      await page.fill("#prompt", "Once upon a time");
      await page.press("#prompt", "Enter");
      await waitFor(page, "generating");
      await waitFor(page, "ready");
      tasks = tasks.concat(await takeLongTasks(page));
      tokens += Number(/([\d,]+) tokens/.exec(await page.innerText("#output .turn:last-child .note"))[1].replaceAll(",", ""));
    }
    const told = (ms) => (ms.length === 0 ? `none of ${LIMIT_MS} ms or more` : `${ms.length} of ${LIMIT_MS} ms or more, the longest ${Math.max(...ms).toFixed(0)} ms`);
    console.log(`${await page.innerText("#status-device")}: tasks of the main thread while ${tokens} tokens were streamed in ${rounds} texts: ${told(tasks)}; while the model was loaded: ${told(loading)}`);
    await browser.close();
  }
} finally {
  await server.stop();
}
