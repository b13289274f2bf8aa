/** How models, encoders and rerankers are loaded. */

import { Loader, type Device, type Index } from "../classes.js";
import { codeOf, ensure, messageOf, TilewrightError } from "../errors.js";
import { defined, orFree } from "../helpers.js";
import { PEFT_FILES, PREPROCESSOR_FILES, type DeviceRequest, type EmbedderRequest, type LoadRequest, type ModelRequest, type RerankerRequest } from "../protocol.js";
import { CHAT_FILES, INDEX, SENTENCE_FILES, type StoredCopy, type ModelFile } from "../source.js";
import type { Embedder, FileInfo, Model, Mol, ReadFile, Reranker } from "../tilewright.js";
import type { Transcriber } from "../tilewright_speech.js";
import { readTuning, tuningKey, writeTuning } from "../tuning.js";
import type { DeviceInfo } from "../types.js";
import {
  describe, feed, ReopenedFiles, finish, withContents, withCopies, withFiles, type Requester, type FilesRequest,
} from "./files.js";
import { bytesOfOthers, placeOf } from "./handles.js";
import { GPU_FAILURES, openCpu, Place } from "./place.js";
import type { Caller } from "./port.js";
import { ProgressMeter } from "./progress.js";

/** Objects that are loaded again after their device was lost. */
export type Loadable = Model | Embedder | Reranker | Transcriber;

/** Objects that are streamed from files. */
type Streamed = Loadable | Index | Mol;

/** A loader of any engine. */
type AnyLoader<T> = Pick<Loader<T>, "setFolder" | "want" | "push" | "end" | "finish" | "free">;

/** The configuration of a Hugging Face folder. */
const CONFIG = "config.json";

export interface Streaming<T extends Streamed> {
  request: FilesRequest & Pick<LoadRequest, "settings">;
  extras: readonly string[];
  /** The files to read in place of those that were opened. */
  gather?(files: ModelFile[]): Promise<ModelFile[]>;
  /** Checks before anything is read. */
  expect?(requester: Requester): Promise<void>;
  begin(device: Device, files: FileInfo[], memoryLimit: number | undefined, read: ReadFile | undefined): AnyLoader<T>;
  /** Runs when all bytes have arrived. */
  prepare?(loader: AnyLoader<T>, device: Device, caller: Caller): Promise<void>;
  /** Adds to the loaded object, and checks it. `copies`: the stored copies that it was read from. */
  complete?(loaded: T, requester: Requester, copies: StoredCopy[], device: Device): Promise<void>;
  /** Whether its passes read weights from the files. */
  streams?(loaded: T): boolean;
}

export interface Recipe<T extends Loadable> extends Streaming<T> {
  request: LoadRequest;
  /** The same without rounding, so that texts of a lost GPU continue unchanged on the CPU. */
  exact?(): Recipe<T>;
}

export function modelRecipe(request: ModelRequest): Recipe<Model> {
  const adapter = request.adapter === undefined ? undefined : { ...request, ...request.adapter };
  const vision = request.vision === undefined ? undefined : { ...request, ...request.vision };
  return {
    request,
    extras: CHAT_FILES,
    exact: () => modelRecipe({ ...request, settings: { ...request.settings, exact: true } }),
    expect: async (requester) => {
      // These are read after the model, so a missing one should fail first.
      await (adapter && withFiles(adapter, requester, { peek: true }, () => {}));
      await (vision && !vision.isOwn && withFiles(vision, requester, { peek: true, extras: PREPROCESSOR_FILES }, () => {}));
    },
    begin: (device, files, memoryLimit, read) => Loader.model(device, files, limited(request.settings, memoryLimit), read),
    prepare: async (loader, device, caller) => {
      if (loader instanceof Loader && device.isGpu()) {
        await tune(loader, device.info(), request.tune, caller);
      }
    },
    complete: async (model, requester, copies, device) => {
      const streamedBytes = model.streamedBytes();
      if (streamedBytes !== undefined) {
        const what = streamedBytes === 0 ? "the rows of its tokens" : `${(streamedBytes / 1e9).toPrecision(2)} GB`;
        requester.caller.notify("weights_in_files", `memory has no room for all weights; each pass reads ${what} from the model's files`);
      }
      await (adapter && useAdapter(model, adapter, requester));
      await (vision && useVision(model, vision, requester, copies, device));
    },
    streams: (model) => model.streamedBytes() !== undefined,
  };
}

