// Renders a model's answer while it grows: Markdown as `marked` reads it, as DOM nodes of our own.
// Nothing of the text is ever parsed as HTML, links lead to the web or to a mail only, and no picture is loaded.
//
//     a finished block is built once, and never touched again
//     the last one, still growing, is built anew in each frame; of what is shown only what differs is changed
import { Marked, type MarkedToken, type Token, type TokenizerAndRendererExtension, type Tokens } from "marked";
import { make } from "./dom.js";
import { paint } from "./highlight.js";
import { formula } from "./math.js";

// A block is read anew each time that it grows. What these say bounds the time of that, whatever a model or a file holds: reading takes the
// square of the number of marks, and as often as lists are in each other.
/** Characters of a block, code aside; a longer one is cut between two of its lines. */
const MAX_OPEN = 4096;
/** Marks of emphasis, links, addresses, code, HTML, quotes and numbered items in a block. */
const MAX_MARKS = 400;
const MARK = /[*_`[\]<>~!$@\\]|\d[.)]|\+ /g;
/** Spaces in front of a line. */
const TOO_DEEP = /^[ \t]{40}/m;
/** Characters that are read at once. */
const SLICE = 1024;
/** Blocks and marks in each other, at most; what is deeper stays text. */
const MAX_DEPTH = 16;

interface MathToken extends Tokens.Generic {
  type: "math";
  text: string;
  display: boolean;
}

/** LaTeX between `$$`, `\[` and `\]` as a block. */
const MATH_BLOCK = /^ {0,3}(?:\$\$((?:[^$\\]|\\[\s\S]|\$(?!\$)){1,4000}?)\$\$|\\\[((?:[^\\]|\\[^\]]){1,4000}?)\\\])[ \t]*(?:\n|$)/;
/** The same in a line, and between `$`, which prices have too, `\(` and `\)`. */
const MATH_INLINE = /^(?:\$\$((?:[^$\\\n]|\\.){1,1000}?)\$\$|\\\[((?:[^\\\n]|\\[^\]\n]){1,1000}?)\\\]|\\\(((?:[^\\\n]|\\[^)\n]){1,1000}?)\\\)|\$(?![\s\d$])((?:[^$\\\n]|\\.){0,1000}?(?:[^$\\\s]|\\.))\$(?![\d$])|\$(\d[^$\n]{0,80}?[\\^_=][^$\n]{0,200}?(?<!\s))\$(?![\d$]))/;

const mathToken = (match: RegExpExecArray | null, display: boolean): MathToken | undefined => {
  const text = match?.slice(1).find((it) => it !== undefined);
  return match === null || text === undefined ? undefined : { type: "math", raw: match[0], text: text.trim(), display };
};
const extensions: TokenizerAndRendererExtension[] = [
  {
    name: "mathBlock",
    level: "block",
    start: (text) => /(?:^|\n) {0,3}(?:\$\$|\\\[)/.exec(text)?.index,
    tokenizer: (text) => mathToken(MATH_BLOCK.exec(text), true),
  },
  {
    name: "math",
    level: "inline",
    start: (text) => /\$|\\[([]/.exec(text)?.index,
    tokenizer: (text) => {
      const match = MATH_INLINE.exec(text);
      return mathToken(match, match?.[1] !== undefined || match?.[2] !== undefined);
    },
  },
];
const marked = new Marked({ gfm: true, breaks: true, extensions });

/** A view on text that arrives in pieces. */
export class GrowingMarkdown {
  /** The text of the open block, not yet known to be finished. */
  private open = "";
  private openNodes: ChildNode[] = [];

  constructor(private readonly into: HTMLElement) {}

  append(text: string): void {
    // What has a carriage return has a line feed, too.
    const all = text.replaceAll("\r", "");
    for (let at = 0; at < all.length; at += SLICE) this.read(all.slice(at, at + SLICE));
  }

  private read(text: string): void {
    this.open += text;
    const tokens = lex(this.open);
    const finished = finishedTokens(tokens, this.open);
    if (finished.length > 0) this.showFinished(finished);
    this.open = this.open.slice(finished.reduce((sum, { raw }) => sum + raw.length, 0));
    if (isFence(this.open) || (this.open.length <= MAX_OPEN && countMarks(this.open) <= MAX_MARKS)) {
      this.show(tokens.slice(finished.length));
      return;
    }
    const lines = [...this.open.matchAll(/\n(?=\S)/g)];
    const cut = (lines.at(-1)?.index ?? this.open.length - 1) + 1;
    this.showFinished(lex(this.open.slice(0, cut)));
    this.open = this.open.slice(cut);
    this.show(lex(this.open));
  }

  /** No more text comes. */
  end(): void {
    this.finish();
    this.open = "";
  }

  /** Makes the nodes of the open block those of these tokens. */
  private show(tokens: readonly Token[]): void {
    const wanted = blocks(tokens, 0);
    patch(this.into, this.openNodes, wanted);
    const { childNodes } = this.into;
    this.openNodes = wanted.length === 0 ? [] : [...childNodes].slice(-wanted.length);
  }

  private showFinished(tokens: readonly Token[]): void {
    this.show(tokens);
    this.finish();
  }

  private finish(): void {
    for (const node of this.openNodes) {
      if (!(node instanceof HTMLElement)) continue;
      for (const code of node.matches("pre") ? [node] : node.querySelectorAll("pre")) paint(code.firstElementChild as HTMLElement);
    }
    this.openNodes = [];
  }
}

const isFence = (text: string): boolean => /^ {0,3}(?:```|~~~)/.test(text);
const countMarks = (text: string): number => text.match(MARK)?.length ?? 0;

