/** Tunings of this browser's adapter, in IndexedDB. */

const DATABASE = "tilewright";
const STORE = "tunings";

export function tuningKey(adapter: string, tier: string): string {
  // Browser versions differ in their shader compilers.
  return [adapter, tier, globalThis.navigator?.userAgent ?? ""].join(" | ");
}

export async function readTuning(key: string): Promise<string | undefined> {
  try {
    const found: unknown = await inStore("readonly", (store) => store.get(key));
    return typeof found === "string" ? found : undefined;
  } catch {
    return undefined;
  }
}

/** Stores a tuning. Rejects without IndexedDB, as in Node, and where the browser refuses it. */
export async function writeTuning(key: string, text: string): Promise<void> {
  await inStore("readwrite", (store) => store.put(text, key));
}

async function inStore<T>(mode: IDBTransactionMode, ask: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  if (globalThis.indexedDB === undefined) {
    throw new Error("there is no IndexedDB here");
  }
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await settled(opening);
  try {
    return await settled(ask(database.transaction(STORE, mode).objectStore(STORE)));
  } finally {
    database.close();
  }
}

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
