// A turn on the page: the prompt with its files, the answer with thoughts and calls, and what can be done with them.
import { isComposing, make } from "../dom.js";
import { GrowingMarkdown } from "../markdown.js";
import { announce } from "../messages.js";
import { chip } from "./attachments.js";
import { answerOf, type Step, type Turn } from "./records.js";

/** What a person can do with a turn. */
export interface TurnActions {
  /** Shows another branch, so many after this one. */
  choose(turn: Turn, by: number): void;
  regenerate(turn: Turn): void;
  /** Asks otherwise, in a branch beside this one; false if that is not possible now. */
  edit(turn: Turn, prompt: string): boolean;
  remove(turn: Turn): void;
}

export class TurnView {
  readonly element = make("div", { className: "turn" });
  /** The turn as it is shown, to see whether another one differs. */
  private shown = "";
  private turn: Turn;
  private readonly asked = make("article", { className: "message", ariaLabel: "You" });
  private readonly answer = make("div", { className: "answer" });
  private readonly note = make("span", { className: "note" });
  private readonly branches = make("span", { className: "branches", hidden: true });
  private readonly buttons = make("div", { className: "actions" });
  private readonly forgetting = make("p", { className: "forgets help", hidden: true }, "What is above no longer fits the context: the model does not see it.");
  private steps: StepView[] = [];

  constructor(turn: Turn, private readonly actions: TurnActions) {
    this.turn = turn;
    this.asked.dataset["role"] = "user";
    this.element.dataset["mode"] = turn.mode;
    this.element.dataset["id"] = turn.id;
    const isStory = turn.mode === "story";
    const again = isStory ? "Tell another" : "Regenerate";
    this.buttons.append(
      this.branches,
      this.note,
      this.button("copy", "Copy", (button) => void copy(isStory ? this.turn.prompt + answerOf(this.turn) : answerOf(this.turn), button, this.answer)),
      this.button("regenerate", again, () => this.actions.regenerate(this.turn)),
      this.button("edit", "Edit", () => this.edit()),
      this.button("delete", "Delete", () => this.actions.remove(this.turn)),
    );
    // Both messages are one text in a story; the wrapper is what flows.
    this.element.append(this.forgetting, make("div", { className: "text" }, this.asked, this.answer), this.buttons);
    this.show(turn);
  }

  /** Shows the turn, if it is not what is shown already. */
  show(turn: Turn): void {
    const written = digestOf(turn);
    this.turn = turn;
    if (written === this.shown) return;
    this.shown = written;
    this.showPrompt();
    this.answer.replaceChildren();
    this.steps = [];
    for (const step of turn.steps) this.addStep(step).finish();
    // An answer that failed before the first word, and one that is still to come.
    if (turn.steps.length === 0) this.answer.append(emptyMessage());
    this.note.textContent = turn.note;
  }

  /** Which of several branches it is, from 0 on. */
  showBranch(at: number, of: number): void {
    if (of < 2) {
      this.branches.hidden = true;
      return;
    }
    if (this.branches.childElementCount === 0) {
      this.branches.append(
        this.button("before", "‹", () => this.actions.choose(this.turn, -1), "The branch before"),
        make("span"),
        this.button("next", "›", () => this.actions.choose(this.turn, 1), "The next branch"),
      );
    }
    const [before, text, next] = this.branches.children as unknown as [HTMLButtonElement, HTMLElement, HTMLButtonElement];
    text.textContent = `${at + 1} of ${of}`;
    before.disabled = at === 0;
    next.disabled = at === of - 1;
    this.branches.hidden = false;
  }

  /** Whether the model does not see what is above. */
  set forgets(value: boolean) {
    this.forgetting.hidden = !value;
  }

  /** A new answer begins. */
  begin(): void {
    this.answer.replaceChildren();
    this.steps = [];
    this.shown = "";
    this.element.ariaBusy = "true";
    this.note.textContent = "";
  }

  addStep(step: Step): StepView {
    // What was waiting for a first step, or failed.
    if (this.steps.length === 0) this.answer.replaceChildren();
    this.steps.at(-1)?.finish();
    const view = new StepView(step, this.turn.mode, this.answer);
    this.steps.push(view);
    return view;
  }

  /** The view of the last step. */
  get last(): StepView | undefined {
    return this.steps.at(-1);
  }

  end(): void {
    this.last?.finish();
    if (this.steps.length === 0) this.answer.replaceChildren(emptyMessage());
    this.element.ariaBusy = "false";
    this.note.textContent = this.turn.note;
    this.shown = digestOf(this.turn);
  }

  private showPrompt(): void {
    const { prompt, attachments } = this.turn;
    this.asked.classList.remove("editing");
    this.asked.replaceChildren(prompt);
    this.element.querySelector(":scope > .attachments")?.remove();
    if (attachments.length > 0) {
      this.forgetting.after(make("ul", { className: "attachments", ariaLabel: "Attached files" }, ...attachments.map((it) => chip(it))));
    }
  }

