/** What is asked of one target is done in turn; targets do not wait for each other. */

const queues = new Map<number | "loads", Promise<unknown>>();

/** Runs an action after those that were asked of the target before. */
export function inTurn<T>(target: number | "loads", signal: AbortSignal, action: () => T | Promise<T>): Promise<T> {
  const turn = (queues.get(target) ?? Promise.resolve()).then(() => {
    signal.throwIfAborted();
    return action();
  });
  // A failure is its caller's; the next in line does not care.
  queues.set(target, turn.catch(() => {}));
  return turn;
}

/** Loads after the loads before it: how much memory those take is known then. */
export function loading<T>(signal: AbortSignal, load: () => Promise<T>): Promise<T> {
  return inTurn("loads", signal, load);
}

/** The same, but over at once with `nothing` where `ending` comes before the turn. */
export function inTurnUnless<T>(target: number, signal: AbortSignal, ending: AbortSignal, nothing: T, action: () => T | Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    const leave = (): void => resolve(nothing);
    ending.addEventListener("abort", leave, { once: true });
    inTurn(target, signal, () => {
      ending.removeEventListener("abort", leave);
      return ending.aborted ? nothing : action();
    }).then(resolve, reject);
  });
}

/** Nothing will be asked of the target any more. */
export function forgetTurns(target: number): void {
  queues.delete(target);
}

/** Milliseconds between two looks whether anything is asked of the worker. */
const IDLE_MS = 50;

let nCalls = 0;

/** Counts a call while it runs. */
export async function counted<T>(call: () => Promise<T>): Promise<T> {
  nCalls += 1;
  try {
    return await call();
  } finally {
    nCalls -= 1;
  }
}

/** Resolves as soon as nothing is asked of the worker. */
export async function idle(): Promise<void> {
  while (nCalls > 0) {
    await new Promise((resolve) => setTimeout(resolve, IDLE_MS));
  }
}
