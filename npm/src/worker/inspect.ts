/** Facts from the headers of a model's files, and whether it fits here. */

import { Header, type Device } from "../classes.js";
import { codeOf, isTrap, messageOf } from "../errors.js";
import { inspectGpu } from "../gpu.js";
import { defined, sumOf } from "../helpers.js";
import type { InspectRequest } from "../protocol.js";
import { CHAT_FILES, SENTENCE_FILES, TOKENIZER, type ModelFile } from "../source.js";
import { freeBytes, openStore, storedAddress } from "../store.js";
import type { PlanOptions } from "../tilewright.js";
import type { MemoryForecast, ModelReport } from "../types.js";
import { engineModule } from "../wasm.js";
import { describe, feed, withFiles, type Requester } from "./files.js";
import { limitOf } from "./load.js";
import { openPlace } from "./place.js";

const CONTEXTS = [512, 2048, 4096, 8192];
/** Default context length, as in `model.rs`. */
const USUAL_CONTEXT = 4096;

export async function inspect(request: InspectRequest, requester: Requester): Promise<ModelReport> {
  await engineModule.start();
  return withFiles(request, requester, { extras: [...CHAT_FILES, ...SENTENCE_FILES], peek: true }, (files) => {
    const read = files.filter(({ name }) => name !== TOKENIZER);
    return using(new Header(read.map(describe)), async (header) => {
      if (request.source.name !== undefined) {
        header.setFolder(request.source.name);
      }
      await feed(header, read, requester.signal);
      return report(header, request, files, requester);
    });
  });
}

/** Frees an object after its use, unless WASM trapped: it may still be borrowed, and that error would hide the trap. */
async function using<T extends { free(): void }, R>(it: T, use: (it: T) => R | Promise<R>): Promise<R> {
  let trapped = false;
  try {
    return await use(it);
  } catch (error) {
    trapped = isTrap(error);
    throw error;
  } finally {
    if (!trapped) {
      it.free();
    }
  }
}

async function report(header: Header, request: InspectRequest, files: ModelFile[], requester: Requester): Promise<ModelReport> {
  const { name, architecture, licence, maxContextLength, chatTemplate, weights, problem, kind } = header.facts();
  // Servers that compress a file do not announce its size, but all of it has arrived.
  const sized = files.map((file) => ({ name: file.name, size: file.size ?? (file.name === TOKENIZER ? undefined : file.arrived) }));
  const sizeBytes = sumOf(sized.map(({ size }) => size));
  const named = { name, architecture, licence: licence ?? request.source.licence ?? null, maxContextLength, problem };
  const result: ModelReport = {
    kind,
    parameters: weights.reduce((sum, share) => sum + share.parameters, 0),
    weights,
    files: sized.map(({ name, size }) => ({ name, ...defined({ sizeBytes: size }) })),
    ...defined({ sizeBytes }),
    hasChatTemplate: chatTemplate,
    memory: {},
    fits: { storage: await storageFor(files, sizeBytes) },
    ...Object.fromEntries(Object.entries(named).filter(([, value]) => value !== null)),
  };
  for (const choice of request.device === "auto" ? ["gpu", "cpu"] as const : [request.device]) {
    requester.signal.throwIfAborted();
    const missing = problem ?? (choice === "gpu" ? await whyNoGpu(request) : undefined);
    if (missing !== undefined) {
      result.fits[choice] = missing;
      continue;
    }
    try {
      const { device } = await openPlace({ choice, subgroups: true }, requester.caller);
      const readsAgain = files.every((file) => file.isLocal);
      const { memory, fits } = await using(device, () => forecast(header, device, result, request, readsAgain, requester));
      result.fits[choice] = fits;
      if (memory !== undefined) {
        result.memory[choice] = memory;
      }
    } catch (error) {
      if (isTrap(error) || codeOf(error) === "option") {
        throw error;
      }
      result.fits[choice] = messageOf(error);
    }
  }
  return result;
}

/** Why a load would not use a GPU, if so. */
async function whyNoGpu({ device }: InspectRequest): Promise<string | undefined> {
  const found = await inspectGpu();
  if (found.adapter === undefined) {
    return found.reason;
  }
  const { name, isSoftware } = found.adapter;
  return isSoftware && device === "auto" ? `the only adapter is software (${name}), and the engine's own code for the CPU is faster` : undefined;
}

/** Memory of a model on a device, and whether it fits. */
function forecast(
  header: Header, device: Device, { kind, maxContextLength = USUAL_CONTEXT, ...found }: ModelReport, request: InspectRequest, readsAgain: boolean,
  { caller }: Requester,
): { memory?: MemoryForecast; fits: true | string } {
  const { contextLength, kvType } = request.settings;
  const memoryLimit = limitOf(request, device, caller.target);
  const options = (length: number | undefined): PlanOptions => defined({ contextLength: kind === "model" ? length : undefined, kvType });
  const plan = (length: number): MemoryForecast["contexts"][number] & { weightsBytes: number } =>
    ({ contextLength: length, ...header.plan(device, options(length)) });
  const asked = request.contextLengths ?? [...CONTEXTS, maxContextLength];
  const lengths = kind !== "model" ? [maxContextLength] : [...new Set(asked)].filter((length) => length <= maxContextLength).sort((a, b) => a - b);
  let memory: MemoryForecast | undefined;
  try {
    const longest = plan(maxContextLength);
    const half = Math.floor(maxContextLength / 2);
    const contexts = lengths.map((length) => length === maxContextLength ? longest : plan(length));
    memory = {
      weightsBytes: longest.weightsBytes,
      cacheBytesPerToken: kind !== "model" ? 0 : Math.round((longest.cacheBytes - (half === 0 ? 0 : plan(half).cacheBytes)) / (maxContextLength - half)),
      contexts: contexts.map(({ weightsBytes: _, ...context }) => context),
    };
  } catch (error) {
    // Such as a context that exceeds the device's buffers; the requested one may still fit.
    if (isTrap(error)) {
      throw error;
    }
  }
  const planned = defined({ memory });
  try {
    header.check(device, { ...options(contextLength), readsAgain, ...defined({ memoryLimit }) });
  } catch (error) {
    if (isTrap(error) || codeOf(error) === "option") {
      throw error;
    }
    return { ...planned, fits: messageOf(error) };
  }
  const weightsBytes = memory?.weightsBytes ?? found.sizeBytes ?? 0;
  return { ...planned, fits: device.isGpu() ? withinMachine(weightsBytes) : true };
}

/** Whether weights fit the memory that the browser reports: rounded, and at most 8 GiB. */
function withinMachine(bytes: number): true | string {
  const gigabytes = (globalThis.navigator as { deviceMemory?: number } | undefined)?.deviceMemory;
  return gigabytes === undefined || gigabytes >= 8 || bytes <= gigabytes * 2 ** 30
    || `the weights take ${bytes} bytes, and the browser says that this machine has about ${gigabytes} GiB of memory`;
}

/** Whether the browser has room for the bytes that are not stored. */
async function storageFor(files: ModelFile[], sizeBytes: number | undefined): Promise<true | string> {
  try {
    const records = await (await openStore()).list();
    const kept = new Map(records.map(({ url, stored }) => [url, stored]));
    const stored = files.reduce((sum, { url }) => sum + (url === undefined ? 0 : kept.get(storedAddress(url)) ?? 0), 0);
    const missing = (sizeBytes ?? 0) - stored;
    const room = await freeBytes();
    return missing <= room || `${missing} bytes are to be stored, and the browser has room for ${room}`;
  } catch (error) {
    return messageOf(error);
  }
}
