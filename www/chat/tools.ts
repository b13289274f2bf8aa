// Tools that a model may call in the page: what it is told of them, and what they do. No DOM in here.
import { passagesOf } from "../passages.js";
import type { Attachment } from "./records.js";
import { calculate } from "./calculator.js";

/** What a tool works with. */
export interface Surroundings {
  /** Texts that were attached to the conversation. */
  texts: readonly Attachment[];
}

interface Tool {
  description: string;
  parameters: object;
  run(given: Record<string, unknown>, surroundings: Surroundings): string;
}

/** Passages that a search gives. */
const N_FOUND = 3;

const parameters = (properties: Record<string, object>): object => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});

const TOOLS: Record<string, Tool> = {
  calculator: {
    description: "Computes the value of an arithmetic expression, such as 2*(3+4)^2 or sqrt(2).",
    parameters: parameters({ expression: { type: "string", maxLength: 200 } }),
    run: ({ expression }) => String(calculate(String(expression))),
  },
  clock: {
    description: "Tells the date, the time and the time zone of the person who asks.",
    parameters: parameters({}),
    run: () => {
      const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
      return `${new Date().toLocaleString("en", { dateStyle: "full", timeStyle: "medium" })}, ${timeZone}`;
    },
  },
  search: {
    description: "Finds the passages of the attached files that have most words in common with a query.",
    parameters: parameters({ query: { type: "string", maxLength: 200 } }),
    run: ({ query }, { texts }) => found(String(query), texts),
  },
};

/** The tools as a model is told of them. */
export const SCHEMAS: readonly object[] = Object.entries(TOOLS).map(([name, { description, parameters }]) => ({
  type: "function", function: { name, description, parameters },
}));

/** What a tool says; what goes wrong is for the model to read. */
export function runTool(name: string, given: Record<string, unknown>, surroundings: Surroundings): string {
  const tool = Object.hasOwn(TOOLS, name) ? TOOLS[name] : undefined;
  if (tool === undefined) return `error: there is no tool ${name}; there are ${Object.keys(TOOLS).join(", ")}`;
  try {
    return tool.run(given, surroundings);
  } catch (error) {
    return `error: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** Passages by the words that they share with the query: rarer words count more. */
function found(query: string, texts: readonly Attachment[]): string {
  const passages = texts.flatMap(({ name, text }) => passagesOf(name, text).map((passage) => ({ name, passage, words: wordsOf(passage) })));
  if (passages.length === 0) return "no file is attached";
  let scored = passages.map((passage) => ({ ...passage, score: 0 }));
  for (const word of wordsOf(query)) {
    const having = scored.filter(({ words }) => words.has(word));
    for (const passage of having) passage.score += Math.log(1 + passages.length / having.length);
  }
  scored = scored.filter(({ score }) => score > 0).sort((a, b) => b.score - a.score).slice(0, N_FOUND);
  return scored.map(({ name, passage }) => `${name}: ${passage}`).join("\n\n") || "nothing was found";
}

function wordsOf(text: string): Set<string> {
  return new Set(text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []);
}
