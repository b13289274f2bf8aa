// User projects: a folder with the packed npm package, an example of `examples/web` or a test's files, and their
// dependencies.

import { execFile } from "node:child_process";
import { once } from "node:events";
import { cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { promisify } from "node:util";

import { serveFile } from "../../scripts/static-server.mjs";
import { repository } from "./server.mjs";

export const run = promisify(execFile);

/** Packs the package into a folder. Returns npm's report, with `path`. */
export async function pack(into) {
  const { stdout } = await run("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", into], { cwd: join(repository, "npm") });
  const [tarball] = JSON.parse(stdout);
  return { ...tarball, path: join(into, tarball.filename) };
}

/** A new folder for this test file; `forget` deletes it. */
export function newFolder() {
  const folder = mkdtempSync(join(tmpdir(), "tilewright-project-"));
  return { folder, forget: () => rmSync(folder, { recursive: true, force: true, maxRetries: 5 }) };
}

/** Creates a project from an example and named files. */
export function makeProject(folder, { example, files = {} }) {
  mkdirSync(folder, { recursive: true });
  if (example !== undefined) cpSync(join(repository, "examples/web", example), folder, { recursive: true });
  for (const [name, text] of Object.entries(files)) {
    mkdirSync(dirname(join(folder, name)), { recursive: true });
    writeFileSync(join(folder, name), text);
  }
  return folder;
}

/** Puts the package's files beside a page, as a site without a build has them. */
export function copyPackage(to) {
  cpSync(join(repository, "npm/dist"), to, { recursive: true });
}

/** Installs packages into a project, and those in its `package.json`. Throws if a download fails. */
export async function install(folder, ...packages) {
  const manifest = join(folder, "package.json");
  // Without one, npm would use one in a parent folder.
  if (!existsSync(manifest)) writeFileSync(manifest, JSON.stringify({ private: true, type: "module" }));
  await run("npm", ["install", "--no-audit", "--no-fund", "--omit=peer", ...packages], { cwd: folder });
}

/** Serves a folder while `use` runs, on its own origin. `paths` lists the requests. */
export async function served(folder, use, headers = {}) {
  const paths = [];
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    paths.push(pathname);
    for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
    serveFile(folder, pathname, request, response).catch(() => response.destroy());
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const stop = async () => {
    server.closeAllConnections();
    if (server.listening) await new Promise((resolve) => server.close(resolve));
  };
  try {
    return await use({ url: `http://localhost:${server.address().port}/`, paths, stop });
  } finally {
    await stop();
  }
}
