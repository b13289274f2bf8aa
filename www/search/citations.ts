// Citations in an answer: `[1]` or `[1, 3]`, which become links to passages. No DOM in here.

/** A stretch of an answer: its text, and the passage that it cites if it does. */
export interface Stretch {
  text: string;
  cites?: number;
}

const CITATION = /\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\]/g;
/** What may still become a citation. */
const BEGINNING = /\[[\d,\s]{0,20}$/;

/** Takes an answer apart while it grows. Numbers from 1 to `nPassages` are citations; others are text. */
export class Citations {
  private held = "";

  constructor(private readonly nPassages: number) {}

  /** Further text; what may be the beginning of a citation is held back. */
  append(text: string): Stretch[] {
    const all = this.held + text;
    const at = BEGINNING.exec(all)?.index ?? all.length;
    this.held = all.slice(at);
    return this.parts(all.slice(0, at));
  }

  /** What was held back. */
  end(): Stretch[] {
    const rest = this.parts(this.held);
    this.held = "";
    return rest;
  }

  private parts(text: string): Stretch[] {
    const found: Stretch[] = [];
    let end = 0;
    for (const match of text.matchAll(CITATION)) {
      const numbers = (match[1] ?? "").split(",").map(Number);
      if (!numbers.every((n) => n >= 1 && n <= this.nPassages)) continue;
      found.push({ text: text.slice(end, match.index) }, ...numbers.map((n) => ({ text: `[${n}]`, cites: n })));
      end = match.index + match[0].length;
    }
    return [...found, { text: text.slice(end) }].filter(({ text }) => text !== "");
  }
}
