// Hosts of the package: each installs it as users do, from the tarball or as a folder, with the examples of
// `examples/web`. All generate the beginning of the same story on the CPU.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { cpSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { EXECUTABLE as DENO, missingDeno } from "./deno.mjs";
import { copyPackage, install, makeProject, newFolder, pack, run, served } from "./projects.mjs";
import { dataPath, lacksData, repository } from "./server.mjs";
import { withTemplate } from "./template.mjs";

/** The story model's greedy continuation, as in tests/data/builtin. */
const STORY = /a silly boy named Ben/;
/** The example of the package's README, except for the device. */
const FIVE_LINES = `import { Model } from "tilewright";
const model = await Model.builtin({ device: "cpu" });
for await (const { text } of model.generate("Once upon a time", { maxTokens: 24 })) {
  document.body.append(text);
}
`;
const HTML = '<!doctype html><html lang="en"><title>example</title><link rel="icon" href="data:,"><body><script type="module" src="main.js"></script></body></html>\n';
const CORS = { "access-control-allow-origin": "*" };
const limited = { timeout: 180_000 };
/** Large or slow hosts run in full runs only. */
const inFull = (name, options, body) => process.env.TILEWRIGHT_FULL ? test(name, { timeout: 600_000, ...options }, body) : undefined;

let tarball;
let chromium;
const { folder: root, forget } = newFolder();
before(async () => {
  tarball = await pack(root);
  chromium = await openBrowser({ extensions: true });
});
afterEach(() => chromium.closePages());
after(async () => {
  await chromium?.close();
  forget();
});

/** Waits until a page shows a text. */
async function shows(url, text = STORY) {
  const page = await chromium.open(url);
  await page.waitForFunction((text) => new RegExp(text).test(document.body.innerText), text.source, { timeout: 60_000 });
  assert.deepEqual(page.problems, []);
  return page;
}

/** Runs a project's server while `use` needs its address. */
async function started(folder, program, args, use) {
  const child = spawn(join(folder, "node_modules/.bin", program), args, { cwd: folder, env: { ...process.env, NO_COLOR: "1" } });
  try {
    const url = await new Promise((resolve, reject) => {
      let output = "";
      const read = (text) => {
        output += text;
        const found = /http:\/\/(?:127\.0\.0\.1|localhost):\d+/.exec(output);
        if (found) resolve(`${found[0]}/`);
      };
      child.stdout.on("data", read);
      child.stderr.on("data", read);
      child.once("exit", () => reject(new Error(`${program} ended: ${output}`)));
    });
    await use(url);
  } finally {
    child.kill();
  }
}

test("the tarball has what is needed, and little else", (t) => {
  const names = tarball.files.map((file) => file.path);
  for (const name of ["package.json", "README.md", "LICENSE-MIT", "LICENSE-APACHE", ...["index.js", "index.d.ts", "worker.js", "tilewright_bg.wasm", "tilewright_text_bg.wasm", "speech-worker.js", "tilewright_speech_bg.wasm", "cpu.js", "tilewright_cpu_bg.wasm", "stories.gguf"].map((name) => `dist/${name}`)]) {
    assert.ok(names.includes(name), `${name} is missing`);
  }
  assert.deepEqual(names.filter((name) => /\.js$/.test(name)), ["dist/cpu.js", "dist/index.js", "dist/speech-worker.js", "dist/worker.js"]);
  assert.deepEqual(names.filter((name) => /\.ts$/.test(name) && !/\.d\.ts$/.test(name)), [], "TypeScript sources");
  const { size } = statSync(tarball.path);
  t.diagnostic(`tarball ${(size / 1e6).toFixed(2)} MB, unpacked ${(tarball.unpackedSize / 1e6).toFixed(2)} MB, ${names.length} files`);
  assert.ok(size < 6.5e6);
});

test("a page's policy comes as a header as well, as a host may send it", async () => {
  await served(join(repository, "www/dist"), async ({ url }) => {
    const response = await fetch(url);
    const policy = response.headers.get("content-security-policy");
    assert.match(policy, /^default-src 'none'; script-src 'self' 'wasm-unsafe-eval'/);
    assert.ok((await response.text()).includes(`<meta http-equiv="Content-Security-Policy" content="${policy}">`));
    assert.equal((await fetch(`${url}main.js`)).headers.get("content-security-policy"), null);
  });
});

