// Service worker of the demo page: keeps whole versions of the page, so that it opens without a network, and with one that hardly works.
//
//     install     keep the version that the server has
//     the page    from the server, so that a new version is seen at once; if no answer comes in time, the version that was kept last
//     its files   from the version that their page is of if that is kept, else from the server, and never from another version;
//                 those of speech and of the CPU are kept when they are first used
//
// `scripts/build-web` writes into index.html which version it is. Models are the package's.

// The DOM's types and a worker's cannot be in one program; this is what is used of the latter.
interface WaitingEvent extends Event {
  waitUntil(work: Promise<unknown>): void;
}
interface RequestEvent extends WaitingEvent {
  readonly request: Request;
  /** Who asks. */
  readonly clientId: string;
  /** The page or worker that comes of the answer, if it is one. */
  readonly resultingClientId: string;
  respondWith(answer: Promise<Response>): void;
}
declare const clients: {
  matchAll(options: { includeUncontrolled: true; type: "all" }): Promise<{ id: string }[]>;
  /** Waits for a page or worker that is still opened. */
  get(id: string): Promise<object | undefined>;
};

/** Milliseconds in which the server has to answer. */
const PATIENCE_MS = 4000;
/** A cache for each version has this name and the version. */
const PAGE = "tilewright-page";
/** Versions by what they are of: `newest`, and each page and worker that is open. */
const VERSIONS = "tilewright-versions";
const SCOPE = new URL("./", location.href).href;
const FILE = /\.(?:js|css|wasm|svg|webmanifest)$|\/(?:icon-[\w-]+\.png|stories\.gguf|mol\.safetensors)$/;
/** How files of the page name each other: `src`, `href`, imports, and what workers and WASM are loaded by. */
const REFERENCES = /(?:src=|href=|from\s*|import\s*\(?\s*|new URL\(\s*)["']([^"'#]+\.(?:js|css|wasm|svg|png|webmanifest|gguf|safetensors))["']/g;

/** Files that few visits need, and that are large. */
const LATER = /\/(?:speech-worker\.js|tilewright_speech_bg\.wasm|cpu\.js|tilewright_cpu_bg\.wasm)$/;

addEventListener("install", (event) => {
  (event as WaitingEvent).waitUntil(fetchPage().then(({ version }) => keep(version)));
});

addEventListener("fetch", (given) => {
  const event = given as RequestEvent;
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  const url = origin + pathname;
  // A request for a part of a file is about a model.
  if (request.method !== "GET" || !url.startsWith(SCOPE) || request.headers.has("Range")) return;
  if (request.mode === "navigate") {
    if (url === SCOPE || url === `${SCOPE}index.html`) event.respondWith(answerPage(event));
  } else if (FILE.test(pathname)) {
    event.respondWith(answerFile(event, url));
  }
});

/** The server's page. Throws without an answer, or if it is no page of a version. */
async function fetchPage(signal?: AbortSignal): Promise<{ page: Response; html: string; version: string }> {
  const response = await fetch(SCOPE, { cache: "no-cache", ...(signal ? { signal } : {}) });
  const html = await response.text();
  const [, version] = /data-version="([^"]+)"/.exec(html) ?? [];
  if (!response.ok || version === undefined) throw new Error(`${SCOPE} has no page with a version`);
  // What came by a redirect must not answer a navigation, unlike a copy of it.
  return { page: new Response(html, { headers: response.headers }), html, version };
}

/** Keeps a version. Throws unless it is whole and still on the server at the end. */
async function keep(version: string): Promise<void> {
  const kept = await caches.open(PAGE + version);
  const found = new Set<string>();
  const follow = (text: string, from: string): void => {
    for (const [, name = ""] of text.matchAll(REFERENCES)) {
      const next = new URL(name, from).href;
      if (/^[.\w]/.test(name) && next.startsWith(SCOPE)) found.add(next);
    }
  };
  follow((await fetchPage()).html, SCOPE);
  // A set that grows is still walked to its end.
  for (const url of found) {
    if (LATER.test(url)) continue;
    const response = await fetch(url, { cache: "no-cache" });
    // A name in a comment may lead nowhere.
    if (response.status === 404) continue;
    if (!response.ok) throw new Error(`${url}: HTTP status ${response.status}`);
    await kept.put(url, response.clone());
    if (/javascript/.test(response.headers.get("Content-Type") ?? "")) follow(await response.text(), url);
  }
  const last = await fetchPage();
  if (last.version !== version) throw new Error(`another version than ${version} came to the server meanwhile`);
  // A version with a page is whole.
  await kept.put(SCOPE, last.page);
  await note("newest", version);
  await tidy();
}

const isKept = async (version: string): Promise<boolean> => (await caches.match(SCOPE, { cacheName: PAGE + version })) !== undefined;

async function answerPage(event: RequestEvent): Promise<Response> {
  const found = await fetchPage(AbortSignal.timeout(PATIENCE_MS)).catch(() => undefined);
  const version = found?.version ?? await noted("newest");
  // Never kept anything: the browser says best what is wrong.
  if (version === undefined) return fetch(event.request);
  await note(event.resultingClientId, version);
  if (found === undefined) return (await caches.match(SCOPE, { cacheName: PAGE + version })) ?? fetch(event.request);
  if (await isKept(version)) await note("newest", version);
  // If that fails, the next visit tries again.
  else event.waitUntil(keep(version).catch((error: unknown) => console.info("this version of the page is not kept:", error)));
  return found.page;
}

async function answerFile(event: RequestEvent, url: string): Promise<Response> {
  // Some browsers do not tell which page starts a worker.
  const version = await noted(event.clientId) ?? await noted("newest");
  if (version === undefined) return fetch(event.request);
  // A worker is of its page's version, and asks for files itself.
  if (event.resultingClientId) await note(event.resultingClientId, version);
  const kept = await caches.match(url, { cacheName: PAGE + version });
  if (kept !== undefined) return kept;
  const response = await fetch(event.request, { cache: "no-cache" });
  if (LATER.test(url) && response.ok) event.waitUntil(keepLater(url, version, response.clone()));
  return response;
}

/** Keeps a file with its version, if that is kept and still on the server. */
async function keepLater(url: string, version: string, response: Response): Promise<void> {
  try {
    if (await isKept(version) && (await fetchPage()).version === version) await (await caches.open(PAGE + version)).put(url, response);
  } catch (error) {
    console.info(`${url} is not kept:`, error);
  }
}

/** Writes down which version something is of. This worker may be ended at any time, and what it holds in variables with it. */
async function note(what: string, version: string): Promise<void> {
  try {
    await (await caches.open(VERSIONS)).put(SCOPE + what, new Response(version));
  } catch (error) {
    // A full storage must not keep the page from opening.
    console.info("the version of the page is not noted:", error);
  }
}

async function noted(what: string): Promise<string | undefined> {
  return (await caches.match(SCOPE + what, { cacheName: VERSIONS }))?.text();
}

/** Forgets versions that are neither the newest nor shown anywhere, and what is closed. */
async function tidy(): Promise<void> {
  const open = (await clients.matchAll({ includeUncontrolled: true, type: "all" })).map(({ id }) => id);
  const used = new Set(await Promise.all(["newest", ...open].map(noted)));
  for (const name of await caches.keys()) {
    if (name.startsWith(PAGE) && !used.has(name.slice(PAGE.length))) await caches.delete(name);
  }
  const notes = await caches.open(VERSIONS);
  for (const request of await notes.keys()) {
    const id = request.url.slice(SCOPE.length);
    if (id !== "newest" && (await clients.get(id)) === undefined) await notes.delete(request);
  }
}
