/** What the worker does for each call. */

import type { Calls } from "../protocol.js";
import { ScoreResident, VectorResident } from "./batch-resident.js";
import { drop, Held, held, hold, placeOf, present } from "./held.js";
import { compute, HeldDevice, measure } from "./kernels.js";
import { inspect } from "./inspect.js";
import { embedderRecipe, modelRecipe, rerankerRecipe } from "./load.js";
import { listDevices } from "./place.js";
import type { CallContext, Handler, Handlers } from "./port.js";
import { prefetch } from "./prefetch.js";
import { load, Resident } from "./resident.js";
import { NOTHING, TextResident } from "./text-resident.js";
import { forgetTurns, inTurn, inTurnUnless } from "./turns.js";
import { createIndex, HeldIndex, HeldMol, loadIndex, loadMol } from "./vectors.js";

/** A call on something of a kind, in its turn. */
function on<K extends keyof Calls, T extends Held>(
  kind: abstract new (...given: never[]) => T, work: (it: T, args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]>,
): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(held(context.target, kind), args, context));
}

/** A call that makes something, in its turn: an end that comes meanwhile waits. */
function making<K extends keyof Calls>(work: Handler<K>): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(args, context));
}

export const handlers: Handlers = {
  loadModel: (request, context) => load(TextResident, modelRecipe(request), context),
  loadEmbedder: (request, context) => load(VectorResident, embedderRecipe(request), context),
  loadReranker: (request, context) => load(ScoreResident, rerankerRecipe(request), context),
  inspect: making(inspect),
  prefetch: making(prefetch),
  generate: (args, context) =>
    inTurnUnless(context.target, context.signal, context.ending, NOTHING, () => held(context.target, TextResident).generate(args, context)),
  makeEngine: on(TextResident, (model, args, { target }) => model.makeEngine(args, target)),
  // One that waits for a lost device waits with the others, in the engine.
  generateWith: async (args, context) => (await present(context.target, TextResident)).generateWith(args, context),
  engineStats: async ({ engine }, { target }) => (await present(target, TextResident)).engine(engine).stats(),
  freeEngine: ({ engine }, { target }) => held(target, TextResident).freeEngine(engine),
  saveSession: on(TextResident, (model, args) => model.saveSession(args)),
  timeline: on(TextResident, (model) => model.timeline()),
  headWeights: on(TextResident, (model, args) => model.headWeights(args)),
  tokenize: async ({ text, addSpecial }, { target }) => (await present(target, TextResident)).model.tokenize(text, addSpecial),
  detokenize: async ({ ids }, { target }) => (await present(target, TextResident)).model.detokenize(ids),
  embed: on(VectorResident, (embedder, { texts, prompt }, { signal, emit }) => embedder.run(signal, (it) => it.embed(texts, prompt, emit))),
  encode: async (args, { target }) => (await present(target, VectorResident)).encode(args),
  rerank: on(ScoreResident, (reranker, { query, documents, topK }, { signal, emit }) =>
    reranker.run(signal, (it) => it.rerank(query, documents, topK, emit))),
  memory: async (_, { target }) => (await present(target, Resident)).memory(),
  counters: (_, { target }) => held(target, Held).place.device.counters(),
  destroyDevice(_, { target }) {
    held(target, Held).place.device.destroy();
    return undefined;
  },
  close: (_, { target, signal }) => inTurn(target, signal, () => {
    drop(target);
    forgetTurns(target);
    return undefined;
  }),
  devices: listDevices,
  openDevice: making(async (request, { target, caller }) => hold(target, new HeldDevice(await placeOf(request, caller))).place.info()),
  bench: on(HeldDevice, (device, args, { emit }) => measure(device, args, emit)),
  keepTensor: on(HeldDevice, (device, args) => device.keep(args)),
  readTensor: on(HeldDevice, ({ tensors }, { kept }) => tensors.get(kept).read()),
  freeTensor: on(HeldDevice, ({ tensors }, { kept }) => tensors.free(kept)),
  createIndex: making(createIndex),
  loadIndex: making(loadIndex),
  appendVectors: on(HeldIndex, async (it, { vectors }) => ({ first: await it.index.append(vectors), info: it.info() })),
  deleteVectors: on(HeldIndex, (it, { ids }) => ({ deleted: it.index.delete(ids), info: it.info() })),
  searchVectors: on(HeldIndex, ({ index }, { queries, k, filter }) => index.search(queries, k, filter)),
  beginSave: on(HeldIndex, ({ index, saves }) => saves.put(index.saving())),
  savedPiece: on(HeldIndex, ({ saves }, { save }) => saves.get(save).next()),
  endSave: on(HeldIndex, ({ saves }, { save }) => saves.free(save)),
  loadMol: making(loadMol),
  appendItems: on(HeldMol, async (it, { vectors }) => ({ first: await it.mol.append(vectors), info: it.info() })),
  searchItems: on(HeldMol, ({ mol }, { queries, k, method, users }) => mol.search(queries, k, method, users)),
  matmul: on(HeldDevice, (on, { operands: { a, b }, options: { m, n, k }, keep }) => compute(on, [a, b], keep, (device, a, b) => device.matmul(a, b, m, n, k))),
  rmsNorm: on(HeldDevice, (on, { operands: { x, weight }, options: { eps }, keep }) =>
    compute(on, [x, weight], keep, (device, x, weight) => device.rmsNorm(x, weight, eps))),
  layerNorm: on(HeldDevice, (on, { operands: { x, weight, bias }, options: { eps }, keep }) =>
    compute(on, [x, weight, bias], keep, (device, x, weight, bias) => device.layerNorm(x, weight, bias, eps))),
  softmax: on(HeldDevice, (on, { operands: { x }, options: { columns }, keep }) => compute(on, [x], keep, (device, x) => device.softmax(x, columns))),
  rope: on(HeldDevice, (on, { operands: { x }, options: { nHeads, headDim, firstPos, theta, style }, keep }) =>
    compute(on, [x], keep, (device, x) => device.rope(x, nHeads, headDim, firstPos, theta, style))),
  attention: on(HeldDevice, (on, { operands: { q, k, v }, options: { nHeads, nKvHeads, headDim }, keep }) =>
    compute(on, [q, k, v], keep, (device, q, k, v) => device.attention(q, k, v, nHeads, nKvHeads, headDim))),
};
