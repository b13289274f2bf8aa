// Small helpers over the DOM: typed look-up, building elements, and one batch of updates for each frame.

/** The element with this id, which index.html is expected to have. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element #${id}`);
  return element as T;
}

/** A new element. Children that are strings become text, never markup. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Partial<HTMLElementTagNameMap[K]> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/**
 * Whether a key belongs to an input method that composes a word. Safari sends the Enter that chooses the word after the composition has
 * ended; only the code 229 tells it from an Enter of the person's own.
 */
export function isComposing(event: KeyboardEvent): boolean {
  return event.isComposing || event.keyCode === 229;
}

/**
 * Makes `update` run at most once a frame however often it is asked for, so that a fast model or disk does not fill the
 * main thread. A hidden tab has no frames; `now` brings the page up to date there.
 */
export function perFrame(update: () => void): { ask: () => void; now: () => void } {
  let frame: number | undefined;
  const now = (): void => {
    if (frame !== undefined) cancelAnimationFrame(frame);
    frame = undefined;
    update();
  };
  const ask = (): void => {
    frame ??= requestAnimationFrame(now);
  };
  return { ask, now };
}

/** Bytes as people read them: 1.2 GB, 34 MB, 512 kB. */
export function formatBytes(bytes: number): string {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${bytes.toFixed(unit > 0 && bytes < 9.95 ? 1 : 0)} ${units[unit]}`;
}

/** A duration in seconds as people read it: 250 ms, 3.4 s, 45 s, 2 min 10 s, 1 h 5 min. */
export function formatSeconds(seconds: number): string {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
}

/** A rate with the digits that matter: 3.4, 85, 1,240. */
export function formatRate(perSecond: number): string {
  return perSecond.toLocaleString("en", { maximumFractionDigits: perSecond < 10 ? 1 : 0 });
}
