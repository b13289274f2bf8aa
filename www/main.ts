// The demo page: loads a model, connects picker, conversation, settings and status, and keeps the page's state.
//
// Elements that tests and scripts may rely on:
//
//     html[data-state]      loading, ready, generating, error (an error is shown) or empty (no model)
//     html[data-mode]       story (the model continues a text) or chat
//     #output               the messages: .message[data-role=user], .message[data-role=assistant]; their text is the message
//     #prompt #send #stop #clear
//     #model-builtin #model-file #model-url #model-url-load #cache-list
//     #model-name           the loaded model's name
//     #progress             shown while loading, with #progress-bar (<progress>), #progress-text and #cancel-load
//     #error[data-code]     shown with an error; #error-text, #error-detail, #error-retry, #error-close
//     #notice               notices, each .notice[data-code]
//     #settings             <details>; fields #setting-temperature, -topK, -topP, -minP, -repeatPenalty, -maxTokens, -seed,
//                           -contextLength, -device, -systemPrompt; #settings-reset, #settings-reload
//     #status-device[data-backend] #status-speed #status-memory, and all details in #facts
//     #panel #panel-toggle #panel-close   model and settings on narrow screens
//     #drop                 shown while files are dragged over the page
//     #theme                aria-pressed: dark
import { Model, type Progress } from "./tilewright/index.js";
import { Chat } from "./chat.js";
import { byId, formatBytes, formatSeconds, perFrame } from "./dom.js";
import { announce, clearNotices, hideError, isFatal, onErrorClosed, showError, showNotice } from "./messages.js";
import { showStored, startPicker } from "./picker.js";
import { SettingsForm } from "./settings.js";
import { BUILTIN, type ModelChoice } from "./sources.js";
import { showModel, showNothing } from "./status.js";

type State = "loading" | "ready" | "generating" | "error" | "empty";

let model: Model | undefined;
let choice: ModelChoice = BUILTIN;
let loading: { abort: AbortController; done: Promise<void> } | undefined;

function setState(state: State): void {
  document.documentElement.dataset["state"] = state;
}

/** The state when nothing is going on. */
function rest(): void {
  setState(model ? "ready" : "empty");
}

const settings = new SettingsForm(() => void load(choice));

const chat = new Chat({
  settings: () => settings.values(),
  began: () => setState("generating"),
  ended: (error, again) => {
    if (error === undefined) rest();
    else if (isFatal(error)) {
      dropModel();
      fail(error, () => void load(choice));
    } else fail(error, again);
    if (model) void showModel(model).catch(fail);
  },
});

function fail(error: unknown, again?: () => void): void {
  showError(error, again);
  setState("error");
}

function dropModel(): void {
  model?.free();
  model = undefined;
  byId("model-name").textContent = "none";
  chat.setModel(undefined);
  showNothing("–");
}

/** Loads a model in place of the one that is there. A load that is still going on is cancelled. */
async function load(next: ModelChoice): Promise<void> {
  const abort = new AbortController();
  const before = loading;
  before?.abort.abort();
  const done = (async () => {
    await before?.done;
    await chat.stop();
    // Another choice was made while this one waited.
    if (!abort.signal.aborted) await loadNow(next, abort);
  })();
  loading = { abort, done };
  await done;
}

