/** What people give as a model's source, made into what the worker is told. */

import { TilewrightError } from "./errors.js";
import { hasPaths } from "./platform.js";
import type { FileSpec, SourceSpec } from "./protocol.js";
import type { FileSource, ModelSource } from "./types.js";

/** The files of a source, with absolute addresses. */
export function specOf(source: ModelSource): SourceSpec {
  if (Array.isArray(source)) {
    if (source.length === 0) {
      throw new TilewrightError("option", "source is an empty list, expected the files of a model");
    }
    const files = (source as readonly FileSource[]).map(fileOf);
    const config = files.find(({ name }) => name === "config.json");
    return { kind: "files", files, ...(config === undefined ? {} : named(placeOf(config).replace(/[^/\\]*$/, ""))) };
  }
  const file = fileOf(source as FileSource);
  if (file.kind === "url" && new URL(file.url).pathname.endsWith("/")) {
    return { kind: "folder", url: file.url, ...named(placeOf(file)) };
  }
  // Only the disk knows whether a path is a folder's.
  return file.kind === "path" ? { kind: "path", file, ...named(placeOf(file)) } : { kind: "files", files: [file] };
}

/** The path of a file, with slashes. */
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

/** The name of the folder with this path: its last part; of a repository of Hugging Face what stands in front of `resolve` and its revision. */
function named(folder: string): { name?: string } {
  const parts = folder.split(/[/\\]/).filter((part) => part !== "");
  const name = parts.at(parts.at(-2) === "resolve" ? -3 : -1);
  return name === undefined || /^\.+$/.test(name) ? {} : { name };
}

function fileOf(source: FileSource): FileSpec {
  if (source instanceof Blob) {
    const { name = UNNAMED, webkitRelativePath } = source as Partial<File>;
    return { kind: "blob", name: nameOf(webkitRelativePath || name), blob: source };
  }
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
    throw new TilewrightError("option", `source is ${JSON.stringify(text)}, expected an address, a file, or a list of them`, { cause: error });
  }
  // What follows a # is the page's and never reaches a server.
  url.hash = "";
  return { kind: "url", name: decoded(nameOf(url.pathname)), url: url.href };
}

/** A part of an address as people read it. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    // A percent sign that begins no escape: the text is as it stands.
    return text;
  }
}

/** A file in the folder of one of sentence-transformers' modules: its name alone would be that of a file of the model's own folder. */
const IN_MODULE = /(?:^|[/\\])(\d+_(?:Pooling|Dense|Normalize|LayerNorm))[/\\]([^/\\]+)$/;
const UNNAMED = "model.gguf";

/** A file's name in the model's folder. */
function nameOf(path: string): string {
  const [, folder, file] = IN_MODULE.exec(path) ?? [];
  return folder === undefined ? path.split(/[/\\]/).at(-1) || UNNAMED : `${folder}/${file}`;
}
