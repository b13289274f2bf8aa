// Caches the page and the package's files for offline use. The package caches models itself.

/** Increment for every release: files of different releases do not fit together. */
const RELEASE = "story-page-1";
const FILES = [
  "./", "main.js", "tilewright/index.js", "tilewright/worker.js", "tilewright/tilewright_bg.wasm", "tilewright/tilewright_text_bg.wasm", "tilewright/stories.gguf",
];

addEventListener("install", (event) => {
  // Bypasses the browser's own cache, which may hold the previous release's files.
  const requests = FILES.map((name) => new Request(name, { cache: "reload" }));
  event.waitUntil(caches.open(RELEASE).then((kept) => kept.addAll(requests)));
});

addEventListener("activate", (event) => {
  const forget = (names) => Promise.all(names.filter((name) => name.startsWith("story-page-") && name !== RELEASE).map((name) => caches.delete(name)));
  event.waitUntil(caches.keys().then(forget));
});

addEventListener("fetch", (event) => {
  const { method, headers, url } = event.request;
  // Range requests are the package's own, for a model.
  if (method !== "GET" || headers.has("Range") || !url.startsWith(registration.scope)) return;
  event.respondWith(caches.match(event.request, { cacheName: RELEASE, ignoreSearch: true }).then((kept) => kept ?? fetch(event.request)));
});
