// The package as people get it: packed, installed into an empty Vite project, built, served in development, run in Node.

import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { cp, mkdtemp, rm, stat, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { promisify } from "node:util";

import { serveFile } from "../../scripts/static-server.mjs";
import { openBrowser } from "./browser.mjs";
import { repository } from "./server.mjs";

const run = promisify(execFile);

const EXAMPLE = `import { Model } from "tilewright";
const model = await Model.builtin({ device: "cpu" });
for await (const { text } of model.generate("Once upon a time", { maxTokens: 24 })) {
  document.body.append(text);
}
`;
const NODE_EXAMPLE = EXAMPLE.replace("document.body.append", "process.stdout.write") + "model.free();\n";
const FOLDER_EXAMPLE = `import { Embedder } from "tilewright";
const show = (text) => document.body.append(text);
try {
  const embedder = await Embedder.load("/model/", { device: "cpu" });
  show("vector of " + (await embedder.embed("the cat")).length + " numbers");
} catch (error) {
  show(error.code + ": " + error.message);
}
`;
const HTML = '<!doctype html><html lang="en"><title>example</title><body><script type="module" src="/main.js"></script></body></html>\n';
// The story model's greedy continuation, as in tests/data/builtin.
const STORY = /a silly boy named Ben/;

let folder;
let tarball;
let chromium;
let isInstalled = false;
before(async () => {
  folder = await mkdtemp(join(tmpdir(), "tilewright-vite-"));
  const { stdout } = await run("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", folder], { cwd: join(repository, "npm") });
  tarball = JSON.parse(stdout)[0];
  chromium = await openBrowser();
});
after(async () => {
  await chromium?.close();
  await rm(folder, { recursive: true, force: true });
});

test("the tarball has what is needed, and little else", async (t) => {
  const names = tarball.files.map((file) => file.path);
  for (const name of ["package.json", "README.md", "LICENSE-MIT", "LICENSE-APACHE", "dist/index.js", "dist/index.d.ts", "dist/worker.js", "dist/tilewright_bg.wasm", "dist/tilewright_text_bg.wasm", "dist/stories.gguf"]) {
    assert.ok(names.includes(name), `${name} is missing`);
  }
  assert.deepEqual(names.filter((name) => /\.ts$/.test(name) && !/\.d\.ts$/.test(name)), [], "TypeScript sources");
  const { size } = await stat(join(folder, tarball.filename));
  t.diagnostic(`tarball ${(size / 1e6).toFixed(2)} MB, unpacked ${(tarball.unpackedSize / 1e6).toFixed(2)} MB, ${names.length} files`);
  assert.ok(size < 4e6);
});

test("it installs into an empty project", { timeout: 180_000 }, async () => {
  await writeFile(join(folder, "package.json"), JSON.stringify({ name: "example", private: true, type: "module" }));
  await writeFile(join(folder, "main.js"), EXAMPLE);
  await writeFile(join(folder, "node.js"), NODE_EXAMPLE);
  await writeFile(join(folder, "index.html"), HTML);
  await run("npm", ["install", "--no-audit", "--no-fund", "--omit=peer", `./${tarball.filename}`, "vite@8", "typescript@7"], { cwd: folder });
  isInstalled = true;
});

const showsStory = (url) => shows(url, STORY);

async function shows(url, text) {
  const page = await chromium.open(url);
  try {
    await page.waitForFunction((text) => new RegExp(text).test(document.body.textContent), text.source, { timeout: 60_000 });
    assert.deepEqual(page.problems, []);
  } finally {
    await page.close();
  }
}

test("the five-line example runs from `vite build`", { timeout: 120_000 }, async (t) => {
  if (!isInstalled) return t.skip("not installed");
  await run("npx", ["--no-install", "vite", "build", "--logLevel", "warn"], { cwd: folder });
  const server = createServer((request, response) => serveFile(join(folder, "dist"), new URL(request.url, "http://localhost").pathname, request, response));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  try {
    await showsStory(`http://localhost:${server.address().port}/`);
  } finally {
    server.closeAllConnections();
    server.close();
  }
});

/** Starts Vite's development server in the project, for as long as `use` needs. */
async function withVite(use) {
  const vite = spawn(join(folder, "node_modules/.bin/vite"), ["--host", "127.0.0.1", "--port", "0"], { cwd: folder, env: { ...process.env, NO_COLOR: "1" } });
  try {
    const url = await new Promise((resolve, reject) => {
      let output = "";
      const read = (text) => {
        output += text;
        const found = /http:\/\/127\.0\.0\.1:\d+\//.exec(output);
        if (found) resolve(found[0]);
      };
      vite.stdout.on("data", read);
      vite.stderr.on("data", read);
      vite.once("exit", () => reject(new Error(`vite ended: ${output}`)));
    });
    await use(url);
  } finally {
    vite.kill();
  }
}

test("the five-line example runs from Vite's development server", { timeout: 120_000 }, async (t) => {
  if (!isInstalled) return t.skip("not installed");
  await withVite(showsStory);
});

test("a model's folder in Vite's `public` loads, though the server answers with its page for files that are not there", { timeout: 120_000 }, async (t) => {
  if (!isInstalled) return t.skip("not installed");
  await cp(join(repository, "tests/data/encoders/modernbert-bpe"), join(folder, "public/model"), { recursive: true });
  await writeFile(join(folder, "folder.js"), FOLDER_EXAMPLE);
  await writeFile(join(folder, "folder.html"), HTML.replace("/main.js", "/folder.js"));
  await withVite(async (url) => {
    const absent = await fetch(`${url}model/sentence_bert_config.json`, { headers: { accept: "*/*" } });
    t.diagnostic(`what is not there is ${absent.status}, ${absent.headers.get("content-type")}`);
    await shows(`${url}folder.html`, /vector of \d+ numbers/);
  });
});

test("TypeScript accepts the example against the package's types", { timeout: 120_000 }, async (t) => {
  if (!isInstalled) return t.skip("not installed");
  await writeFile(join(folder, "main.ts"), EXAMPLE);
  const flags = ["--noEmit", "--strict", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.asynciterable,esnext.disposable"];
  const { stdout } = await run(join(folder, "node_modules/.bin/tsc"), [...flags, "main.ts"], { cwd: folder }).catch((error) => error);
  assert.equal(stdout, "");
});

test("it runs in Node without the package `webgpu`", { timeout: 60_000 }, async (t) => {
  if (!isInstalled) return t.skip("not installed");
  const { stdout } = await run("node", ["node.js"], { cwd: folder });
  assert.match(stdout, STORY);
});
