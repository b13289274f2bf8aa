/** Where the code runs, and modules that exist only there. */

/**
 * Whether a page of a desktop application runs this: Electron and NW.js give Node's `process` to their pages and workers, which are a
 * browser's all the same, with its workers, its storage and `navigator.gpu`. Their main processes are Node.
 */
function isDesktopPage(): boolean {
  const { versions, type } = process as { versions: Partial<Record<string, string>>; type?: string };
  return versions["electron"] !== undefined ? type === "renderer" || type === "worker" : versions["nw"] !== undefined && "document" in globalThis;
}

/** Cloudflare's Workers may have Node's `process`, but neither its threads nor its files. */
function isCloudflare(): boolean {
  return globalThis.navigator?.userAgent === "Cloudflare-Workers";
}

/** Node, or what looks like it. Deno has the browser's workers and `navigator.gpu`, so it counts as a browser here. */
export const isNode = !("Deno" in globalThis) && typeof process === "object" && typeof process.versions?.node === "string" &&
  !isDesktopPage() && !isCloudflare();

/** Whether there are files with paths. */
export const hasPaths = isNode || "Deno" in globalThis;

/**
 * Imports a module by a name that bundlers do not see, because they would look for it while they build a page.
 * The caller says what the module is.
 */
export function importHidden<T>(name: string): Promise<T> {
  return import(/* @vite-ignore */ /* webpackIgnore: true */ name) as Promise<T>;
}

/** The address of a file beside the package, for Node. Bundlers must not see it either: they would put a copy of the file in a page. */
export function besidePackage(name: string): URL {
  // As a plain `import.meta.url` webpack would read it as a request for any file of the folder.
  return new URL(name, String(import.meta.url));
}

/**
 * What to give the glue of a WASM module: its address, or its bytes in Node, whose `fetch` reads no files. Nothing where the glue is to
 * look beside the worker, which bundlers understand.
 */
export async function wasmAt(url: string | undefined, name: string): Promise<string | Uint8Array<ArrayBuffer> | undefined> {
  const file = isNode ? url ?? besidePackage(name).href : undefined;
  if (file === undefined || !file.startsWith("file:")) {
    return url;
  }
  const { readFile } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
  return readFile(new URL(file));
}

/** A `FinalizationRegistry`, or nothing on servers that have none and only import the package. */
export function finalizer<T>(onCollected: (held: T) => void): Pick<FinalizationRegistry<T>, "register" | "unregister"> {
  return "FinalizationRegistry" in globalThis ? new FinalizationRegistry(onCollected) : { register: () => {}, unregister: () => false };
}
