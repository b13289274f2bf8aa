// A module of the page by itself, for tests of what needs no page.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { repository } from "./server.mjs";

const esbuild = createRequire(join(repository, "npm/package.json"))("esbuild");
const builtPackage = { path: pathToFileURL(join(repository, "npm/dist/index.js")).href, external: true };

/** Imports `www/NAME.ts` with the built package. */
export async function pageModule(name) {
  const plugin = { name: "built package", setup: (build) => build.onResolve({ filter: /\/tilewright\/index\.js$/ }, () => builtPackage) };
  const entryPoints = [join(repository, "www", `${name}.ts`)];
  const { outputFiles } = await esbuild.build({ entryPoints, bundle: true, format: "esm", write: false, plugins: [plugin] });
  return import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString("base64")}`);
}
