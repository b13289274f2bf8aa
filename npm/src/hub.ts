/** Models on a hub: `hf:owner/repo[/path][:quantisation][@revision]`. */

import { httpError, LONGEST_WAIT_MS, retryAfter, type RequestSettings } from "./download.js";
import { ensure, messageOf, TilewrightError } from "./errors.js";
import { ownFetch, type Fetch } from "./fetching.js";
import type { GitBlob } from "./git.js";
import { defined, delay } from "./helpers.js";
import { PREPROCESSOR_FILES, type FileSpec, type SourceSpec } from "./protocol.js";
import { CHAT_FILES, INDEX, NEEDED_FILES, OPTIONAL_FILES, SENTENCE_FILES } from "./source.js";
import { openStore } from "./store.js";
import type { HubOptions } from "./types.js";

export const ENDPOINT = "https://huggingface.co";
const BACKOFF_MS = [500, 1000, 2000];
/** A hub that is silent for this long counts as gone. */
const SILENCE_MS = 30_000;

/** Default quantisations, in order of preference. As in the command line. */
const PREFERRED_QUANTS = [
  "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_0", "IQ4_XS", "IQ4_NL", "Q4_1", "UD-Q4_K_XL", "Q5_K_M", "Q5_K_S", "Q6_K", "MXFP4", "Q8_0", "BF16", "F16", "F32",
];

interface Address {
  text: string;
  repo: string;
  path: string | undefined;
  quant: string | undefined;
  revision: string;
}

interface Listing {
  files: HubFile[];
  licence?: string;
}

interface HubFile {
  path: string;
  /** SHA-256 of a file in Git LFS. */
  sha256?: string;
  /** Git digest of another file. */
  git?: GitBlob;
}

/**
 * What an address names: a model, a single safetensors file, a vision encoder or the model that has one, or a speech model,
 * which may be a file of whisper.cpp.
 */
export type Wanted = "model" | "file" | "vision" | "speech";

export function isHubAddress(text: string): boolean {
  return text.startsWith("hf:");
}

/**
 * The files of an address, from the hub's list or, without a response, from the stored files.
 *
 * @throws {@link TilewrightError}: `option` for an invalid address or one without a model, `http` or `network` if the
 * hub refuses or does not respond, `format` if its response is invalid; or the signal's reason.
 */
export async function hubSpec(
  text: string, options: HubOptions & { fetch?: Fetch }, signal: AbortSignal | undefined, wanted: Wanted = "model",
): Promise<SourceSpec> {
  const address = parse(text, options.revision);
  const endpoint = endpointOf(options.endpoint);
  const headers = headersOf(options);
  const base = `${endpoint}/${address.repo}/resolve/${encodeURIComponent(address.revision)}/`;
  const { files, licence } = await list(address, endpoint, { headers, base, ...defined({ fetch: options.fetch }) }, wanted, signal);
  const given = Object.keys(headers).length === 0 ? {} : { headers };
  const specs = choose(files, address, wanted).map(({ path, name, sha256, git }): FileSpec =>
    ({ kind: "url", name, url: base + path.split("/").map(encodeURIComponent).join("/"), ...given, ...defined({ sha256, git }) }));
  const name = specs.length > 1 ? lastOf(address.repo) : undefined;
  return { kind: "files", files: specs, ...defined({ name, licence }) };
}

function parse(text: string, revision: string | undefined): Address {
  const [, owner, repo, path, quant, own] = /^hf:([^/:@]+)\/([^/:@]+)(?:\/([^:@]*))?(?::([^@]*))?(?:@(.*))?$/.exec(text) ?? [];
  const isName = (name: string | undefined): boolean => name !== undefined && /^[\w-][\w.-]{0,95}$/.test(name) && !name.includes("--");
  const place = path?.replace(/\/+$/, "") || undefined;
  const chosen = revision ?? own ?? "main";
  const isValid = isName(owner) && isName(repo) && (quant === undefined || isName(quant))
    && (place === undefined || isPlainPath(place)) && isPlainPath(chosen);
  ensure(isValid,
    "option", `source is ${JSON.stringify(text)}, expected hf:owner/repo[/path][:quantisation][@revision]`);
  ensure(revision === undefined || own === undefined || revision === own,
    "option", `revision is ${JSON.stringify(revision)}, and the address says ${JSON.stringify(own)}`);
  return { text, repo: `${owner}/${repo}`, path: place, quant, revision: chosen };
}

