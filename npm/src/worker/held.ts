/** What the worker holds for its callers, by the numbers that they gave to it: models, indices, devices. */

import { TilewrightError } from "../errors.js";
import type { DeviceRequest } from "../protocol.js";
import type { Caller } from "./port.js";
import { openPlace, type Place } from "./place.js";

/** Something on a device. */
export abstract class Held {
  #place: Place;

  /** `place` is counted as used already. */
  constructor(place: Place) {
    this.#place = place;
  }

  get place(): Place {
    return this.#place;
  }

  protected set place(place: Place) {
    this.#place = place;
  }

  /** Frees it, and its device if it is the last one there. */
  free(): void {
    try {
      this.release();
    } finally {
      this.#place.release();
    }
  }

  /** Frees all but the device. */
  protected abstract release(): void;

  /** Settles when it can be asked. */
  async ready(): Promise<void> {}

  /** Bytes that it takes, as far as it says. */
  bytes(): number {
    return 0;
  }
}

const all = new Map<number, Held>();

/** Holds something under a number. */
export function hold<T extends Held>(target: number, it: T): T {
  all.set(target, it);
  return it;
}

/** What has this number, if anything has. */
export function find(target: number): Held | undefined {
  return all.get(target);
}

/** The same, if it is of the kind that a call needs. */
export function held<T extends Held>(target: number, kind: abstract new (...given: never[]) => T): T {
  const it = find(target);
  if (!(it instanceof kind)) {
    throw new TilewrightError("disposed", "it was freed, or was never made");
  }
  return it;
}

/** The same, once it can be asked: for calls that do not wait for their turn. */
export async function present<T extends Held>(target: number, kind: abstract new (...given: never[]) => T): Promise<T> {
  await held(target, kind).ready();
  return held(target, kind);
}

/** The device of what has this number, or a new one; counted as used. */
export async function placeOf(where: DeviceRequest | number, caller: Caller): Promise<Place> {
  const place = typeof where === "number" ? held(where, Held).place : await openPlace(where, caller);
  return place.use();
}

/** Frees what has this number. */
export function drop(target: number): void {
  const it = all.get(target);
  all.delete(target);
  it?.free();
}

/** Bytes that others than this target take of the CPU's memory, which all of them share. */
export function bytesOfOthers(target: number): number {
  return [...all].reduce((sum, [id, it]) => id === target || it.place.device.isGpu() ? sum : sum + it.bytes(), 0);
}
