// The model of the last visit, which is reopened if the browser keeps all of it.
import { cache } from "../tilewright/index.js";
import { BUILTIN, storedModels, type LocatedModel, type ModelChoice } from "../sources.js";
import { recall, remember } from "./storage.js";

/** What is kept of a choice, by view: the search's encoder and the speech model are remembered like the model of the chat. */
export type Place = "chat" | "search" | "listen";

const KEYS: Record<Place, string> = { chat: "tilewright.last", search: "tilewright.encoder", listen: "tilewright.speech" };
/**
 * Set while a model is reopened: a page that ends then, for lack of memory, must not do so each time it is opened. The page holds a lock of
 * the same name meanwhile, by which other tabs see that it has not ended.
 */
const OPENING_KEYS: Record<Place, string> = { chat: "tilewright.opening", search: "tilewright.opening-encoder", listen: "tilewright.opening-speech" };
const MAX_PARTS = 1000;
/** Browsers have locks only where they trust the page. */
const locks: LockManager | undefined = navigator.locks;

/** Remembers what was loaded. Files of the user's cannot be opened again without asking, so of those nothing is. */
export function rememberLast(place: Place, { label, source }: LocatedModel): void {
  const addresses = Array.isArray(source) ? source : [source];
  remember(KEYS[place], addresses.every((it) => typeof it === "string") ? { label, source } : undefined);
}

/** The last model if it is kept completely; a sentence if it should be there and is not; undefined if there was none. */
export async function lastModel(place: Place): Promise<ModelChoice | string | undefined> {
  const known = recall(KEYS[place]);
  if (known === undefined) return undefined;
  const choice = choiceOf(known);
  if (choice === undefined) {
    remember(KEYS[place], undefined);
    return "What was remembered of the last model is damaged, so it is not reopened.";
  }
  if (choice.source === "builtin") return place === "chat" ? BUILTIN : undefined;
  if (recall(OPENING_KEYS[place]) === JSON.stringify(choice.source) && !(await isOpening(place))) {
    remember(OPENING_KEYS[place], undefined);
    return `${choice.label} is not reopened, because the page ended while it was loaded. Choose it again under “Stored on this device”.`;
  }
  const models = storedModels(await cache.list().catch(() => []));
  return models.find(({ source, complete }) => complete && JSON.stringify(source) === JSON.stringify(choice.source));
}

/** Does something that opens a last model, so that the next visit knows if the page ended during it. */
export async function whileOpening(place: Place, { source }: ModelChoice, open: () => Promise<void>): Promise<void> {
  const key = OPENING_KEYS[place];
  const marked = async (): Promise<void> => {
    const done = (): void => void remember(key, undefined);
    remember(key, JSON.stringify(source));
    // Whoever leaves the page has not crashed it.
    addEventListener("pagehide", done, { once: true });
    try {
      await open();
    } finally {
      removeEventListener("pagehide", done);
      done();
    }
  };
  await (locks ? locks.request(key, { mode: "shared" }, marked) : marked());
}

/** Whether a tab is reopening a model now. */
async function isOpening(place: Place): Promise<boolean> {
  const held = (await locks?.query())?.held ?? [];
  return held.some(({ name }) => name === OPENING_KEYS[place]);
}

/** What was remembered, if it is a choice. */
function choiceOf(known: unknown): ModelChoice | undefined {
  if (typeof known !== "object" || known === null) return undefined;
  const { label, source } = known as Record<string, unknown>;
  const isAddress = (it: unknown): it is string => typeof it === "string" && /^https?:\/\//.test(it);
  if (typeof label !== "string") return undefined;
  if (source === "builtin" || isAddress(source)) return { label, source };
  return Array.isArray(source) && source.length > 0 && source.length <= MAX_PARTS && source.every(isAddress) ? { label, source } : undefined;
}
