/** Addresses of the package's files. */

import { ensure, TilewrightError } from "./errors.js";
import { known } from "./options.js";
import type { ConfigureOptions } from "./types.js";

/** Absolute addresses. Files without one are beside the package. */
export type FileUrls = { [K in keyof ConfigureOptions]?: string };

let urls: FileUrls = {};

/**
 * Sets the addresses of the package's files for all workers that start later. Others stay as they are; `undefined` is
 * beside the package.
 *
 * @throws TilewrightError `option` for an invalid address.
 */
export function configure(options: ConfigureOptions): void {
  const next = { ...urls };
  for (const [name, given] of Object.entries(known("configure", options)) as [keyof ConfigureOptions, unknown][]) {
    if (given === undefined) {
      delete next[name];
    } else {
      next[name] = absolute(name, given);
    }
  }
  urls = next;
}

export function fileUrls(): Readonly<FileUrls> {
  return urls;
}

function absolute(name: string, given: unknown): string {
  ensure(typeof given === "string" || given instanceof URL,
    "option", `configure: \`${name}\` is ${given === null ? "null" : `of type ${typeof given}`}, expected an address: a string or a URL`);
  // Pages have a base, workers a location, Node neither.
  const base = (globalThis as { document?: { baseURI?: string } }).document?.baseURI ?? globalThis.location?.href;
  try {
    return new URL(given, base).href;
  } catch (error) {
    const expected = base === undefined ? "an absolute address, such as `file:///..`" : "an address";
    throw new TilewrightError("option", `configure: \`${name}\` is "${String(given)}", expected ${expected}`, { cause: error });
  }
}
