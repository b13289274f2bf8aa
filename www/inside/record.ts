// The pieces of the last answer, which the view “Inside” shows. Written down while it is generated, whether the view is open or not.
import type { Piece } from "../tilewright/index.js";

/** Answers are as long as one likes; more than this nobody looks at. */
const MAX_PIECES = 4096;

let pieces: Piece[] = [];
let changed: () => void = () => {};

/** An answer begins. */
export function beginRecord(): void {
  pieces = [];
  changed();
}

/** A piece of the answer. */
export function recordPiece(piece: Piece): void {
  if (pieces.length < MAX_PIECES) pieces.push(piece);
  changed();
}

export function recorded(): readonly Piece[] {
  return pieces;
}

/** Says what to do when an answer begins or has another piece. */
export function onRecord(then: () => void): void {
  changed = then;
}