  /** Puts a field in the place of the prompt. */
  private edit(): void {
    if (this.asked.querySelector("textarea")) return;
    const field = make("textarea", { value: this.turn.prompt, rows: 3, ariaLabel: "The prompt, to be changed" });
    const send = make("button", { type: "submit", className: "primary" }, "Send");
    const cancel = make("button", { type: "button" }, "Cancel");
    const form = make("form", {}, field, make("div", { className: "row" }, send, cancel));
    const close = (): void => {
      this.showPrompt();
      this.buttons.querySelector<HTMLElement>("[data-action=edit]")?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() !== "" && this.actions.edit(this.turn, field.value)) this.showPrompt();
    });
    form.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter" && !event.shiftKey && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    cancel.addEventListener("click", close);
    this.asked.classList.add("editing");
    this.asked.replaceChildren(form);
    field.focus();
  }

  private button(action: string, text: string, run: (button: HTMLButtonElement) => void, label?: string): HTMLButtonElement {
    const button = make("button", { type: "button", className: "quiet", ...(label === undefined ? {} : { ariaLabel: label, title: label }) }, text);
    button.dataset["action"] = action;
    button.addEventListener("click", () => run(button));
    return button;
  }
}

function emptyMessage(): HTMLElement {
  const message = make("article", { className: "message", ariaLabel: "Model" });
  message.dataset["role"] = "assistant";
  return message;
}

/** What the model writes in one go: a thought, a text, and calls of tools. */
class StepView {
  private readonly message = emptyMessage();
  private readonly markdown: GrowingMarkdown | undefined;
  private readonly calls = make("div", { className: "calls" });
  private thought: HTMLDetailsElement | undefined;
  private readonly thinking = new Text();
  private nCharacters = 0;

  constructor(private readonly step: Step, mode: Turn["mode"], into: HTMLElement) {
    this.markdown = mode === "story" ? undefined : new GrowingMarkdown(this.message);
    this.message.ariaBusy = "true";
    into.append(this.message);
    if (mode === "chat") into.append(this.calls);
  }

  /** Shows what came since the last time. */
  draw(): void {
    const { text } = this.step;
    const more = text.slice(this.nCharacters);
    this.nCharacters = text.length;
    this.showThought(text !== "" || this.step.calls.length > 0);
    if (more === "") return;
    if (this.markdown !== undefined) this.markdown.append(more);
    else if (this.message.firstChild instanceof Text) this.message.firstChild.appendData(more);
    else this.message.append(more);
  }

  showCalls(): void {
    this.calls.replaceChildren(...this.step.calls.map(({ name, arguments: given, result }) => {
      const details = make("details", { className: "call" }, make("summary", {}, `${name} ${given}`));
      if (result !== undefined) {
        details.firstElementChild?.append(make("span", {}, ` → ${result.length > 60 ? `${result.slice(0, 60)}…` : result}`));
        details.append(make("pre", { tabIndex: 0 }, `${JSON.stringify(JSON.parse(given), undefined, 2)}\n→ ${result}`));
      }
      return details;
    }));
  }

  /** The step is complete, or ends here. */
  finish(): void {
    this.draw();
    this.showThought(true);
    this.markdown?.end();
    this.showCalls();
    this.message.ariaBusy = "false";
    this.message.hidden = this.step.text === "" && this.step.calls.length > 0;
  }

  /** What the model thinks, above its answer: open while it thinks, and folded when it answers. */
  private showThought(isAnswering: boolean): void {
    const { thinking } = this.step;
    if (thinking === "") return;
    if (this.thought === undefined) {
      this.thought = make("details", { className: "thought", open: true }, make("summary", {}, "Thinking…"), make("p", {}, this.thinking));
      this.message.before(this.thought);
    }
    if (this.thinking.length < thinking.length) this.thinking.appendData(thinking.slice(this.thinking.length));
    const summary = this.thought.firstElementChild;
    // Once: whoever opens it again wants to read it.
    if (isAnswering && summary !== null && summary.textContent !== "Thought") {
      summary.textContent = "Thought";
      this.thought.open = false;
    }
  }
}

/** All of a turn but its pictures, which never change. */
function digestOf(turn: Turn): string {
  return JSON.stringify(turn, (key, value: unknown) => key === "image" ? "" : value);
}

/** What buttons that say how copying went are called otherwise. */
const labels = new WeakMap<HTMLButtonElement, string>();

/** Copies a text; where that is not allowed, selects what is shown of it. The button says which. */
export async function copy(text: string, button: HTMLButtonElement, shown: Node): Promise<void> {
  const label = labels.get(button) ?? button.ariaLabel ?? button.textContent;
  labels.set(button, label);
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without permission, or without HTTPS, the page may not write; what it can do is select.
    const range = new Range();
    range.selectNodeContents(shown);
    getSelection()?.removeAllRanges();
    getSelection()?.addRange(range);
    said = "Selected: press Ctrl+C";
  }
  const tell = (text: string): void => {
    if (button.ariaLabel === null) button.textContent = text;
    else button.ariaLabel = text;
  };
  tell(said);
  announce(said);
  setTimeout(() => tell(label), 2000);
}

