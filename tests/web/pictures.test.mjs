// The pictures of the page in the README, and the plots of the records.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { repository } from "./server.mjs";

test("the pictures that the README shows are there, and small", () => {
  const readme = readFileSync(join(repository, "README.md"), "utf8");
  const pictures = [...readme.matchAll(/(?:src="|\]\()((?:assets\/pictures|benches\/record\/plots)\/[^")]+)/g)].map(([, path]) => path);
  assert.ok(pictures.length >= 6, pictures.join());
  for (const path of pictures) {
    assert.ok(existsSync(join(repository, path)), path);
    assert.ok(statSync(join(repository, path)).size <= 200_000, path);
  }
});

test("the plots are of the newest records", () => {
  const { status, stderr } = spawnSync("python3", [join(repository, "scripts/plots"), "--check"], { encoding: "utf8" });
  assert.equal(status, 0, stderr);
});
