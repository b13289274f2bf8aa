import { useEffect, useState } from "react";
import { Model, type LoadOptions, type ModelSource, type Progress } from "tilewright";

/** Loading state of a model. */
export interface ModelState {
  model?: Model;
  progress?: Progress;
  error?: Error;
}

/** A model for the lifetime of the component; without a source the package's story model. */
export function useModel(source?: ModelSource, device: LoadOptions["device"] = "auto"): ModelState {
  const [state, setState] = useState<ModelState>({});
  useEffect(() => {
    const left = new AbortController();
    const options: LoadOptions = { device, signal: left.signal, onProgress: (progress) => setState({ progress }) };
    const loading = source === undefined ? Model.builtin(options) : Model.load(source, options);
    loading.then((model) => {
      if (left.signal.aborted) {
        return model.free();
      }
      left.signal.addEventListener("abort", () => model.free());
      setState({ model });
    }).catch((error: Error) => left.signal.aborted || setState({ error }));
    return () => left.abort();
  }, [source, device]);
  return state;
}
