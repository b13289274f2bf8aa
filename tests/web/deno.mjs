// Deno for tests: the npm package `deno`, whose program npm installs for this machine without any script.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, readdirSync } from "node:fs";
import { fileURLToPath } from "node:url";

const FOLDER = fileURLToPath(new URL("../../npm/node_modules/@deno", import.meta.url));
export const EXECUTABLE = [process.env.DENO, ...(existsSync(FOLDER) ? readdirSync(FOLDER).map((kind) => `${FOLDER}/${kind}/deno`) : [])]
  .find((path) => path && existsSync(path));

/** Why there is no Deno; undefined if there is one. */
export const missingDeno = EXECUTABLE === undefined ? "Deno has no program for this machine in npm/node_modules/@deno" : undefined;

/** Reads the code to run from its input, and writes the result as the last line of its output. */
const PROGRAM = `
const { module, source, given } = JSON.parse(await new Response(Deno.stdin.readable).text());
const value = await new Function("return " + source)()(await import(module), given);
console.log(JSON.stringify(value ?? null));
Deno.exit(0);
`;

/** Runs a function with a module in a separate Deno with read permission and WebGPU. */
export async function runInDeno(module, run, given) {
  // Node's file API, which the package uses to read folders, requests the user id.
  const permissions = ["--allow-read", "--allow-env", "--allow-sys=uid", "--allow-net=localhost,127.0.0.1", "--no-prompt", "--no-remote", "--no-config", "--no-lock"];
  const program = `data:text/javascript,${encodeURIComponent(PROGRAM)}`;
  const child = spawn(EXECUTABLE, ["run", "--quiet", "--unstable-webgpu", ...permissions, program], { stdio: ["pipe", "pipe", "pipe"] });
  child.stdin.end(JSON.stringify({ module, source: run.toString(), given }));
  let output = "";
  let errors = "";
  child.stdout.on("data", (text) => (output += text));
  child.stderr.on("data", (text) => (errors += text));
  const [code] = await once(child, "close");
  if (code !== 0) throw new Error(`Deno ended with ${code}: ${errors}`);
  return JSON.parse(output.trim().split("\n").at(-1));
}
