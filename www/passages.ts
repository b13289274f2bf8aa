// Texts cut into passages, which is what a search finds. No DOM in here.
import Papa from "papaparse";

/** Files that hold texts. */
export const TEXT_FILE = /\.(txt|md|csv|jsonl)$/i;

/** Words of a passage, at most: less than encoders read. */
const WORDS = 90;
/** Characters of a passage, at most, for scripts without spaces. */
const CHARACTERS = 8 * WORDS;
/** Keys of a JSON object under which its text is, if one of them is there. */
const TEXT_KEYS = ["text", "content", "passage", "body"];

/**
 * The passages of a file: records of `.csv` and `.jsonl`, else paragraphs. What is longer than a passage is cut, between sentences where
 * that is possible.
 *
 * Throws an `Error` that names the place for a `.jsonl` or `.csv` file that is none.
 */
export function passagesOf(name: string, text: string): string[] {
  const records = /\.csv$/i.test(name) ? csvRecords(name, text) : /\.jsonl$/i.test(name) ? jsonRecords(name, text) : paragraphs(text);
  return records.map((record) => record.replaceAll(/\s+/g, " ").trim()).filter((record) => record !== "").flatMap(pieces);
}

/** Stretches between empty lines; a heading goes with what follows it. */
function paragraphs(text: string): string[] {
  const lines = text.replaceAll(/\r\n?/g, "\n").trim();
  // Without empty lines, one that ends a sentence ends a paragraph.
  const blocks = /\n\s*\n/.test(lines) ? lines.split(/\n\s*\n/) : lines.split(/(?<=[.!?…。！？]["'”’)\]]*)[ \t]*\n/);
  const found: string[] = [];
  let heading = "";
  for (const block of blocks) {
    if (/^#{1,6}\s/.test(block) && !block.trim().includes("\n")) {
      heading += `${block} `;
    } else {
      found.push(heading + block);
      heading = "";
    }
  }
  return heading === "" ? found : [...found, heading];
}

/** A text in pieces that are no longer than a passage. */
function pieces(text: string): string[] {
  // Between sentences; one that is too long by itself, between words, and a word that is, anywhere.
  const sentences = text.split(/(?<=[.!?…]["'”’)\]]*\s)|(?<=[。！？])/);
  return joined(sentences.flatMap((sentence) => (isLong(sentence.length, countWords(sentence)) ? joined(sentence.match(WORD) ?? []) : [sentence])))
    .map((piece) => piece.trim());
}

const WORD = new RegExp(`\\S{1,${CHARACTERS / 2}}\\s*`, "g");

/** Parts joined to as few as are not too long. */
function joined(parts: string[]): string[] {
  const found: string[] = [];
  let [piece, nWords] = ["", 0];
  for (const part of parts) {
    const more = countWords(part);
    if (piece !== "" && isLong(piece.length + part.length, nWords + more)) {
      found.push(piece);
      [piece, nWords] = ["", 0];
    }
    piece += part;
    nWords += more;
  }
  return piece === "" ? found : [...found, piece];
}

function countWords(text: string): number {
  return text.trim().split(" ").length;
}

function isLong(length: number, nWords: number): boolean {
  return length > CHARACTERS || nWords > WORDS;
}

/**
 * Records of comma-separated values (RFC 4180), or of such with semicolons or tabs between them, each in one line; the first one, which names
 * the columns, is none of them.
 */
function csvRecords(name: string, text: string): string[] {
  const { data, errors } = Papa.parse(text, { skipEmptyLines: "greedy" });
  const cut = errors.find(({ code }) => code === "MissingQuotes");
  // All that follows would be one field.
  if (cut) throw new Error(`${name}: record ${(cut.row ?? 0) + 1} has a quote that nothing closes`);
  return data.slice(1).map((fields) => fields.map((field) => field.trim()).filter((field) => field !== "").join(" · "));
}

/** A record for each line: a string, or an object with a text. */
function jsonRecords(name: string, text: string): string[] {
  return text.split(/\r?\n/).flatMap((line, i) => {
    if (line.trim() === "") return [];
    let value: unknown;
    try {
      value = JSON.parse(line);
    } catch (error) {
      throw new Error(`${name}: line ${i + 1} is no JSON`, { cause: error });
    }
    if (typeof value === "string") return [value];
    if (typeof value !== "object" || value === null) return [];
    const key = TEXT_KEYS.find((key) => typeof (value as Record<string, unknown>)[key] === "string");
    const texts: unknown[] = key === undefined ? Object.values(value) : [(value as Record<string, unknown>)[key]];
    return [texts.filter((it) => typeof it === "string").join(" · ")];
  });
}
