/** Where the code runs, and modules that exist only there. */

/** Node, or what looks like it. Deno has the browser's workers and `navigator.gpu`, so it counts as a browser here. */
export const isNode = !("Deno" in globalThis) && typeof process === "object" && typeof process.versions?.node === "string";

/** Whether there are files with paths. */
export const hasPaths = isNode || "Deno" in globalThis;

/**
 * Imports a module by a name that bundlers do not see, because they would look for it while they build a page.
 * The caller says what the module is.
 */
export function importHidden<T>(name: string): Promise<T> {
  return import(/* @vite-ignore */ /* webpackIgnore: true */ name) as Promise<T>;
}