// Vite, webpack, esbuild, TypeScript and Node in one project, installed once.

const project = join(root, "project");
let isInstalled = false;

test("it installs into a project", limited, async () => {
  makeProject(project, { example: "vite-react" });
  await install(project, tarball.path, "webpack@5", "esbuild");
  isInstalled = true;
});

/** A test in the project. */
const inProject = (name, test_) => test(name, limited, (t) => isInstalled ? test_(t) : t.skip("not installed"));

/** The React example in Vite's build and development server. */
async function vite(folder) {
  await run("npx", ["--no-install", "vite", "build", "--logLevel", "warn"], { cwd: folder });
  await served(join(folder, "dist"), ({ url }) => shows(`${url}?device=cpu`));
  await started(folder, "vite", ["--host", "127.0.0.1", "--port", "0"], (url) => shows(`${url}?device=cpu`));
}

inProject("Vite 8: React, built and in development", () => vite(project));

inProject("Vite 8: a model's folder in `public` loads, though the server answers with its page for files that are not there", async (t) => {
  cpSync(join(repository, "tests/data/encoders/modernbert-bpe"), join(project, "public/model"), { recursive: true });
  writeFileSync(join(project, "folder.js"), `import { Embedder } from "tilewright";
const embedder = await Embedder.load("/model/", { device: "cpu" });
document.body.append("vector of " + (await embedder.embed("the cat")).length + " numbers");
`);
  writeFileSync(join(project, "folder.html"), HTML.replace("main.js", "/folder.js"));
  await started(project, "vite", ["--host", "127.0.0.1", "--port", "0"], async (url) => {
    const absent = await fetch(`${url}model/sentence_bert_config.json`, { headers: { accept: "*/*" } });
    t.diagnostic(`what is not there is ${absent.status}, ${absent.headers.get("content-type")}`);
    await shows(`${url}folder.html`, /vector of \d+ numbers/);
  });
});

for (const version of [6, 7]) {
  inFull(`Vite ${version}: React, built and in development`, {}, async () => {
    const folder = makeProject(join(root, `vite-${version}`), {
      example: "vite-react",
      // The development bundles of these versions lose the worker.
      files: { "vite.config.js": 'export default { optimizeDeps: { exclude: ["tilewright"] } };\n' },
    });
    await install(folder, tarball.path, `vite@${version}`);
    await vite(folder);
  });
}

inProject("webpack 5", async () => {
  const out = join(project, "webpack");
  makeProject(project, {
    files: {
      "story.js": FIVE_LINES, "webpack/index.html": HTML,
      "webpack.mjs": `import webpack from "webpack";
webpack({ mode: "production", entry: "./story.js", performance: { hints: false }, output: { path: ${JSON.stringify(out)}, filename: "main.js" } }, (error, stats) => {
  if (error || stats.hasErrors() || stats.hasWarnings()) throw error ?? new Error(stats.toString());
});
`,
    },
  });
  await run("node", ["webpack.mjs"], { cwd: project });
  await served(out, ({ url }) => shows(url));
});

inProject("esbuild, with the worker where `configure` says", async () => {
  const out = join(project, "esbuild");
  makeProject(project, { files: { "esbuild.js": `import { configure } from "tilewright";\nconfigure({ workerUrl: "files/worker.js" });\n${FIVE_LINES}`, "esbuild/index.html": HTML } });
  await run(join(project, "node_modules/.bin/esbuild"), ["esbuild.js", "--bundle", "--format=esm", "--outfile=esbuild/main.js", "--log-level=warning"], { cwd: project });
  copyPackage(join(out, "files"));
  await served(out, async ({ url, paths }) => {
    await shows(url);
    assert.deepEqual(paths.filter((path) => path.startsWith("/files/")).sort(), ["/files/cpu.js", "/files/stories.gguf", "/files/tilewright_cpu_bg.wasm", "/files/worker.js"]);
  });
});

