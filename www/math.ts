// Formulas in LaTeX, as MathML that KaTeX makes. It is fetched when the first formula comes; until then its source is shown.
import { make } from "./dom.js";

type Render = (tex: string, into: HTMLElement, display: boolean) => void;

let render: Render | undefined;
let loading: Promise<void> | undefined;
const waiting = new Set<HTMLElement>();
/** Formulas of the block that is being written, which is built anew in each frame. */
const made = new Map<string, HTMLElement>();
const MAX_MADE = 64;

/** An element that shows a formula. */
export function formula(tex: string, display: boolean): HTMLElement {
  const key = `${display} ${tex}`;
  const known = made.get(key);
  if (known !== undefined) return known.cloneNode(true) as HTMLElement;
  const element = make("span", { className: display ? "math display" : "math" }, tex);
  if (render !== undefined) {
    render(tex, element, display);
    if (made.size >= MAX_MADE) made.clear();
    made.set(key, element.cloneNode(true) as HTMLElement);
  } else {
    waiting.add(element);
    loading ??= load();
  }
  return element;
}

async function load(): Promise<void> {
  try {
    const { default: katex } = await import("katex");
    render = (tex, into, display) => {
      try {
        katex.render(tex, into, { output: "mathml", displayMode: display, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 });
      } catch {
        // It is no LaTeX, or none that KaTeX knows: the source stays.
        into.replaceChildren(make("code", {}, tex));
      }
    };
  } catch (error) {
    console.info("formulas are shown as their source:", error);
    // Once there is a network again, the next one may be shown.
    loading = undefined;
  }
  for (const element of waiting) if (element.isConnected) render?.(element.textContent, element, element.classList.contains("display"));
  waiting.clear();
}
