// From opening a page to the first token of a text, in Chromium on the CPU: this package, the demo page, and the npm package
// `@wllama/wllama` with the same GGUF file, in turns, each cold (a new profile) and warm (the page opened again).
//
//     scripts/build-web && node benches/web/cold_start.mjs [runs]
//
// wllama is fetched from npm into a temporary folder. Times are the page's own clock, which starts with the navigation.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { openBrowser } from "../../tests/web/browser.mjs";
import { repository, startServer } from "../../tests/web/server.mjs";
import { median, scriptPage, serveWllama } from "./wllama.mjs";

const PROMPT = "Once upon a time";
const runs = Number(process.argv[2] ?? 7);

const tilewright = scriptPage(`
  import { Model } from "/npm/index.js";
  const model = await Model.load(location.origin + "/assets/stories.gguf", { device: "cpu" });
  for await (const { text } of model.generate(${JSON.stringify(PROMPT)}, { maxTokens: 8 })) {
    if (text !== "") { window.firstToken ??= performance.now(); }
  }`);

const wllama = scriptPage(`
  import { Wllama } from "/files/wllama.js";
  const wllama = new Wllama({ default: location.origin + "/files/wllama.wasm" }, { suppressNativeLog: true });
  await wllama.loadModelFromUrl(location.origin + "/assets/stories.gguf", { n_gpu_layers: 0, n_threads: 1, n_ctx: 512 });
  const stream = await wllama.createCompletion({ prompt: ${JSON.stringify(PROMPT)}, max_tokens: 8, temperature: 0, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices?.[0]?.text) { window.firstToken ??= performance.now(); }
  }`);

/** Sends a prompt as soon as the demo page lets it, and notes when the answer begins. */
function driveDemo(prompt) {
  const begin = () => {
    const field = document.querySelector("#prompt");
    field.value = prompt;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    document.querySelector("#send").click();
  };
  let sent = false;
  const look = () => {
    if (!sent && document.documentElement.dataset.state === "ready") {
      sent = true;
      begin();
    }
    const answer = document.querySelector("#output .message[data-role=assistant]");
    if (sent && answer && answer.textContent.replace(prompt, "").trim() !== "") {
      window.firstToken ??= performance.now();
    }
    if (window.firstToken === undefined) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}

const server = await startServer();
try {
  const version = serveWllama(server);
  server.files.set("wllama.html", wllama);
  server.files.set("tilewright.html", tilewright);

  const contenders = [
    { name: "tilewright, package", path: "/files/tilewright.html" },
    { name: "tilewright, demo page", path: "/www/index.html", drive: driveDemo },
    { name: `wllama ${version}`, path: "/files/wllama.html" },
  ];
  const times = new Map(contenders.map(({ name }) => [name, { cold: [], warm: [] }]));
  for (let run = 0; run < runs; run++) {
    for (const { name, path, drive } of contenders) {
      const browser = await openBrowser({ gpu: false });
      for (const visit of ["cold", "warm"]) {
        const view = await browser.context.newPage();
        if (drive) await view.addInitScript(drive, PROMPT);
        await view.goto(server.origin + path);
        const handle = await view.waitForFunction(() => window.firstToken);
        times.get(name)[visit].push(await handle.jsonValue());
        await view.close();
      }
      await browser.close();
    }
  }
  const base = times.get("tilewright, package");
  console.log(`assets/stories.gguf, ${readFileSync(join(repository, "assets/stories.gguf")).length} bytes; median of ${runs} runs, in ms (lowest to highest)`);
  for (const [name, visits] of times) {
    const cells = ["cold", "warm"].map((visit) => {
      const values = visits[visit];
      const range = `${Math.min(...values).toFixed(0)} to ${Math.max(...values).toFixed(0)}`;
      return `${visit} ${median(values).toFixed(0)} (${range}), ${(median(values) / median(base[visit])).toFixed(2)}x`;
    });
    console.log(`${name.padEnd(24)} ${cells.join("   ")}`);
  }
} finally {
  await server.stop();
}
