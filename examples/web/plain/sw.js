// Keeps the page with the package's files, so that it opens without a network. Models the package keeps itself.

/** Another number for every release: the files of one fit each other. */
const RELEASE = "story-page-1";
const FILES = [
  "./", "main.js", "tilewright/index.js", "tilewright/worker.js", "tilewright/tilewright_bg.wasm", "tilewright/tilewright_text_bg.wasm", "tilewright/stories.gguf",
];

addEventListener("install", (event) => {
  // Past the browser's own cache, where files of the release before may be.
  const requests = FILES.map((name) => new Request(name, { cache: "reload" }));
  event.waitUntil(caches.open(RELEASE).then((kept) => kept.addAll(requests)));
});

addEventListener("activate", (event) => {
  const forget = (names) => Promise.all(names.filter((name) => name.startsWith("story-page-") && name !== RELEASE).map((name) => caches.delete(name)));
  event.waitUntil(caches.keys().then(forget));
});

addEventListener("fetch", (event) => {
  const { method, headers, url } = event.request;
  // A request for a part of a file is the package's, about a model.
  if (method !== "GET" || headers.has("Range") || !url.startsWith(registration.scope)) return;
  event.respondWith(caches.match(event.request, { cacheName: RELEASE, ignoreSearch: true }).then((kept) => kept ?? fetch(event.request)));
});
