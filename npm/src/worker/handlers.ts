/** The worker's handler of each call. */

import type { Calls } from "../protocol.js";
import type { Index, Mol } from "../tilewright.js";
import { prefetch } from "./files.js";
import { freeHandle, Handle, handleOf, placeOf, readyHandle, register } from "./handles.js";
import { inspect } from "./inspect.js";
import { DeviceHandle, measure } from "./kernels.js";
import { embedderRecipe, modelRecipe, rerankerRecipe } from "./load.js";
import { load, LoadedEmbedder, LoadedModel, LoadedReranker } from "./loaded-model.js";
import { CANCELLED, LoadedTextModel } from "./loaded-text-model.js";
import { listDevices } from "./place.js";
import type { CallContext, Handler, Handlers } from "./port.js";
import { forgetTurns, inTurn, inTurnUnless } from "./turns.js";
import { createIndex, IndexHandle, loadIndex, loadMol, MolHandle, VectorsHandle } from "./vectors.js";

/** A call on an object of a kind, in its turn. */
function on<K extends keyof Calls, T extends Handle>(
  kind: abstract new (...given: never[]) => T, work: (it: T, args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]>,
): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(handleOf(context.target, kind), args, context));
}

/** A call that makes an object, in its turn, so that `close` waits for it. */
function making<K extends keyof Calls>(work: Handler<K>): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(args, context));
}

export const handlers: Handlers = {
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
  encode: async ({ text, prompt }, { target }) => (await readyHandle(target, LoadedEmbedder)).loaded.encode(text, prompt),
  rerank: on(LoadedReranker, (reranker, { query, documents, topK, instruction }, { signal, emit }) =>
    reranker.run(signal, (it) => it.rerank(query, documents, topK, instruction, emit))),
  memory: async (_, { target }) => (await readyHandle(target, LoadedModel)).memory(),
  counters: (_, { target }) => handleOf(target, Handle).place.device.counters(),
  destroyDevice: (_, { target }) => handleOf(target, Handle).place.device.destroy(),
  close: (_, { target, signal }) => inTurn(target, signal, () => {
    freeHandle(target);
    forgetTurns(target);
  }),
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
