// The views of the page: tabs, of which the arrow keys choose one, and the part of the address behind # that names it.
import { byId } from "./dom.js";

const VIEWS = ["chat", "search", "listen", "kernels", "inside"] as const;
export type View = (typeof VIEWS)[number];

/** What is done when a view is shown. */
export type Opened = Partial<Record<View, () => void>>;

let opened: Opened = {};
const changes = new EventTarget();

/** Has something done whenever another view, or the same one, is to be shown. */
export function onView(done: () => void): void {
  changes.addEventListener("view", done);
}

const tab = (view: View): HTMLElement => byId(`tab-${view}`);

/** The view that is shown. */
export function currentView(): View {
  return VIEWS.find((view) => view === document.documentElement.dataset["view"]) ?? "chat";
}

/** Shows a view. */
export function showView(view: View): void {
  document.documentElement.dataset["view"] = view;
  for (const it of VIEWS) {
    const isShown = it === view;
    tab(it).ariaSelected = String(isShown);
    // Tab goes to the chosen tab, the arrows from there to the others.
    tab(it).tabIndex = isShown ? 0 : -1;
    byId(`view-${it}`).hidden = !isShown;
  }
  history.replaceState(history.state, "", view === "chat" ? location.pathname + location.search : `#${view}`);
  opened[view]?.();
  changes.dispatchEvent(new Event("view"));
}

/** Makes the tabs work, and shows the view that the address names. */
export function startViews(whenOpened: Opened): void {
  opened = whenOpened;
  for (const view of VIEWS) {
    tab(view).addEventListener("click", () => showView(view));
  }
  byId("tabs").addEventListener("keydown", (event) => {
    const at = VIEWS.indexOf(currentView());
    const last = VIEWS.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    const view = next === undefined ? undefined : VIEWS[next];
    if (view === undefined) return;
    event.preventDefault();
    showView(view);
    tab(view).focus();
  });
  // Other names in the address are places in a view, such as those of the links that skip to the prompt and the query.
  const named = (): View | undefined => VIEWS.find((view) => location.hash === `#${view}`);
  addEventListener("hashchange", () => {
    const view = location.hash === "" ? "chat" : named();
    if (view !== undefined) showView(view);
  });
  showView(named() ?? "chat");
}
