// The texts of the search and their vectors in the browser's storage, so that they are there on the next visit.
//
// IndexedDB writes a record whole or not at all. What is read is looked at all the same: another version of the page, or another page of
// this origin, may have written it. Whoever changes the texts counts `revision` up in the same transaction, and a tab changes nothing unless
// it has seen the latest one: what another tab or another version of the page has kept stays.
import { openDB, type IDBPDatabase, type IDBPObjectStore } from "idb";
import type { Passage } from "./passage.js";

const DATABASE = "tilewright-search";
const STORE = "kept";
const VERSION = 1;

/** Texts as they are kept. */
export interface KeptTexts {
  nTexts: number;
  passages: Passage[];
}

/** Vectors of the first passages as they are kept: what `Index.save` gave. */
export interface KeptVectors {
  /** The encoder's name for people, by which it is known again. */
  encoder: string;
  nDone: number;
  bytes: Blob;
}

/** Something is kept and cannot be used. */
export class DamagedError extends Error {
  override readonly name = "DamagedError";
}

/** Texts are kept that another version of the page has written. */
export class OtherVersionError extends Error {
  override readonly name = "OtherVersionError";
}

/** Of the texts that this tab has read or written last; undefined: there are none that it may change. */
let revision: number | undefined;

/** Does one thing with the database, and closes it: another tab may have to change it. */
async function withDatabase<T>(work: (database: IDBPDatabase) => Promise<T>): Promise<T> {
  const database = await openDB(DATABASE, 1, { upgrade: (opened) => void opened.createObjectStore(STORE) });
  try {
    return await work(database);
  } finally {
    database.close();
  }
}

/** Changes what is kept, in one transaction; `isOfTexts`: other tabs have other texts from then on. */
async function change(isOfTexts: boolean, work: (kept: IDBPObjectStore<unknown, [typeof STORE], typeof STORE, "readwrite">) => Promise<unknown>): Promise<void> {
  await withDatabase(async (database) => {
    const transaction = database.transaction(STORE, "readwrite");
    if (revision === undefined || (await revisionIn(transaction.store)) !== revision) {
      throw new Error("another tab has changed the texts that are kept. Reload this page to see them");
    }
    const next = isOfTexts ? revision + 1 : revision;
    await Promise.all([work(transaction.store), transaction.store.put(next, "revision"), transaction.done]);
    revision = next;
  });
}

async function revisionIn(kept: { get(key: string): Promise<unknown> }): Promise<number> {
  return Number(await kept.get("revision") ?? 0);
}

/** Tells apart texts that are not the same, without reading all of them: by the lengths and one character of each. */
function fingerprint(passages: readonly Passage[], n: number): number {
  let word = n;
  for (const { text } of passages.slice(0, n)) word = (Math.imul(word, 0x01000193) ^ text.length ^ text.charCodeAt(text.length >> 1) << 8) >>> 0;
  return word;
}

/** Whether there is nothing that this version of the page must leave as it is. */
export function mayKeep(): boolean {
  return revision !== undefined;
}

/** Keeps texts in the place of those that were kept. Throws an `Error`, as all that change something do, if another tab has changed them. */
export async function keepTexts({ nTexts, passages }: KeptTexts): Promise<void> {
  await change(true, (kept) => kept.put({ version: VERSION, nTexts, passages }, "texts"));
}

/** Keeps vectors of the first passages. */
export async function keepVectors(vectors: KeptVectors, passages: readonly Passage[]): Promise<void> {
  await change(false, (kept) => kept.put({ version: VERSION, ...vectors, print: fingerprint(passages, vectors.nDone) }, "vectors"));
}

/** Forgets texts and vectors. */
export async function forgetKept(): Promise<void> {
  await change(true, (kept) => Promise.all([kept.delete("texts"), kept.delete("vectors")]));
}

/** Forgets vectors alone. */
export async function forgetVectors(): Promise<void> {
  await change(false, (kept) => kept.delete("vectors"));
}

/** The texts that are kept; undefined if none are. Throws a `DamagedError` or an `OtherVersionError` for what cannot be used. */
export async function keptTexts(): Promise<KeptTexts | undefined> {
  const [kept, latest] = await withDatabase(async (database): Promise<[unknown, number]> => {
    const { store } = database.transaction(STORE);
    return [await store.get("texts"), await revisionIn(store)];
  });
  const { version, nTexts, passages } = (kept ?? {}) as Record<string, unknown>;
  if (typeof version === "number" && version !== VERSION) {
    throw new OtherVersionError(`they are of another version of this page (${version}, this one reads ${VERSION})`);
  }
  revision = latest;
  if (kept === undefined) return undefined;
  if (typeof nTexts !== "number" || !Array.isArray(passages) || !passages.every(isPassage)) throw new DamagedError("they are damaged");
  return { nTexts, passages };
}

/** The vectors that an encoder made of the first passages; undefined if none are kept of it. Throws a `DamagedError` for what cannot be used. */
export async function keptVectors(encoder: string, passages: readonly Passage[]): Promise<KeptVectors | undefined> {
  if (!mayKeep()) return undefined;
  const kept: unknown = await withDatabase((database) => database.get(STORE, "vectors"));
  if (kept === undefined) return undefined;
  const { version, encoder: mine, nDone, bytes, print } = kept as Record<string, unknown>;
  if (version !== VERSION) throw new DamagedError("they are of another version of this page");
  if (typeof nDone !== "number" || !(bytes instanceof Blob)) throw new DamagedError("they are damaged");
  // Another tab may have kept other texts since.
  if (mine !== encoder || nDone > passages.length || print !== fingerprint(passages, nDone)) return undefined;
  return { encoder, nDone, bytes };
}

function isPassage(it: unknown): it is Passage {
  if (typeof it !== "object" || it === null) return false;
  const { text, source, number } = it as Record<string, unknown>;
  return typeof text === "string" && typeof source === "string" && typeof number === "number";
}

/** The numbers in what `Index.save` gave of an index that stores floats of 32 bits, one vector behind the other. */
export async function vectorsIn(bytes: Blob): Promise<Float32Array> {
  const start = 8 + Number(new DataView(await bytes.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  const header = JSON.parse(await bytes.slice(8, start).text()) as { vectors: { data_offsets: [number, number] } };
  const [first, end] = header.vectors.data_offsets;
  return new Float32Array(await bytes.slice(start + first, start + end).arrayBuffer());
}
