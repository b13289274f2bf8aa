// Where a model is: what people type, paste or drop, turned into what the package loads. No DOM in here.
import type { CacheEntry, ModelSource } from "./tilewright/index.js";

/** Something to load, with a name for people. */
export interface ModelChoice {
  label: string;
  source: ModelSource | "builtin";
}

export const BUILTIN: ModelChoice = { label: "Story model", source: "builtin" };

/** A small encoder for a beginning. */
export const MINILM: ModelChoice = {
  label: "all-MiniLM-L6-v2",
  source: "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/",
};

const SHARD = /-(\d{5})-of-(\d{5})(\.gguf)$/;
const FOLDER_FILE = /\.(safetensors|json)$/;
/** The folder of one of sentence-transformers' modules, inside the model's. */
const MODULE_FOLDER = /\/\d+_[A-Z]\w*\/$/;
/** A repository of Hugging Face: `owner/name`, which is no file's name. */
const HUB_NAME = /^[\w-][\w.-]*\/(?!.*\.(?:gguf|safetensors|json)$)[\w-][\w.-]*$/i;
/** What of a model's folder is read, by its path in the folder: files of the folder itself, and of sentence-transformers' modules. */
const IN_FOLDER = /^[^/]+\/(?:\d+_[A-Z]\w*\/)?[^/]+\.(?:gguf|safetensors|json)$/;

/** The last part of an address or path, without what follows `?` or `#`. */
function lastPart(url: string): string {
  const path = url.replace(/[?#].*$/, "").replace(/\/+$/, "");
  const part = path.slice(path.lastIndexOf("/") + 1) || url;
  try {
    return decodeURIComponent(part);
  } catch {
    // A percent sign that begins no escape: the name is as it stands.
    return part;
  }
}

/** All parts of a split GGUF, from the address of one of them; undefined for other addresses. */
function shards(url: string): string[] | undefined {
  const match = SHARD.exec(url);
  if (!match) return undefined;
  const [tail, , total = ""] = match;
  // The format's own limit is 65535; more than a thousand parts is a mistyped address.
  if (Number(total) < 1 || Number(total) > 1000) return undefined;
  const stem = url.slice(0, -tail.length);
  return Array.from({ length: Number(total) }, (_, i) => `${stem}-${String(i + 1).padStart(5, "0")}-of-${total}.gguf`);
}

/**
 * The model at an address that somebody typed, or with a name on Hugging Face, `owner/name`. Pages of Hugging Face are turned into the files they show: `/blob/` is the
 * page about a file and `/resolve/` the file, and a repository's page stands for its folder.
 *
 * Throws a `TypeError` for what is no address.
 */
export function choiceOfAddress(typed: string, base: string): ModelChoice {
  const name = typed.trim();
  const url = new URL(HUB_NAME.test(name) ? `https://huggingface.co/${name}` : name, base);
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw new TypeError(`expected an address with http or https, found ${url.protocol}`);
  }
  if (url.hostname === "huggingface.co") {
    url.pathname = url.pathname.replace(/^(\/[^/]+\/[^/]+)\/blob\//, "$1/resolve/");
    const repository = /^(\/[^/]+\/[^/]+)(?:\/tree\/([^/]+))?\/?$/.exec(url.pathname);
    if (repository) {
      url.pathname = `${repository[1]}/resolve/${repository[2] ?? "main"}/`;
      return { label: lastPart(repository[1] ?? url.href), source: url.href };
    }
  }
  return { label: lastPart(url.href), source: shards(url.href) ?? url.href };
}

/**
 * The model in files that were picked or dropped; undefined if there is none. Parts are put in the order of their names. Of a folder,
 * only what belongs to a model counts.
 */
export function choiceOfFiles(picked: File[]): ModelChoice | undefined {
  const files = picked.filter(({ webkitRelativePath: path }) => path === "" || IN_FOLDER.test(path));
  const [first] = files;
  if (!first) return undefined;
  const [folder = ""] = first.webkitRelativePath.split("/");
  if (folder !== "" && files.length > 1) return { label: folder, source: sorted(files) };
  if (files.length === 1) return { label: first.name, source: first };
  const named = sorted(files).find((file) => !file.name.endsWith(".json")) ?? first;
  return { label: `${named.name} and ${files.length - 1} more`, source: sorted(files) };
}

function sorted(files: File[]): File[] {
  return [...files].sort((a, b) => (a.name < b.name ? -1 : 1));
}

/** A model among the stored files: a GGUF, or several files that belong together. */
export interface StoredModel extends ModelChoice {
  urls: string[];
  storedBytes: number;
  complete: boolean;
}

/** Groups stored files into models. */
export function storedModels(entries: CacheEntry[]): StoredModel[] {
  const models = new Map<string, StoredModel>();
  for (const { url, stored, complete } of entries) {
    const parts = shards(url);
    const path = url.replace(/[?#].*$/, "");
    const folder = FOLDER_FILE.test(path) ? path.slice(0, path.lastIndexOf("/") + 1).replace(MODULE_FOLDER, "/") : undefined;
    const key = parts?.[0] ?? folder ?? url;
    const model = models.get(key) ?? {
      label: folder === undefined ? lastPart(url) : folderLabel(folder),
      source: parts ?? folder ?? url,
      urls: [],
      storedBytes: 0,
      complete: true,
    };
    model.urls.push(url);
    model.storedBytes += stored;
    model.complete &&= complete;
    models.set(key, model);
  }
  for (const model of models.values()) {
    if (Array.isArray(model.source)) model.complete &&= model.urls.length === model.source.length;
  }
  return [...models.values()].sort((a, b) => (a.label < b.label ? -1 : 1));
}

/** `https://huggingface.co/owner/name/resolve/main/` is known to people as `name`. */
function folderLabel(folder: string): string {
  return lastPart(folder.replace(/\/resolve\/[^/]+\/$/, ""));
}
