/** Models in the browser's storage: which are there, how they come there without being loaded, and how they go. */

import { attempt, storeIfAny } from "./cache.js";
import { TilewrightError } from "./errors.js";
import type { PrefetchOptions } from "./load-options.js";
import { callOnce } from "./load.js";
import { known } from "./options.js";
import { keptAs, specOf } from "./spec.js";
import type { StoredRecord } from "./store.js";
import type { CachedModel, ModelSource, RemoveOptions } from "./types.js";

/** What {@link Model.cached} gives. */
export async function cachedModels(): Promise<CachedModel[]> {
  const store = await storeIfAny();
  if (store === undefined) {
    return [];
  }
  const [models, records] = await attempt(Promise.all([store.models(), store.list()]));
  const byAddress = new Map(records.map((record) => [record.url, record]));
  // Two addresses may lead to the same files.
  const sets = new Set<string>();
  const found = models.flatMap(({ source, endpoint, files, date }): CachedModel[] => {
    const there = files.flatMap((url) => byAddress.get(url) ?? []);
    const set = [...files].sort().join(" ");
    if (there.length === 0 || sets.has(set)) {
      return [];
    }
    sets.add(set);
    return [{ source, ...(endpoint === undefined ? {} : { endpoint }), ...totalOf(there, files.length), date }];
  });
  return found.sort((a, b) => b.date - a.date);
}

/** Of those of a model's files that are there. */
function totalOf(there: readonly StoredRecord[], nFiles: number): Pick<CachedModel, "sizeBytes" | "storedBytes" | "complete"> {
  const sizes = there.map(({ size, stored, complete }) => complete ? stored : size);
  const sizeBytes = there.length < nFiles ? undefined : sizes.reduce((sum, size) => sum === undefined || size === undefined ? undefined : sum + size, 0);
  return {
    ...(sizeBytes === undefined ? {} : { sizeBytes }),
    storedBytes: there.reduce((sum, { stored }) => sum + stored, 0),
    complete: there.length === nFiles && there.every(({ complete }) => complete),
  };
}

/** What {@link Model.prefetch} does. */
export async function prefetchModel(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
  const given = known("Model.prefetch", options);
  const spec = await specOf(source, given.signal, given);
  if (spec.given === undefined) {
    throw new TilewrightError("option", "source has bytes or files, expected addresses that begin with https://, http:// or hf:");
  }
  await callOnce("prefetch", { source: spec, ownFetch: given.fetch !== undefined }, given);
}

/** What {@link Model.remove} does. */
export async function removeModel(source: ModelSource, options: RemoveOptions = {}): Promise<boolean> {
  const model = await keptAs(source, known("Model.remove", options));
  if (model === undefined) {
    throw new TilewrightError("option", "source has bytes or files, expected addresses that begin with https://, http:// or hf:");
  }
  const store = await storeIfAny();
  if (store === undefined) {
    return false;
  }
  return attempt((async () => {
    const models = await store.models();
    const isIt = (one: { source: string | string[]; endpoint?: string }): boolean =>
      JSON.stringify([one.source, one.endpoint]) === JSON.stringify([model.source, model.endpoint]);
    const addresses = typeof model.source === "string" ? [model.source] : model.source;
    const files = new Set(models.find(isIt)?.files ?? addresses.filter((address) => !address.startsWith("hf:")));
    let existed = false;
    for (const url of files) {
      existed = await store.delete(url) || existed;
    }
    for (const one of models.filter((one) => isIt(one) || one.files.every((url) => files.has(url)))) {
      await store.removeModel(one);
    }
    return existed;
  })());
}
