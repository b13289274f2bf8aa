// Pictures of the page in the README and guides, and plots of the records.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, readFileSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";

import { repository } from "./server.mjs";

test("the pictures that the README and the guides show are there, and small", () => {
  const shown = (name, least) => {
    const text = readFileSync(join(repository, name), "utf8");
    const links = [...text.matchAll(/(?:src="|\]\()((?:\.\.\/)?(?:assets\/pictures|benches\/record\/plots)\/[^")]+)/g)];
    assert.ok(links.length >= least, `${name} shows ${links.length}`);
    return links.map(([, link]) => join(dirname(name), link));
  };
  const pictures = [...shown("README.md", 2), ...shown("docs/demo.md", 6), ...shown("docs/performance.md", 2)];
  for (const path of pictures) {
    assert.ok(existsSync(join(repository, path)), path);
    assert.ok(statSync(join(repository, path)).size <= 200_000, path);
  }
});

test("the plots are of the newest records", () => {
  const { status, stderr } = spawnSync("python3", [join(repository, "scripts/plots"), "--check"], { encoding: "utf8" });
  assert.equal(status, 0, stderr);
});
