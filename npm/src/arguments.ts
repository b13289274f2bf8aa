/** Validated copies of callers' arguments. */

import { Embeddings } from "./embeddings.js";
import { ensure } from "./errors.js";

/** `orOne`: the alternative, for the message. */
export function textsOf(name: string, given: unknown, orOne = ""): string[] {
  ensureIs(Array.isArray(given), name, given, `${orOne}a list of texts`);
  const wrong = given.findIndex((text) => typeof text !== "string");
  ensureIs(wrong < 0, `${name}[${wrong}]`, given[wrong], "a text");
  return [...given as string[]];
}

export function textOf(name: string, given: unknown): string {
  ensureIs(typeof given === "string", name, given, "a text");
  return given;
}

export function vectorsOf(name: string, given: unknown): Float32Array<ArrayBuffer> {
  const vectors = given instanceof Embeddings ? given.vectors : given;
  ensureIs(isArrayOf("Float32Array", vectors), name, given, "a Float32Array or what `embed` gave");
  return new Float32Array(vectors as Float32Array);
}

export function idsOf(name: string, ids: Iterable<number>): Uint32Array {
  const list = [...ids];
  const wrong = list.findIndex((id) => !isId(id));
  ensure(wrong < 0, "option", `${name}[${wrong}] is ${list[wrong]}, expected an id`);
  return Uint32Array.from(list);
}

/** Whether it is an id or a count: a whole number of 32 bits. */
export function isId(id: unknown): id is number {
  return Number.isInteger(id) && id as number >= 0 && id as number < 2 ** 32;
}

/** Whether it is such an array. Arrays of other realms, such as frames, have other constructors. */
export function isArrayOf(kind: "Float32Array" | "Uint8Array", value: unknown): boolean {
  return ArrayBuffer.isView(value) && (value as Uint8Array)[Symbol.toStringTag] as string === kind;
}

function ensureIs(condition: boolean, name: string, found: unknown, expected: string): asserts condition {
  ensure(condition, "option", `${name} is ${Object.prototype.toString.call(found).slice(8, -1)}, expected ${expected}`);
}
