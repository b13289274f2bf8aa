/** Converts callers' sources into the worker's terms. */

import { ensure, messageOf, TilewrightError } from "./errors.js";
import type { Fetch } from "./fetching.js";
import { isArrayOf } from "./arguments.js";
import { decoded, defined, orAborted } from "./helpers.js";
import { ENDPOINT, endpointOf, hubSpec, isHubAddress, type Wanted } from "./hub.js";
import { hasPaths } from "./platform.js";
import type { FileSpec, Pins, SourceSpec } from "./protocol.js";
import { storedAddress } from "./store.js";
import type { FileSource, HubOptions, ModelSource, SourceOptions } from "./types.js";

/**
 * The files of a source, with absolute addresses. The bytes of a `Response` are awaited.
 *
 * @throws {@link TilewrightError}: `option` for an invalid source, `http` or `network` for a response that fails; or
 * the signal's reason.
 */
export async function specOf(
  source: ModelSource, signal: AbortSignal | undefined, options: SourceOptions & { fetch?: Fetch } = {}, wanted: Wanted = "model",
): Promise<SourceSpec> {
  const { sha256, ...hub } = options;
  const pins = pinsOf(sha256);
  const spec = await unpinned(source, signal, hub, wanted);
  const given = wanted === "model" || wanted === "speech" ? givenOf(source, spec, hub) : undefined;
  return { ...spec, ...defined({ pins, given }) };
}

/** The storage's record of a source, without requests; `undefined` unless all files have addresses. */
export async function keptAs(source: ModelSource, hub: HubOptions): Promise<SourceSpec["given"]> {
  const isHub = typeof source === "string" && isHubAddress(source);
  return givenOf(source, isHub ? undefined : await unpinned(source, undefined, hub, "model"), hub);
}

function pinsOf(sha256: SourceOptions["sha256"]): Pins | undefined {
  if (sha256 === undefined) {
    return undefined;
  }
  const digestOf = (name: string, text: unknown): string => {
    ensure(typeof text === "string" && /^[0-9a-f]{64}$/i.test(text),
      "option", `${name} is ${JSON.stringify(text) ?? typeof text}, expected 64 hexadecimal digits`);
    return text.toLowerCase();
  };
  return typeof sha256 === "object" && sha256 !== null && !Array.isArray(sha256)
    ? Object.fromEntries(Object.entries(sha256).map(([name, text]) => [name, digestOf(`sha256[${JSON.stringify(name)}]`, text)]))
    : digestOf("sha256", sha256);
}

/** `spec`: needed unless the source is an address of a hub. */
function givenOf(source: ModelSource, spec: SourceSpec | undefined, { revision, endpoint }: HubOptions): SourceSpec["given"] {
  if (typeof source === "string" && isHubAddress(source)) {
    const address = revision === undefined || source.includes("@") ? source : `${source}@${revision}`;
    const hub = endpoint === undefined ? undefined : endpointOf(endpoint);
    return { source: address, ...(hub === undefined || hub === ENDPOINT ? {} : { endpoint: hub }) };
  }
  const urls = spec?.kind === "folder" ? [spec.url] : spec?.kind === "files" ? spec.files.map((file) => file.kind === "url" ? file.url : "") : [];
  const [first] = urls;
  if (first === undefined || !urls.every((url) => /^https?:/.test(url))) {
    return undefined;
  }
  return { source: Array.isArray(source) ? urls.map(storedAddress) : storedAddress(first) };
}

async function unpinned(source: ModelSource, signal: AbortSignal | undefined, hub: HubOptions & { fetch?: Fetch }, wanted: Wanted): Promise<SourceSpec> {
  const { revision, token, headers, endpoint } = hub;
  const option = Object.entries({ revision, token, headers, endpoint }).find(([, value]) => value !== undefined);
  if (typeof source === "string" && isHubAddress(source)) {
    return hubSpec(source, hub, signal, wanted);
  }
  ensure(option === undefined,
    "option", `${option?.[0]} is for addresses of a hub, and the source is none, expected hf:owner/repo`);
  if (Array.isArray(source)) {
    ensure(source.length !== 0, "option", "source is an empty list, expected the files of a model");
    const files = await Promise.all((source as readonly FileSource[]).map((file) => fileOf(file, signal)));
    const config = files.find(({ name }) => name === "config.json");
    return { kind: "files", files, ...(config === undefined ? {} : named(placeOf(config).replace(/[^/\\]*$/, ""))) };
  }
  const file = await fileOf(source as FileSource, signal);
  if (file.kind === "url" && new URL(file.url).pathname.endsWith("/")) {
    return { kind: "folder", url: file.url, ...named(placeOf(file)) };
  }
  // Only the disk shows whether a path is a folder.
  return file.kind === "path" ? { kind: "path", file, ...named(placeOf(file)) } : { kind: "files", files: [file] };
}

