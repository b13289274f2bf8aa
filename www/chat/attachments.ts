// Files that are attached to a message: texts, shown as chips and put into the message, and pictures for models that take them.
import { Model } from "../tilewright/index.js";
import { formatBytes, make } from "../dom.js";
import { showNotice } from "../messages.js";
import { fenced } from "./files.js";
import type { Attachment } from "./records.js";

/** Bytes of a file, at most; what is longer fills any context. */
const MAX_BYTES = 1024 * 1024;
/** Bytes of a picture, at most: the conversation keeps it. */
const MAX_PICTURE_BYTES = 16 * 1024 * 1024;
/** Share of the context that all attachments of a message may take. */
const MAX_SHARE = 0.75;

/** Files by the ends of their names: texts, data and code. */
export const ATTACHABLE = [
  ".txt", ".md", ".csv", ".json", ".jsonl", ".log", ".xml", ".html", ".css", ".js", ".mjs", ".ts", ".tsx", ".jsx", ".py", ".rs", ".go", ".c", ".h",
  ".cpp", ".hpp", ".java", ".kt", ".rb", ".sh", ".sql", ".toml", ".yaml", ".yml", ".wgsl", ".tex",
];

/** Pictures, by their types. */
export const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** What is needed to say how much of a context a text takes; undefined without a model. */
export interface Context {
  length: number;
  count(text: string): Promise<number>;
  /** The number of tokens of a picture; undefined if the model takes none. */
  imageTokens: ((width: number, height: number) => Promise<number>) | undefined;
}

/** The files of the message that is being written. */
export class Attachments {
  #items: { attachment: Attachment; tokens: number }[] = [];
  /** Pictures are decoded one after the other. */
  #adding = Promise.resolve();

  /** `changed` is called with what the chips look like from now on. */
  constructor(private readonly list: HTMLElement, private readonly context: () => Context | undefined, private readonly changed: () => void) {}

  get texts(): Attachment[] {
    return this.#items.map(({ attachment }) => attachment);
  }

  /** Takes files, or says in a sentence why one is not taken. */
  add(files: readonly File[]): Promise<void> {
    this.#adding = this.#adding.then(() => this.#addAll(files));
    return this.#adding;
  }

  async #addAll(files: readonly File[]): Promise<void> {
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
    this.#items = attachments.map((attachment) => ({ attachment, tokens: attachment.tokens ?? 0 }));
    this.#show();
  }

  async #add(file: File): Promise<void> {
    if (file.type.startsWith("image/")) return this.#addPicture(file);
    if (file.size > MAX_BYTES) throw new Error(`it has ${formatBytes(file.size)}, at most ${formatBytes(MAX_BYTES)} are read`);
    const text = textOf(await file.arrayBuffer());
    const context = this.context();
    let tokens = 0;
    if (context !== undefined) {
      tokens = await context.count(text);
      this.#checkRoom(tokens, context);
    }
    this.#items.push({ attachment: { name: file.name, text }, tokens });
  }

  async #addPicture(file: File): Promise<void> {
    const context = this.context();
    if (context === undefined) throw new Error("no model is loaded");
    if (context.imageTokens === undefined) throw new Error(whyNoPictures());
    if (!PICTURES.includes(file.type)) throw new Error(`it is of the type ${file.type}; PNG, JPEG, WebP and GIF are read`);
    if (file.size > MAX_PICTURE_BYTES) throw new Error(`it has ${formatBytes(file.size)}, and a picture may have ${formatBytes(MAX_PICTURE_BYTES)}`);
    const image = await asAddress(file);
    const picture = make("img", { src: image });
    try {
      await picture.decode();
    } catch {
      throw new Error("it cannot be decoded");
    }
    const tokens = await context.imageTokens(picture.naturalWidth, picture.naturalHeight);
    this.#checkRoom(tokens, context);
    this.#items.push({ attachment: { name: file.name, text: "", image, tokens }, tokens });
  }

  /** Refuses more than a share of the context. */
  #checkRoom(tokens: number, context: Context): void {
    const share = tokens / context.length;
    const all = this.#items.reduce((sum, item) => sum + item.tokens, tokens) / context.length;
    if (all <= MAX_SHARE) return;
    const others = all > share ? `, and ${percent(all)} with the other files` : "";
    throw new Error(
      `it takes ${tokens.toLocaleString("en")} tokens, ${percent(share)} of the context of ${context.length.toLocaleString("en")}${others}; `
      + `files may take ${percent(MAX_SHARE)} together. A larger context length in the settings may help`,
    );
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
export function chip({ name, text, image, tokens = 0 }: Attachment, note = "", ...more: Node[]): HTMLElement {
  const size = image === undefined ? formatBytes(new Blob([text]).size) : `${tokens.toLocaleString("en")} tokens`;
  const item = make("li", { className: "attachment" }, make("span", {}, name), make("span", { className: "help" }, note === "" ? size : `${size}, ${note}`), ...more);
  if (image !== undefined) {
    item.classList.add("picture");
    item.prepend(make("img", { src: image, alt: `Picture ${name}` }));
  }
  return item;
}

/** What to load for pictures, as a part of a sentence. */
function whyNoPictures(): string {
  const example = Model.list().find(({ use, vision }) => use === "chat" && vision !== undefined);
  return `this model takes no pictures; a model with a vision encoder does${example === undefined ? "" : `, such as ${example.address.replace(/^hf:/, "")} as the model address`}`;
}

/** A file as a data: address. */
function asAddress(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(String(reader.result)));
    reader.addEventListener("error", () => reject(new Error("it cannot be read")));
    reader.readAsDataURL(file);
  });
}

/** A prompt with the files that go with it, as the model reads it. */
export function promptWith(prompt: string, attachments: readonly Attachment[]): string {
  return [prompt, ...attachments.filter(({ image }) => image === undefined).map(({ name, text }) => `File ${name}:\n${fenced(text)}`)].join("\n\n");
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
