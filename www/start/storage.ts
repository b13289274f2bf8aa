// Small things that the page remembers from visit to visit, as JSON in the browser's storage.

/** What is remembered under a key; undefined if nothing is, if it is damaged, or where storage is forbidden. */
export function recall(key: string): unknown {
  try {
    const text = localStorage.getItem(key);
    return text === null ? undefined : JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Remembers a value; undefined forgets it. Returns whether the browser lets the page do so. */
export function remember(key: string, value: unknown): boolean {
  try {
    if (value === undefined) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
