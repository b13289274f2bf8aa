/** Where the code runs, and modules that exist only there. */

/**
 * Whether a page of a desktop application runs this: Electron and NW.js give Node's `process` to their pages and workers, which are a
 * browser's all the same, with its workers, its storage and `navigator.gpu`. Their main processes are Node.
 */
function isDesktopPage(): boolean {
  const { versions, type } = process as { versions: Partial<Record<string, string>>; type?: string };
  return versions["electron"] !== undefined ? type === "renderer" || type === "worker" : versions["nw"] !== undefined && "document" in globalThis;
}

/** Node, or what looks like it. Deno has the browser's workers and `navigator.gpu`, so it counts as a browser here. */
export const isNode =
  !("Deno" in globalThis) && typeof process === "object" && typeof process.versions?.node === "string" && !isDesktopPage();

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
  return new URL(name, import.meta.url);
}
