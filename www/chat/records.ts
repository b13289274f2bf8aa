// What a conversation is, as it is stored and as it is written into files. No DOM in here.
//
// A turn is a prompt with its answer. Turns make a tree: those with the same parent are branches, of which one is shown.
import * as v from "valibot";

/** The version of everything below. What is of another version is left as it is. */
export const FORMAT = 1;

const text = v.string();
const time = v.pipe(v.number(), v.finite());
const id = v.pipe(v.string(), v.minLength(1), v.maxLength(64));

const Call = v.object({
  id: text,
  name: text,
  /** A JSON object, as text. */
  arguments: v.pipe(text, v.check(isJsonObject, "expected a JSON object as text")),
  /** What the tool said; missing until it did. */
  result: v.optional(text),
});

/** What the model writes in one go: an answer has a further one for each time that tools were called. */
const Step = v.object({ thinking: text, text, calls: v.array(Call) });

/** A file: a text, or a picture with the tokens that it takes. */
const Attached = v.object({
  name: text,
  text,
  /** The picture's file, as an address. */
  image: v.optional(v.pipe(text, v.regex(/^data:image\/(png|jpeg|webp|gif);base64,/, "expected a picture as a data: address"))),
  tokens: v.optional(v.pipe(v.number(), v.integer(), v.minValue(0))),
});

const Turn = v.object({
  id,
  /** The turn before, or `null`. */
  parent: v.nullable(id),
  /** Whether a model without a chat template went on with the prompt. */
  mode: v.picklist(["chat", "story"]),
  prompt: text,
  attachments: v.array(Attached),
  steps: v.array(Step),
  /** How it was written: numbers for people. */
  note: text,
  /** Tokens of the context that prompt and answer took; missing if it was broken off. */
  usedTokens: v.optional(v.pipe(v.number(), v.integer(), v.minValue(0))),
  /** The first turn that the model saw, if it was not the first of all. */
  seenFrom: v.optional(id),
  createdAt: time,
});

const Conversation = v.object({
  format: v.literal(FORMAT),
  id,
  title: v.pipe(text, v.maxLength(400)),
  /** Whether a person gave the title. */
  isNamed: v.boolean(),
  /** Empty: the one of the settings. */
  systemPrompt: text,
  tools: v.picklist(["none", "auto", "required"]),
  createdAt: time,
  updatedAt: time,
  turns: v.array(Turn),
  /** Which branch is shown, by the parent's id; that of the first turns is empty. */
  chosen: v.record(v.string(), v.string()),
  /** The kept session of what the model has computed. */
  session: v.optional(text),
});

export type Call = v.InferOutput<typeof Call>;
export type Step = v.InferOutput<typeof Step>;
export type Turn = v.InferOutput<typeof Turn>;
export type Attachment = Turn["attachments"][number];
export type Conversation = v.InferOutput<typeof Conversation>;
export type ToolUse = Conversation["tools"];

/**
 * A conversation, from storage or from a file.
 *
 * Throws an `Error` that says what is wrong with what is none, or of another version.
 */
export function conversationOf(value: unknown): Conversation {
  const format: unknown = typeof value === "object" && value !== null && "format" in value ? value.format : undefined;
  if (typeof format === "number" && format !== FORMAT) {
    const age = format > FORMAT ? "a newer" : "an older";
    throw new Error(`it was stored by ${age} version of this page (${format}, this one reads ${FORMAT})`);
  }
  const { success, output, issues } = v.safeParse(Conversation, value, { abortEarly: true });
  if (!success) throw new Error(`${v.getDotPath(issues[0]) ?? "it"}: ${lower(issues[0].message)}`);
  checkTree(output.turns);
  return output;
}

/** Every turn leads to one without a parent. */
function checkTree(turns: readonly Turn[]): void {
  const parents = new Map(turns.map(({ id, parent }) => [id, parent]));
  if (parents.size < turns.length) throw new Error("turns: two have the same id");
  const rooted = new Set<string>();
  for (const { id } of turns) {
    const way: string[] = [];
    for (let at: string | null = id; at !== null && !rooted.has(at); at = parents.get(at) ?? null) {
      if (!parents.has(at)) throw new Error("turns: one has a parent that is not there");
      if (way.length > turns.length) throw new Error("turns: some are their own parents");
      way.push(at);
    }
    for (const at of way) rooted.add(at);
  }
}

function isJsonObject(text: string): boolean {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

const lower = (text: string): string => text.charAt(0).toLowerCase() + text.slice(1);

/** A name that nothing else has. */
export function newId(): string {
  // `randomUUID` is for secure contexts only.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A conversation without turns. */
export function newConversation(): Conversation {
  const now = Date.now();
  return {
    format: FORMAT, id: newId(), title: "", isNamed: false, systemPrompt: "", tools: "none", createdAt: now, updatedAt: now, turns: [], chosen: {},
  };
}

/** What an answer says, without thoughts and calls. */
export function answerOf({ steps }: Turn): string {
  return steps.map(({ text }) => text).filter((text) => text !== "").join("\n\n");
}

const TITLE_CHARACTERS = 60;

/** A title for a conversation that begins so. */
export function titleOf(prompt: string): string {
  const line = prompt.trim().split("\n", 1)[0] ?? "";
  const characters = Array.from(line);
  return characters.length <= TITLE_CHARACTERS ? line : `${characters.slice(0, TITLE_CHARACTERS).join("").trimEnd()}…`;
}