function isPlainPath(path: string): boolean {
  return path.length <= 1024 && path.split("/").every((part) => part !== "" && !/^\.+$/.test(part) && !/[\u0000-\u001f\\:]/.test(part));
}

/** The address of a hub without its final slash. */
export function endpointOf(endpoint: string | URL = ENDPOINT): string {
  const text = String(endpoint);
  ensure(/^https?:\/\/./i.test(text),
    "option", `endpoint is ${JSON.stringify(text)}, expected an address that begins with https:// or http://`);
  return text.replace(/\/+$/, "");
}

function headersOf({ headers, token }: HubOptions): Record<string, string> {
  let all: Headers;
  try {
    all = new Headers(headers);
    if (token !== undefined) {
      all.set("authorization", `Bearer ${token.trim()}`);
    }
  } catch (error) {
    // The original message would contain the token.
    throw new TilewrightError("option", "headers or token have characters that no header may have, expected plain text", { cause: error });
  }
  return Object.fromEntries(all);
}

/** The files of a revision: from the hub, or the stored ones if it does not respond. */
async function list(
  address: Address, endpoint: string, { headers, base, fetch = ownFetch }: RequestSettings & { base: string }, wanted: Wanted, signal: AbortSignal | undefined,
): Promise<Listing> {
  const url = `${endpoint}/api/models/${address.repo}/revision/${encodeURIComponent(address.revision)}?blobs=true`;
  for (let failures = 0; ; failures += 1) {
    signal?.throwIfAborted();
    let error: TilewrightError;
    let wait = BACKOFF_MS[failures];
    try {
      const response = await fetch(url, { headers, cache: "no-store", signal: AbortSignal.any([AbortSignal.timeout(SILENCE_MS), ...(signal === undefined ? [] : [signal])]) });
      if (response.ok) {
        return listingOf(url, await response.text());
      }
      void response.body?.cancel().catch(() => {});
      error = httpError(url, response.status, "the hub", MEANINGS);
      if (response.status !== 408 && response.status !== 429 && response.status < 500) {
        throw error;
      }
      wait = wait === undefined ? undefined : retryAfter(response) ?? wait;
    } catch (cause) {
      signal?.throwIfAborted();
      if (cause instanceof TilewrightError) {
        throw cause;
      }
      error = new TilewrightError("network", `${url} could not be fetched (${messageOf(cause)})`, { cause });
    }
    if (failures === 0) {
      const kept = await keptFiles(base);
      try {
        choose(kept, address, wanted);
        return { files: kept };
      } catch {
        // They are not a whole model.
      }
    }
    if (wait === undefined || wait > LONGEST_WAIT_MS) {
      throw error;
    }
    await delay(wait, signal);
  }
}

const MEANINGS = {
  401: "the hub wants a valid token, or there is no such repository",
  403: "the token's account may not read this; the model's page says how to get access",
  404: "there is no such repository or revision",
};

