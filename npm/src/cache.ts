/** What the browser's storage keeps of downloads, for people who want to see or delete it. */

import { messageOf, TilewrightError } from "./errors.js";
import { openStore, type Store } from "./store.js";
import type { CacheEntry } from "./types.js";

/**
 * Downloads that are kept in the browser's storage for this origin.
 *
 * Of files, one for each address; `Model.cached` tells which models they are.
 *
 * Where there is no storage (Node, Deno, some private windows) nothing is kept, and the list is empty.
 */
export const cache = {
  /** All downloads, the newest first. Those with `complete: false` were interrupted; the next load of their address continues them. */
  async list(): Promise<CacheEntry[]> {
    const store = await storeIfAny();
    const records = await attempt(store?.list() ?? Promise.resolve([]));
    return records.map(({ lastModified: _, ...entry }) => entry);
  },

  /**
   * Deletes the download of an address. Resolves to whether there was one.
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

/** The storage, if there is one. */
export async function storeIfAny(): Promise<Store | undefined> {
  try {
    return await openStore();
  } catch (error) {
    if (error instanceof TilewrightError && error.code === "storage") {
      return undefined;
    }
    throw error;
  }
}

/** Makes the browser's own errors the package's. */
export async function attempt<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof TilewrightError) {
      throw error;
    }
    throw new TilewrightError("storage", `the browser's storage failed: ${messageOf(error)}`, { cause: error });
  }
}
