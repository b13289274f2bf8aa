/** Models in the browser's storage: listing, prefetching and removing them. */

import { TilewrightError } from "./errors.js";
import { defined } from "./helpers.js";
import type { PrefetchOptions } from "./load-options.js";
import { callOnce } from "./load.js";
import { known } from "./options.js";
import { keptAs, specOf } from "./spec.js";
import { attempt, storeIfAny, type StoredRecord } from "./store.js";
import type { CachedModel, ModelSource, RemoveOptions } from "./types.js";

/** See {@link Model.cached}. */
export async function cachedModels(): Promise<CachedModel[]> {
  const store = await storeIfAny();
  if (store === undefined) {
    return [];
  }
  const [models, records] = await attempt(Promise.all([store.models(), store.list()]));
  const byAddress = new Map(records.map((record) => [record.url, record]));
  // Two addresses can have the same files.
  const sets = new Set<string>();
  const found = models.flatMap(({ source, endpoint, files, date }): CachedModel[] => {
    const there = files.flatMap((url) => byAddress.get(url) ?? []);
    const set = [...files].sort().join(" ");
    if (there.length === 0 || sets.has(set)) {
      return [];
    }
    sets.add(set);
    return [{ source, ...defined({ endpoint }), ...totalOf(there, files.length), date }];
  });
  return found.sort((a, b) => b.date - a.date);
}

/** Sizes, from the records of a model's stored files. */
function totalOf(there: readonly StoredRecord[], nFiles: number): Pick<CachedModel, "sizeBytes" | "storedBytes" | "complete"> {
  const sizes = there.map(({ size, stored, complete }) => complete ? stored : size);
  const sizeBytes = there.length < nFiles ? undefined : sizes.reduce((sum, size) => sum === undefined || size === undefined ? undefined : sum + size, 0);
  return {
    ...defined({ sizeBytes }),
    storedBytes: there.reduce((sum, { stored }) => sum + stored, 0),
    complete: there.length === nFiles && there.every(({ complete }) => complete),
  };
}

function notAddresses(): TilewrightError {
  return new TilewrightError("option", "source has bytes or files, expected addresses that begin with https://, http:// or hf:");
}

/** See {@link Model.prefetch}. */
export async function prefetchModel(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
  const given = known("Model.prefetch", options);
  const spec = await specOf(source, given.signal, given);
  if (spec.given === undefined) {
    throw notAddresses();
  }
  await callOnce("prefetch", { source: spec, ownFetch: given.fetch !== undefined }, given);
}

/** See {@link Model.remove}. */
export async function removeModel(source: ModelSource, options: RemoveOptions = {}): Promise<boolean> {
  const model = await keptAs(source, known("Model.remove", options));
  if (model === undefined) {
    throw notAddresses();
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
