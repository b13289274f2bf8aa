// WebKit for tests: Debian's MiniBrowser on a virtual screen, driven by WebKitWebDriver with the W3C protocol.
// playwright-core supports only its own WebKit builds.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, readdirSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const DRIVER = "/usr/bin/WebKitWebDriver";
const SCREEN = "/usr/bin/Xvfb";
const BROWSER = [process.env.MINIBROWSER, ...browsers()].find((path) => path && existsSync(path));

/** Debian installs the program in the library's folder, below one for the architecture. */
function browsers() {
  const kinds = existsSync("/usr/lib") ? readdirSync("/usr/lib").filter((name) => name.endsWith("-linux-gnu")) : [];
  return kinds.flatMap((kind) => ["webkit2gtk-4.1", "webkitgtk-6.0", "webkit2gtk-4.0"].map((folder) => join("/usr/lib", kind, folder, "MiniBrowser")));
}

/** Why there is no WebKit; undefined if there is one. */
export const missingWebKit = existsSync(DRIVER) && existsSync(SCREEN) && BROWSER !== undefined ? undefined
  : "WebKit is not installed (Debian: webkit2gtk-driver and xvfb)";

/** A browser without a profile. `evaluate` runs a function in a page. */
export async function openWebKit() {
  const children = [];
  const stop = async () => {
    for (const child of children.reverse()) {
      if (child.exitCode === null && child.signalCode === null) {
        child.kill();
        await once(child, "exit");
      }
    }
  };
  try {
    // It prints its screen's number on file descriptor 3.
    const screen = spawn(SCREEN, ["-displayfd", "3", "-screen", "0", "800x600x24", "-nolisten", "tcp"], { stdio: ["ignore", "ignore", "ignore", "pipe"] });
    children.push(screen);
    const [display] = await once(screen.stdio[3], "data");
    const port = await freePort();
    children.push(spawn(DRIVER, [`--port=${port}`], { stdio: "ignore", env: { ...process.env, DISPLAY: `:${String(display).trim()}` } }));
    const call = async (method, path, body) => {
      const response = await fetch(`http://127.0.0.1:${port}${path}`, { method, body: body && JSON.stringify(body) });
      const { value } = await response.json();
      if (!response.ok) throw new Error(`WebKitWebDriver: ${value.error}: ${value.message}`);
      return value;
    };
    await reachable(port);
    const options = { binary: BROWSER, args: ["--automation"] };
    const { sessionId } = await call("POST", "/session", { capabilities: { alwaysMatch: { "webkitgtk:browserOptions": options } } });
    await call("POST", `/session/${sessionId}/timeouts`, { script: 1_200_000 });
    return {
      async evaluate(url, run, ...given) {
        await call("POST", `/session/${sessionId}/url`, { url });
        const script = `const done = arguments[1];
          Promise.resolve().then(() => (${run})(...arguments[0])).then((value) => done({ value }), (error) => done({ error: String(error) }));`;
        const { value, error } = await call("POST", `/session/${sessionId}/execute/async`, { script, args: [given] });
        if (error !== undefined) throw new Error(`in WebKit: ${error}`);
        return value;
      },
      async close() {
        await call("DELETE", `/session/${sessionId}`);
        await stop();
      },
    };
  } catch (error) {
    await stop();
    throw error;
  }
}

async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

/** Waits until the driver listens. */
async function reachable(port) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await fetch(`http://127.0.0.1:${port}/status`);
    } catch (error) {
      if (attempt === 200) throw error;
      await sleep(100);
    }
  }
}
