/** Objects that callers have in the worker, by the numbers that they chose: models, indices, devices. */

import { ensure } from "../errors.js";
import type { DeviceRequest } from "../protocol.js";
import { openPlace, type Place } from "./place.js";
import type { Caller } from "./port.js";

export abstract class Handle {
  /** `place` already counts this user. */
  constructor(public place: Place) {}

  /** Frees the object, and its device after the last user. */
  free(): void {
    try {
      this.release();
    } finally {
      this.place.free();
    }
  }

  /** Frees all but the device. */
  protected abstract release(): void;

  /** Resolves when calls can run. */
  async ready(): Promise<void> {}

  bytes(): number {
    return 0;
  }
}

const handles = new Map<number, Handle>();

export function register<T extends Handle>(target: number, it: T): T {
  handles.set(target, it);
  return it;
}

export function findHandle(target: number): Handle | undefined {
  return handles.get(target);
}

/** The object of a target. Throws `disposed` if it is gone or of another kind. */
export function handleOf<T extends Handle>(target: number, kind: abstract new (...given: never[]) => T): T {
  const it = findHandle(target);
  ensure(it instanceof kind, "disposed", "it was freed, or was never made");
  return it;
}

/** The same once it is ready, for calls that do not wait for their turn. */
export async function readyHandle<T extends Handle>(
  target: number, kind: abstract new (...given: never[]) => T,
): Promise<T> {
  await handleOf(target, kind).ready();
  return handleOf(target, kind);
}

/** The device of a target, or a new one, with one user more. */
export async function placeOf(where: DeviceRequest | number, caller: Caller): Promise<Place> {
  const place = typeof where === "number" ? handleOf(where, Handle).place : await openPlace(where, caller);
  return place.use();
}

export function freeHandle(target: number): void {
  const it = handles.get(target);
  handles.delete(target);
  it?.free();
}

/** Bytes of the shared CPU memory in use by other targets. */
export function bytesOfOthers(target: number): number {
  return [...handles].reduce((sum, [id, it]) => id === target || it.place.device.isGpu() ? sum : sum + it.bytes(), 0);
}