function listingOf(url: string, json: string): Listing {
  const wrong = (found: string): TilewrightError => new TilewrightError("format", `${url}: ${found}`);
  let listing: { siblings?: unknown; cardData?: { license?: unknown } | null; tags?: unknown } | null;
  try {
    listing = JSON.parse(json);
  } catch (error) {
    throw wrong(`the list of files is not JSON: ${messageOf(error)}`);
  }
  const siblings = listing?.siblings;
  if (!Array.isArray(siblings)) {
    throw wrong(`siblings is ${JSON.stringify(siblings)?.slice(0, 100)}, expected a list of files`);
  }
  const files = siblings.map((sibling: { rfilename?: unknown; size?: unknown; blobId?: unknown; lfs?: { sha256?: unknown } | null } | null): HubFile => {
    const path = sibling?.rfilename;
    if (typeof path !== "string" || !isPlainPath(path)) {
      throw wrong(`rfilename is ${JSON.stringify(path)}, expected a path that stays in the repository`);
    }
    const sha256 = sibling?.lfs?.sha256;
    if (sha256 === undefined) {
      const { blobId, size, lfs } = sibling ?? {};
      // The digest of an LFS pointer is not that of the content.
      const isKnown = (lfs ?? undefined) === undefined && typeof blobId === "string" && /^[0-9a-f]{40}$/i.test(blobId) && Number.isSafeInteger(size);
      return { path, ...(isKnown ? { git: { sha1: blobId.toLowerCase(), size: size as number } } : {}) };
    }
    if (typeof sha256 !== "string" || !/^[0-9a-f]{64}$/i.test(sha256)) {
      throw wrong(`lfs.sha256 of ${path} is ${JSON.stringify(sha256)}, expected 64 hexadecimal digits`);
    }
    return { path, sha256: sha256.toLowerCase() };
  });
  const tags = Array.isArray(listing?.tags) ? listing.tags : [];
  const tag = tags.find((one) => typeof one === "string" && one.startsWith("license:")) as string | undefined;
  const licence = listing?.cardData?.license ?? tag?.slice("license:".length);
  return { files, ...(typeof licence === "string" && licence !== "" ? { licence: licence.slice(0, 200) } : {}) };
}

/** Stored files of a revision, without digests: they may be outdated, so each file is checked with its own server. */
async function keptFiles(base: string): Promise<HubFile[]> {
  try {
    const records = await (await openStore()).list();
    const kept = records.filter(({ url, complete }) => complete && url.startsWith(base));
    return kept.map(({ url }) => ({ path: decodeURIComponent(url.slice(base.length)) }));
  } catch {
    return [];
  }
}

/** A model in one GGUF file, or in all shards in order. */
interface Gguf {
  quant: string | undefined;
  files: HubFile[];
}

/** Chooses the files of an address; `name` is relative to the model's folder. */
function choose(files: HubFile[], address: Address, what: Wanted): (HubFile & { name: string })[] {
  const { path, quant } = address;
  const wrong = (wanted: string, there: string[]): TilewrightError => {
    const shown = there.length === 0 ? "nothing" : there.slice(0, 40).join(", ") + (there.length > 40 ? ` and ${there.length - 40} more` : "");
    return new TilewrightError("option", `${address.text}: ${wanted}; there: ${shown}`);
  };
  const last = (file: HubFile): HubFile & { name: string } => ({ ...file, name: lastOf(file.path) });
  const named = files.find((file) => file.path === path);
  if (what === "file") {
    const there = files.filter((file) => file.path.endsWith(".safetensors"));
    const one = path === undefined && there.length === 1 ? there[0] : named;
    if (one === undefined || quant !== undefined) {
      throw wrong(quant !== undefined ? `:${quant} chooses nothing of a file in safetensors` : "the address has to name one file by its path", there.map((file) => file.path));
    }
    return [last(one)];
  }
  if (what === "vision" && (named === undefined || !/mmproj/i.test(lastOf(named.path)))) {
    const [first] = choose(files, address, "model");
    if (first !== undefined && /\.gguf$/i.test(first.name)) {
      const one = visionFile(files, first.path);
      if (one === undefined) {
        throw wrong("no vision encoder (a GGUF file with mmproj in its name) is beside the model", files.map((file) => file.path));
      }
      return [last(one)];
    }
  }
  if (what === "speech" && named !== undefined && quant === undefined && /\.bin$/i.test(named.path)) {
    return [last(named)];
  }
  if (named !== undefined) {
    const model = ggufs(files, true).find((one) => one.files.includes(named));
    if (model === undefined || quant !== undefined) {
      throw wrong(quant !== undefined ? `${path} is a file, so :${quant} chooses nothing`
        : /\.gguf$/i.test(named.path) ? `shards of ${path} are missing` : `${path} is no GGUF file`, files.map((file) => file.path));
    }
    return model.files.map(last);
  }
  const root = path === undefined ? "" : `${path}/`;
  const below = files.filter((file) => file.path.startsWith(root));
  const models = ggufs(below, false);
  if (models.length > 0) {
    const of = (name: string): Gguf[] => models.filter((model) => model.quant === name);
    const found = quant !== undefined ? of(normalized(quant))
      : models.length === 1 ? models : PREFERRED_QUANTS.map(of).find((some) => some.length > 0) ?? [];
    const [one] = found;
    if (one === undefined || found.length > 1) {
      const label = (model: Gguf): string => model.quant !== undefined && of(model.quant).length === 1 ? model.quant : model.files[0]?.path ?? "";
      throw one !== undefined ? wrong("several files would do, so the address has to name one by its path", found.map(label))
        : wrong(quant === undefined ? "the quantisation has to be named" : `no ${normalized(quant)}`, models.map(label));
    }
    return one.files.map(last);
  }
  const byName = new Map(below.map((file) => [file.path.slice(root.length), file]));
  const weights = !byName.has(INDEX) ? ["model.safetensors"] : [...byName.keys()].filter((name) => /^[^/]+-\d{5}-of-\d{5}\.safetensors$/.test(name)).sort();
  if (weights.length === 0 || ![...NEEDED_FILES, ...weights].every((name) => byName.has(name))) {
    throw wrong(`neither a GGUF file nor ${NEEDED_FILES.join(", ")} with safetensors`, (below.length === 0 ? files : below).map((file) => file.path));
  }
  const chosen = [...NEEDED_FILES, ...OPTIONAL_FILES, ...CHAT_FILES, ...SENTENCE_FILES, ...what === "vision" ? PREPROCESSOR_FILES : [], INDEX, ...weights].flatMap((name) => {
    const file = byName.get(name);
    return file === undefined ? [] : [{ ...file, name }];
  });
  if (quant !== undefined) {
    throw wrong(`${quant} of a GGUF file is wanted, the model is in safetensors`, chosen.map((file) => file.path));
  }
  return chosen;
}

