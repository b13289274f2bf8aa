// The extension's service worker. It may start no workers, and the browser ends it when it is idle, so the model lives in an offscreen document.

let opening;

async function openOffscreen() {
  const open = await chrome.runtime.getContexts({ contextTypes: ["OFFSCREEN_DOCUMENT"] });
  if (open.length > 0) return;
  // Two documents there must not be, and two popups may ask at once.
  opening ??= chrome.offscreen.createDocument({ url: "offscreen.html", reasons: ["WORKERS"], justification: "runs a language model" });
  await opening.finally(() => (opening = undefined));
}

chrome.runtime.onMessage.addListener((message, _sender, answer) => {
  if (message !== "open") return;
  openOffscreen().then(() => answer({}), (error) => answer({ error: error.message }));
  return true; // the answer comes later
});
