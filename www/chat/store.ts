// Where conversations are kept: IndexedDB, and the page's memory where the browser gives none.
//
//     a change is a function of a conversation; it is applied to what is stored at that moment, in one transaction
//     so two tabs that change the same conversation never undo each other's changes
//     each tab tells the others what it has changed
import { openDB, type IDBPDatabase } from "idb";
import { conversationOf, type Conversation } from "./records.js";
import { shownTurns } from "./tree.js";

const NAME = "tilewright-conversations";
/** Of the database: its stores. Records say by themselves of which format they are. */
const VERSION = 1;
const STORE = "conversations";

/** A record as the list shows it. */
export interface Entry {
  id: string;
  title: string;
  updatedAt: number;
  /** Why it cannot be opened. */
  problem?: string;
}

/** What happens to conversations in other tabs, and to the storage. */
export interface Watcher {
  /** Another tab has changed a conversation, deleted it, or several of them. */
  changed(id: string | undefined): void;
  /** A sentence about the storage. */
  told(message: string): void;
}

/** Changes a record; undefined deletes it. */
type Change = (record: unknown) => unknown;

/** Records by id. */
interface Records {
  ids(): Promise<string[]>;
  get(id: string): Promise<unknown>;
  change(id: string, change: Change): Promise<void>;
}

export class Conversations {
  readonly #records: Records;
  readonly #channel = new BroadcastChannel(NAME);

  private constructor(records: Records, watcher: Watcher) {
    this.#records = records;
    this.#channel.addEventListener("message", ({ data }) => watcher.changed(typeof data === "string" ? data : undefined));
  }

  /** Opens the storage; if it cannot be opened, says so and keeps conversations until the page is closed. */
  static async open(watcher: Watcher): Promise<Conversations> {
    const inDatabase = new InDatabase(watcher);
    try {
      await inDatabase.ids();
      return new Conversations(inDatabase, watcher);
    } catch (error) {
      const isNewer = error instanceof DOMException && error.name === "VersionError";
      const why = isNewer ? "a newer version of this page has stored them" : error instanceof Error ? error.message : String(error);
      watcher.told(`Conversations cannot be stored here, and are lost with this page: ${why}`);
      return new Conversations(new InMemory(), watcher);
    }
  }

  /** All whose title or texts contain the words of `query`, the one that was changed last first; those that cannot be read last. */
  async list(query = ""): Promise<Entry[]> {
    const words = query.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const entries: Entry[] = [];
    // One by one: one that cannot be read does not hide the others, and not all of them lie in memory.
    for (const id of await this.#records.ids()) {
      try {
        const conversation = conversationOf(await this.#records.get(id));
        const { title, updatedAt } = conversation;
        if (matches(conversation, words)) entries.push({ id, title, updatedAt });
      } catch (error) {
        if (words.length === 0) entries.push({ id, title: "Cannot be read", updatedAt: -Infinity, problem: error instanceof Error ? error.message : String(error) });
      }
    }
    return entries.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** A conversation; undefined if there is none. Throws an `Error` for a record that is none. */
  async get(id: string): Promise<Conversation | undefined> {
    const record = await this.#records.get(id);
    return record === undefined ? undefined : conversationOf(record);
  }

  /** What is stored, whatever it is. */
  raw(id: string): Promise<unknown> {
    return this.#records.get(id);
  }

  /** Stores a conversation that is not there yet. */
  async add(conversation: Conversation): Promise<void> {
    await this.#records.change(conversation.id, (record) => record ?? conversation);
    this.#channel.postMessage(conversation.id);
  }

  /** Changes what is stored of a conversation, and returns it; undefined if it is no longer there. */
  async update(id: string, change: (conversation: Conversation) => void): Promise<Conversation | undefined> {
    let changed: Conversation | undefined;
    await this.#records.change(id, (record) => {
      if (record === undefined) return undefined;
      changed = conversationOf(record);
      change(changed);
      // What nobody could read again is not stored.
      conversationOf(changed);
      return changed;
    });
    if (changed !== undefined) this.#channel.postMessage(id);
    return changed;
  }

  /** Deletes a record. */
  async delete(id: string): Promise<void> {
    await this.#records.change(id, () => undefined);
    this.#channel.postMessage(id);
  }
}

function matches(conversation: Conversation, words: string[]): boolean {
  if (words.length === 0) return true;
  const texts = [conversation.title];
  for (const { prompt, attachments, steps } of shownTurns(conversation)) {
    texts.push(prompt, ...attachments.flatMap(({ name, text }) => [name, text]), ...steps.map(({ text }) => text));
  }
  const all = texts.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

class InDatabase implements Records {
  #opening: Promise<IDBPDatabase> | undefined;

  constructor(private readonly watcher: Watcher) {}

  async ids(): Promise<string[]> {
    return (await (await this.#open()).getAllKeys(STORE)).map(String);
  }

  async get(id: string): Promise<unknown> {
    return (await this.#open()).get(STORE, id);
  }

  async change(id: string, change: Change): Promise<void> {
    const transaction = (await this.#open()).transaction(STORE, "readwrite");
    try {
      const changed = change(await transaction.store.get(id));
      if (changed === undefined) await transaction.store.delete(id);
      else await transaction.store.put(changed, id);
    } catch (error) {
      transaction.done.catch(() => {});
      try {
        transaction.abort();
      } catch {
        // It has ended already.
      }
      throw error;
    }
    await transaction.done;
  }

  #open(): Promise<IDBPDatabase> {
    const closed = (): void => {
      this.#opening = undefined;
    };
    this.#opening ??= openDB(NAME, VERSION, {
      upgrade: (database) => void database.createObjectStore(STORE),
      // A newer version of the page wants to change it in another tab.
      blocking: (_current, _blocked, { target }) => {
        (target as IDBDatabase).close();
        closed();
        this.watcher.told("A newer version of this page is open in another tab: reload this one, so that it can store conversations.");
      },
      terminated: closed,
    });
    this.#opening.catch(closed);
    return this.#opening;
  }
}

class InMemory implements Records {
  readonly #records = new Map<string, unknown>();

  async ids(): Promise<string[]> {
    return [...this.#records.keys()];
  }

  async get(id: string): Promise<unknown> {
    return structuredClone(this.#records.get(id));
  }

  async change(id: string, change: Change): Promise<void> {
    const changed = change(structuredClone(this.#records.get(id)));
    if (changed === undefined) this.#records.delete(id);
    else this.#records.set(id, structuredClone(changed));
  }
}
