// The list of conversations: search, open, import, export. On narrow screens it lies over the conversation and opens by a button.
import { byId, isComposing, make } from "../dom.js";
import { showNotice } from "../messages.js";
import { onView } from "../views.js";
import { asJson, fileName, fromJson, MAX_IMPORT_BYTES } from "./files.js";
import { newId, type Conversation } from "./records.js";
import type { Conversations, Entry } from "./store.js";

/** Milliseconds without a key before a search begins. */
const PAUSE_MS = 150;

export class Sidebar {
  private readonly list = byId("conversation-list");
  private readonly search = byId<HTMLInputElement>("conversation-search");
  private readonly toggle = byId<HTMLButtonElement>("conversations-toggle");
  private current = "";
  private listings = 0;

  /** `open` shows a conversation. */
  constructor(private readonly store: Promise<Conversations>, private readonly open: (id: string) => void) {
    let timer: ReturnType<typeof setTimeout> | undefined;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => void this.refresh(), PAUSE_MS);
    });
    this.toggle.addEventListener("click", () => this.openDrawer());
    byId("conversations-close").addEventListener("click", () => this.closeDrawer());
    byId("conversations").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isComposing(event) || !this.isOpen) return;
      event.stopPropagation();
      this.closeDrawer();
    });
    // Texts that are dropped show the search, where nothing may stay inert.
    onView(() => this.closeDrawer());
    matchMedia("(min-width: 80rem)").addEventListener("change", () => this.closeDrawer());
    const file = byId<HTMLInputElement>("conversations-import");
    file.addEventListener("change", () => {
      const [chosen] = file.files ?? [];
      if (chosen) void this.import(chosen);
      // Choosing the same file again is a change, too.
      file.value = "";
    });
    byId("conversations-export").addEventListener("click", () => void this.exportAll());
    void this.refresh();
  }

  /** Marks the conversation that is open. */
  mark(id: string): void {
    this.current = id;
    for (const item of this.list.querySelectorAll<HTMLElement>("li[data-id]")) {
      item.querySelector("button")?.setAttribute("aria-current", String(item.dataset["id"] === id));
    }
  }

  /** Lists what is stored now. */
  async refresh(): Promise<void> {
    const listing = ++this.listings;
    try {
      const query = this.search.value.trim();
      const entries = await (await this.store).list(query);
      // What another call has begun to list since is newer.
      if (listing !== this.listings) return;
      const focused = document.activeElement?.closest<HTMLElement>("#conversation-list li")?.dataset["id"];
      this.list.replaceChildren(...entries.map((entry) => this.row(entry)));
      if (focused !== undefined) this.list.querySelector<HTMLElement>(`li[data-id="${CSS.escape(focused)}"] button`)?.focus();
      this.mark(this.current);
      byId("conversations-none").hidden = entries.length > 0;
      byId("conversations-none").textContent = query === "" ? "None yet. What you write is kept on this device." : "None has all of these words.";
      byId<HTMLButtonElement>("conversations-export").disabled = entries.length === 0 && query === "";
    } catch (error) {
      tell("Conversations cannot be listed", error);
    }
  }

  private get isOpen(): boolean {
    return document.documentElement.dataset["conversations"] === "open";
  }

  private openDrawer(): void {
    document.documentElement.dataset["conversations"] = "open";
    this.toggle.ariaExpanded = "true";
    for (const behind of document.querySelectorAll("#chat, .top, #panel")) behind.setAttribute("inert", "");
    this.search.focus();
  }

  private closeDrawer(): void {
    if (!this.isOpen) return;
    delete document.documentElement.dataset["conversations"];
    this.toggle.ariaExpanded = "false";
    for (const behind of document.querySelectorAll("#chat, .top, #panel")) behind.removeAttribute("inert");
    this.toggle.focus();
  }

  private row({ id, title, updatedAt, problem }: Entry): HTMLElement {
    const item = make("li");
    item.dataset["id"] = id;
    if (problem === undefined) {
      const open = make("button", { type: "button", className: "conversation" }, make("span", {}, title || "Untitled"), make("span", { className: "help" }, dateOf(updatedAt)));
      open.addEventListener("click", () => {
        this.closeDrawer();
        this.open(id);
      });
      item.append(open);
      return item;
    }
    item.dataset["problem"] = problem;
    const save = make("button", { type: "button", className: "quiet" }, "Save as a file");
    save.addEventListener("click", async () => download("conversation.json", JSON.stringify(await (await this.store).raw(id), undefined, 1) ?? ""));
    const remove = make("button", { type: "button", className: "quiet" }, "Delete");
    remove.addEventListener("click", async () => {
      await (await this.store).delete(id);
      await this.refresh();
    });
    item.append(make("p", {}, title), make("p", { className: "help" }, `${problem}. It is left as it is.`), make("div", { className: "row" }, save, remove));
    return item;
  }

  /** Takes all conversations of a file, or none. One that is here already is added beside the one that is. */
  private async import(file: File): Promise<void> {
    try {
      if (file.size > MAX_IMPORT_BYTES) throw new Error("it is larger than any such file");
      const store = await this.store;
      const conversations = fromJson(await file.text());
      for (const conversation of conversations) {
        const isThere = await store.raw(conversation.id) !== undefined;
        await store.add(isThere ? { ...conversation, id: newId() } : conversation);
      }
      const n = conversations.length;
      showNotice({ code: "imported", message: `${n} ${n === 1 ? "conversation was" : "conversations were"} imported from ${file.name}` });
    } catch (error) {
      tell(`Nothing was imported from ${file.name}`, error);
    }
    this.search.value = "";
    await this.refresh();
  }

  private async exportAll(): Promise<void> {
    try {
      const store = await this.store;
      const all: Conversation[] = [];
      let nLeft = 0;
      for (const { id, problem } of await store.list()) {
        const conversation = problem === undefined ? await store.get(id) : undefined;
        if (conversation !== undefined) all.push(conversation);
        else nLeft += 1;
      }
      download(fileName("conversations", "json"), asJson(all));
      if (nLeft > 0) showNotice({ code: "export", message: `${nLeft} of the conversations cannot be read, and are not in the file` });
    } catch (error) {
      tell("Nothing was exported", error);
    }
  }
}

/** Says in a sentence what went wrong with stored conversations. */
export function tell(what: string, error: unknown): void {
  showNotice({ code: "conversations", message: `${what}: ${error instanceof Error ? error.message : String(error)}` });
}

/** Has the browser save a text as a file. */
export function download(name: string, text: string): void {
  const href = URL.createObjectURL(new Blob([text]));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

function dateOf(time: number): string {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? date.toLocaleTimeString([], { timeStyle: "short" }) : date.toLocaleDateString([], { dateStyle: "medium" });
}