async function loadNow(next: ModelChoice, abort: AbortController): Promise<void> {
  const sameModel = next === choice && model !== undefined;
  choice = next;
  setState("loading");
  hideError();
  clearNotices();
  // The old model goes first: both together may not fit the memory.
  dropModel();
  if (!sameModel) await chat.clear();
  showNothing("starting");
  closePanel();
  const progress = showProgress(next.label);
  try {
    const { device, contextLength } = settings.values();
    const options = {
      device,
      ...(contextLength === undefined ? {} : { contextLength }),
      signal: abort.signal,
      onProgress: progress.update,
      onNotice: showNotice,
    };
    settings.applied();
    model = next.source === "builtin" ? await Model.builtin(options) : await Model.load(next.source, options);
    // A model that arrived together with the click on "Cancel".
    abort.signal.throwIfAborted();
    byId("model-name").textContent = next.source === "builtin" ? next.label : model.info.name || next.label;
    chat.setModel(model);
    rest();
    announce(`${next.label} is ready.`);
    // On a phone, a focused prompt would open the keyboard.
    if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) byId("prompt").focus();
    await showModel(model);
  } catch (error) {
    dropModel();
    if (abort.signal.aborted) rest();
    else fail(error, () => void load(next));
  } finally {
    progress.end();
    if (loading?.abort === abort) loading = undefined;
  }
  await showStored().catch((error: unknown) => showNotice({ code: "no_storage", message: `Stored models cannot be listed: ${String(error)}` }));
}

const PHASES: Record<Progress["phase"], string> = {
  download: "Downloading",
  cache: "Loading from this device",
  file: "Reading",
  prepare: "Preparing",
};

/** Shows the progress of a load until `end` is called. */
function showProgress(label: string): { update: (progress: Progress) => void; end: () => void } {
  const section = byId("progress");
  const bar = byId<HTMLProgressElement>("progress-bar");
  let latest: Progress | undefined;
  const draw = perFrame(() => {
    byId("progress-title").textContent = `${latest ? PHASES[latest.phase] : "Opening"} ${label}`;
    if (!latest || latest.total === undefined || latest.phase === "prepare") {
      // A bar without a value shows that something goes on, not how far it is.
      bar.removeAttribute("value");
    } else {
      bar.max = latest.total;
      bar.value = latest.loaded;
    }
    byId("progress-text").textContent = latest ? progressText(latest) : "";
  });
  draw.now();
  section.hidden = false;
  announce(`Loading ${label}.`);
  return {
    update: (progress) => {
      latest = progress;
      draw.ask();
    },
    end: () => {
      draw.now();
      section.hidden = true;
    },
  };
}

function progressText({ phase, loaded, total, bytesPerSecond, secondsLeft }: Progress): string {
  if (phase === "prepare") return "The device gets ready";
  return [
    total === undefined ? formatBytes(loaded) : `${formatBytes(loaded)} of ${formatBytes(total)}`,
    ...(bytesPerSecond > 0 ? [`${formatBytes(bytesPerSecond)}/s`] : []),
    ...(secondsLeft === undefined ? [] : [`${formatSeconds(secondsLeft)} left`]),
  ].join(" · ");
}

// On narrow screens model and settings lie over the conversation.
const panelToggle = byId<HTMLButtonElement>("panel-toggle");

function openPanel(): void {
  document.documentElement.dataset["panel"] = "open";
  panelToggle.setAttribute("aria-expanded", "true");
  for (const behind of document.querySelectorAll("main, .top")) behind.setAttribute("inert", "");
  byId("panel-close").focus();
}

function closePanel(): void {
  if (document.documentElement.dataset["panel"] !== "open") return;
  delete document.documentElement.dataset["panel"];
  panelToggle.setAttribute("aria-expanded", "false");
  for (const behind of document.querySelectorAll("main, .top")) behind.removeAttribute("inert");
  panelToggle.focus();
}

panelToggle.addEventListener("click", openPanel);
byId("panel-close").addEventListener("click", closePanel);
// The panel is beside the conversation from here on, where nothing may stay inert.
matchMedia("(min-width: 60rem)").addEventListener("change", closePanel);

byId("cancel-load").addEventListener("click", () => {
  loading?.abort.abort();
  byId("prompt").focus();
});
onErrorClosed(() => {
  rest();
  chat.focusPrompt();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.documentElement.dataset["panel"] === "open") closePanel();
  else if (chat.isRunning) void chat.stop();
});

startPicker((next) => void load(next));
await load(BUILTIN);
// The page opens without a network from now on. Later than the model, which should not wait for it.
navigator.serviceWorker?.register("sw.js").catch((error: unknown) => console.info("this page will need a network to open:", error));
