// The conversation: the prompt, the messages, and the answer while it is written. A model without a chat template continues
// a text instead: then each prompt stands for itself, and prompt and continuation read as one.
import type { ChatMessage, Generation, GenerateOptions, Model, ToolCall } from "./tilewright/index.js";
import { byId, formatRate, isComposing, make, perFrame } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";
import { beginRecord, recordPiece } from "./inside/record.js";
import { announce, hideError } from "./messages.js";
import { TOP_LOGPROBS, type Settings } from "./settings.js";
import { firstScreen } from "./start/first-screen.js";
import { showSpeed, speedOf, type Speed } from "./status.js";

const STORY_STARTERS = ["Once upon a time", "One day", "The little fox", "In a small village", "Lily was"];
const CHAT_STARTERS = ["Explain what a GPU does in three sentences", "Write a haiku about rain", "Give me five names for a sailing boat"];

/** A prompt and its answer. */
interface Turn {
  prompt: string;
  answer: string;
  /** What the model thought, and the tools that it called: there are none, but a model may do so all the same. */
  thinking: string;
  calls: ToolCall[];
  element: HTMLElement;
  reply: HTMLElement;
  actions: HTMLElement;
}

/** What the conversation asks of the page. */
interface Page {
  settings(): Settings;
  /** A generation began. */
  began(): void;
  /** A generation ended, with the error if there was one. The returned function offers to do it again. */
  ended(error: unknown, again: () => void): void;
}

export class Chat {
  private readonly output = byId("output");
  private readonly prompt = byId<HTMLTextAreaElement>("prompt");
  private readonly send = byId<HTMLButtonElement>("send");
  private readonly stopButton = byId<HTMLButtonElement>("stop");
  private readonly clearButton = byId<HTMLButtonElement>("clear");
  private model: Model | undefined;
  private turns: Turn[] = [];
  /** Whether the newest text is in view, and should stay there. */
  private isAtEnd = true;
  private running: { abort: AbortController; done: Promise<void> } | undefined;