/** The tokens of a text; one that would take too long is a text as it is. */
function lex(text: string): MarkedToken[] {
  const plain: MarkedToken[] = [{ type: "html", raw: text, text, pre: false, block: true }];
  if (!isFence(text) && (TOO_DEEP.test(text) || countMarks(text) > 2 * MAX_MARKS)) return plain;
  try {
    return marked.lexer(text) as MarkedToken[];
  } catch {
    return plain;
  }
}

/**
 * The first tokens of a text, which no later text changes: all before the last block, and that one, too, if it cannot go on after the empty
 * line behind it.
 */
function finishedTokens(tokens: readonly MarkedToken[], text: string): MarkedToken[] {
  let end = tokens.findLastIndex(({ type }) => type !== "space");
  const last = tokens[end];
  const space = tokens.slice(end + 1).map(({ raw }) => raw).join("");
  const goesOn = last?.type === "list" || last?.type === "html" || (last?.type === "code" && last.codeBlockStyle === "indented");
  if (last !== undefined && !goesOn && `${last.raw}${space}`.endsWith("\n\n") && space !== "") end += 1;
  const finished = tokens.slice(0, Math.max(0, end));
  return text.startsWith(finished.map(({ raw }) => raw).join("")) ? finished : [];
}

/** Changes the last nodes of an element, `from`, into `to`, and leaves alone what is equal, so that a selection in it stays. */
function patch(parent: Element, from: readonly ChildNode[], to: readonly ChildNode[]): void {
  to.forEach((node, i) => {
    const old = from[i];
    if (old === undefined) parent.append(node);
    else if (old instanceof Text && node instanceof Text) patchText(old, node.data);
    else if (old instanceof Element && node instanceof Element && !old.isEqualNode(node)) {
      if (old.cloneNode(false).isEqualNode(node.cloneNode(false)) && !(old instanceof MathMLElement)) patch(old, [...old.childNodes], [...node.childNodes]);
      else old.replaceWith(node);
    } else if (!(old instanceof Element) || !(node instanceof Element)) old.replaceWith(node);
  });
  for (const old of from.slice(to.length)) old.remove();
}

/** Changes the end of a text. */
function patchText(node: Text, text: string): void {
  const { data } = node;
  if (data === text) return;
  let same = 0;
  while (same < data.length && data.charCodeAt(same) === text.charCodeAt(same)) same += 1;
  node.replaceData(same, data.length - same, text.slice(same));
}

function blocks(tokens: readonly Token[], depth: number): ChildNode[] {
  return tokens.flatMap((token) => block(token as MarkedToken | MathToken, depth + 1));
}

function block(token: MarkedToken | MathToken, depth: number): ChildNode[] {
  if (depth > MAX_DEPTH) return [make("p", {}, token.raw)];
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading": {
      // The page has the first two levels. Models leave levels out, which would be gaps for those who hear the page.
      const heading = make("h3", {}, ...inline(token.tokens, depth));
      heading.dataset["level"] = String(token.depth);
      return [heading];
    }
    case "paragraph":
      return [make("p", {}, ...inline(token.tokens, depth))];
    case "text":
      return token.tokens === undefined ? [new Text(entities(token.text))] : inline(token.tokens, depth);
    case "code":
      return [codeBlock(token.text, token.lang ?? "")];
    case "blockquote":
      return [make("blockquote", {}, ...blocks(token.tokens, depth))];
    case "list":
      return [list(token, depth)];
    case "table":
      return [table(token, depth)];
    case "hr":
      return [make("hr")];
    case "math":
      return [make("p", {}, formula(token.text, token.display))];
    default:
      return [make("p", {}, token.raw.trimEnd())];
  }
}

