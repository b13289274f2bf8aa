// The conversation: the prompt, the turns, and the answer while it is written. A model without a chat template continues a text instead:
// then each prompt stands for itself, and prompt and continuation read as one.
//
//     conversation   what is shown; each change is made here and in the storage, where other tabs may have changed it, too
//     views          the turns on the page, by their ids
//     running        the answer that is being written
import { sessions, TilewrightError, type Model } from "./tilewright/index.js";
import { byId, isComposing, make, perFrame } from "./dom.js";
import { beginRecord, recordPiece } from "./inside/record.js";
import { startCopying } from "./markdown.js";
import { hideError, showNotice } from "./messages.js";
import type { Settings } from "./settings.js";
import { firstScreen } from "./start/first-screen.js";
import { showSpeed, speedOf, type Speed } from "./status.js";
import { noteOf, tellsStories, writeAnswer } from "./chat/answer.js";
import { ATTACHABLE, Attachments, PICTURES, type Context } from "./chat/attachments.js";
import { asJson, asMarkdown, fileName } from "./chat/files.js";
import { newConversation, newId, type Attachment, type Conversation, type ToolUse, type Turn } from "./chat/records.js";
import { download, Sidebar, tell } from "./chat/sidebar.js";
import { Speech } from "./chat/speech.js";
import { Conversations } from "./chat/store.js";
import { SCHEMAS } from "./chat/tools.js";
import { branchesOf, chooseTurn, putTurn, removeTurn, restoreTurns, shownTurns } from "./chat/tree.js";
import { copy, TurnView } from "./chat/turn-view.js";
import { sweep } from "./highlight.js";

const STORY_STARTERS = ["Once upon a time", "One day", "The little fox", "In a small village", "Lily was"];
const CHAT_STARTERS = ["Explain what a GPU does in three sentences", "Write a haiku about rain", "Give me five names for a sailing boat"];
/** Milliseconds between two times that an answer is stored while it is written. */
const SAVE_MS = 500;
/** Milliseconds without a question before what the model has computed is kept. */
const KEEP_MS = 2000;
/** Where a tab remembers which conversation it shows. */
const OPEN_KEY = "tilewright.conversation";

/** What the conversation asks of the page. */
interface Page {
  settings(): Settings;
  /** A generation began. */
  began(): void;
  /** A generation ended, with the error if there was one. The function offers to do it again. */
  ended(error: unknown, again: () => void): void;
}

