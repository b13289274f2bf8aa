// A page with transformers.js and the built package beside each other. It is cross-origin isolated, so that ONNX Runtime's WASM has its
// threads.

import { createServer } from "node:http";
import { fileURLToPath } from "node:url";

import { serveFile } from "../../scripts/static-server.mjs";

/** Where transformers.js is installed. */
export const PACKAGES = fileURLToPath(new URL("target/js/node_modules", import.meta.url));

const IMPORTS = {
  "@huggingface/transformers": "/packages/@huggingface/transformers/dist/transformers.web.js",
  "onnxruntime-common": "/packages/onnxruntime-common/dist/esm/index.js",
  "onnxruntime-web/webgpu": "/packages/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
};

/** In the page: transformers.js, which reads models of this server alone. */
async function transformers() {
  const { env, ...others } = await import("@huggingface/transformers");
  env.allowRemoteModels = false;
  env.allowLocalModels = true;
  env.localModelPath = "/";
  env.backends.onnx.wasm.wasmPaths = "/packages/onnxruntime-web/dist/";
  return others;
}

const PAGE = `<!doctype html><title>bench</title><script type="importmap">${JSON.stringify({ imports: IMPORTS })}</script><script>globalThis.transformers = ${transformers}</script>`;

/** Serves the page, folders by name, the package in `npm`, and some paths under others. */
export async function servePage(folders, renamed = {}) {
  const all = { npm: fileURLToPath(new URL("../../npm", import.meta.url)), ...folders };
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    response.setHeader("cross-origin-opener-policy", "same-origin");
    response.setHeader("cross-origin-embedder-policy", "require-corp");
    if (pathname === "/") return response.setHeader("content-type", "text/html").end(PAGE);
    const [, name, ...rest] = (renamed[pathname] ?? pathname).split("/");
    if (!all[name]) return response.writeHead(404).end();
    return serveFile(all[name], `/${rest.join("/")}`, request, response);
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  return { origin: `http://localhost:${server.address().port}/`, close: () => server.close() };
}
