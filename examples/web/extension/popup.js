// The extension's popup.

const byId = (id) => document.getElementById(id);
const device = new URLSearchParams(location.search).get("device") ?? "auto";
let port;

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  port?.disconnect();
  byId("text").textContent = byId("prompt").value;
  byId("status").textContent = "Loading …";
  const { error } = await chrome.runtime.sendMessage("open");
  if (error !== undefined) return void (byId("status").textContent = error);
  port = chrome.runtime.connect();
  port.onMessage.addListener(({ text, result, error }) => {
    if (text !== undefined) byId("text").append(text);
    else byId("status").textContent = error ?? `${result.generatedTokens} tokens`;
  });
  port.postMessage({ prompt: byId("prompt").value, device });
});
