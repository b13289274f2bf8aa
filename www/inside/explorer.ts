// What the pictures of the view “Inside” share: one part at a time is told in words, by pointer or arrow keys.
import { make } from "../dom.js";

/** The heading of a section, which names it. */
export function title(section: HTMLElement, text: string): HTMLElement {
  const heading = make("h2", { id: `${section.id}-title` }, text);
  section.removeAttribute("aria-label");
  section.setAttribute("aria-labelledby", heading.id);
  return heading;
}

/** Runs what a button asks for; what goes wrong is told in a note. */
export async function report(button: HTMLButtonElement, note: HTMLElement, run: () => Promise<void>): Promise<void> {
  button.disabled = true;
  try {
    await run();
  } catch (error) {
    note.textContent = error instanceof Error ? error.message : String(error);
  } finally {
    button.disabled = false;
  }
}

/** A picture of `n` parts along one direction. It is a slider: a screen reader says each part as `tell` does. */
export function explorer({ label, picture, n, vertical, at, tell }: {
  label: string;
  picture: Element;
  n: number;
  vertical: boolean;
  /** The part at a share of the picture's length. */
  at: (share: number) => number;
  /** Marks a part and tells it. */
  tell: (at: number) => string;
}): { element: HTMLElement; detail: HTMLElement } {
  const element = make("div", { className: "explorer", tabIndex: 0, role: "slider", ariaLabel: label, ariaOrientation: vertical ? "vertical" : "horizontal" }, picture);
  const detail = make("p", { className: "detail" });
  let current = -1;
  const show = (next: number): void => {
    if (next < 0 || next >= n || next === current) return;
    current = next;
    detail.textContent = tell(next);
    element.ariaValueNow = String(next + 1);
    element.ariaValueText = detail.textContent;
  };
  element.ariaValueMin = "1";
  element.ariaValueMax = String(n);
  element.addEventListener("pointermove", ({ clientX, clientY }) => {
    const { left, top, width, height } = picture.getBoundingClientRect();
    const share = vertical ? (clientY - top) / height : (clientX - left) / width;
    if (share >= 0 && share <= 1) show(at(share));
  });
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -n, End: n }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(Math.min(n - 1, Math.max(0, current + step)));
  });
  show(vertical ? n - 1 : 0);
  return { element, detail };
}
