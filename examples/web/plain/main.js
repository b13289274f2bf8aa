// Continues the typed text. `?model=ADDRESS` selects another model, `?device=cpu` or `gpu` the device.

import { Model } from "./tilewright/index.js";

const byId = (id) => document.getElementById(id);
const form = byId("form");
const asked = new URLSearchParams(location.search);

async function load() {
  const options = {
    device: asked.get("device") ?? "auto",
    onProgress: ({ loaded, total }) => (byId("status").textContent = `${loaded} of ${total ?? "?"} bytes`),
  };
  const source = asked.get("model");
  return source === null ? Model.builtin(options) : Model.load(source, options);
}

async function generate(model) {
  byId("text").textContent = byId("prompt").value;
  const generation = model.generate(byId("prompt").value, { maxTokens: 100 });
  for await (const { text } of generation) byId("text").append(text);
  const { generatedTokens, stopReason } = await generation.result;
  byId("status").textContent = `${generatedTokens} tokens on ${model.device.name}; stop reason: ${stopReason}`;
}

try {
  const model = await load();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    generate(model).catch((error) => (byId("status").textContent = error.message));
  });
  for (const element of form.elements) element.disabled = false;
  await generate(model);
} catch (error) {
  byId("status").textContent = `${error.code}: ${error.message}`;
}

// The service worker lets the page open offline.
navigator.serviceWorker?.register("sw.js").catch((error) => console.info("this page will not open offline:", error));