inProject("TypeScript: no `lib` but es2022 and dom, and declarations are checked as well", async () => {
  const { compilerOptions } = JSON.parse(readFileSync(join(project, "tsconfig.json"), "utf8"));
  assert.deepEqual([compilerOptions.lib, compilerOptions.types, compilerOptions.skipLibCheck], [["es2022", "dom"], [], undefined]);
  // All exports, and one misuse.
  makeProject(project, {
    files: {
      "src/uses.ts": `import * as all from "tilewright";
export const names: string[] = Object.keys(all);
export async function story(): Promise<string> {
  using model = await all.Model.builtin();
  return model.generate("Once upon a time").text();
}
// @ts-expect-error
all.configure({ workerURL: "worker.js" });
`,
    },
  });
  const { stdout } = await run(join(project, "node_modules/.bin/tsc"), ["-p", "."], { cwd: project }).catch((error) => error);
  assert.equal(stdout, "");
});

inProject("Node without the package `webgpu`", async () => {
  makeProject(project, { example: "node" });
  const { stdout } = await run("node", ["story.mjs"], { cwd: project });
  assert.match(stdout, STORY);
});

inProject("Deno", async (t) => {
  if (missingDeno) return t.skip(missingDeno);
  makeProject(project, { example: "node" });
  // Mesa's OpenGL driver crashes processes that unload it on exit, and Deno loads it unless restricted to other
  // drivers.
  const env = { ...process.env, DENO_WEBGPU_BACKEND: "vulkan" };
  const { stdout } = await run(DENO, ["run", "--quiet", "--no-prompt", "--allow-read", "--allow-env", "--no-remote", "--node-modules-dir=manual", "story.mjs"], { cwd: project, env });
  assert.match(stdout, STORY);
});

inFull("Bun", {}, async () => {
  const folder = makeProject(join(root, "bun"), { example: "node" });
  await install(folder, tarball.path, "@oven/bun-linux-x64@1");
  const { stdout } = await run(join(folder, "node_modules/@oven/bun-linux-x64/bin/bun"), ["story.mjs"], { cwd: folder });
  assert.match(stdout, STORY);
});

// Server-side rendering.

inFull("Next 16: imported on the server, it generates in the browser", {}, async () => {
  const folder = makeProject(join(root, "next"), {
    files: {
      "app/layout.jsx": 'export default ({ children }) => <html lang="en"><body>{children}</body></html>;\n',
      "app/page.jsx": `import { Model, TilewrightError } from "tilewright";
import Story from "./story";
export default () => <main>{typeof Model.builtin + " " + new TilewrightError("option", "on the server").code}<Story /></main>;
`,
      "app/story.jsx": `"use client";
import { useEffect, useState } from "react";
import { Model } from "tilewright";
export default function Story() {
  const [text, setText] = useState("");
  useEffect(() => {
    const left = new AbortController();
    (async () => {
      using model = await Model.builtin({ device: "cpu", signal: left.signal });
      setText(await model.generate("Once upon a time", { maxTokens: 24, signal: left.signal }).text());
    })().catch((error) => left.signal.aborted || setText(String(error)));
    return () => left.abort();
  }, []);
  return <p>{text}</p>;
}
`,
    },
  });
  await install(folder, tarball.path, "next@16", "react@19", "react-dom@19");
  await run("npx", ["--no-install", "next", "build"], { cwd: folder, env: { ...process.env, NEXT_TELEMETRY_DISABLED: "1" } });
  await started(folder, "next", ["start", "--port", "0"], async (url) => {
    assert.match(await (await fetch(url)).text(), /function option/);
    await (await shows(url)).close();
  });
});

