/** How models, encoders and cross-encoders are loaded. */

import { codeOf, isTrap, messageOf, TilewrightError } from "../errors.js";
import { PEFT_FILES, type DeviceRequest, type EmbedderRequest, type LoadRequest, type ModelRequest, type RerankerRequest } from "../protocol.js";
import { CHAT_FILES, isUseless, SENTENCE_FILES, type KeptCopy } from "../source.js";
import { Loader, type Device, type Embedder, type FileInfo, type Index, type Model, type Mol, type ReadFile, type Reranker } from "../tilewright.js";
import { readTuning, tuningKey, writeTuning } from "../tuning.js";
import type { DeviceInfo } from "../types.js";
import { describe, feed, FilesAgain, finish, open, withContents, withCopies, type Asked, type FilesRequest } from "./files.js";
import { bytesOfOthers, placeOf } from "./handles.js";
import { GPU_FAILURES, openCpu, Place } from "./place.js";
import type { Caller } from "./port.js";
import { ProgressMeter } from "./progress.js";

/** What can be loaded. */
export type Loadable = Model | Embedder | Reranker;

/** What is streamed from files. */
type Streamed = Loadable | Index | Mol;

/** What is asked for, and how it is streamed. */
export interface Streaming<T extends Streamed> {
  request: FilesRequest & Pick<LoadRequest, "settings">;
  /** Names of files that its folder may have besides. */
  extras: readonly string[];
  /** What is looked for before anything is read. */
  expect(asked: Asked): Promise<void>;
  /** `memoryLimit`: bytes that it may take. */
  begin(device: Device, files: FileInfo[], memoryLimit: number | undefined, read: ReadFile | undefined): Loader<T>;
  /** What is to be done once all bytes are there. */
  prepare(loader: Loader<T>, device: Device, caller: Caller): Promise<void>;
  /** What is added to it then, and looked at. `copies`: those of earlier loads that it was read from. */
  complete(loaded: T, asked: Asked, copies: KeptCopy[]): Promise<void>;
  /** Whether its passes read weights from the files. */
  streams?(loaded: T): boolean;
}

/** The same of what can be loaded again. */
export interface Recipe<T extends Loadable> extends Streaming<T> {
  request: LoadRequest;
}

export function modelRecipe(request: ModelRequest): Recipe<Model> {
  return {
    request,
    extras: CHAT_FILES,
    expect: async (asked) => {
      // It is read when the model is there, and one that is missing would cost all of it.
      if (request.adapter !== undefined) {
        const files = await open({ ...request, ...request.adapter }, [], asked, [], () => {}, { peek: true });
        await Promise.all(files.map((file) => file.close(false)));
      }
    },
    begin: (device, files, memoryLimit, read) => Loader.model(device, files, { ...request.settings, ...limited(memoryLimit) }, read),
    prepare: async (loader, device, caller) => {
      if (device.isGpu()) {
        await tune(loader, device.info(), request.tune, caller);
      }
    },
    complete: async (model, asked) => {
      const streamedBytes = model.streamedBytes();
      if (streamedBytes !== undefined) {
        const what = streamedBytes === 0 ? "the rows of its tokens" : `${(streamedBytes / 1e9).toPrecision(2)} GB`;
        asked.caller.notify("weights_in_files", `memory has no room for all weights; each pass reads ${what} from the model's files`);
      }
      if (request.adapter !== undefined) {
        await useAdapter(model, { ...request, ...request.adapter }, asked);
      }
    },
    streams: (model) => model.streamedBytes() !== undefined,
  };
}

export function embedderRecipe(request: EmbedderRequest): Recipe<Embedder> {
  return {
    request,
    extras: SENTENCE_FILES,
    expect: async () => {},
    begin: (device, files, memoryLimit) => Loader.embedder(device, files, { ...request.settings, ...limited(memoryLimit) }),
    prepare: async () => {},
    complete: async () => {},
  };
}

export function rerankerRecipe(request: RerankerRequest): Recipe<Reranker> {
  return {
    request,
    extras: [],
    expect: async () => {},
    begin: (device, files, memoryLimit) => Loader.reranker(device, files, { ...request.settings, ...limited(memoryLimit) }),
    prepare: async () => {},
    complete: async () => {},
  };
}

const limited = (memoryLimit: number | undefined): { memoryLimit?: number } => memoryLimit === undefined ? {} : { memoryLimit };

/** Bytes that WASM's memory has for everything that is loaded, as `memory.rs` counts them. */
const HEAP_BYTES = 2 ** 32 - 2 ** 28;

/** Bytes that a load may take: what was asked for, and on the CPU what others leave. */
export function limitOf({ settings }: Pick<LoadRequest, "settings">, device: Device, target: number): number | undefined {
  const others = device.isGpu() ? 0 : bytesOfOthers(target);
  return others === 0 ? settings.memoryLimit : Math.max(0, Math.min(settings.memoryLimit ?? Infinity, HEAP_BYTES - others));
}

/** Streams files into a device. */
export async function loadOnto<T extends Streamed>(device: Device, recipe: Streaming<T>, asked: Asked): Promise<Omit<Loaded<T>, "place">> {
  const result = await withCopies(asked, (copies) => loadOnce(device, recipe, asked, copies));
  if (recipe.streams?.(result.loaded) === true) {
    try {
      await result.again?.open();
    } catch (error) {
      result.loaded.free();
      throw error;
    }
  }
  return result;
}

