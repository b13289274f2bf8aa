// Conversations as files: JSON to keep and to import again, Markdown to read. No DOM in here.
import { answerOf, conversationOf, FORMAT, type Conversation } from "./records.js";
import { shownTurns } from "./tree.js";

const KIND = "tilewright conversations";
/** Bytes of a file that is imported, at most. */
export const MAX_IMPORT_BYTES = 64 * 1024 * 1024;

/** The text of a file with conversations. */
export function asJson(conversations: readonly Conversation[]): string {
  // What the kept session knows is on this device.
  const written = conversations.map(({ session, ...conversation }) => conversation);
  return `${JSON.stringify({ kind: KIND, format: FORMAT, conversations: written }, undefined, 1)}\n`;
}

/**
 * The conversations in the text of a file.
 *
 * Throws an `Error` that says what is wrong if one of them is none.
 */
export function fromJson(text: string): Conversation[] {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON");
  }
  const { kind, conversations } = (typeof file === "object" && file !== null ? file : {}) as { kind?: unknown; conversations?: unknown };
  if (kind !== KIND || !Array.isArray(conversations)) throw new Error("it holds no conversations of this page");
  return conversations.map((value: unknown, i) => {
    try {
      const { session, ...conversation } = conversationOf(value);
      return conversation;
    } catch (error) {
      throw new Error(`conversation ${i + 1} of ${conversations.length}: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
    }
  });
}

/** The turns that are shown, to be read. */
export function asMarkdown(conversation: Conversation): string {
  const parts = [`# ${conversation.title}`];
  for (const turn of shownTurns(conversation)) {
    if (turn.mode === "story") {
      parts.push(turn.prompt + answerOf(turn));
      continue;
    }
    parts.push("**You**", ...turn.attachments.map(({ name }) => `(with ${name})`), turn.prompt, "**Model**");
    for (const { text, calls } of turn.steps) {
      if (text !== "") parts.push(text);
      for (const call of calls) parts.push(fenced(`${call.name}(${call.arguments})${call.result === undefined ? "" : `\n→ ${call.result}`}`));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** A text between marks of code that are longer than all in it. */
export function fenced(text: string): string {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** A title as the name of a file. */
export function fileName(title: string, ending: string): string {
  const name = title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-+|-+$/g, "").slice(0, 60) || "conversation";
  return `${name}.${ending}`;
}
