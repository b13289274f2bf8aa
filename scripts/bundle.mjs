// Bundles what `tsc` has checked, for `scripts/build-web`:
//
//     node scripts/bundle.mjs package OUT    of npm/build/: index.js, both workers, cpu.js and the types that users need
//     node scripts/bundle.mjs page OUT       of www/: the page's scripts and its style; libraries are those of npm/
//
// Writes the notices of the bundled libraries beside them, THIRD-PARTY-NOTICES.txt.

import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, posix } from "node:path";
import { fileURLToPath } from "node:url";

const repository = fileURLToPath(new URL("..", import.meta.url));
const esbuild = createRequire(join(repository, "npm/package.json"))("esbuild");
const COMMON = { bundle: true, metafile: true, minify: true, sourcemap: true, target: "es2022", logLevel: "warning", absWorkingDir: repository };

/** Notices required by the licences of libraries, for the files that esbuild reports in bundles. */
function writeNotices(out, results) {
  const inputs = results.flatMap(({ metafile }) => Object.keys(metafile.inputs));
  const folders = new Set(inputs.map((path) => path.match(/^.*node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/)?.[0]).filter((folder) => folder));
  const notices = [...folders].sort().map((folder) => {
    const place = join(repository, folder);
    const { name, version, license } = JSON.parse(readFileSync(join(place, "package.json"), "utf8"));
    const texts = readdirSync(place).filter((file) => /^(licen[cs]e|copying|notice)/i.test(file));
    if (texts.length === 0) throw new Error(`${name} has no licence text (${license})`);
    return [`Of ${name} ${version}, ${license}:`, ...texts.map((file) => readFileSync(join(place, file), "utf8").trim())].join("\n\n");
  });
  const rule = `\n\n${"-".repeat(100)}\n`;
  const head = `Third-party notices: libraries\n\nThe scripts beside this file contain ${notices.length || "no"} libraries.`;
  writeFileSync(join(out, "THIRD-PARTY-NOTICES.txt"), `${[head, ...notices].join(rule)}\n\n`);
}

/** The public types, and the types that they reference. */
function copyTypes(from, to) {
  const names = new Set(["index"]);
  // Iteration includes items added meanwhile.
  for (const name of names) {
    const text = readFileSync(join(from, `${name}.d.ts`), "utf8");
    mkdirSync(dirname(join(to, name)), { recursive: true });
    writeFileSync(join(to, `${name}.d.ts`), text);
    for (const [, next] of text.matchAll(/(?:from |import\()"(\.[^"]+)\.js"/g)) names.add(posix.join(posix.dirname(name), next));
  }
}

/**
 * Comments by which users' bundlers leave an import alone. A name of equal length replaces them while comments are
 * stripped.
 */
const HIDDEN = "import(/*@vite-ignore*//*webpackIgnore:true*/";
const HIDDEN_NAME = `hidden${"_".repeat(HIDDEN.length - "hidden(".length)}(`;
const hideImports = {
  name: "imports that bundlers do not see",
  setup: (build) => build.onLoad({ filter: /build\/platform\.js$/ }, ({ path }) => {
    const text = readFileSync(path, "utf8");
    const contents = text.replace(/import\(\s*\/\* @vite-ignore \*\/ \/\* webpackIgnore: true \*\/\s*/, HIDDEN_NAME);
    if (contents === text) throw new Error(`${path} has no import with comments for bundlers`);
    return { contents, resolveDir: dirname(path) };
  }),
};

/** The worker of transcribers has the engine for speech in place of the other, whose names it has where both need them. */
const speechEngine = {
  name: "engine for speech",
  setup: (build) => build.onResolve({ filter: /^\.\.?\/tilewright\.js$/ }, () => ({ path: join(repository, "npm/build/tilewright_speech.js") })),
};

/**
 * Bundles three files, which refer to each other, the WASM modules and the built-in model by `new URL(..,
 * import.meta.url)`, the form that users' bundlers recognise.
 */
async function bundlePackage(out) {
  const from = join(repository, "npm/build");
  const results = [];
  // Names in the index are public; those of workers are never visible.
  const bundles = [["index", true, []], ["worker", false, []], ["speech-worker", false, [speechEngine]]];
  // Where the toolchain builds its module.
  if (existsSync(join(from, "tilewright_cpu.js"))) bundles.push(["cpu", false, []]);
  for (const [name, keepNames, plugins] of bundles) {
    const settings = { ...COMMON, format: "esm", outdir: out, plugins: [hideImports, ...plugins], keepNames, write: false };
    const result = await esbuild.build({ ...settings, entryPoints: [join(from, `${name}.js`)] });
    for (const { path, text } of result.outputFiles) writeFileSync(path, text.replaceAll(HIDDEN_NAME, HIDDEN));
    results.push(result);
  }
  writeNotices(out, results);
  copyTypes(from, out);
}

/** The page loads the package like a user's page: from a folder beside it. */
const beside = {
  name: "package beside the page",
  setup: (build) => build.onResolve({ filter: /^\.\.?\/tilewright\/index\.js$/ }, () => ({ path: "./tilewright/index.js", external: true })),
};

async function bundlePage(out) {
  const scripts = (...names) => names.map((name) => join(repository, "www", `${name}.ts`));
  // Modules loaded by `import()` and their shared chunks are separate files, named by content.
  const modules = { format: "esm", splitting: true, chunkNames: "[name]-[hash]", plugins: [beside] };
  const build = (settings) => esbuild.build({ ...COMMON, ...settings, outdir: out });
  const results = [
    await build({ ...modules, entryPoints: scripts("main") }),
    await build({ format: "iife", entryPoints: scripts("theme", "sw") }),
    await build({ format: "iife", entryPoints: { "listen-worklet": join(repository, "www/listen/worklet.ts") } }),
    await build({ entryPoints: [join(repository, "www/style.css")] }),
  ];
  // Two self-contained files: a report embeds them, and is passed on with their notices.
  const notice = "/*! With uPlot, Copyright (c) Leon Sorokin, and valibot, Copyright (c) Fabian Hiller; both under the MIT License. */";
  const dashboard = ["ts", "css"].map((ext) => join(repository, `www/dashboard/dashboard.${ext}`));
  results.push(await build({ format: "iife", entryPoints: dashboard, banner: { js: notice, css: notice } }));
  writeNotices(out, results);
}

const [what, out] = process.argv.slice(2);
await { package: bundlePackage, page: bundlePage }[what](join(repository, out));
