import { StrictMode, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import type { LoadOptions, Model } from "tilewright";
import { useModel } from "./useModel";

const device = (new URLSearchParams(location.search).get("device") ?? "auto") as LoadOptions["device"];

function Story({ model }: { model: Model }) {
  const [prompt, setPrompt] = useState("Once upon a time");
  const [asked, setAsked] = useState(prompt);
  const [text, setText] = useState("");
  useEffect(() => {
    const left = new AbortController();
    setText(asked);
    (async () => {
      for await (const { text } of model.generate(asked, { maxTokens: 100, signal: left.signal })) {
        setText((before) => before + text);
      }
    })().catch((error: Error) => left.signal.aborted || setText(error.message));
    return () => left.abort();
  }, [model, asked]);
  return (
    <form action={() => setAsked(prompt)}>
      <label>Prompt <input value={prompt} onChange={(event) => setPrompt(event.target.value)} /></label>
      <button>Continue</button>
      <p aria-live="polite">{text}</p>
    </form>
  );
}

function App() {
  const { model, progress, error } = useModel(undefined, device);
  if (model !== undefined) return <Story model={model} />;
  return <p role="status">{error?.message ?? `Loading, ${progress?.loaded ?? 0} bytes`}</p>;
}

createRoot(document.getElementById("root")!).render(<StrictMode><App /></StrictMode>);
