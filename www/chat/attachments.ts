// Files that are attached to a message: read as text, shown as chips, and put into the message.
import { formatBytes, make } from "../dom.js";
import { showNotice } from "../messages.js";
import { fenced } from "./files.js";
import type { Attachment } from "./records.js";

/** Bytes of a file, at most; what is longer fills any context. */
const MAX_BYTES = 1024 * 1024;
/** Share of the context that all attachments of a message may take. */
const MAX_SHARE = 0.75;

/** Files by the ends of their names: texts, data and code. */
export const ATTACHABLE = [
  ".txt", ".md", ".csv", ".json", ".jsonl", ".log", ".xml", ".html", ".css", ".js", ".mjs", ".ts", ".tsx", ".jsx", ".py", ".rs", ".go", ".c", ".h",
  ".cpp", ".hpp", ".java", ".kt", ".rb", ".sh", ".sql", ".toml", ".yaml", ".yml", ".wgsl", ".tex",
];

/** What is needed to say how much of a context a text takes; undefined without a model. */
export interface Context {
  length: number;
  count(text: string): Promise<number>;
}

/** The files of the message that is being written. */
export class Attachments {
  #items: { attachment: Attachment; tokens: number }[] = [];

  /** `changed` is called with what the chips look like from now on. */
  constructor(private readonly list: HTMLElement, private readonly context: () => Context | undefined, private readonly changed: () => void) {}

  get texts(): Attachment[] {
    return this.#items.map(({ attachment }) => attachment);
  }

  /** Takes files, or says in a sentence why one is not taken. */
  async add(files: readonly File[]): Promise<void> {
    for (const file of files) {
      try {
        await this.#add(file);
      } catch (error) {
        showNotice({ code: "attachment", message: `${file.name} was not attached: ${error instanceof Error ? error.message : String(error)}` });
      }
    }
    this.#show();
  }

  /** The files are part of a message now, or of none. */
  set(attachments: readonly Attachment[]): void {
    this.#items = attachments.map((attachment) => ({ attachment, tokens: 0 }));
    this.#show();
  }

  async #add(file: File): Promise<void> {
    if (file.size > MAX_BYTES) throw new Error(`it has ${formatBytes(file.size)}, at most ${formatBytes(MAX_BYTES)} are read`);
    const text = textOf(await file.arrayBuffer());
    const context = this.context();
    let tokens = 0;
    if (context !== undefined) {
      tokens = await context.count(text);
      const share = tokens / context.length;
      const all = this.#items.reduce((sum, item) => sum + item.tokens, tokens) / context.length;
      if (all > MAX_SHARE) {
        const others = all > share ? `, and ${percent(all)} with the other files` : "";
        throw new Error(
          `it takes ${tokens.toLocaleString("en")} tokens, ${percent(share)} of the context of ${context.length.toLocaleString("en")}${others}; `
          + `files may take ${percent(MAX_SHARE)} together. A larger context length in the settings may help`,
        );
      }
    }
    this.#items.push({ attachment: { name: file.name, text }, tokens });
  }

  #show(): void {
    const length = this.context()?.length;
    this.list.replaceChildren(...this.#items.map((item) => {
      const remove = make("button", { type: "button", className: "quiet", ariaLabel: `Remove ${item.attachment.name}` }, "×");
      remove.addEventListener("click", () => {
        this.#items = this.#items.filter((other) => other !== item);
        this.#show();
      });
      return chip(item.attachment, length !== undefined && item.tokens > 0 ? `${percent(item.tokens / length)} of the context` : "", remove);
    }));
    this.list.hidden = this.#items.length === 0;
    this.changed();
  }
}

/** A file as a line of a list. */
export function chip({ name, text }: Attachment, note = "", ...more: Node[]): HTMLElement {
  const size = formatBytes(new Blob([text]).size);
  return make("li", { className: "attachment" }, make("span", {}, name), make("span", { className: "help" }, note === "" ? size : `${size}, ${note}`), ...more);
}

/** A prompt with the files that go with it, as the model reads it. */
export function promptWith(prompt: string, attachments: readonly Attachment[]): string {
  return [prompt, ...attachments.map(({ name, text }) => `File ${name}:\n${fenced(text)}`)].join("\n\n");
}

function textOf(bytes: ArrayBuffer): string {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("it is no text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("it is no text");
  if (text.trim() === "") throw new Error("it is empty");
  return text;
}

function percent(share: number): string {
  const whole = Math.round(share * 100);
  return `${whole > 0 ? whole : "<1"} %`;
}