export function embedderRecipe(request: EmbedderRequest): Recipe<Embedder> {
  return {
    request,
    extras: [...SENTENCE_FILES, ...request.settings.textsOnly === true ? [] : PREPROCESSOR_FILES],
    begin: (device, files, memoryLimit) => Loader.embedder(device, files, limited(request.settings, memoryLimit)),
  };
}

export function rerankerRecipe(request: RerankerRequest): Recipe<Reranker> {
  return {
    request,
    extras: [],
    begin: (device, files, memoryLimit) => Loader.reranker(device, files, limited(request.settings, memoryLimit)),
  };
}

export const limited = <T extends object>(settings: T, memoryLimit: number | undefined): T & { memoryLimit?: number } =>
  ({ ...settings, ...defined({ memoryLimit }) });

/** Bytes of WASM's memory for all loaded objects, as in `memory.rs`. */
const HEAP_BYTES = 2 ** 32 - 2 ** 28;

/** Bytes that a load may take: the limit, and on the CPU what others leave. */
export function limitOf({ settings }: Pick<LoadRequest, "settings">, device: Device, target: number): number | undefined {
  const others = device.isGpu() ? 0 : bytesOfOthers(target);
  return others === 0 ? settings.memoryLimit : Math.max(0, Math.min(settings.memoryLimit ?? Infinity, HEAP_BYTES - others));
}

export async function loadOnto<T extends Streamed>(device: Device, recipe: Streaming<T>, requester: Requester): Promise<Omit<Loaded<T>, "place">> {
  const result = await withCopies(requester, (copies) => loadOnce(device, recipe, requester, copies));
  if (recipe.streams?.(result.loaded) === true) {
    await orFree(result.loaded, async () => result.again?.open());
  }
  return result;
}

async function loadOnce<T extends Streamed>(
  device: Device, recipe: Streaming<T>, requester: Requester, copies: StoredCopy[],
): Promise<Omit<Loaded<T>, "place">> {
  const { request, extras } = recipe;
  const { caller, signal } = requester;
  const meter = new ProgressMeter(caller);
  const load = async (opened: ModelFile[]): Promise<Omit<Loaded<T>, "place">> => {
    const files = await recipe.gather?.(opened) ?? opened;
    const again = files.every((file) => file.isLocal) ? new ReopenedFiles(request, extras, caller, files) : undefined;
    const limit = limitOf(request, device, caller.target);
    const loader = recipe.begin(device, files.map(describe), limit, again?.read);
    await orFree(loader, async () => {
      if (request.source.name !== undefined) {
        loader.setFolder(request.source.name);
      }
      const last = await feed(loader, files, signal, meter);
      await finish(files, signal);
      meter.report(last?.phase ?? "file", true);
      meter.report("prepare", true);
      await recipe.prepare?.(loader, device, caller);
    });
    // The engine owns the loader from here on, even if this fails.
    const loaded = await loader.finish();
    await orFree(loaded, async () => recipe.complete?.(loaded, requester, copies, device));
    return { loaded, fileBytes: files.reduce((sum, file) => sum + file.arrived, 0), copies, again };
  };
  await recipe.expect?.(requester);
  return withFiles(request, requester, { extras, copies, meter }, load);
}

