// The page of diagrams: what a server measures now, and what benches measured before. Data comes from the block in the page (a report),
// from `?data=ADDRESS` of the same origin, from files that are opened or dropped, and from `/metrics`.
//
// Elements that tests and scripts may rely on:
//
//     html[data-live]      waiting, live, none or locked; absent in a report
//     #panel-ID            a panel, with data-state "shown" or "empty"
//     #error               what is wrong with a file or an address
//     #source              what is shown
//     #open #key-form #key
import { byId, make } from "../dom.js";
import { read, type Data, type Part } from "./data.js";
import { Live, type State } from "./live.js";
import { deviceOf, PANELS, type Panel } from "./panels.js";

/** No bench writes more. */
const MOST_BYTES = 50_000_000;

const data: Data = {};
let since: number | undefined;

function panelOf(panel: Panel): HTMLElement {
  const section = make("section", { id: `panel-${panel.id}`, className: "panel" });
  section.setAttribute("aria-labelledby", `title-${panel.id}`);
  return section;
}

function show(): void {
  for (const panel of PANELS) {
    const drawn = panel.draw(data);
    const empty = (): Node[] => [make("p", { className: "empty" }, "No data so far. It comes from ", make("code", {}, panel.command), ".")];
    const section = byId(`panel-${panel.id}`);
    section.dataset["state"] = drawn === undefined ? "empty" : "shown";
    section.replaceChildren(make("h2", { id: `title-${panel.id}` }, panel.title), make("p", { className: "help" }, panel.help), ...(drawn ?? empty()));
  }
  const names = Object.keys(data);
  const date = since === undefined ? [] : [new Date(since * 1000).toISOString().slice(0, 10)];
  byId("source").textContent = names.length === 0 ? "Open what a bench wrote with --json, or drop it here." : [deviceOf(data) ?? "", ...date, names.join(", ")].filter((text) => text !== "").join(" · ");
}

function add(parts: readonly Part[]): void {
  for (const part of parts) Object.assign(data, { [part.bench]: part });
}

function fail(message: string): void {
  const error = byId("error");
  error.textContent = message;
  error.hidden = message === "";
}

/** Shows what a text holds; what is wrong with it is told with its name. */
function take(name: string, text: string): void {
  try {
    const { parts, time } = read(text);
    add(parts);
    since = time ?? since;
  } catch (error) {
    fail(`${name}: ${(error as Error).message}`);
  }
}

async function openFiles(files: readonly File[]): Promise<void> {
  fail("");
  for (const file of files) {
    if (file.size > MOST_BYTES) fail(`${file.name}: it has more than ${MOST_BYTES / 1e6} MB`);
    else take(file.name, await file.text());
  }
  show();
}

/** The address in `?data=`, which must be of this origin. */
async function openAddress(given: string): Promise<void> {
  const url = URL.parse(given, location.href);
  if (url?.origin !== location.origin) return fail(`data: ${given} is not an address of this server`);
  try {
    const response = await fetch(url, { cache: "no-store" });
    if (!response.ok) return fail(`${url.pathname}: status ${response.status}`);
    take(url.pathname, await response.text());
  } catch (error) {
    fail(`${url.pathname}: ${(error as Error).message}`);
  }
  show();
}

function watch(): void {
  const section = byId("panel-live");
  const live = new Live(byId("live"), (state: State) => {
    document.documentElement.dataset["live"] = state;
    section.dataset["state"] = state === "live" ? "shown" : "empty";
    byId("live-none").hidden = state !== "none" && state !== "waiting";
    byId("key-form").hidden = state !== "locked";
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    live.unlock(byId<HTMLInputElement>("key").value);
  });
  document.documentElement.dataset["live"] = "waiting";
  live.start();
}

function start(): void {
  byId("panels").append(...PANELS.map(panelOf));
  const block = document.getElementById("data");
  if (block !== null) {
    // A report holds all that it shows, and asks nobody.
    take("this report", block.textContent ?? "");
    byId("panel-live").remove();
  } else {
    watch();
    const given = new URLSearchParams(location.search).get("data");
    if (given !== null) void openAddress(given);
  }
  show();
  const input = byId<HTMLInputElement>("open");
  input.addEventListener("change", () => {
    void openFiles([...(input.files ?? [])]);
    input.value = "";
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    void openFiles([...(event.dataTransfer?.files ?? [])]);
  });
}

start();
