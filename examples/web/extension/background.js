// The extension's service worker. It cannot start workers and ends when idle, so an offscreen document holds the
// model.

let opening;

async function openOffscreen() {
  const open = await chrome.runtime.getContexts({ contextTypes: ["OFFSCREEN_DOCUMENT"] });
  if (open.length > 0) return;
  // Only one such document may exist, and two popups may request it at once.
  opening ??= chrome.offscreen.createDocument({ url: "offscreen.html", reasons: ["WORKERS"], justification: "runs a language model" });
  await opening.finally(() => (opening = undefined));
}

chrome.runtime.onMessage.addListener((message, _sender, answer) => {
  if (message !== "open") return;
  openOffscreen().then(() => answer({}), (error) => answer({ error: error.message }));
  return true; // the answer is asynchronous
});
