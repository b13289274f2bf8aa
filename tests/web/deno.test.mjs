// The package in Deno: files by path, as in Node, and workers and WebGPU, as in browsers.

import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

import { missingDeno, runInDeno } from "./deno.mjs";
import { lane } from "./lane.mjs";
import { repository } from "./server.mjs";

const module = pathToFileURL(join(repository, "npm/dist/index.js")).href;

async function open() {
  const folder = mkdtempSync(join(tmpdir(), "tilewright-deno-"));
  return {
    run: (run, given) => runInDeno(module, run, given),
    source(name, files) {
      for (const [file, content] of Object.entries(files)) {
        mkdirSync(dirname(join(folder, name, file)), { recursive: true });
        writeFileSync(join(folder, name, file), content);
      }
      return `${join(folder, name)}/`;
    },
    close: async () => rmSync(folder, { recursive: true, force: true }),
  };
}

lane("Deno", { missing: missingDeno, open, devices: ["cpu", "gpu"] });