inFull("Cloudflare Workers: importing it starts nothing, loading is an error with code `unsupported_platform`", {}, async () => {
  const folder = makeProject(join(root, "cloudflare"), {
    files: {
      "worker.js": `import { Model } from "tilewright";
export default {
  fetch: () => Model.builtin().then(() => Response.json("loaded"), ({ code, message }) => Response.json([code, message])),
};
`,
      "run.mjs": `import { Miniflare } from "miniflare";
for (const options of [{ compatibilityDate: "2024-01-01" }, { compatibilityDate: "2026-01-01", compatibilityFlags: ["nodejs_compat"] }]) {
  const server = new Miniflare({ ...options, modules: [{ type: "ESModule", path: "bundle.js" }] });
  console.log(await (await server.dispatchFetch("http://localhost/")).text());
  await server.dispose();
}
`,
    },
  });
  await install(folder, tarball.path, "miniflare@4", "esbuild");
  await run(join(folder, "node_modules/.bin/esbuild"), ["worker.js", "--bundle", "--format=esm", "--outfile=bundle.js", "--log-level=warning"], { cwd: folder });
  const { stdout } = await run("node", ["run.mjs"], { cwd: folder });
  const answers = stdout.trim().split("\n").map((line) => JSON.parse(line));
  assert.equal(answers.length, 2);
  for (const [code, message] of answers) {
    assert.equal(code, "unsupported_platform");
    assert.match(message, /Web Workers/);
  }
});

// Hosts without a bundler.

/** The plain page with the package beside it. */
function plainPage(name) {
  const folder = makeProject(join(root, name), { example: "plain" });
  copyPackage(join(folder, "tilewright"));
  return folder;
}

test("a plain folder; and without a network, by its service worker, a model of another site among them", limited, async () => {
  const models = makeProject(join(root, "models"), {});
  cpSync(join(repository, "assets/stories.gguf"), join(models, "other.gguf"));
  await served(models, (other) => served(plainPage("plain"), async ({ url, stop }) => {
    const address = `${url}?device=cpu&model=${other.url}other.gguf`;
    const page = await shows(`${url}?device=cpu`);
    await page.evaluate(() => navigator.serviceWorker.ready);
    await page.goto(address);
    await page.waitForFunction((text) => new RegExp(text).test(document.body.innerText), STORY.source);
    await stop();
    await other.stop();
    for (const again of [address, `${url}?device=cpu`]) {
      await page.goto(again);
      await page.waitForFunction((text) => new RegExp(text).test(document.body.innerText), STORY.source);
    }
    assert.deepEqual(page.problems, []);
  }), CORS);
});

/** Counts a page's unrevoked `blob:` addresses. */
const COUNT_BLOBS = `const blobs = new Set();
for (const [name, note] of [["createObjectURL", (_, url) => blobs.add(url)], ["revokeObjectURL", (url) => blobs.delete(url)]]) {
  const original = URL[name];
  URL[name] = (given) => { const made = original.call(URL, given); note(given, made); return made; };
}
`;

