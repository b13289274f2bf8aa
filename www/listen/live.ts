// The transcript of a sound that grows: what two runs in a row agree on is settled, and only the rest is heard again. No DOM in here.
import type { TranscriptSegment } from "../tilewright/index.js";

/** A window of the model. A longer rest is heard in parts, so all but the last of its segments are settled. */
const WINDOW = 30;
/** Ends that differ by less are the same. */
const SAME = 0.6;
/** Characters of the text before that the model is given. */
const MAX_PROMPT = 200;

type Timed = Pick<TranscriptSegment, "start" | "end" | "text">;

export class LiveTranscript {
  readonly settled: Timed[] = [];
  /** What may still change. */
  tail: Timed[] = [];
  /** Seconds of the sound that need not be heard again. */
  heardUntil = 0;

  /** The text before what is heard next. */
  get prompt(): string {
    return this.settled.map(({ text }) => text).join("").slice(-MAX_PROMPT).trim();
  }

  /** All segments. */
  get segments(): Timed[] {
    return [...this.settled, ...this.tail];
  }

  /** Takes the segments of the sound from `heardUntil` to `until`, whose times begin there. */
  add(found: readonly Timed[], until: number): void {
    const from = this.heardUntil;
    const segments = found.map(({ start, end, text }) => ({ start: start + from, end: end + from, text }));
    const isLong = until - from > WINDOW;
    // The last one may go on.
    let n = 0;
    while (n < segments.length - 1 && (isLong || isSame(segments[n], this.tail[n]))) n += 1;
    this.settle(segments.slice(0, n));
    this.tail = segments.slice(n);
    // Where nobody has spoken for a window, nothing will be heard.
    if (segments.length === 0 && isLong) this.heardUntil = until - 1;
  }

  /** Takes the last segments of the sound, after which nothing changes. */
  end(found: readonly Timed[]): void {
    const from = this.heardUntil;
    this.settle(found.map(({ start, end, text }) => ({ start: start + from, end: end + from, text })));
    this.tail = [];
  }

  private settle(segments: Timed[]): void {
    this.settled.push(...segments);
    this.heardUntil = segments.at(-1)?.end ?? this.heardUntil;
  }
}

function isSame(a: Timed | undefined, b: Timed | undefined): boolean {
  const plain = (text: string): string => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  return a !== undefined && b !== undefined && Math.abs(a.end - b.end) < SAME && plain(a.text) === plain(b.text);
}