function placeOf(file: FileSpec): string {
  switch (file.kind) {
    case "url":
      return decoded(new URL(file.url).pathname);
    case "path":
      return file.path.startsWith("file:") ? decoded(file.path) : file.path;
    case "blob":
      return (file.blob as Partial<File>).webkitRelativePath ?? "";
  }
}

/** The name of a folder: the last part of its path, or of a hub's the part before `resolve` and the revision. */
function named(folder: string): { name?: string } {
  const parts = folder.split(/[/\\]/).filter((part) => part !== "");
  const name = parts.at(parts.at(-2) === "resolve" ? -3 : -1);
  return name === undefined || /^\.+$/.test(name) ? {} : { name };
}

async function fileOf(source: FileSource, signal: AbortSignal | undefined): Promise<FileSpec> {
  if (source instanceof Blob) {
    const { name = UNNAMED, webkitRelativePath } = source as Partial<File>;
    return { kind: "blob", name: nameOf(webkitRelativePath || name), blob: source };
  }
  // Objects of other realms, such as frames, have other constructors, so their names decide.
  const kind = Object.prototype.toString.call(source).slice(8, -1);
  if (kind === "ArrayBuffer" || isArrayOf("Uint8Array", source)) {
    return { kind: "blob", name: UNNAMED, blob: new Blob([source as ArrayBuffer | Uint8Array<ArrayBuffer>]) };
  }
  if (kind === "Response") {
    return responseOf(source as Response, signal);
  }
  ensure(typeof source === "string" || kind === "URL", "option", `source is ${kind}, expected ${EXPECTED}`);
  const text = String(source);
  const isAddress = /^(https?|data|blob):/i.test(text);
  if (hasPaths && !isAddress) {
    return { kind: "path", name: nameOf(text), path: text };
  }
  const base = (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href;
  let url: URL;
  try {
    url = new URL(text, base);
  } catch (error) {
    throw new TilewrightError("option", `source is ${JSON.stringify(text)}, expected ${EXPECTED}`, { cause: error });
  }
  url.hash = "";
  return { kind: "url", name: decoded(nameOf(url.pathname)), url: url.href };
}

const EXPECTED = "an address, a file, bytes, a Response, or a list of them";

/** The bytes of a response are awaited, because the engine may go back, and may load again. */
async function responseOf(response: Response, signal: AbortSignal | undefined): Promise<FileSpec> {
  const name = decoded(nameOf(/^https?:/i.test(response.url) ? new URL(response.url).pathname : ""));
  const what = response.url === "" ? "the Response" : `the Response of ${response.url}`;
  ensure(response.type !== "opaque",
    "option", `source is ${what}, which the browser lets no page read, expected one of a request in mode "cors"`);
  ensure(response.ok, "http", `${what} is an error (HTTP status ${response.status})`, { status: response.status });
  ensure(!response.bodyUsed,
    "option", `source is ${what}, whose bytes were read already, expected one that nobody has read`);
  try {
    return { kind: "blob", name, blob: await orAborted(response.blob(), signal) };
  } catch (error) {
    signal?.throwIfAborted();
    throw new TilewrightError("network", `${what} broke (${messageOf(error)})`, { cause: error });
  }
}

/** A file of a module of sentence-transformers, whose name alone would be ambiguous. */
const IN_MODULE = /(?:^|[/\\])(\d+_(?:Pooling|Dense|Normalize|LayerNorm))[/\\]([^/\\]+)$/;
const UNNAMED = "model.gguf";

/** A file's name relative to the model's folder. */
function nameOf(path: string): string {
  const [, folder, file] = IN_MODULE.exec(path) ?? [];
  return folder === undefined ? path.split(/[/\\]/).at(-1) || UNNAMED : `${folder}/${file}`;
}
