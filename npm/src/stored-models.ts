/** Models in the browser's storage: listing, prefetching and removing them. */

import { ensure } from "./errors.js";
import { defined, sumOf } from "./helpers.js";
import type { PrefetchOptions } from "./load-options.js";
import { callOnce } from "./load.js";
import { known } from "./options.js";
import { keptAs, specOf } from "./spec.js";
import { withStore } from "./store.js";
import type { CachedModel, ModelSource, RemoveOptions } from "./types.js";

export function cachedModels(): Promise<CachedModel[]> {
  return withStore(async (store) => {
    const byAddress = new Map((await store?.list() ?? []).map((record) => [record.url, record]));
    // Two addresses can have the same files.
    const sets = new Set<string>();
    return (await store?.models() ?? []).flatMap(({ source, endpoint, files, date }): CachedModel[] => {
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
  });
}

const NO_ADDRESS = "source has bytes or files, expected addresses that begin with https://, http:// or hf:";

export async function prefetchModel(source: ModelSource, options: PrefetchOptions = {}): Promise<void> {
  const given = known("Model.prefetch", options);
  const spec = await specOf(source, given.signal, given);
  ensure(spec.given !== undefined, "option", NO_ADDRESS);
  await callOnce("prefetch", { source: spec, ownFetch: given.fetch !== undefined }, given);
}

export async function removeModel(source: ModelSource, options: RemoveOptions = {}): Promise<boolean> {
  const model = await keptAs(source, known("Model.remove", options));
  ensure(model !== undefined, "option", NO_ADDRESS);
  return withStore(async (store) => {
    const models = await store?.models() ?? [];
    const isIt = (one: { source: string | string[]; endpoint?: string }): boolean =>
      JSON.stringify([one.source, one.endpoint]) === JSON.stringify([model.source, model.endpoint]);
    const files = new Set(models.find(isIt)?.files ?? [model.source].flat().filter((address) => !address.startsWith("hf:")));
    let existed = false;
    for (const url of files) {
      existed = await store?.delete(url) === true || existed;
    }
    for (const one of models.filter((one) => isIt(one) || one.files.every((url) => files.has(url)))) {
      await store?.removeModel(one);
    }
    return existed;
  });
}
