/** Calls on one target run in turn; targets do not wait for each other. */

import { delay } from "../helpers.js";

const queues = new Map<number | "loads", Promise<unknown>>();

/** Runs an action after the earlier ones of its target. */
export function inTurn<T>(target: number | "loads", signal: AbortSignal, action: () => T | Promise<T>): Promise<T> {
  const turn = (queues.get(target) ?? Promise.resolve()).then(() => {
    signal.throwIfAborted();
    return action();
  });
  queues.set(target, turn.catch(() => {}));
  return turn;
}

/** The same, but resolves to `nothing` if `stopSignal` aborts before the turn. */
export function inTurnUnless<T>(target: number, signal: AbortSignal, stopSignal: AbortSignal, nothing: T, action: () => T | Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    const leave = (): void => resolve(nothing);
    stopSignal.addEventListener("abort", leave, { once: true });
    inTurn(target, signal, () => {
      stopSignal.removeEventListener("abort", leave);
      return stopSignal.aborted ? nothing : action();
    }).then(resolve, reject);
  });
}

export function forgetTurns(target: number): void {
  queues.delete(target);
}

const IDLE_MS = 50;

let nCalls = 0;

export async function counted<T>(call: () => Promise<T>): Promise<T> {
  nCalls += 1;
  try {
    return await call();
  } finally {
    nCalls -= 1;
  }
}

export async function idle(): Promise<void> {
  while (nCalls > 0) {
    await delay(IDLE_MS);
  }
}
