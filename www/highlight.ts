// Colours of code. `lowlight` (highlight.js as a tree) is fetched when the first code comes. What it finds becomes ranges that the style
// sheet colours (CSS Custom Highlight API): the text stays one node, so that neither a selection in it nor the layout changes.

type Paint = (code: HTMLElement, text: string, language: string) => void;

/** Characters of code that are coloured, at most: the rest would take the page's time. */
const MAX_CHARACTERS = 20_000;
/** Kinds of highlight.js by the first word of their names, and the names in chat.css. */
const KINDS: Record<string, string> = {
  keyword: "code-keyword", literal: "code-keyword", selector: "code-keyword", tag: "code-keyword", section: "code-keyword", meta: "code-comment",
  comment: "code-comment", quote: "code-comment", string: "code-string", regexp: "code-string", addition: "code-string", number: "code-number",
  title: "code-title", name: "code-title", built: "code-title", type: "code-title", attr: "code-name", attribute: "code-name", property: "code-name",
  variable: "code-name", deletion: "code-name", symbol: "code-number", bullet: "code-number",
};

let loading: Promise<Paint | undefined> | undefined;

/** Colours the code in a <code> element that changes no more. */
export function paint(code: HTMLElement): void {
  const language = code.closest<HTMLElement>(".code")?.querySelector<HTMLElement>(".code-head")?.dataset["language"]?.toLowerCase() ?? "";
  const text = code.textContent;
  if (language === "" || text.length > MAX_CHARACTERS || !("highlights" in CSS)) return;
  loading ??= load();
  void loading.then((paint) => {
    if (code.isConnected) paint?.(code, text, language);
  });
}

/** Forgets colours of what is no longer shown. */
export function sweep(): void {
  if (!("highlights" in CSS)) return;
  for (const highlight of CSS.highlights.values()) {
    for (const range of highlight) if (!range.startContainer.isConnected) highlight.delete(range);
  }
}

interface Node {
  type: string;
  value?: string;
  properties?: { className?: unknown };
  children?: Node[];
}

async function load(): Promise<Paint | undefined> {
  try {
    const { languages, createLowlight } = await import("./languages.js");
    const lowlight = createLowlight(languages);
    return (code, text, language) => {
      const { firstChild } = code;
      if (!lowlight.registered(language) || !(firstChild instanceof Text)) return;
      let at = 0;
      const walk = ({ type, value = "", properties, children = [] }: Node, outer: string | undefined): void => {
        const [name = ""] = Array.isArray(properties?.className) ? properties.className as string[] : [];
        const kind = KINDS[name.replace(/^hljs-/, "").split(/[_-]/, 1)[0] ?? ""] ?? outer;
        if (type === "text") {
          if (kind !== undefined) highlightOf(kind).add(new StaticRange({ startContainer: firstChild, startOffset: at, endContainer: firstChild, endOffset: at + value.length }));
          at += value.length;
        }
        for (const child of children) walk(child, kind);
      };
      walk(lowlight.highlight(language, text) as Node, undefined);
    };
  } catch (error) {
    console.info("code is shown without colours:", error);
    loading = undefined;
    return undefined;
  }
}

function highlightOf(kind: string): Highlight {
  const known = CSS.highlights.get(kind);
  if (known !== undefined) return known;
  const highlight = new Highlight();
  CSS.highlights.set(kind, highlight);
  return highlight;
}
