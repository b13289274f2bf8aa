// Holds the model. A client connects, sends a prompt and receives pieces of text, then the result; disconnecting
// cancels the generation.

import { Model } from "./tilewright/index.js";

let loading;

chrome.runtime.onConnect.addListener((port) => {
  const left = new AbortController();
  port.onDisconnect.addListener(() => left.abort());
  port.onMessage.addListener(async ({ prompt, device }) => {
    try {
      const model = await (loading ??= Model.builtin({ device }));
      const generation = model.generate(prompt, { maxTokens: 100, signal: left.signal });
      for await (const { text } of generation) port.postMessage({ text });
      port.postMessage({ result: await generation.result });
    } catch (error) {
      if (!left.signal.aborted) port.postMessage({ error: error.message });
    }
  });
});
