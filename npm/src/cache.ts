/** Access to the stored downloads. */

import { attempt, storeIfAny } from "./store.js";
import type { CacheEntry } from "./types.js";

/**
 * Downloaded files in the browser's storage for this origin, by address. `Model.cached` lists models. Empty where
 * there is no storage (Node, Deno, some private windows).
 */
export const cache = {
  /** All downloads, the newest first. The next load continues those with `complete: false`. */
  async list(): Promise<CacheEntry[]> {
    const store = await storeIfAny();
    const records = await attempt(store?.list() ?? Promise.resolve([]));
    return records.map(({ lastModified: _, ...entry }) => entry);
  },

  /**
   * Deletes the download of an address. Resolves to whether it existed.
   *
   * @throws {@link TilewrightError} `storage` while the file is being loaded, here or in another tab.
   */
  async delete(url: string | URL): Promise<boolean> {
    const store = await storeIfAny();
    const absolute = new URL(url, (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href);
    absolute.hash = "";
    return attempt(store?.delete(absolute.href) ?? Promise.resolve(false));
  },

  /**
   * Deletes all downloads.
   *
   * @throws {@link TilewrightError} `storage` while one of them is being loaded, here or in another tab.
   */
  async clear(): Promise<void> {
    const store = await storeIfAny();
    await attempt(store?.clear() ?? Promise.resolve());
  },
};