test("another origin: from a CDN, under a strict Content Security Policy", limited, async () => {
  const page = join(root, "page");
  await served(join(repository, "npm/dist"), async (cdn) => {
    const story = `${COUNT_BLOBS}const { Model } = await import("${cdn.url}index.js");\n${FIVE_LINES.replace(/^import.*\n/, "")}document.body.append(" blobs left: " + blobs.size);\n`;
    makeProject(page, { files: { "main.js": story, "index.html": HTML } });
    const policy = (workers) => ({
      "content-security-policy": `default-src 'none'; script-src 'self' 'wasm-unsafe-eval' ${cdn.url}; worker-src ${workers}; connect-src ${cdn.url}; img-src data:`,
    });
    await served(page, ({ url }) => shows(url, new RegExp(`${STORY.source}.* blobs left: 0`, "s")), policy(`blob: ${cdn.url}`));
    // Without permission to import from there, the error names it.
    await served(page, async ({ url }) => {
      const refused = await (await chromium.open(`${url}?`)).evaluate((at) => import(at).then(({ Model }) => Model.builtin()).then(() => "nothing", ({ code, message }) => [code, message]), `${cdn.url}index.js`);
      assert.deepEqual(refused[0], "worker_crashed");
      assert.match(refused[1], /could not be loaded from http.*worker\.js.*`worker-src blob: http/);
    }, policy("blob:"));
  }, CORS);
});

test("configure: the worker on one origin, its WASM on others", limited, async () => {
  const wasm = makeProject(join(root, "wasm"), {});
  for (const [name, as] of [["tilewright_bg", "engine"], ["tilewright_cpu_bg", "cpu"], ["tilewright_text_bg", "text"]]) cpSync(join(repository, `npm/dist/${name}.wasm`), join(wasm, `${as}.wasm`));
  // Under the example's policy, a worker of another origin may not start.
  const folder = makeProject(join(root, "configured"), { files: { "index.html": HTML, "main.js": "" } });
  copyPackage(join(folder, "tilewright"));
  await served(join(repository, "npm/dist"), (workers) => served(wasm, (modules) => served(folder, async ({ url, paths }) => {
    const page = await chromium.open(url);
    const found = await page.evaluate(async ([workers, modules]) => {
      const { configure, Model } = await import("./tilewright/index.js");
      configure({ workerUrl: `${workers}worker.js`, wasmUrl: `${modules}nowhere.wasm`, cpuWasmUrl: `${modules}nowhere-either.wasm` });
      const missing = await Model.builtin({ device: "cpu" }).then(() => "nothing", ({ code, message }) => [code, message]);
      configure({ wasmUrl: `${modules}engine.wasm`, textWasmUrl: new URL(`${modules}text.wasm`) });
      const usual = await Model.builtin({ device: "cpu" });
      configure({ cpuWasmUrl: `${modules}cpu.wasm` });
      const model = await Model.builtin({ device: "cpu" });
      const drivers = [usual, model].map(({ device }) => device.driver);
      const text = await model.generate("Once upon a time", { maxTokens: 24 }).text();
      const digits = await model.generate("Once", { responseFormat: { type: "regex", pattern: "[0-9]{4}" } }).text();
      return { missing, drivers, text, digits };
    }, [workers.url, modules.url]);
    assert.equal(found.missing[0], "network");
    assert.match(found.missing[1], /nowhere\.wasm/);
    assert.deepEqual(found.drivers, ["", "relaxed SIMD"]);
    assert.match(found.text, STORY);
    assert.match(found.digits, /^[0-9]{4}$/);
    assert.deepEqual(modules.paths, ["/nowhere-either.wasm", "/nowhere.wasm", "/nowhere-either.wasm", "/engine.wasm", "/cpu.wasm", "/text.wasm"]);
    assert.deepEqual([...new Set(workers.paths)].sort(), ["/cpu.js", "/stories.gguf", "/worker.js"]);
    assert.deepEqual(paths.filter((path) => /worker|wasm/.test(path)), []);
  }), CORS), CORS);
});

test("a browser extension: Manifest V3, the model in an offscreen document", limited, async () => {
  const folder = makeProject(join(root, "extension"), { example: "extension" });
  copyPackage(join(folder, "tilewright"));
  const page = await chromium.open(`${await chromium.loadExtension(folder)}popup.html?device=cpu`);
  await page.getByRole("button", { name: "Continue" }).click();
  await page.getByText(STORY).waitFor({ timeout: 60_000 });
  await page.getByText(/^\d+ tokens$/).waitFor();
  assert.deepEqual(page.problems, []);
});

inFull("the example that answers from files finds the passage, and names no source that there is not", { skip: lacksData("minilm-l6-v2") }, async () => {
  const folder = makeProject(join(root, "rag"), {
    example: "rag",
    files: { "owls.txt": "Owls sleep by day in hollow trees.\n\nThey hunt mice at night.", "trains.txt": "The first train leaves at six.\n\nTickets are sold at the counter." },
  });
  // Any model works: the schema determines its possible sources.
  writeFileSync(join(folder, "model.gguf"), withTemplate("{% for message in messages %}{{ message.content }}\n{% endfor %}"));
  await install(folder, tarball.path);
  const env = { ...process.env, ENCODER: `${dataPath("minilm-l6-v2")}/`, MODEL: join(folder, "model.gguf") };
  const { stdout } = await run("node", ["rag.mjs", "Where do owls sleep?", "trains.txt", "owls.txt"], { cwd: folder, env });
  const cited = stdout.trim().split("\n").filter((line) => /^\[\d\] /.test(line));
  assert.ok(cited.length > 0, stdout);
  // The question is about owls, so other passages come last.
  for (const line of cited) assert.match(line, /^\[(?:[12]\] owls|3\] trains)\.txt: /);
});
