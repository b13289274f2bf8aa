/** The platform, and modules that exist only there. */

/** Whether this is a page of Electron or NW.js, which has Node's `process`. Their main processes are Node. */
function isDesktopPage(): boolean {
  const { versions, type } = process as { versions: Partial<Record<string, string>>; type?: string };
  return versions["electron"] !== undefined ? type === "renderer" || type === "worker" : versions["nw"] !== undefined && "document" in globalThis;
}

/** Cloudflare's Workers can have Node's `process`, but neither its threads nor its files. */
function isCloudflare(): boolean {
  return globalThis.navigator?.userAgent === "Cloudflare-Workers";
}

/** Node or a compatible platform. Deno counts as a browser: it has workers and `navigator.gpu`. */
export const isNode = !("Deno" in globalThis) && typeof process === "object" && typeof process.versions?.node === "string" &&
  !isDesktopPage() && !isCloudflare();

export const hasPaths = isNode || "Deno" in globalThis;

/** Imports a module by a name that bundlers do not see, because it does not exist when they build a page. */
export function importHidden<T>(name: string): Promise<T> {
  return import(/* @vite-ignore */ /* webpackIgnore: true */ name) as Promise<T>;
}

/** The address of a file beside the package, for Node. Bundlers that saw it would copy the file into a page. */
export function besidePackage(name: string): URL {
  // webpack would read a plain `import.meta.url` as a request for any file of the folder.
  return new URL(name, String(import.meta.url));
}

/** Whether browsers refuse a worker of this address, because of its origin. Deno never does. */
export function isForeign(url: string): boolean {
  return !("Deno" in globalThis) && /^https?:/.test(url) && new URL(url).origin !== globalThis.origin;
}

/** An address that a worker can be started from: of a script of another origin, a module of this one that imports it. */
export function startable(script: string): { url: string; isBlob: boolean; revoke(): void } {
  if (!isForeign(script)) {
    return { url: script, isBlob: false, revoke: () => {} };
  }
  const url = URL.createObjectURL(new Blob([`import ${JSON.stringify(script)};`], { type: "text/javascript" }));
  return { url, isBlob: true, revoke: () => URL.revokeObjectURL(url) };
}

/** The argument of a WASM module's `init`: an address, or bytes in Node; `undefined`: the file beside the worker. */
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
