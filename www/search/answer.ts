// Answers from passages: the model of the chat is given what a search found, and says which passages it has an answer from.
//
//     #answer         with #answer-ask, #answer-stop, #answer-text (its links are .cite[data-passage]) and #answer-note
import type { ChatMessage, Model } from "../tilewright/index.js";
import { byId, make, perFrame } from "../dom.js";
import { announce } from "../messages.js";
import { Citations, type Stretch } from "./citations.js";
import { counted, type Passage } from "./passage.js";

/** Passages that a model is given, at most. */
const N_PASSAGES = 6;
/** Tokens that an answer may have. */
const MAX_TOKENS = 400;

/** What the answer asks of the page. */
export interface AnswerHost {
  /** The model of the chat, if one is loaded. */
  model(): Model | undefined;
  /** Shows the chat, where a model is chosen. */
  showChat(): void;
  failed(error: unknown): void;
}

/** The question with its passages, for a model that knows nothing else. */
export function questionOf(query: string, passages: readonly Passage[]): ChatMessage[] {
  const listed = passages.map(({ text, source }, i) => `[${i + 1}] (${source}) ${text}`).join("\n\n");
  const content = `Answer the question from the passages below and from nothing else. After each statement, name the passage that it is from by its number in brackets, such as [1]. If the passages do not answer the question, say so.\n\n${listed}\n\nQuestion: ${query}`;
  return [{ role: "user", content }];
}

export class Answer {
  private readonly text = byId("answer-text");
  private readonly note = byId("answer-note");
  private readonly ask = byId<HTMLButtonElement>("answer-ask");
  private readonly stopButton = byId<HTMLButtonElement>("answer-stop");
  private going: { abort: AbortController; done: Promise<void> } | undefined;
  /** The answer whose text is shown, until another query comes. */
  private shown: AbortController | undefined;
  private query = "";
  private found: { passage: Passage; id: number }[] = [];

  constructor(private readonly host: AnswerHost) {
    this.ask.addEventListener("click", () => void this.begin());
    this.stopButton.addEventListener("click", () => void this.stop());
  }

  /** What may be asked from now on. An answer to another query goes. */
  offer(query: string, found: { passage: Passage; id: number }[]): void {
    const isSame = query === this.query;
    this.query = query;
    this.found = found.slice(0, N_PASSAGES);
    byId("answer").hidden = this.found.length === 0;
    if (isSame) return;
    void this.stop();
    this.shown = undefined;
    this.text.replaceChildren();
    this.note.textContent = "";
  }

  /** Stops the answer that is written, and resolves when it has stopped. */
  async stop(): Promise<void> {
    this.going?.abort.abort();
    await this.going?.done;
  }

  private async begin(): Promise<void> {
    await this.stop();
    const model = this.host.model();
    this.text.replaceChildren();
    if (model === undefined || model.info.chatTemplate === "none") {
      this.explain(model);
      return;
    }
    const abort = new AbortController();
    this.shown = abort;
    const done = this.write(model, abort).catch((error: unknown) => {
      if (!abort.signal.aborted) this.host.failed(error);
      if (this.shown === abort) this.note.textContent = abort.signal.aborted ? "Stopped." : "The answer broke off.";
    }).finally(() => {
      this.going = undefined;
      this.show(false);
    });
    this.going = { abort, done };
    this.show(true);
    await done;
  }

  /** Why there is no answer from a model that cannot chat. */
  private explain(model: Model | undefined): void {
    const choose = make("button", { type: "button", className: "quiet" }, "Choose a chat model");
    choose.addEventListener("click", () => this.host.showChat());
    const why = model === undefined ? "No chat model is loaded."
      : `${model.info.name} has no chat template: it continues texts, and cannot answer questions.`;
    this.note.replaceChildren(`${why} Any chat model in the view “Chat” can. `, choose);
    announce(why);
  }

  private show(isGoing: boolean): void {
    const hadFocus = document.activeElement === (isGoing ? this.ask : this.stopButton);
    this.ask.hidden = isGoing;
    this.stopButton.hidden = !isGoing;
    this.text.ariaBusy = String(isGoing);
    if (hadFocus) (isGoing ? this.stopButton : this.ask).focus();
  }

  private async write(model: Model, abort: AbortController): Promise<void> {
    // Both may be others by the time that the answer is there.
    const { query, found } = this;
    const { signal } = abort;
    this.note.textContent = "The model reads the passages…";
    const { messages, nPassages } = await this.fitting(model, query, found);
    const citations = new Citations(nPassages);
    const ids = found.map(({ id }) => id);
    const append = (stretches: Stretch[]): void => {
      if (this.shown === abort) this.append(stretches, ids);
    };
    let pending = "";
    let all = "";
    const draw = perFrame(() => {
      append(citations.append(pending));
      pending = "";
    });
    const generation = model.chat(messages, { maxTokens: MAX_TOKENS, temperature: 0, thinking: "auto", signal });
    try {
      for await (const { text, thinking } of generation) {
        if (thinking && all === "" && this.shown === abort) this.note.textContent = "The model thinks…";
        pending += text;
        all += text;
        if (text !== "") draw.ask();
      }
    } finally {
      draw.now();
      append(citations.end());
    }
    const { stopReason } = await generation.result;
    if (this.shown !== abort) return;
    this.note.textContent = `From ${counted(nPassages, "passage")}, by ${model.info.name}. A model can misread them: follow the numbers.${stopReason === "max_tokens" ? " Cut off: it was too long." : ""}`;
    announce(all);
  }

  /** The question with as many passages as leave room for an answer. */
  private async fitting(model: Model, query: string, found: readonly { passage: Passage }[]): Promise<{ messages: ChatMessage[]; nPassages: number }> {
    const room = model.info.contextLength - Math.min(MAX_TOKENS, Math.trunc(model.info.contextLength / 2));
    for (let nPassages = found.length; ; nPassages -= 1) {
      const messages = questionOf(query, found.slice(0, nPassages).map(({ passage }) => passage));
      const ids = await model.tokenize(String(messages[0]?.content));
      if (nPassages <= 1 || ids.length < room) return { messages, nPassages };
    }
  }

  private append(stretches: Stretch[], ids: readonly number[]): void {
    this.text.append(...stretches.map(({ text, cites }) => {
      const id = cites === undefined ? undefined : ids[cites - 1];
      return id === undefined ? text : citation(text, id);
    }));
  }
}

/** A link to a passage in the list of results. */
function citation(text: string, id: number): HTMLElement {
  const link = make("a", { className: "cite", href: "#query", ariaLabel: `Passage ${text.slice(1, -1)}` }, text);
  link.dataset["passage"] = String(id);
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const row = byId("results").querySelector<HTMLElement>(`[data-id="${id}"]`);
    row?.scrollIntoView({ block: "nearest" });
    row?.focus();
  });
  return link;
}
