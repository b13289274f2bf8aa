/** Models in the browser's storage: listing, prefetching and removing them. */

import { TilewrightError } from "./errors.js";
import { defined, sumOf } from "./helpers.js";
import type { PrefetchOptions } from "./load-options.js";
import { callOnce } from "./load.js";
import { known } from "./options.js";
import { keptAs, specOf } from "./spec.js";
import { attempt, storeIfAny } from "./store.js";
import type { CachedModel, ModelSource, RemoveOptions } from "./types.js";

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
    const isWhole = there.length === files.length;
    const sizeBytes = isWhole ? sumOf(there.map(({ size, stored, complete }) => complete ? stored : size)) : undefined;
    return [{
      source, ...defined({ endpoint, sizeBytes }), date,
      storedBytes: there.reduce((sum, { stored }) => sum + stored, 0), complete: isWhole && there.every(({ complete }) => complete),
    }];
  });
  return found.sort((a, b) => b.date - a.date);
}

function notAddresses(): TilewrightError {
  return new TilewrightError("option", "source has bytes or files, expected addresses that begin with https://, http:// or hf:");
}

export async function prefetchModel(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
  const given = known("Model.prefetch", options);
  const spec = await specOf(source, given.signal, given);
  if (spec.given === undefined) {
    throw notAddresses();
  }
  await callOnce("prefetch", { source: spec, ownFetch: given.fetch !== undefined }, given);
}

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
