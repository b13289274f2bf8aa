/** Models before their download. */

import { ensure } from "./errors.js";
import { isId } from "./given.js";
import { defined } from "./helpers.js";
import type { InspectOptions } from "./load-options.js";
import { callOnce } from "./load.js";
import { known } from "./options.js";
import { specOf } from "./spec.js";
import type { ModelReport, ModelSource } from "./types.js";

/** See {@link Model.inspect}. */
export async function inspectModel(source: ModelSource, options: InspectOptions = {}): Promise<ModelReport> {
  const given = known("Model.inspect", options);
  const { contextLengths, contextLength, kvType, memoryLimit, device = "auto", cache = true, fetch } = given;
  const wrong = contextLengths?.find((length) => !isId(length) || length === 0);
  ensure(wrong === undefined, "option", `contextLengths has ${String(wrong)}, expected whole numbers from 1 on`);
  ensure(device === "auto" || device === "gpu" || device === "cpu",
    "option", `device is ${String(device)}, expected auto, gpu or cpu`);
  return callOnce("inspect", {
    source: await specOf(source, given.signal, given), cache, device, ownFetch: fetch !== undefined,
    settings: defined({ contextLength, kvType, memoryLimit }),
    ...defined({ contextLengths: contextLengths === undefined ? undefined : [...contextLengths] }),
  }, given);
}
