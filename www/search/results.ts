// The lists of passages that a search found.
import type { Hit } from "../tilewright/index.js";
import { byId, make } from "../dom.js";
import { count, type Passage } from "./passage.js";

/** Hits by cosine among which those of the mixture have a rank: as many as an index gives. */
export const N_RANKS = 1024;

/** What a search found. */
export interface Found {
  query: string;
  hits: Hit[];
  /** Whether a cross-encoder put the hits in their order; their scores are its own then. */
  isReranked: boolean;
  /** By the mixture. */
  learned: Hit[];
  /** Each passage's place by cosine, from 1 on. */
  ranks: Map<number, number>;
}

export const NOTHING: Found = { query: "", hits: [], isReranked: false, learned: [], ranks: new Map() };

/** Shows what was found among passages, whose places in the list are their ids. */
export function showResults({ query, hits, isReranked, learned, ranks }: Found, passages: readonly Passage[]): void {
  const words = wordsOf(query);
  const list = byId("results");
  const place = (id: number): HTMLElement => {
    const rank = ranks.get(id);
    return make("span", { className: "rank" }, rank === undefined ? `not among the first ${count(N_RANKS)} by cosine` : `number ${count(rank)} by cosine`);
  };
  const rows = (hits: Hit[], marks: (hit: Hit) => HTMLElement[]): HTMLElement[] => hits.flatMap((hit) => {
    const passage = passages[hit.id];
    return passage ? [resultRow(passage, hit.id, passages, marks(hit), words)] : [];
  });
  list.replaceChildren(...rows(hits, ({ id, score }) => {
    const rounded = score.toFixed(2);
    if (isReranked) return [make("span", { className: "score" }, rounded), place(id)];
    const meter = make("meter", { min: 0, max: 1, value: Math.max(0, score), ariaLabel: `Cosine ${rounded}` });
    return [meter, make("span", { className: "score" }, rounded)];
  }));
  byId("learned-results").replaceChildren(...rows(learned, ({ id, score }) => [make("span", { className: "score" }, score.toFixed(2)), place(id)]));
  // Last, so that who waits for the query's results finds both lists.
  list.dataset["query"] = query;
  list.dataset["reranked"] = String(isReranked);
}

function resultRow({ text, source, number }: Passage, id: number, passages: readonly Passage[], marks: HTMLElement[], words: RegExp | undefined): HTMLElement {
  const head = make("p", { className: "result-head" }, ...marks, make("span", { className: "source" }, `${source}, passage ${count(number)}`));
  const row = make("li", { className: "result", tabIndex: -1 }, head, make("p", { className: "passage" }, ...marked(text, words)));
  const near = [passages[id - 1], passages[id + 1]].filter((it) => it?.source === source);
  if (near.length > 0) {
    const before = near.filter((it) => it && it.number < number).map((it) => make("p", {}, it?.text ?? ""));
    const after = near.filter((it) => it && it.number > number).map((it) => make("p", {}, it?.text ?? ""));
    row.append(make("details", {}, make("summary", {}, "Around it"), ...before, make("p", { className: "here" }, text), ...after));
  }
  row.dataset["id"] = String(id);
  return row;
}

/** Matches the words of a query, and what begins with them; undefined if it has none that say something. */
function wordsOf(query: string): RegExp | undefined {
  const words = (query.match(/[\p{L}\p{N}]{3,}/gu) ?? []).filter((word) => !STOP_WORDS.has(word.toLowerCase()));
  return words.length === 0 ? undefined : new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.join("|")})[\\p{L}\\p{N}]*`, "giu");
}

/** Words that are everywhere and would be marked everywhere. */
const STOP_WORDS: ReadonlySet<string> = new Set(
  "about and are but can did does for from had has have how into its not than that the their them then there they this was were what when where which who why will with you your".split(" "),
);

/** A text with the words marked. */
function marked(text: string, words: RegExp | undefined): (Node | string)[] {
  if (!words) return [text];
  const parts: (Node | string)[] = [];
  let end = 0;
  for (const match of text.matchAll(words)) {
    parts.push(text.slice(end, match.index), make("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}