export class Chat {
  private readonly output = byId("output");
  private readonly prompt = byId<HTMLTextAreaElement>("prompt");
  private readonly send = byId<HTMLButtonElement>("send");
  private readonly stopButton = byId<HTMLButtonElement>("stop");
  private readonly newButton = byId<HTMLButtonElement>("clear");
  private readonly title = byId<HTMLInputElement>("conversation-title");
  private readonly systemPrompt = byId<HTMLTextAreaElement>("conversation-system");
  private readonly tools = byId<HTMLSelectElement>("conversation-tools");
  private readonly menu = byId<HTMLDetailsElement>("conversation-menu");
  private readonly store: Promise<Conversations>;
  private readonly sidebar: Sidebar;
  private readonly attachments: Attachments;
  private model: Model | undefined;
  private conversation = newConversation();
  private isStored = false;
  /** Conversations of which no write has succeeded so far: the next one writes all of it. */
  private readonly unwritten = new Set<string>();
  /** Resolves when all changes so far are stored. */
  private saved = Promise.resolve();
  private readonly views = new Map<string, TurnView>();
  /** Whether the newest text is in view, and should stay there. */
  private isAtEnd = true;
  private running: { abort: AbortController; done: Promise<void> } | undefined;
  /** Whether another tab has changed the conversation while an answer is written here. */
  private isStale = false;
  /** Tokens of the conversation that are kept in a session. */
  private nKept = 0;
  private keepTimer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly page: Page) {
    this.store = Conversations.open({
      changed: (id) => void this.changedElsewhere(id),
      told: (message) => showNotice({ code: "conversations", message }),
    });
    this.sidebar = new Sidebar(this.store, (id) => void this.open(id));
    this.attachments = new Attachments(byId("attachments"), () => this.contextOf(), () => this.refresh());
    this.startComposer();
    this.startHead();
    startCopying(this.output, (button, text) => void copy(text, button, button.closest(".code")?.querySelector("code") ?? button));
    this.output.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.output;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < 48;
    });
    // An error or a longer prompt takes room from the messages.
    new ResizeObserver(() => {
      if (this.isAtEnd && this.conversation.turns.length > 0) this.scrollDown();
    }).observe(this.output);
    const id = remembered();
    this.show(this.conversation);
    if (id !== null) void this.open(id);
  }

  get isRunning(): boolean {
    return this.running !== undefined;
  }

  private get isStory(): boolean {
    return this.model !== undefined && tellsStories(this.model);
  }

  /** Uses this model from now on; undefined while there is none. */
  setModel(model: Model | undefined): void {
    this.model = model;
    clearTimeout(this.keepTimer);
    if (model) {
      document.documentElement.dataset["mode"] = this.isStory ? "story" : "chat";
      byId("prompt-label").textContent = this.isStory ? "Beginning of a story" : "Message";
    }
    const takesImages = model?.info.takesImages === true;
    document.documentElement.toggleAttribute("data-images", takesImages);
    const attach = byId<HTMLInputElement>("attach");
    attach.accept = [...ATTACHABLE, ...(takesImages ? PICTURES : [])].join(",");
    attach.ariaLabel = takesImages ? "Attach pictures and text files" : "Attach text files";
    byId("attach-files").title = takesImages ? "Attach pictures and text files; pictures may also be pasted or dropped" : "Attach text files; this model takes no pictures";
    this.prompt.placeholder = !model ? "Waiting for a model…" : this.isStory ? "Begin a story…" : "Write a message…";
    if (this.conversation.turns.length === 0) this.showIntro();
    this.refresh();
  }

  /** Stops the answer that is being written, and resolves when it has stopped. */
  async stop(): Promise<void> {
    this.running?.abort.abort();
    await this.running?.done;
  }

  /** Begins a new conversation. */
  private async clear(): Promise<void> {
    await this.stop();
    hideError();
    this.isStored = false;
    this.show(newConversation());
  }

  private startComposer(): void {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendPrompt(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      // While an input method composes a word, Enter chooses it.
      if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
      event.preventDefault();
      this.sendPrompt(this.prompt.value);
    });
    this.prompt.addEventListener("input", () => this.refresh());
    this.stopButton.addEventListener("click", () => void this.stop());
    for (const id of ["attach", "camera"]) {
      const input = byId<HTMLInputElement>(id);
      input.addEventListener("change", () => {
        this.attach([...(input.files ?? [])]);
        input.value = "";
      });
    }
    // A text that is copied with a picture of it, as from a spreadsheet, is a text.
    document.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
      const isText = event.clipboardData?.types.includes("text/plain") ?? false;
      if (files.length === 0 || isText || document.documentElement.dataset["view"] !== "chat") return;
      event.preventDefault();
      this.attach(files);
    });
  }

  /** Adds files to the message that is being written. */
  attach(files: File[]): void {
    if (this.isStory) showNotice({ code: "attachment", message: "A story model takes neither pictures nor files." });
    else void this.attachments.add(files);
    this.focusPrompt();
  }

  /** What is above the turns: title, menu, and a new conversation. */
  private startHead(): void {
    this.newButton.addEventListener("click", async () => {
      await this.clear();
      this.prompt.focus();
    });
    this.title.addEventListener("change", () => {
      const title = this.title.value.trim();
      if (title !== "") {
        this.change((it) => {
          it.title = title;
          it.isNamed = true;
        });
        void this.listAgain();
      }
      this.title.value = this.conversation.title;
    });
    this.title.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !isComposing(event)) this.title.blur();
    });
    this.systemPrompt.addEventListener("change", () => {
      const text = this.systemPrompt.value.trim();
      this.change((it) => (it.systemPrompt = text));
    });
    this.tools.addEventListener("change", () => {
      const use = this.tools.value as ToolUse;
      this.change((it) => (it.tools = use));
    });
    byId("tools-schema").textContent = JSON.stringify(SCHEMAS, undefined, 2);
    const closeMenu = (): void => {
      this.menu.open = false;
    };
    document.addEventListener("click", ({ target }) => {
      if (target instanceof Node && !this.menu.contains(target)) closeMenu();
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isComposing(event) || !this.menu.open) return;
      event.stopPropagation();
      closeMenu();
      this.menu.querySelector("summary")?.focus();
    });
    byId("export-json").addEventListener("click", () => download(fileName(this.conversation.title, "json"), asJson([this.conversation])));
    byId("export-markdown").addEventListener("click", () => download(fileName(this.conversation.title, "md"), asMarkdown(this.conversation)));
    byId("conversation-delete").addEventListener("click", () => {
      closeMenu();
      void this.deleteConversation();
    });
  }

  /** Makes a change here and in the storage. */
  private change(change: (conversation: Conversation) => unknown, conversation = this.conversation): void {
    const { id } = conversation;
    const now = Date.now();
    const whole = (it: Conversation): void => {
      change(it);
      it.updatedAt = now;
    };
    whole(conversation);
    if (id === this.conversation.id) {
      if (!this.isStored) {
        if (conversation.turns.length === 0) return;
        this.unwritten.add(id);
        this.isStored = true;
      }
      this.remember();
    }
    this.saved = this.saved.then(async () => {
      try {
        const store = await this.store;
        if (this.unwritten.has(id)) {
          await store.add(structuredClone(conversation));
          this.unwritten.delete(id);
        } else if (await store.update(id, whole) === undefined && this.conversation.id === id) this.lost();
      } catch (error) {
        tell("This conversation could not be stored", error);
      }
    });
  }

  private async listAgain(): Promise<void> {
    await this.saved;
    await this.sidebar.refresh();
  }

  /** Shows a stored conversation. */
  private async open(id: string): Promise<void> {
    if (id === this.conversation.id && this.isStored) return;
    await this.stop();
    try {
      const conversation = await (await this.store).get(id);
      if (conversation === undefined) return;
      // A prompt may have been sent meanwhile.
      await this.stop();
      hideError();
      this.isStored = true;
      this.show(conversation);
      this.scrollDown();
    } catch (error) {
      tell("This conversation cannot be opened", error);
    }
  }

  /** Another tab has changed a conversation, or several of them. */
  private async changedElsewhere(id: string | undefined): Promise<void> {
    void this.sidebar.refresh();
    if (!this.isStored || (id !== undefined && id !== this.conversation.id)) return;
    if (this.running) this.isStale = true;
    else await this.reread();
  }

  /** Shows what is stored of the conversation now. */
  private async reread(): Promise<void> {
    this.isStale = false;
    const { id } = this.conversation;
    await this.saved;
    try {
      const conversation = await (await this.store).get(id);
      // Meanwhile an answer began, or another conversation was opened.
      if (this.conversation.id !== id || this.running) return;
      if (conversation === undefined) this.lost();
      else this.show(conversation);
    } catch (error) {
      tell("This conversation cannot be read any more", error);
    }
  }

  /** The conversation is no longer stored. */
  private lost(): void {
    void this.clear();
    showNotice({ code: "conversations", message: "This conversation was deleted in another tab." });
  }

  private async deleteConversation(): Promise<void> {
    const { conversation } = this;
    await this.clear();
    await this.saved;
    this.unwritten.delete(conversation.id);
    try {
      await (await this.store).delete(conversation.id);
    } catch (error) {
      tell("This conversation could not be deleted", error);
      return;
    }
    if (conversation.session !== undefined) void sessions.delete(conversation.session).catch(() => {});
    showNotice({ code: "deleted", message: `“${conversation.title}” was deleted` }, {
      label: "Undo",
      run: async () => {
        try {
          await (await this.store).add(conversation);
        } catch (error) {
          tell("This conversation could not be stored", error);
        }
        await this.open(conversation.id);
        await this.sidebar.refresh();
      },
    });
    await this.sidebar.refresh();
    this.focusPrompt();
  }

  /** Remembers which conversation this tab shows. */
  private remember(): void {
    try {
      if (this.isStored) sessionStorage.setItem(OPEN_KEY, this.conversation.id);
      else sessionStorage.removeItem(OPEN_KEY);
    } catch {
      // Storage is forbidden: a reload shows a new conversation.
    }
    this.sidebar.mark(this.isStored ? this.conversation.id : "");
  }

  private show(conversation: Conversation): void {
    if (conversation.id !== this.conversation.id) {
      this.views.clear();
      this.output.replaceChildren();
      clearTimeout(this.keepTimer);
      this.nKept = 0;
    }
    this.conversation = conversation;
    this.remember();
    this.systemPrompt.value = conversation.systemPrompt;
    this.tools.value = conversation.tools;
    this.showTurns();
    this.refresh();
  }

  /** Shows the turns as they are now; what is shown of them already stays. */
  private showTurns(): void {
    const shown = shownTurns(this.conversation);
    if (shown.length === 0) {
      this.views.clear();
      this.showIntro();
    } else this.output.querySelector(".intro")?.remove();
    shown.forEach((turn, i) => {
      const view = this.views.get(turn.id) ?? new TurnView(turn, {
        choose: (turn, by) => this.choose(turn, by),
        regenerate: (turn) => this.regenerate(turn),
        edit: (turn, prompt) => this.ask(prompt, turn.attachments, turn.parent),
        remove: (turn) => this.remove(turn),
      });
      this.views.set(turn.id, view);
      view.show(turn);
      const branches = branchesOf(this.conversation, turn);
      view.showBranch(branches.indexOf(turn), branches.length);
      if (this.output.children[i] !== view.element) this.output.insertBefore(view.element, this.output.children[i] ?? null);
    });
    while (this.output.childElementCount > shown.length && shown.length > 0) this.output.lastElementChild?.remove();
    const ids = new Set(shown.map(({ id }) => id));
    for (const id of this.views.keys()) if (!ids.has(id)) this.views.delete(id);
    sweep();
    this.markForgotten(shown.at(-1));
    this.showContext();
  }

  /** Says from where on the model has seen the conversation when it wrote this answer. */
  private markForgotten(turn: Turn | undefined): void {
    for (const [id, view] of this.views) view.forgets = id === turn?.seenFrom;
  }

  private sendPrompt(text: string): void {
    if (!this.model || this.running || text.trim() === "") return;
    // A story is no message, and a message is no story.
    const mode = this.isStory ? "story" : "chat";
    if (this.conversation.turns.some((turn) => turn.mode !== mode)) {
      this.isStored = false;
      this.show({ ...newConversation(), tools: this.conversation.tools });
    }
    const attachments = this.isStory ? [] : this.attachments.texts;
    this.prompt.value = "";
    this.attachments.set([]);
    this.ask(text, attachments, shownTurns(this.conversation).at(-1)?.id ?? null);
  }

  /** Asks in a turn behind `parent`; false if that is not possible now. */
  private ask(prompt: string, attachments: readonly Attachment[], parent: string | null): boolean {
    if (!this.model || this.running) return false;
    const turn: Turn = {
      id: newId(), parent, mode: this.isStory ? "story" : "chat", prompt, attachments: [...attachments], steps: [], note: "", createdAt: Date.now(),
    };
    this.change((it) => putTurn(it, turn));
    this.showTurns();
    this.title.value = this.conversation.title;
    void this.listAgain();
    this.start(this.model, turn);
    return true;
  }

  /** Answers anew, in a branch beside the answer that is there. */
  private regenerate({ id }: Turn): void {
    const turn = this.conversation.turns.find((it) => it.id === id);
    if (!this.model || this.running || turn === undefined) return;
    // An answer without a word is no branch.
    if (turn.steps.every(({ text, thinking, calls }) => text === "" && thinking === "" && calls.length === 0)) this.start(this.model, turn);
    else this.ask(turn.prompt, turn.attachments, turn.parent);
    this.focusPrompt();
  }

  private choose(turn: Turn, by: number): void {
    if (this.running) return;
    const branches = branchesOf(this.conversation, turn);
    const other = branches[branches.findIndex(({ id }) => id === turn.id) + by];
    if (other === undefined) return;
    this.change((it) => chooseTurn(it, other));
    this.showTurns();
    // The arrow that was pressed is another turn's now.
    this.views.get(other.id)?.element.querySelector<HTMLElement>(`[data-action=${by < 0 ? "before" : "next"}]:enabled, .branches button:enabled`)?.focus();
  }

  private remove(turn: Turn): void {
    if (this.running) return;
    let removed: Turn[] = [];
    this.change((it) => {
      removed = removeTurn(it, turn.id);
    });
    this.showTurns();
    this.refresh();
    const restored = structuredClone(removed);
    const { conversation } = this;
    const isShown = (): boolean => this.conversation.id === conversation.id;
    const more = removed.length - 1;
    const what = more === 0 ? "A turn was deleted" : `A turn was deleted, and ${more} behind it`;
    showNotice({ code: "deleted", message: what }, {
      label: "Undo",
      run: async () => {
        if (isShown()) await this.stop();
        this.change((it) => {
          restoreTurns(it, structuredClone(restored));
          chooseTurn(it, turn);
        }, isShown() ? this.conversation : conversation);
        if (!isShown()) return;
        this.showTurns();
        this.refresh();
      },
    });
    this.focusPrompt();
  }

  private start(model: Model, turn: Turn): void {
    const view = this.views.get(turn.id);
    if (view === undefined) return;
    const abort = new AbortController();
    clearTimeout(this.keepTimer);
    this.nKept = 0;
    hideError();
    const done = this.write(model, turn, view, abort.signal).then(
      () => this.finished(turn, undefined),
      (error: unknown) => this.finished(turn, abort.signal.aborted ? undefined : error),
    );
    this.running = { abort, done };
    const focused = document.activeElement;
    this.refresh();
    if (focused === this.send) this.stopButton.focus();
    this.page.began();
    this.scrollDown();
  }

  private finished(turn: Turn, error: unknown): void {
    const focused = document.activeElement;
    this.running = undefined;
    this.refresh();
    // The button that had the focus is hidden now.
    if (focused === this.stopButton || focused === document.body) this.focusPrompt();
    this.page.ended(error, () => this.regenerate(turn));
    void this.listAgain();
    if (this.isStale) void this.reread();
    if (error === undefined) this.keepSoon();
  }

  /** Writes an answer into its turn. Rejects with what went wrong, or with the signal's reason. */
  private async write(model: Model, turn: Turn, view: TurnView, signal: AbortSignal): Promise<void> {
    const settings = this.page.settings();
    const seed = settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
    const { conversation } = this;
    const shown = shownTurns(conversation);
    const store = (): void => this.change((it) => putTurn(it, turn), conversation);
    const startedAt = performance.now();
    const speech = new Speech();
    let pending = "";
    let nPieces = 0;
    let firstAt: number | undefined;
    let speed: Speed = {};
    let savedAt = startedAt;
    // Each time all of the conversation is written.
    const saveMs = conversation.turns.some(({ attachments }) => attachments.some(({ image }) => image !== undefined)) ? 10 * SAVE_MS : SAVE_MS;
    const draw = perFrame(() => {
      view.last?.draw();
      speech.say(pending);
      pending = "";
      showSpeed(speed);
      if (this.isAtEnd) this.scrollDown();
    });
    beginRecord();
    turn.note = "broken off";
    delete turn.usedTokens;
    delete turn.seenFrom;
    view.begin();
    try {
      const result = await writeAnswer({
        model, turn, settings, seed, signal,
        before: shown.slice(0, shown.findIndex(({ id }) => id === turn.id)),
        systemPrompt: conversation.systemPrompt || settings.systemPrompt,
        tools: turn.mode === "story" ? "none" : conversation.tools,
      }, {
        restart: () => view.begin(),
        step: (step) => {
          draw.now();
          view.addStep(step);
        },
        called: () => view.last?.showCalls(),
        forgets: () => this.markForgotten(turn),
        piece: (piece) => {
          recordPiece(piece);
          const now = performance.now();
          firstAt ??= now;
          const elapsed = (now - firstAt) / 1000;
          // The first token's time is the prompt's, so the rate counts those behind it.
          speed = { firstToken: (firstAt - startedAt) / 1000, decode: nPieces > 0 && elapsed > 0 ? nPieces / elapsed : undefined };
          nPieces += 1;
          pending += piece.text;
          draw.ask();
          if (now - savedAt > saveMs) {
            savedAt = now;
            store();
          }
        },
      });
      speed = speedOf(result, speed.firstToken);
      turn.usedTokens = result.promptTokens + result.generatedTokens;
      turn.note = noteOf(result, settings.temperature > 0 ? seed : undefined);
    } catch (error) {
      turn.note = signal.aborted ? `${nPieces.toLocaleString("en")} tokens · stopped` : "broken off";
      throw error;
    } finally {
      draw.now();
      view.end();
      store();
      speech.end();
      if (this.isAtEnd) this.scrollDown();
    }
  }

  /** Keeps what the model has computed, so that the conversation goes on without that another time. */
  private keepSoon(): void {
    const { model } = this;
    clearTimeout(this.keepTimer);
    if (!model || this.isStory) return;
    const { id } = this.conversation;
    this.keepTimer = setTimeout(async () => {
      try {
        const { id: session, nTokens } = await model.saveSession();
        if (this.conversation.id !== id) return;
        if (this.conversation.session !== session) this.change((it) => (it.session = session));
        this.nKept = nTokens;
        this.showContext();
      } catch (error) {
        // A browser without storage, or without room, computes prompts again.
        if (!(error instanceof TilewrightError)) throw error;
        console.info("what was computed is not kept:", error.message);
      }
    }, KEEP_MS);
  }

  /** What is needed to count tokens. */
  private contextOf(): Context | undefined {
    const { model } = this;
    return model && {
      length: model.info.contextLength,
      count: async (text) => (await model.tokenize(text, { addSpecial: false })).length,
      imageTokens: model.info.takesImages ? (width, height) => model.imageTokens(width, height) : undefined,
    };
  }

  /** Shows how much of the context is in use. */
  private showContext(): void {
    const used = shownTurns(this.conversation).at(-1)?.usedTokens;
    const length = this.model?.info.contextLength;
    const meter = byId<HTMLMeterElement>("context-meter");
    const text = byId("status-context");
    text.title = this.nKept === 0 ? "" : `${this.nKept.toLocaleString("en")} tokens are kept on this device: the conversation goes on without computing them again`;
    text.dataset["kept"] = String(this.nKept);
    text.textContent = used === undefined || length === undefined ? "–" : `${used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens`;
    meter.value = (used ?? 0) / (length ?? 1);
  }

  /** What the page says before the first message. */
  private showIntro(): void {
    const intro = make("div", { className: "intro" });
    if (!this.model) {
      intro.append(
        make("h3", {}, "Talk to a model"),
        make("p", {}, "It runs on this device, and what you write stays here. The story model is built in and is there at once; files and addresses are under “Model and settings”."),
      );
      const story = make("button", { type: "button", className: "chip" }, "Load the story model");
      story.addEventListener("click", () => byId("model-builtin").click());
      intro.append(make("div", { className: "chips" }, story));
    } else {
      const story = this.isStory;
      intro.append(
        make("h3", {}, story ? "Begin a story" : `Talk to ${this.model.info.name}`),
        make(
          "p",
          {},
          story
            ? "This is a base model: it does not chat, it continues what you write. A few words are enough."
            : `It runs on this device. What you write stays here.${this.model.info.takesImages ? " It takes pictures: paste, drop or attach them." : ""}`,
        ),
      );
      const chips = make("div", { className: "chips" });
      for (const text of story ? STORY_STARTERS : CHAT_STARTERS) {
        const chip = make("button", { type: "button", className: "chip" }, text);
        chip.addEventListener("click", () => {
          this.sendPrompt(text);
          this.focusPrompt();
        });
        chips.append(chip);
      }
      intro.append(chips);
    }
    intro.append(firstScreen);
    this.output.replaceChildren(intro);
  }

  /** Fields and buttons follow from the state. */
  private refresh(): void {
    const running = this.running !== undefined;
    const { turns, title } = this.conversation;
    this.send.hidden = running;
    this.stopButton.hidden = !running;
    this.send.disabled = !this.model || this.prompt.value.trim() === "";
    this.newButton.disabled = turns.length === 0;
    this.title.disabled = !this.isStored;
    if (document.activeElement !== this.title) this.title.value = title;
    for (const id of ["export-json", "export-markdown", "conversation-delete"]) byId<HTMLButtonElement>(id).disabled = !this.isStored;
    // What would change the tree has to wait; stopped answers can be changed at once.
    this.output.toggleAttribute("data-busy", running);
    this.showContext();
  }

  /** Writes a prompt for the user to send. */
  fillPrompt(text: string): void {
    this.prompt.value = text;
    this.refresh();
  }

  /** Adds words to the prompt. */
  addToPrompt(text: string): void {
    this.fillPrompt(`${this.prompt.value.trimEnd()} ${text}`.trimStart());
    this.focusPrompt();
  }

  /** On a phone, a focused prompt would open the keyboard over what is to be read. */
  focusPrompt(): void {
    if (matchMedia("(hover: hover)").matches) this.prompt.focus();
    else this.output.focus();
  }

  private scrollDown(): void {
    this.isAtEnd = true;
    this.output.scrollTop = this.output.scrollHeight;
  }
}

/** The conversation that this tab has shown. */
function remembered(): string | null {
  try {
    return sessionStorage.getItem(OPEN_KEY);
  } catch {
    return null;
  }
}
