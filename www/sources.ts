// Where a model is: what people type, paste or drop, turned into what the package loads. No DOM in here.
import { TilewrightError, type CacheEntry, type ModelSource } from "./tilewright/index.js";

/** Something to load, with a name for people. */
export interface ModelChoice {
  label: string;
  source: ModelSource | "builtin" | Repository;
  /** Where its vision encoder is, if it may have one: `true` is in its own files. */
  vision?: true | string | File;
}

/** A repository of Hugging Face, of which nobody has asked yet what it has. */
export interface Repository {
  /** `owner/name`. */
  repository: string;
  revision: string;
  /** Which of its GGUF files is wanted, if that was said: `Q8_0`. */
  quantisation?: string;
}

/** A choice of which it is known where it is. */
export interface LocatedModel extends ModelChoice {
  source: ModelSource | "builtin";
}

export const BUILTIN: ModelChoice = { label: "Story model", source: "builtin" };

/** A small encoder for a beginning. */
export const MINILM: ModelChoice = {
  label: "all-MiniLM-L6-v2",
  source: "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/",
};

/** A small encoder that finds pictures by words. */
export const SIGLIP: ModelChoice = {
  label: "siglip-base-patch16-224",
  source: "https://huggingface.co/google/siglip-base-patch16-224/resolve/main/",
};

