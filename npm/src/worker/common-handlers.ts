/** Handlers of calls that all workers have. */

import type { Calls } from "../protocol.js";
import { freeHandle, Handle, handleOf, readyHandle } from "./handles.js";
import { LoadedModel } from "./loaded-model.js";
import type { CallContext, Handler, Handlers } from "./port.js";
import { forgetTurns, inTurn } from "./turns.js";

/** A call on an object of a kind, in its turn. */
export function on<K extends keyof Calls, T extends Handle>(
  kind: abstract new (...given: never[]) => T, work: (it: T, args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]>,
): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(handleOf(context.target, kind), args, context));
}

/** A call that makes an object, in its turn, so that `close` waits for it. */
export function making<K extends keyof Calls>(work: Handler<K>): Handler<K> {
  return (args, context) => inTurn(context.target, context.signal, () => work(args, context));
}

export const commonHandlers: Pick<Handlers, "memory" | "counters" | "destroyDevice" | "close"> = {
  memory: async (_, { target }) => (await readyHandle(target, LoadedModel)).memory(),
  counters: (_, { target }) => handleOf(target, Handle).place.device.counters(),
  destroyDevice: (_, { target }) => handleOf(target, Handle).place.device.destroy(),
  close: (_, { target, signal }) => inTurn(target, signal, () => {
    freeHandle(target);
    forgetTurns(target);
  }),
};