async function useAdapter(
  model: Model, { scale, ...request }: FilesRequest & { scale: number }, requester: Requester,
): Promise<void> {
  await withContents(request, requester, (files) => {
    const config = files.find(({ name }) => name === PEFT_FILES[0]);
    const [weights, ...others] = files.filter((file) => file !== config);
    ensure(weights !== undefined && others.length === 0,
      "option", `adapter.source has ${files.length} files, expected a GGUF file, or ${PEFT_FILES.join(" and ")}`);
    model.useAdapter(weights.bytes, config?.bytes, scale);
  });
}

async function useVision(
  model: Model, { isOwn, maxTokens, ...request }: FilesRequest & { isOwn: boolean; maxTokens?: number }, requester: Requester, copies: StoredCopy[],
  device: Device,
): Promise<void> {
  const meter = new ProgressMeter(requester.caller);
  await withFiles(request, requester, { extras: PREPROCESSOR_FILES, copies, meter }, async (files) => {
    const isFolder = files.some(({ name }) => name === CONFIG);
    ensure(isFolder || !isOwn,
      "option", "vision is true, and the source is a GGUF file, expected vision: { source } with the address of its vision encoder (mmproj)");
    const isPart = ({ name }: ModelFile): boolean =>
      [CONFIG, INDEX, ...PREPROCESSOR_FILES].includes(name) || (name.endsWith(".safetensors") && !name.includes("/"));
    const parts = isFolder ? files.filter(isPart) : files;
    const loader = Loader.vision(device, parts.map(describe), defined({ maxTokens }));
    await orFree(loader, async () => {
      await feed(loader, parts, requester.signal, meter);
      await finish(files, requester.signal);
    });
    const encoder = await loader.finish();
    try {
      model.useVision(encoder);
    } finally {
      encoder.free();
    }
  });
}

/** Applies the tuning of this device: measured now or in an earlier visit. */
async function tune(loader: Loader<Model>, { name, tier }: DeviceInfo, anew: boolean, caller: Caller): Promise<void> {
  const key = tuningKey(name, tier);
  const stored = await readTuning(key);
  const why = stored === undefined ? undefined : loader.useTuning(stored);
  if (why !== undefined) {
    caller.notify("tuning_ignored", `the tuned choices for ${name} are not used: ${why}`);
  }
  if (anew) {
    const tuned = await loader.tune();
    try {
      await writeTuning(key, tuned);
    } catch (error) {
      caller.notify("tuning_ignored", `the tuned choices for ${name} were not saved: ${messageOf(error)}`);
    }
  }
}

export interface Loaded<T extends Streamed> {
  place: Place;
  loaded: T;
  fileBytes: number;
  copies: StoredCopy[];
  /** Files to read weights from during passes. */
  again: ReopenedFiles | undefined;
}

/** Loads onto an open device or a new one. Unless a GPU is demanded, the CPU replaces one that fails. */
export async function loadAt<T extends Loadable>(recipe: Recipe<T>, where: DeviceRequest | number | Place, requester: Requester): Promise<Loaded<T>> {
  const { caller, signal } = requester;
  let place = where instanceof Place ? where.use() : await placeOf(where, caller);
  return orFree({ free: () => place.free() }, async () => {
    signal.throwIfAborted();
    const load = async (): Promise<Loaded<T>> => ({ place, ...await loadOnto(place.device, recipe, requester) });
    try {
      return await load().catch(async (error: unknown) => {
        // An open device may have been lost unnoticed.
        if (typeof where !== "number" || codeOf(error) !== "device_lost") {
          throw error;
        }
        const next = (await place.next(caller)).use();
        place.free();
        place = next;
        return load();
      });
    } catch (error) {
      if (place.request.choice === "gpu" || !place.device.isGpu() || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      const failure = `the GPU failed while the model was loaded (${messageOf(error)})`;
      const cpu = await openCpu(place.request, failure, caller);
      place.free();
      place = cpu.use();
      try {
        return await load();
      } catch (second) {
        throw codeOf(second) === "memory"
          ? new TilewrightError("memory", `${failure}, and the CPU cannot hold it either: ${messageOf(second)}`, { cause: error })
          : second;
      }
    }
  });
}
