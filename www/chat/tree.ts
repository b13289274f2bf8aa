// The tree of a conversation's turns: which branch is shown, and what becomes of it. No DOM in here.
import { titleOf, type Conversation, type Turn } from "./records.js";

const keyOf = (parent: string | null): string => parent ?? "";

/** The turns that have the same parent as this one, itself included, the oldest first. */
export function branchesOf({ turns }: Conversation, { parent }: Turn): Turn[] {
  return turns.filter((turn) => turn.parent === parent);
}

/** The turns that are shown, from the first to the last. */
export function shownTurns({ turns, chosen }: Conversation): Turn[] {
  const children = new Map<string, Turn[]>();
  for (const turn of turns) children.set(keyOf(turn.parent), [...(children.get(keyOf(turn.parent)) ?? []), turn]);
  const shown: Turn[] = [];
  for (let key = ""; ;) {
    const branches = children.get(key) ?? [];
    const turn = branches.find(({ id }) => id === chosen[key]) ?? branches.at(-1);
    if (turn === undefined) return shown;
    shown.push(turn);
    key = turn.id;
  }
}

/** Adds a turn, or puts it in the place of the one with its id, and shows it; nothing if the turn that it follows was taken away. */
export function putTurn(conversation: Conversation, turn: Turn): void {
  if (turn.parent !== null && !conversation.turns.some(({ id }) => id === turn.parent)) return;
  const at = conversation.turns.findIndex(({ id }) => id === turn.id);
  if (at >= 0) conversation.turns[at] = turn;
  else {
    conversation.turns.push(turn);
    chooseTurn(conversation, turn);
  }
  if (conversation.title === "") conversation.title = titleOf(turn.prompt);
}

/** Shows the branch that begins with this turn. */
export function chooseTurn({ chosen }: Conversation, { id, parent }: Pick<Turn, "id" | "parent">): void {
  chosen[keyOf(parent)] = id;
}

/** Takes away a turn and all that follow it, and returns them. */
export function removeTurn(conversation: Conversation, id: string): Turn[] {
  const gone = new Set([id]);
  // A turn may be stored before its parent.
  for (let before = 0; before < gone.size;) {
    before = gone.size;
    for (const turn of conversation.turns) if (turn.parent !== null && gone.has(turn.parent)) gone.add(turn.id);
  }
  const removed = conversation.turns.filter((turn) => gone.has(turn.id));
  conversation.turns = conversation.turns.filter((turn) => !gone.has(turn.id));
  return removed;
}

/** Puts back what was taken away, if what it followed is still there. */
export function restoreTurns(conversation: Conversation, removed: readonly Turn[]): void {
  const turns = new Map(conversation.turns.map((turn) => [turn.id, turn]));
  // A turn may be stored before its parent.
  for (let before = -1; before < turns.size;) {
    before = turns.size;
    for (const turn of removed) if (!turns.has(turn.id) && (turn.parent === null || turns.has(turn.parent))) turns.set(turn.id, turn);
  }
  conversation.turns = [...turns.values()].sort((a, b) => a.createdAt - b.createdAt);
}
