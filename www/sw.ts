// Service worker of the demo page: keeps the page's own files, so that it opens without a network. Models are the package's.
//
//     install:  follow the page's links and imports from index.html on, and keep what they lead to
//     fetch:    the network first, so that a new version is seen at once; what was kept, if there is no network

// The DOM's types and a worker's cannot be in one program; this is what is used of the latter.
interface WaitingEvent extends Event {
  waitUntil(work: Promise<unknown>): void;
}
interface RequestEvent extends WaitingEvent {
  readonly request: Request;
  respondWith(answer: Promise<Response>): void;
}

const CACHE = "tilewright-page";
const SCOPE = new URL("./", location.href).href;
/** How files of the page name each other: `src`, `href`, imports, and what workers and WASM are loaded by. */
const REFERENCES = /(?:src=|href=|from\s*|import\s*\(?\s*|new URL\(\s*)["']([^"'#]+\.(?:js|css|wasm|gguf|safetensors))["']/g;

addEventListener("install", (event) => {
  (event as WaitingEvent).waitUntil(keepPage());
});

addEventListener("fetch", (event) => {
  const { request } = event as RequestEvent;
  const url = new URL(request.url);
  const isPage = request.mode === "navigate" || /\.(?:js|css|wasm)$|\/(?:stories\.gguf|mol\.safetensors)$/.test(url.pathname);
  // A request for a part of a file is about a model.
  if (request.method !== "GET" || !url.href.startsWith(SCOPE) || !isPage || request.headers.has("Range")) return;
  (event as RequestEvent).respondWith(answer(event as RequestEvent, url.origin + url.pathname));
});

/** Fetches the page and everything that it refers to, directly or not. */
async function keepPage(): Promise<void> {
  const kept = await caches.open(CACHE);
  const found = new Set([SCOPE]);
  // A set that grows is still walked to its end.
  for (const url of found) {
    const response = await fetch(url);
    // A name in a comment may lead nowhere.
    if (!response.ok) continue;
    await kept.put(url, response.clone());
    if (!/text\/html|javascript/.test(response.headers.get("Content-Type") ?? "")) continue;
    for (const [, name = ""] of (await response.text()).matchAll(REFERENCES)) {
      const next = new URL(name, url).href;
      if (/^[.\w]/.test(name) && next.startsWith(SCOPE)) found.add(next);
    }
  }
}

/** The server's answer, kept under `key`; without a network, what was kept. */
async function answer(event: RequestEvent, key: string): Promise<Response> {
  const kept = await caches.open(CACHE);
  try {
    const response = await fetch(event.request);
    if (response.ok) event.waitUntil(kept.put(key, response.clone()));
    return response;
  } catch (error) {
    const match = (await kept.match(key)) ?? (event.request.mode === "navigate" ? await kept.match(SCOPE) : undefined);
    if (match) return match;
    throw error;
  }
}