  constructor(private readonly page: Page) {
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
    this.clearButton.addEventListener("click", async () => {
      await this.clear();
      this.prompt.focus();
    });
    this.output.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.output;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < 48;
    });
    // An error or a longer prompt takes room from the messages.
    new ResizeObserver(() => {
      if (this.isAtEnd && this.turns.length > 0) this.scrollDown();
    }).observe(this.output);
    this.showIntro();
  }

  get isRunning(): boolean {
    return this.running !== undefined;
  }

  private get isStory(): boolean {
    return this.model?.info.chatTemplate === "none";
  }

  /** Uses this model from now on; undefined while there is none. */
  setModel(model: Model | undefined): void {
    this.model = model;
    if (model) {
      document.documentElement.dataset["mode"] = this.isStory ? "story" : "chat";
      byId("prompt-label").textContent = this.isStory ? "Beginning of a story" : "Message";
    }
    this.prompt.placeholder = !model ? "Waiting for a model…" : this.isStory ? "Begin a story…" : "Write a message…";
    if (this.turns.length === 0) this.showIntro();
    this.refresh();
  }

  /** Stops the answer that is being written, and resolves when it has stopped. */
  async stop(): Promise<void> {
    this.running?.abort.abort();
    await this.running?.done;
  }

  /** Forgets all messages. */
  async clear(): Promise<void> {
    await this.stop();
    this.turns = [];
    hideError();
    this.showIntro();
    this.refresh();
  }

  private sendPrompt(text: string): void {
    if (!this.model || this.running || text.trim() === "") return;
    const turn = this.addTurn(text);
    this.prompt.value = "";
    this.start(this.model, turn);
  }

  /** Writes the last answer anew. */
  private regenerate(): void {
    const turn = this.turns.at(-1);
    if (!this.model || this.running || !turn) return;
    this.start(this.model, turn);
  }

  private start(model: Model, turn: Turn): void {
    const abort = new AbortController();
    hideError();
    // The buttons under earlier answers act on the last one only.
    for (const { actions } of this.turns) actions.querySelector("[data-action=regenerate]")?.remove();
    turn.answer = "";
    turn.thinking = "";
    turn.calls = [];
    turn.element.querySelector(".thought")?.remove();
    turn.reply.replaceChildren();
    turn.actions.replaceChildren();
    const done = this.write(model, turn, abort.signal).then(
      () => this.finished(undefined),
      (error: unknown) => this.finished(abort.signal.aborted ? undefined : error),
    );
    this.running = { abort, done };
    const focused = document.activeElement;
    this.refresh();
    if (focused === this.send) this.stopButton.focus();
    this.page.began();
    this.scrollDown();
  }

  private finished(error: unknown): void {
    const focused = document.activeElement;
    this.running = undefined;
    this.refresh();
    // The button that had the focus is hidden now.
    if (focused === this.stopButton || focused === document.body) this.focusPrompt();
    this.page.ended(error, () => this.regenerate());
  }

  /** Generates one answer into its turn. Rejects with what went wrong, or with the signal's reason. */
  private async write(model: Model, turn: Turn, signal: AbortSignal): Promise<void> {
    const settings = this.page.settings();
    const seed = settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
    const { temperature, topK, topP, minP, repeatPenalty, maxTokens } = settings;
    const logprobs = settings.probabilities ? TOP_LOGPROBS : undefined;
    const options: GenerateOptions = { temperature, topK, topP, minP, repeatPenalty, maxTokens, seed, signal, logprobs };
    beginRecord();
    const startedAt = performance.now();
    const generation: Generation = this.isStory ? model.generate(turn.prompt, options)
      : model.chat(this.messages(settings.systemPrompt), { ...options, thinking: "auto" });

    const view = this.isStory ? new GrowingText(turn.reply) : new GrowingMarkdown(turn.reply);
    const speech = new Speech();
    turn.reply.ariaBusy = "true";
    const thought = new Thought(turn);
    let pending = "";
    let nPieces = 0;
    let firstAt: number | undefined;
    let speed: Speed = {};
    const draw = perFrame(() => {
      thought.show(pending !== "");
      if (pending !== "") view.append(pending);
      speech.say(pending);
      pending = "";
      showSpeed(speed);
      if (this.isAtEnd) this.scrollDown();
    });
    let note = "";
    try {
      for await (const piece of generation) {
        recordPiece(piece);
        const { text, thinking = "", toolCalls = [] } = piece;
        const now = performance.now();
        firstAt ??= now;
        const elapsed = (now - firstAt) / 1000;
        // The first token's time is the prompt's, so the rate counts those behind it.
        speed = { firstToken: (firstAt - startedAt) / 1000, decode: nPieces > 0 && elapsed > 0 ? nPieces / elapsed : undefined };
        nPieces += 1;
        turn.answer += text;
        turn.thinking += thinking;
        turn.calls.push(...toolCalls);
        pending += text;
        draw.ask();
      }
      const result = await generation.result;
      speed = speedOf(result, speed.firstToken);
      note = [
        `${result.generatedTokens.toLocaleString("en")} tokens`,
        ...(speed.decode === undefined ? [] : [`${formatRate(speed.decode)} tokens/s`]),
        ...(temperature > 0 ? [`seed ${seed}`] : []),
        ...(result.stopReason === "max_tokens" ? ["stopped at the longest answer"] : []),
        ...(result.stopReason === "context_full" ? ["stopped: the context is full"] : []),
      ].join(" · ");
    } catch (error) {
      note = signal.aborted ? `${nPieces.toLocaleString("en")} tokens · stopped` : "broken off";
      throw error;
    } finally {
      draw.now();
      thought.show(true);
      for (const { function: { name, arguments: given } } of turn.calls) {
        turn.reply.append(make("pre", {}, make("code", {}, `${name}(${JSON.stringify(given)})`)));
      }
      speech.end();
      turn.reply.ariaBusy = "false";
      this.addActions(turn, note);
      if (this.isAtEnd) this.scrollDown();
    }
  }

  /** The conversation as the model sees it: everything up to the last prompt. */
  private messages(systemPrompt: string): ChatMessage[] {
    const messages: ChatMessage[] = systemPrompt === "" ? [] : [{ role: "system", content: systemPrompt }];
    this.turns.forEach(({ prompt, answer, thinking, calls }, i) => {
      const isLast = i === this.turns.length - 1;
      // A prompt that failed before the first word is no part of the conversation.
      if (answer === "" && thinking === "" && calls.length === 0 && !isLast) return;
      messages.push({ role: "user", content: prompt });
      if (!isLast) messages.push({ role: "assistant", content: answer, ...(thinking === "" ? {} : { reasoning_content: thinking }) });
    });
    return messages;
  }

  private addTurn(prompt: string): Turn {
    if (this.turns.length === 0) this.output.replaceChildren();
    const asked = make("article", { className: "message", ariaLabel: "You" }, prompt);
    asked.dataset["role"] = "user";
    const reply = make("article", { className: "message", ariaLabel: "Model" });
    reply.dataset["role"] = "assistant";
    const actions = make("div", { className: "actions" });
    // Both messages are one text in a story; the wrapper is what flows.
    const element = make("div", { className: "turn" }, make("div", { className: "text" }, asked, reply), actions);
    element.dataset["mode"] = this.isStory ? "story" : "chat";
    this.output.append(element);
    const turn: Turn = { prompt, answer: "", thinking: "", calls: [], element, reply, actions };
    this.turns.push(turn);
    return turn;
  }

  private addActions(turn: Turn, note: string): void {
    const copy = make("button", { type: "button", className: "quiet" }, "Copy");
    copy.addEventListener("click", () => void this.copy(turn, copy));
    const again = make("button", { type: "button", className: "quiet" }, this.isStory ? "Tell another" : "Regenerate");
    again.dataset["action"] = "regenerate";
    again.addEventListener("click", () => {
      this.regenerate();
      this.focusPrompt();
    });
    turn.actions.replaceChildren(make("span", { className: "note" }, note), copy, again);
  }

  private async copy(turn: Turn, button: HTMLButtonElement): Promise<void> {
    try {
      await navigator.clipboard.writeText(turn.element.dataset["mode"] === "story" ? turn.prompt + turn.answer : turn.answer);
      button.textContent = "Copied";
    } catch {
      // Without permission, or without HTTPS, the page may not write; what it can do is select.
      const range = new Range();
      range.selectNodeContents(turn.reply);
      getSelection()?.removeAllRanges();
      getSelection()?.addRange(range);
      button.textContent = "Selected: press Ctrl+C";
    }
    announce(button.textContent);
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  /** What the page says before the first message. */
  private showIntro(): void {
    const intro = make("div", { className: "intro" });
    if (!this.model) {
      intro.append(
        make("h3", {}, "No model is loaded"),
        make("p", {}, "The story model is built in and is there at once. Files and addresses are under “Model and settings”."),
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
            : "It runs on this device. What you write stays here.",
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

  /** Buttons follow from the state. */
  private refresh(): void {
    const running = this.running !== undefined;
    this.send.hidden = running;
    this.stopButton.hidden = !running;
    this.send.disabled = !this.model || this.prompt.value.trim() === "";
    this.clearButton.disabled = this.turns.length === 0;
  }

  /** Writes a prompt for the user to send. */
  fillPrompt(text: string): void {
    this.prompt.value = text;
    this.refresh();
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

/** What the model thinks, above its answer: open while it thinks, and folded when it answers. */
class Thought {
  private details: HTMLDetailsElement | undefined;
  private readonly node = new Text();

  constructor(private readonly turn: Turn) {}

  show(isAnswering: boolean): void {
    const { thinking, reply } = this.turn;
    if (thinking === "") return;
    if (this.details === undefined) {
      this.details = make("details", { className: "thought", open: true }, make("summary", {}, "Thinking…"), make("p", {}, this.node));
      reply.before(this.details);
    }
    if (this.node.length < thinking.length) this.node.appendData(thinking.slice(this.node.length));
    const summary = this.details.firstElementChild;
    // Once: whoever opens it again wants to read it.
    if (isAnswering && summary !== null && summary.textContent !== "Thought") {
      summary.textContent = "Thought";
      this.details.open = false;
    }
  }
}

/** Text as it is, growing. */
class GrowingText {
  private readonly node = new Text();

  constructor(into: HTMLElement) {
    into.append(this.node);
  }

  append(text: string): void {
    this.node.appendData(text);
  }
}

/** Gives an answer to screen readers in sentences: single tokens would interrupt each other. */
class Speech {
  private waiting = "";

  say(text: string): void {
    this.waiting += text;
    // About two sentences at a time.
    if (this.waiting.length < 120) return;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.waiting.lastIndexOf(mark)));
    if (end < 0) return;
    announce(this.waiting.slice(0, end + 1));
    this.waiting = this.waiting.slice(end + 1);
  }

  end(): void {
    if (this.waiting.trim() !== "") announce(this.waiting);
  }
}
