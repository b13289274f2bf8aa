/** Downloads for a later load. */

import type { Calls } from "../protocol.js";
import { CHAT_FILES, SENTENCE_FILES } from "../source.js";
import { engineModule } from "../wasm.js";
import { finish, withCopies, withFiles, type Asked } from "./files.js";
import { ProgressMeter } from "./progress.js";

export async function prefetch(request: Calls["prefetch"]["args"], asked: Asked): Promise<undefined> {
  await engineModule.start();
  await withCopies(asked, (copies) => {
    const meter = new ProgressMeter(asked.caller);
    // The kind of model is unknown.
    const opening = { extras: [...CHAT_FILES, ...SENTENCE_FILES], copies, meter, mustKeep: true };
    return withFiles({ ...request, cache: true }, asked, opening, async (files) => {
      await finish(files, asked.signal);
      meter.report(files.at(-1)?.phase ?? "download", true);
    });
  });
  return undefined;
}
