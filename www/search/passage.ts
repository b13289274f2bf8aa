// A stretch of a text, which is what a search finds.

export interface Passage {
  text: string;
  /** The file's name, with its folder, or what stands for it. */
  source: string;
  /** Counted from 1 in its text. */
  number: number;
}

/** Numbers as people read them: 1,240. */
export function count(n: number): string {
  return n.toLocaleString("en");
}

export function counted(n: number, what: string): string {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}