const SHARD = /-(\d{5})-of-(\d{5})(\.gguf)$/;
const FOLDER_FILE = /\.(safetensors|json)$/;
/** A vision encoder in GGUF, which is no model by itself. */
const ENCODER = /mmproj[^/]*\.gguf$/i;
/** A file of folders whose models take pictures. */
const PREPROCESSOR = /(?:^|\/)(?:pre)?processor_config\.json$/;
/** Encoders by weight type, the best first: they are small, and suffer from fewer bits. */
const ENCODER_TYPES = ["F16", "BF16", "Q8_0"];
/** The folder of one of sentence-transformers' modules, inside the model's. */
const MODULE_FOLDER = /\/\d+_[A-Z]\w*\/$/;
const HUB = "https://huggingface.co";
/** Milliseconds in which it has to say what a repository has. */
const ASK_MS = 10_000;
/** A repository of Hugging Face: `owner/name`, which is no file's name, after a colon which of its GGUF files, and after an @ the revision. */
const HUB_NAME = /^(?:hf:)?([\w-][\w.-]*\/(?!.*\.(?:gguf|safetensors|json)$)[\w-][\w.-]*?)(?::([\w.-]+))?(?:@([\w.-]+))?$/i;
/** Weight types, as names of GGUF files have them: the first one that a repository has is taken. Small ones that write well come first. */
const PREFERRED = ["Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "F16", "BF16", "F32"];
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
 * What is at an address that somebody typed, or under a name of Hugging Face: `owner/name`, or `hf:owner/name:Q8_0@revision`. Of Hugging Face's pages,
 * `/blob/` is one about a file, and stands for the file, which is at `/resolve/`; and a repository's page stands for the repository.
 *
 * Throws a `TypeError` for what is no address.
 */
export function choiceOfAddress(typed: string, base: string): ModelChoice {
  const [, name, quantisation, revision = "main"] = HUB_NAME.exec(typed.trim()) ?? [];
  if (name !== undefined) {
    return { label: lastPart(name), source: { repository: name, revision, ...(quantisation === undefined ? {} : { quantisation }) } };
  }
  const url = new URL(typed.trim(), base);
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw new TypeError(`expected an address with http or https, found ${url.protocol}`);
  }
  if (url.origin === HUB) {
    url.pathname = url.pathname.replace(/^(\/[^/]+\/[^/]+)\/blob\//, "$1/resolve/");
    const [, repository, revision = "main"] = /^\/([^/]+\/[^/]+)(?:\/tree\/([^/]+))?\/?$/.exec(url.pathname) ?? [];
    if (repository !== undefined) return { label: lastPart(repository), source: { repository, revision } };
  }
  return { label: lastPart(url.href), source: shards(url.href) ?? url.href };
}

/**
 * Where a choice is. Of a repository it is the folder, or of one that has GGUF files alone the one that was asked for, else the first that
 * `PREFERRED` names. Without an answer from `hub` it is the folder, which may be stored here.
 *
 * Throws a `TilewrightError` `http` that says what there is if the repository has no such GGUF file, or the signal's reason.
 */
export async function located({ label, source, vision }: ModelChoice, signal: AbortSignal, hub = HUB): Promise<LocatedModel> {
  if (typeof source !== "object" || !("revision" in source)) return { label, source, ...(vision === undefined ? {} : { vision }) };
  const { repository, revision, quantisation } = source;
  const folder = `${hub}/${repository}/resolve/${revision}/`;
  const files = await filesOfRepository(`${hub}/api/models/${repository}/revision/${revision}`, signal);
  const models = new Map<string, string>();
  for (const path of files) {
    const type = /(?:^|[-._/])((?:I?Q\d|BF16|F16|F32)[A-Z0-9_]*)(?:-\d{5}-of-\d{5})?\.gguf$/i.exec(path)?.[1];
    // A projector of images is no model by itself, and the first part stands for all.
    if (!path.endsWith(".gguf") || /mmproj/i.test(path) || (SHARD.test(path) && !/-00001-of-/.test(path))) continue;
    models.set((type ?? path).toUpperCase(), path);
  }
  const hasFolder = files.includes("config.json") && files.some((path) => path.endsWith(".safetensors"));
  if (quantisation === undefined && (hasFolder || models.size === 0)) {
    return { label, source: folder, ...(files.some((path) => !path.includes("/") && PREPROCESSOR.test(path)) ? { vision: true } : {}) };
  }
  const types = [...models.keys()];
  const type = quantisation?.toUpperCase() ?? PREFERRED.find((it) => models.has(it)) ?? types[0] ?? "";
  const path = models.get(type);
  if (path === undefined) throw new TilewrightError("http", `${repository} has no GGUF file of ${quantisation}; it has ${types.join(", ") || "none at all"}`);
  const urlOf = (path: string): string => folder + path.split("/").map(encodeURIComponent).join("/");
  const url = urlOf(path);
  const encoder = encoderBeside(path, files);
  return { label: lastPart(path), source: shards(url) ?? url, ...(encoder === undefined ? {} : { vision: urlOf(encoder) }) };
}

/** The vision encoder in the folder of a model, by their paths. */
function encoderBeside(model: string, files: string[]): string | undefined {
  const folder = model.slice(0, model.lastIndexOf("/") + 1);
  const encoders = files.filter((path) => path.startsWith(folder) && ENCODER.test(path.slice(folder.length)) && !path.slice(folder.length).includes("/"));
  const of = (type: string): string | undefined => encoders.find((path) => new RegExp(`(?:^|[-._])${type}\\.gguf$`, "i").test(path));
  return ENCODER_TYPES.map(of).find((path) => path !== undefined) ?? encoders[0];
}

/** Paths of all files of a repository; none if the hub cannot be asked. */
async function filesOfRepository(api: string, signal: AbortSignal): Promise<string[]> {
  try {
    const response = await fetch(api, { signal: AbortSignal.any([signal, AbortSignal.timeout(ASK_MS)]) });
    const { siblings } = (await response.json()) as { siblings?: { rfilename?: unknown }[] };
    return (siblings ?? []).map(({ rfilename }) => rfilename).filter((path) => typeof path === "string");
  } catch {
    signal.throwIfAborted();
    return [];
  }
}

/**
 * The model in files that were picked or dropped; undefined if there is none. Parts are put in the order of their names. Of a folder,
 * only what belongs to a model counts.
 */
export function choiceOfFiles(picked: File[]): ModelChoice | undefined {
  const known = picked.filter(({ webkitRelativePath: path }) => path === "" || IN_FOLDER.test(path));
  const models = known.filter(({ name }) => !ENCODER.test(name));
  // An encoder by itself is refused by its name.
  const files = models.length === 0 ? known : models;
  const [first] = files;
  if (!first) return undefined;
  const encoder = files === models ? known.find(({ name }) => ENCODER.test(name)) : undefined;
  const vision = encoder ?? (files.some(({ name }) => PREPROCESSOR.test(name)) ? true : undefined);
  return { ...modelIn(files, first), ...(vision === undefined ? {} : { vision }) };
}

function modelIn(files: File[], first: File): ModelChoice {
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
  const folderOf = (url: string): string => url.slice(0, url.lastIndexOf("/") + 1);
  const isEncoder = ({ url }: CacheEntry): boolean => ENCODER.test(lastPart(url));
  // A model's encoder comes after it.
  for (const entry of [...entries].sort((a, b) => Number(isEncoder(a)) - Number(isEncoder(b)))) {
    const { url, stored, complete } = entry;
    const [model, ...others] = !isEncoder(entry) ? [] : [...models.values()].filter(({ urls: [first = ""] }) => first.endsWith(".gguf") && folderOf(first) === folderOf(url));
    if (model !== undefined) {
      for (const it of [model, ...others]) {
        it.vision = url;
        it.complete &&= complete;
      }
      model.urls.push(url);
      model.storedBytes += stored;
      continue;
    }
    const parts = shards(url);
    const path = url.replace(/[?#].*$/, "");
    const folder = FOLDER_FILE.test(path) ? path.slice(0, path.lastIndexOf("/") + 1).replace(MODULE_FOLDER, "/") : undefined;
    const key = parts?.[0] ?? folder ?? url;
    const found: StoredModel = models.get(key) ?? {
      label: folder === undefined ? lastPart(url) : folderLabel(folder),
      source: parts ?? folder ?? url,
      urls: [],
      storedBytes: 0,
      complete: true,
    };
    found.urls.push(url);
    found.storedBytes += stored;
    found.complete &&= complete;
    if (PREPROCESSOR.test(path)) found.vision = true;
    models.set(key, found);
  }
  for (const model of models.values()) {
    if (Array.isArray(model.source)) model.complete &&= model.urls.filter((url) => url !== model.vision).length === model.source.length;
  }
  return [...models.values()].sort((a, b) => (a.label < b.label ? -1 : 1));
}

/** `https://huggingface.co/owner/name/resolve/main/` is known to people as `name`. */
function folderLabel(folder: string): string {
  return lastPart(folder.replace(/\/resolve\/[^/]+\/$/, ""));
}