async function loadOnce<T extends Streamed>(
  device: Device, recipe: Streaming<T>, asked: Asked, copies: KeptCopy[],
): Promise<Omit<Loaded<T>, "place">> {
  const { request, extras } = recipe;
  const { caller, signal } = asked;
  const meter = new ProgressMeter(caller);
  await recipe.expect(asked);
  const files = await open(request, extras, asked, copies, (file) => meter.report(file.phase, false));
  const again = files.every((file) => file.isLocal) ? new FilesAgain(request, extras, caller, files) : undefined;
  meter.files = files;
  let useless = false;
  let loader: Loader<T> | undefined;
  try {
    meter.report(files[0]?.phase ?? "file", true);
    loader = recipe.begin(device, files.map(describe), limitOf(request, device, caller.target), again?.read);
    if (request.source.name !== undefined) {
      loader.setFolder(request.source.name);
    }
    const last = await feed(loader, files, signal, (file) => meter.report(file.phase, false));
    await finish(files, signal);
    meter.report(last?.phase ?? "file", true);
    meter.report("prepare", true);
    await recipe.prepare(loader, device, caller);
    const finishing = loader;
    // From here on the loader belongs to the engine, also when it fails.
    loader = undefined;
    const loaded = await finishing.finish();
    try {
      await recipe.complete(loaded, asked, copies);
    } catch (error) {
      if (!isTrap(error)) {
        loaded.free();
      }
      throw error;
    }
    return { loaded, fileBytes: files.reduce((sum, file) => sum + file.arrived, 0), copies, again };
  } catch (error) {
    useless = isUseless(error);
    if (isTrap(error)) {
      loader = undefined;
    }
    throw error;
  } finally {
    loader?.free();
    await Promise.all(files.map((file) => file.close(useless)));
  }
}

/** Has a model use an adapter. */
async function useAdapter(
  model: Model, { scale, ...request }: FilesRequest & { scale: number }, asked: Asked,
): Promise<void> {
  await withContents(request, asked, (files) => {
    const config = files.find(({ name }) => name === PEFT_FILES[0]);
    const [weights, ...others] = files.filter((file) => file !== config);
    if (weights === undefined || others.length > 0) {
      throw new TilewrightError("option", `adapter.source has ${files.length} files, expected a GGUF file, or ${PEFT_FILES.join(" and ")}`);
    }
    model.useAdapter(weights.bytes, config?.bytes, scale);
  });
}

/** Makes a model follow what was measured on this device, now or in an earlier visit. */
async function tune(loader: Loader<Model>, { name, tier }: DeviceInfo, anew: boolean, caller: Caller): Promise<void> {
  const key = tuningKey(name, tier);
  const stored = await readTuning(key);
  const why = stored === undefined ? undefined : loader.useTuning(stored);
  if (why !== undefined) {
    caller.notify("tuning_ignored", `what was measured on ${name} before is not used: ${why}`);
  }
  if (anew) {
    const tuned = await loader.tune();
    try {
      await writeTuning(key, tuned);
    } catch (error) {
      caller.notify("tuning_ignored", `what was measured on ${name} is not kept for the next time: ${messageOf(error)}`);
    }
  }
}

/** What was loaded, with the device that it is on. */
export interface Loaded<T extends Streamed> {
  place: Place;
  loaded: T;
  /** Bytes of the model's files. */
  fileBytes: number;
  /** Kept copies that it was loaded from. */
  copies: KeptCopy[];
  /** The files that passes may read weights from. */
  again: FilesAgain | undefined;
}

/**
 * Loads onto a device that is open, or onto a new one. Unless a GPU is demanded, one that fails meanwhile is a reason to take the CPU, if
 * that can hold the model.
 */
export async function loadAt<T extends Loadable>(recipe: Recipe<T>, where: DeviceRequest | number | Place, asked: Asked): Promise<Loaded<T>> {
  const { caller, signal } = asked;
  let place = where instanceof Place ? where.use() : await placeOf(where, caller);
  try {
    signal.throwIfAborted();
    const load = async (): Promise<Loaded<T>> => ({ place, ...await loadOnto(place.device, recipe, asked) });
    try {
      return await load().catch(async (error: unknown) => {
        // What is there may have lost its device unnoticed.
        if (typeof where !== "number" || codeOf(error) !== "device_lost") {
          throw error;
        }
        const next = (await place.next(caller)).use();
        place.release();
        place = next;
        return load();
      });
    } catch (error) {
      if (place.request.choice === "gpu" || !place.device.isGpu() || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      const failure = `the GPU failed while the model was loaded (${messageOf(error)})`;
      const cpu = await openCpu(place.request, failure, caller);
      place.release();
      place = cpu.use();
      try {
        return await load();
      } catch (second) {
        throw codeOf(second) === "memory"
          ? new TilewrightError("memory", `${failure}, and the CPU cannot hold it either: ${messageOf(second)}`, { cause: error })
          : second;
      }
    }
  } catch (error) {
    if (!isTrap(error)) {
      place.release();
    }
    throw error;
  }
}
