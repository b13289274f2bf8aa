// A single module of the page, for tests without the page.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { repository } from "./server.mjs";

const esbuild = createRequire(join(repository, "npm/package.json"))("esbuild");
const builtPackage = { path: pathToFileURL(join(repository, "npm/dist/index.js")).href, external: true };

/** Text of `www/NAME.ts` with all its imports, except the built package. */
export async function pageScript(name) {
  const plugin = { name: "built package", setup: (build) => build.onResolve({ filter: /\/tilewright\/index\.js$/ }, () => builtPackage) };
  const entryPoints = [join(repository, "www", `${name}.ts`)];
  const { outputFiles } = await esbuild.build({ entryPoints, bundle: true, format: "esm", write: false, plugins: [plugin] });
  return outputFiles[0].text;
}

/** Imports `www/NAME.ts` with the built package. */
export async function pageModule(name) {
  return import(`data:text/javascript;base64,${Buffer.from(await pageScript(name)).toString("base64")}`);
}