/** The vision encoder in a GGUF model's folder, if there is one: in half precision where there are several. */
function visionFile(files: HubFile[], model: string): HubFile | undefined {
  const folderOf = (path: string): string => path.slice(0, path.length - lastOf(path).length);
  const found = files.filter(({ path }) => /mmproj.*\.gguf$/i.test(lastOf(path)) && folderOf(path) === folderOf(model));
  const of = (quant: string): HubFile | undefined => found.find(({ path }) => quantOf(path.replace(/\.gguf$/i, "")) === quant);
  return of("F16") ?? of("BF16") ?? of("Q8_0") ?? found[0];
}

/** Complete GGUF models, by path. `all`: including files that are no models by their names. */
function ggufs(files: HubFile[], all: boolean): Gguf[] {
  const groups = new Map<string, { n: number; shards: Map<number, HubFile> }>();
  for (const file of files) {
    const name = lastOf(file.path);
    if (!/.\.gguf$/i.test(name) || (!all && /mmproj|imatrix/i.test(name))) {
      continue;
    }
    const [, stem = "", shard = "1", n = "1"] = /^(.*?)(?:-(\d{5})-of-(\d{5}))?\.gguf$/i.exec(file.path) ?? [];
    const group = groups.get(`${n}:${stem}`) ?? { n: Number(n), shards: new Map<number, HubFile>() };
    groups.set(`${n}:${stem}`, group);
    group.shards.set(Number(shard), file);
  }
  const whole = [...groups].filter(([, { n, shards }]) => shards.size === n && !shards.has(0));
  return whole.sort(([a], [b]) => a < b ? -1 : 1).map(([key, { shards }]) => ({
    quant: quantOf(key),
    files: [...shards].sort(([a], [b]) => a - b).map(([, file]) => file),
  }));
}

/** The quantisation in a file's name: the last part that is one. */
function quantOf(stem: string): string | undefined {
  const parts = lastOf(stem).split(/[-.]/);
  const at = parts.findLastIndex((part) => /^(q\d|q\d+_\w*|i?q\d+_\w+|iq\d\w*|tq\d\w*|bf16|fp?16|fp?32|mxfp4\w*|nvfp4\w*)$/i.test(part));
  const part = parts[at];
  return part === undefined ? undefined : normalized(`${parts[at - 1]?.toLowerCase() === "ud" ? "UD-" : ""}${part}`);
}

function normalized(quant: string): string {
  return quant.toUpperCase().replace(/^FP(16|32)$/, "F$1");
}

function lastOf(path: string): string {
  return path.replace(/^.*\//, "");
}