function list({ ordered, start, items }: Tokens.List, depth: number): HTMLElement {
  const element = ordered ? make("ol", { start: start === "" ? 1 : start }) : make("ul");
  for (const { task, checked, tokens } of items) {
    const content = blocks(tokens.filter(({ type }) => type !== "checkbox"), depth);
    const item = make("li", {}, ...(task ? [checked ? "☑ " : "☐ "] : []), ...content);
    if (task) item.className = "task";
    element.append(item);
  }
  return element;
}

function table({ header, rows }: Tokens.Table, depth: number): HTMLElement {
  const row = (cells: readonly Tokens.TableCell[], tag: "th" | "td"): HTMLElement => make("tr", {}, ...cells.map(({ tokens, align }) => {
    const cell = make(tag, {}, ...inline(tokens, depth));
    if (align !== null) cell.dataset["align"] = align;
    return cell;
  }));
  const body = rows.length === 0 ? [] : [make("tbody", {}, ...rows.map((cells) => row(cells, "td")))];
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, row(header, "th")), ...body));
}

/** Code with its language and a button that copies it, which `startCopying` brings to life. */
function codeBlock(text: string, info: string): HTMLElement {
  const [, language = ""] = /^\s*([\w+#.-]{1,30})/.exec(info) ?? [];
  const copy = make("button", { type: "button", className: "copy quiet", ariaLabel: "Copy this code" });
  const head = make("div", { className: "code-head" }, copy);
  head.dataset["language"] = language;
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, make("code", {}, text)));
}

/** Makes the buttons of code in an element copy it. */
export function startCopying(element: HTMLElement, copied: (button: HTMLButtonElement, text: string) => void): void {
  element.addEventListener("click", ({ target }) => {
    const button = target instanceof Element ? target.closest<HTMLButtonElement>(".code button.copy") : null;
    if (button) copied(button, button.closest(".code")?.querySelector("code")?.textContent ?? "");
  });
}

function inline(tokens: readonly Token[], depth: number): ChildNode[] {
  const nodes: ChildNode[] = [];
  for (const token of tokens as readonly (MarkedToken | MathToken)[]) {
    for (const node of inlineNodes(token, depth + 1)) {
      const last = nodes.at(-1);
      // One text, as the tree of another text may have it.
      if (node instanceof Text && last instanceof Text) last.appendData(node.data);
      else nodes.push(node);
    }
  }
  return nodes;
}

function inlineNodes(token: MarkedToken | MathToken, depth: number): ChildNode[] {
  if (depth > MAX_DEPTH) return [new Text(token.raw)];
  switch (token.type) {
    case "strong":
      return [make("strong", {}, ...inline(token.tokens, depth))];
    case "em":
      return [make("em", {}, ...inline(token.tokens, depth))];
    case "del":
      return [make("del", {}, ...inline(token.tokens, depth))];
    case "codespan":
      return [make("code", {}, token.text)];
    case "br":
      return [make("br")];
    case "link":
      return link(token, depth);
    case "image":
      return [make("span", { className: "image" }, token.text === "" ? token.href : entities(token.text))];
    case "math":
      return [formula(token.text, token.display)];
    case "html":
      // The only tag that has a place in a cell of a table.
      return /^<br\s*\/?>$/i.test(token.raw) ? [make("br")] : [new Text(token.raw)];
    case "text":
      return token.tokens === undefined ? [new Text(entities(token.text))] : inline(token.tokens, depth);
    case "escape":
      return [new Text(token.text)];
    default:
      return [new Text(token.raw)];
  }
}

/** A link that opens beside the page, or its text if it leads anywhere but to the web or to a mail. */
function link({ href, tokens }: Tokens.Link, depth: number): ChildNode[] {
  const text = inline(tokens, depth);
  const url = URL.canParse(href) ? new URL(href) : undefined;
  if (url === undefined || !["http:", "https:", "mailto:"].includes(url.protocol)) return text;
  return [make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...text)];
}

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Characters that are written as `&name;` or by their number. */
function entities(text: string): string {
  return text.replaceAll(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/gi, (all, decimal?: string, hex?: string, name?: string) => {
    if (name !== undefined) return ENTITIES[name.toLowerCase()] ?? all;
    const code = decimal === undefined ? parseInt(hex ?? "", 16) : Number(decimal);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}
