/** The handler of each call of the engine's worker. */

import type { SpeechCallName } from "../protocol.js";
import type { Index, Mol } from "../tilewright.js";
import { commonHandlers, making, on } from "./common-handlers.js";
import { prefetch } from "./files.js";
import { handleOf, placeOf, readyHandle, register } from "./handles.js";
import { inspect } from "./inspect.js";
import { DeviceHandle, measure } from "./kernels.js";
import { embedderRecipe, modelRecipe, rerankerRecipe } from "./load.js";
import { LoadedEmbedder } from "./loaded-embedder.js";
import { load, LoadedReranker } from "./loaded-model.js";
import { CANCELLED, LoadedTextModel } from "./loaded-text-model.js";
import { listDevices } from "./place.js";
import type { Handlers } from "./port.js";
import { inTurnUnless } from "./turns.js";
import { createIndex, IndexHandle, loadIndex, loadMol, MolHandle, VectorsHandle } from "./vectors.js";

export const handlers: Omit<Handlers, SpeechCallName> = {
  ...commonHandlers,
  loadModel: (request, context) => load(LoadedTextModel, modelRecipe(request), context),
  loadEmbedder: (request, context) => load(LoadedEmbedder, embedderRecipe(request), context),
  loadReranker: (request, context) => load(LoadedReranker, rerankerRecipe(request), context),
  inspect: making(inspect),
  prefetch: making(prefetch),
  generate: (args, context) =>
    inTurnUnless(context.target, context.signal, context.stopSignal, CANCELLED, () => handleOf(context.target, LoadedTextModel).generate(args, context)),
  makeEngine: on(LoadedTextModel, (model, args, { target }) => model.makeEngine(args, target)),
  // Requests wait for a lost device in the engine.
  generateWith: async (args, context) => (await readyHandle(context.target, LoadedTextModel)).generateWith(args, context),
  engineStats: async ({ engine }, { target }) => (await readyHandle(target, LoadedTextModel)).engines.get(engine).stats(),
  freeEngine: ({ engine }, { target }) => handleOf(target, LoadedTextModel).engines.free(engine),
  saveSession: on(LoadedTextModel, (model, args) => model.saveSession(args)),
  timeline: on(LoadedTextModel, (model) => model.timeline()),
  headWeights: on(LoadedTextModel, (model, args) => model.headWeights(args)),
  tokenize: async ({ text, addSpecial }, { target }) => (await readyHandle(target, LoadedTextModel)).loaded.tokenize(text, addSpecial),
  imageTokens: async ({ width, height }, { target }) => (await readyHandle(target, LoadedTextModel)).loaded.imageTokens(width, height),
  detokenize: async ({ ids }, { target }) => (await readyHandle(target, LoadedTextModel)).loaded.detokenize(ids),
  embed: on(LoadedEmbedder, (embedder, { texts, prompt, dimensions }, { signal, emit }) =>
    embedder.run(signal, (it) => it.embed(texts, prompt, dimensions, emit))),
  embedImages: on(LoadedEmbedder, (embedder, args, context) => embedder.embedImages(args, context)),
  encode: async ({ text, prompt }, { target }) => (await readyHandle(target, LoadedEmbedder)).loaded.encode(text, prompt),
  rerank: on(LoadedReranker, (reranker, { query, documents, topK, instruction }, { signal, emit }) =>
    reranker.run(signal, (it) => it.rerank(query, documents, topK, instruction, emit))),
  devices: listDevices,
  openDevice: making(async (request, { target, caller }) => register(target, new DeviceHandle(await placeOf(request, caller))).place.info()),
  bench: on(DeviceHandle, (device, args, { emit }) => measure(device, args, emit)),
  keepTensor: on(DeviceHandle, (device, args) => device.keep(args)),
  readTensor: on(DeviceHandle, ({ tensors }, { kept }) => tensors.get(kept).read()),
  freeTensor: on(DeviceHandle, ({ tensors }, { kept }) => tensors.free(kept)),
  createIndex: making(createIndex),
  loadIndex: making(loadIndex),
  appendVectors: on(VectorsHandle<Index | Mol>, async (it, { vectors }) => ({ first: await it.vectors.append(vectors), info: it.info() })),
  deleteVectors: on(IndexHandle, (it, { ids }) => ({ deleted: it.vectors.delete(ids), info: it.info() })),
  searchVectors: on(IndexHandle, ({ vectors }, { queries, k, filter }) => vectors.search(queries, k, filter)),
  beginSave: on(IndexHandle, ({ vectors, saves }) => saves.put(vectors.saving())),
  savedPiece: on(IndexHandle, ({ saves }, { save }) => saves.get(save).next()),
  endSave: on(IndexHandle, ({ saves }, { save }) => saves.free(save)),
  loadMol: making(loadMol),
  searchItems: on(MolHandle, ({ vectors }, { queries, k, method, users }) => vectors.search(queries, k, method, users)),
  runKernel: on(DeviceHandle, (device, args) => device.compute(args)),
};
