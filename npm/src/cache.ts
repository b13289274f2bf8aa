/** Access to the stored downloads. */

import { withStore } from "./store.js";
import type { CacheEntry } from "./types.js";

/**
 * Downloaded files in the browser's storage for this origin, by address. `Model.cached` lists models. Empty where
 * there is no storage (Node, Deno, some private windows).
 */
export const cache = {
  /** All downloads, the newest first. The next load continues those with `complete: false`. */
  async list(): Promise<CacheEntry[]> {
    return withStore(async (store) => (await store?.list() ?? []).map(({ lastModified: _, ...entry }) => entry));
  },

  /**
   * Deletes the download of an address. Resolves to whether it existed.
   *
   * @throws {@link TilewrightError} `storage` while the file is being loaded, here or in another tab.
   */
  async delete(url: string | URL): Promise<boolean> {
    const absolute = new URL(url, (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href);
    absolute.hash = "";
    return withStore(async (store) => await store?.delete(absolute.href) ?? false);
  },

  /**
   * Deletes all downloads.
   *
   * @throws {@link TilewrightError} `storage` while one of them is being loaded, here or in another tab.
   */
  async clear(): Promise<void> {
    await withStore(async (store) => store?.clear());
  },
};
