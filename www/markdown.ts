// Renders a model's answer while it grows: the small part of Markdown that answers use, as DOM nodes.
// Nothing of the text is ever parsed as HTML, and links stay text: the model's words are not to be trusted with either.
//
//     split the text at blank lines outside of code fences into blocks
//     a finished block is built once; the last one, still growing, is built anew in each frame
import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
/**
 * Code, bold, italic; asterisks and underscores only around words, so that `2 * 3` and `snake_case` stay as they are.
 * The lengths are bounded because a model may repeat an opening mark forever, and each would be searched to the end.
 */
const INLINE = /(`+)([^`]|[^`].{0,400}?[^`])\1(?!`)|\*\*(?=\S)(.{1,400}?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])(.{1,400}?)(?<=[^\s*])\*(?![\w*])|(?<!\w)_(?=\S)(.{1,400}?)(?<=\S)_(?!\w)/gs;

/** A view on text that arrives in pieces. */
export class GrowingMarkdown {
  /** The text of the open block, not yet known to be finished. */
  private open = "";
  private openNodes: Node[] = [];

  constructor(private readonly into: HTMLElement) {}

  append(text: string): void {
    this.open += text;
    let end = finishedLength(this.open);
    for (const node of this.openNodes) this.into.removeChild(node);
    if (end > 0) {
      this.into.append(...blocks(this.open.slice(0, end)));
      this.open = this.open.slice(end);
    }
    this.openNodes = blocks(this.open);
    this.into.append(...this.openNodes);
  }
}

/** How much of the text is blocks that later text cannot change: up to the last blank line outside of a fence. */
function finishedLength(text: string): number {
  let fence: string | undefined;
  let end = 0;
  let at = 0;
  let inList = false;
  for (;;) {
    const newline = text.indexOf("\n", at);
    if (newline < 0) return end;
    const line = text.slice(at, newline);
    at = newline + 1;
    if (fence !== undefined) {
      if (closes(line, fence)) {
        fence = undefined;
        end = at;
      }
    } else if (FENCE.test(line)) {
      fence = FENCE.exec(line)?.[1];
    } else if (line.trim() === "") {
      // A list may go on behind a blank line, with its numbers.
      if (!inList) end = at;
    } else {
      inList = ITEM.test(line) || (inList && /^\s/.test(line));
    }
  }
}

function closes(line: string, fence: string): boolean {
  const bare = line.trim();
  return bare.length >= fence.length && bare === fence.charAt(0).repeat(bare.length);
}

/** The elements of a text of whole blocks. */
function blocks(text: string): HTMLElement[] {
  const lines = text.split("\n");
  const made: HTMLElement[] = [];
  let paragraph: string[] = [];
  const endParagraph = (): void => {
    if (paragraph.length > 0) made.push(make("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i += 1) {
    const line = lines[i] ?? "";
    const fence = FENCE.exec(line)?.[1];
    const heading = HEADING.exec(line);
    if (fence !== undefined) {
      endParagraph();
      const code: string[] = [];
      for (i += 1; i < lines.length && !closes(lines[i] ?? "", fence); i += 1) code.push(lines[i] ?? "");
      made.push(make("pre", { tabIndex: 0 }, make("code", {}, code.join("\n"))));
    } else if (heading) {
      endParagraph();
      made.push(make("h4", {}, ...inline(heading[2] ?? "")));
    } else if (RULE.test(line)) {
      endParagraph();
      made.push(make("hr"));
    } else if (ITEM.test(line)) {
      endParagraph();
      const end = listEnd(lines, i);
      made.push(list(lines.slice(i, end)));
      i = end - 1;
    } else if (line.trim() === "") {
      endParagraph();
    } else {
      paragraph.push(line);
    }
  }
  endParagraph();
  return made;
}

/** The line behind the list that starts at `start`: items, what is indented under them, blank lines between items. */
function listEnd(lines: string[], start: number): number {
  let end = start + 1;
  for (let i = start + 1; i < lines.length; i += 1) {
    const line = lines[i] ?? "";
    if (ITEM.test(line) || /^\s+\S/.test(line)) end = i + 1;
    else if (line.trim() !== "") break;
  }
  return end;
}

/** A list, with lists of deeper indentation inside. A stack of open lists takes the place of recursion. */
function list(lines: string[]): HTMLElement {
  const open: { indent: number; element: HTMLElement }[] = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    const last = open.at(-1)?.element.lastElementChild;
    if (!item) {
      if (line.trim() !== "") last?.append("\n", ...inline(line.trim()));
      continue;
    }
    const [, space = "", number, text = ""] = item;
    while (open.length > 1 && space.length < (open.at(-1)?.indent ?? 0)) open.pop();
    const current = open.at(-1);
    // Deeper than 8 is not a list that anyone reads; it stays at that depth.
    if (!current || (space.length >= current.indent + 2 && open.length < 8)) {
      const element = number === undefined ? make("ul") : make("ol", { start: Number(number) });
      last?.append(element);
      open.push({ indent: space.length, element });
    }
    open.at(-1)?.element.append(make("li", {}, ...inline(text)));
  }
  return open[0]?.element ?? make("ul");
}

/** Text with code, bold and italic. */
function inline(text: string): Node[] {
  const nodes: Node[] = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [all, , code, bold, star, underscore] = match;
    if (match.index > at) nodes.push(new Text(text.slice(at, match.index)));
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (bold !== undefined) nodes.push(make("strong", {}, bold));
    else nodes.push(make("em", {}, star ?? underscore ?? ""));
    at = match.index + all.length;
  }
  if (at < text.length) nodes.push(new Text(text.slice(at)));
  return nodes;
}
