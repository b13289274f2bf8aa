/** Downloads that are kept for a later load. */

import type { Calls } from "../protocol.js";
import { CHAT_FILES, isUseless, SENTENCE_FILES } from "../source.js";
import { start } from "../wasm.js";
import { finish, open, withCopies, type Asked } from "./files.js";
import { ProgressMeter } from "./progress.js";

/** Keeps all files of a model. */
export async function prefetch(request: Calls["prefetch"]["args"], asked: Asked): Promise<undefined> {
  await start();
  await withCopies(asked, async (copies) => {
    const meter = new ProgressMeter(asked.caller);
    // What it is, nobody knows yet.
    const extras = [...CHAT_FILES, ...SENTENCE_FILES];
    const files = await open({ ...request, cache: true }, extras, asked, copies, (file) => meter.report(file.phase, false), { mustKeep: true });
    meter.files = files;
    let useless = false;
    try {
      meter.report(files[0]?.phase ?? "download", true);
      await finish(files, asked.signal);
      meter.report(files.at(-1)?.phase ?? "download", true);
    } catch (error) {
      useless = isUseless(error);
      throw error;
    } finally {
      await Promise.all(files.map((file) => file.close(useless)));
    }
  });
  return undefined;
}
