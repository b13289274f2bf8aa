// The demo page: loads a model, connects picker, conversation, settings and status, and keeps the page's state.
//
// Elements that tests and scripts may rely on:
//
//     html[data-version]    which version of the page this is, from scripts/build-web; the service worker tells them apart by it
//     html[data-view]       chat, search, listen, kernels or inside: #tab-chat and so on, #view-chat and so on; listen/, kernels/ and inside/ have
//                           their own lists
//     html[data-state]      of the chat: loading, ready, generating, error (an error is shown) or empty (no model)
//     html[data-mode]       story (the model continues a text) or chat
//     #output               the messages: .message[data-role=user], .message[data-role=assistant]; their text is the message. Each .turn
//                           has .actions with .note, .branches and buttons by data-action: before, next, copy, regenerate, edit, delete
//     #prompt #send #stop   and #clear, which begins a new conversation; the old one stays in the list
//     #dictate              speaks the prompt, with the speech model of the view “Listen”; pressed while it records
//     #attach #attachments  files that go with the prompt, each .attachment; #camera takes a picture on a phone; html[data-images] if the model
//                           takes pictures, which may also be pasted and dropped
//     #conversations        the list, a drawer on narrow screens: #conversations-toggle, -close, -import, -export, #conversation-search, and
//                           #conversation-list with an li[data-id] for each, which has a data-problem if it cannot be read
//     #conversation-title #conversation-menu #conversation-system #conversation-tools #tools-schema #export-json #export-markdown
//     #conversation-delete
//     #context-meter        and #status-context[data-kept]: tokens of the context in use, and of those the ones of a kept session
//     #model-builtin #model-hub #model-file #model-folder #model-url #model-url-load #cache-list: for the view that is shown
//     #model-name           the loaded model's name
//     #start                the first screen: #start-models with .start-model[data-fits], and #start-device
//     html[data-search]     of the search: loading, ready, indexing or empty (no encoder)
//     #encoder-name         the loaded encoder's name
//     #search-load          shown while an encoder is loaded, with #search-load-bar, -text and -stop
//     #texts-input #texts-add #texts-file #texts-folder #texts-sample #texts-go-on #texts-clear #texts-summary
//     #pictures             of the search, with #picture-results: see search/pictures.ts; #model-pictures and #search-intro-pictures load an encoder
//     #search-progress      shown while passages or pictures are embedded, with #search-progress-bar, -text and -stop
//     #query #results-note  the query; #results[data-query] has a .result[data-id] for each passage that was found, best first
//     #answer               #answer-ask, #answer-stop, #answer-text with .cite[data-passage], #answer-note; #rerank-on #rerank-url #rerank-note
//     #search-device[data-backend] #search-speed #search-memory, and all details in #search-facts
//     #progress             shown while loading, with #progress-bar (<progress>), #progress-text and #cancel-load
//     #error[data-code]     shown with an error; #error-text, #error-detail, #error-retry, #error-close
//     #notice               notices, each .notice[data-code]
//     #settings             <details>; fields #setting-temperature, -topK, -topP, -minP, -repeatPenalty, -presencePenalty, -frequencyPenalty,
//                           -maxTokens, -seed, -contextLength, -device, -systemPrompt, -probabilities, -reopen; #settings-reset, #settings-reload
//     #status-device[data-backend] #status-speed #status-memory, and all details in #facts
//     #panel #panel-toggle #panel-close   model and settings on narrow screens
//     #drop                 shown while files are dragged over the page
//     #theme                aria-pressed: dark
import { Model, TilewrightError, type LoadOptions, type ModelSource, type Progress } from "./tilewright/index.js";
import { Chat } from "./chat.js";
import { byId, isComposing } from "./dom.js";
import type { Listen } from "./listen/listen.js";
import { announce, clearNotices, hideError, isFatal, onErrorClosed, showError, showNotice } from "./messages.js";
import { showStored, startPicker } from "./picker.js";
import { loadBegins, loadShown, Newest, showProgress } from "./progress.js";
import { Search } from "./search/search.js";
import { SettingsForm } from "./settings.js";
import { BUILTIN, located, type ModelChoice } from "./sources.js";
import { RateWatch, tellNotice } from "./start/device.js";
import { refreshFirstScreen, showFirstDevice, startFirstScreen } from "./start/first-screen.js";
import { lastModel, rememberLast, whileOpening } from "./start/last.js";
import { readLink } from "./start/link.js";
import { showModel, showNothing } from "./status.js";
import { currentView, showView, startViews } from "./views.js";

type State = "loading" | "ready" | "generating" | "error" | "empty";

let model: Model | undefined;
/** What was chosen last; undefined until anything was. */
let choice: ModelChoice | undefined;
const loads = new Newest();

function setState(state: State): void {
  document.documentElement.dataset["state"] = state;
}

/** The state when nothing is going on. */
function rest(): void {
  setState(model ? "ready" : "empty");
}

const settings = new SettingsForm(() => {
  closePanel();
  if (currentView() === "search") search.reload();
  else if (currentView() === "listen") listen?.reload();
  else void load(choice ?? BUILTIN);
});

const search = new Search({
  settings: () => settings.values(),
  changed: () => void listStored(),
  chatModel: () => model,
  showChat: () => showView("chat"),
});

const chat = new Chat({
  settings: () => settings.values(),
  began: () => setState("generating"),
  ended: (error, again) => {
    if (error === undefined) rest();
    else if (isFatal(error)) {
      void dropModel();
      fail(error, () => void load(choice ?? BUILTIN));
    } else fail(error, again);
    if (model) void showModel(model).catch(fail);
    void refreshInside();
  },
});

function fail(error: unknown, again?: () => void): void {
  showError(error, again);
  setState("error");
}

let leaving = Promise.resolve();

/** Lets the model go. Resolves when its memory is free, and that of those before it. */
function dropModel(): Promise<void> {
  const gone = model?.[Symbol.asyncDispose]();
  leaving = leaving.then(() => gone);
  model = undefined;
  byId("model-name").textContent = "none";
  chat.setModel(undefined);
  showNothing("–");
  void refreshInside();
  return leaving;
}

/** Loads a model in place of the one that is there. A load that is still going on is cancelled. */
async function load(next: ModelChoice): Promise<void> {
  choice = next;
  await loads.run(async (signal) => {
    await Promise.all([chat.stop(), search.stopAnswer()]);
    // Another choice was made while this one waited.
    if (!signal.aborted) await loadNow(next, signal);
  });
  await listStored();
}

async function listStored(): Promise<void> {
  await refreshFirstScreen();
  await showStored().catch((error: unknown) => showNotice({ code: "no_storage", message: `Stored models cannot be listed: ${String(error)}` }));
}

async function loadNow(next: ModelChoice, signal: AbortSignal): Promise<void> {
  setState("loading");
  hideError();
  clearNotices();
  // The old model goes first: both together may not fit the memory.
  await dropModel();
  showNothing("starting");
  const progress = showProgress("progress", loadBegins(next.label));
  const rate = new RateWatch();
  try {
    const { device, contextLength } = settings.values();
    const options = {
      device,
      ...(contextLength === undefined ? {} : { contextLength }),
      signal,
      onProgress: (it: Progress) => {
        rate.see(it);
        progress.update(loadShown(next.label, it));
      },
      onNotice: tellNotice,
    };
    settings.applied();
    const { label, source, vision } = await located(next, signal);
    if (source === "builtin") model = await Model.builtin(options);
    else model = await loadSeeing(source, settings.values().pictures ? vision : undefined, options);
    // A model that arrived together with the click on "Cancel".
    signal.throwIfAborted();
    byId("model-name").textContent = source === "builtin" ? label : model.info.name || label;
    chat.setModel(model);
    rememberLast("chat", { label, source });
    showFirstDevice(model.device);
    // Before the view is seen: what is above it would move it.
    progress.end();
    rest();
    announce(`${label} is ready.`);
    // On a phone, a focused prompt would open the keyboard.
    if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) byId("prompt").focus();
    await showModel(model);
    await refreshInside();
  } catch (error) {
    await dropModel();
    if (signal.aborted) rest();
    else fail(error, () => void load(next));
  } finally {
    rate.end();
    progress.end();
  }
}

/** Loads a model with its vision encoder, or without one that cannot be used. */
async function loadSeeing(source: ModelSource, vision: ModelChoice["vision"], options: LoadOptions): Promise<Model> {
  if (vision === undefined) return Model.load(source, options);
  try {
    return await Model.load(source, { ...options, vision: vision === true ? true : { source: vision } });
  } catch (error) {
    if (!(error instanceof TilewrightError)) throw error;
    const model = await Model.load(source, options);
    showNotice({ code: "no_pictures", message: `this model takes no pictures here: ${error.message}` });
    return model;
  }
}

/** The view of what goes on inside, once it was opened. */
let inside: typeof import("./inside/inside.js") | undefined;

async function refreshInside(): Promise<void> {
  await inside?.showInside(model).catch(fail);
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
  void loads.stop();
  byId("prompt").focus();
});
onErrorClosed(() => {
  if (document.documentElement.dataset["state"] === "error") rest();
  if (currentView() === "search") byId("query").focus();
  else if (currentView() === "listen") byId("listen-record").focus();
  else chat.focusPrompt();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || isComposing(event)) return;
  if (document.documentElement.dataset["panel"] === "open") closePanel();
  else if (currentView() === "search" && search.isBusy) void search.stop();
  else if (currentView() === "listen" && listen?.isBusy === true) void listen.stop();
  else if (chat.isRunning) void chat.stop();
});

/** Loads what a view needs beyond the others when it is first shown; without a network it may not be there. */
function onDemand(load: () => Promise<void>): () => void {
  return () => void load().catch((error: unknown) => showError(error, () => onDemand(load)()));
}

/** The view that listens, once it was opened. */
let listen: Listen | undefined;

async function openListen(): Promise<Listen> {
  const { Listen } = await import("./listen/listen.js");
  return listen ??= new Listen({ settings: () => settings.values(), changed: () => void listStored(), choose });
}

byId("dictate").addEventListener("click", async () => {
  try {
    const it = await openListen();
    if (it.isReady) {
      const said = await it.dictate();
      if (said !== "") chat.addToPrompt(said);
      return;
    }
    showView("listen");
    showNotice({ code: "microphone", message: "The chat hears with the speech model of this view: load one, then go back to the chat." });
  } catch (error) {
    showError(error);
  }
});

startViews({
  search: () => search.open(),
  listen: onDemand(async () => void await openListen()),
  kernels: onDemand(async () => void await import("./kernels/kernels.js")),
  inside: onDemand(async () => {
    inside = await import("./inside/inside.js");
    await refreshInside();
  }),
});
function choose(next: ModelChoice): void {
  closePanel();
  if (currentView() === "listen") void openListen().then((it) => it.load(next)).catch(showError);
  else void (currentView() === "search" ? search.load(next) : load(next));
}
startPicker(choose, {
  texts: (texts) => {
    showView("search");
    void search.addFiles(texts);
  },
  images: (images) => {
    // Those of a folder are too many for a message.
    if (currentView() === "search" || images.some(({ webkitRelativePath }) => webkitRelativePath !== "")) {
      showView("search");
      search.addPictures(images);
      return;
    }
    showView("chat");
    chat.attach(images);
  },
  sound: (sound) => {
    showView("listen");
    void openListen().then((it) => it.hear(sound)).catch(showError);
  },
});

/** What a link to the page asks for, else the model of the last visit, else the built-in one. */
async function begin(): Promise<void> {
  const link = readLink(location.search, document.baseURI);
  if (link.prompt !== undefined) chat.fillPrompt(link.prompt);
  if (link.address !== undefined) byId<HTMLInputElement>("model-url").value = link.address;
  const { choice: wanted } = link;
  if (wanted?.source === "builtin") return load(wanted);
  // Whoever wrote the link does not decide that gigabytes are downloaded here.
  if (wanted !== undefined) {
    const message = `The link asks for the model “${wanted.label}” of Hugging Face. What is not stored on this device is downloaded, which may be gigabytes.`;
    showNotice({ code: "link", message }, { label: "Load it", run: () => void load(wanted) });
  }
  const last = settings.values().reopen ? await lastModel("chat") : undefined;
  let problem = link.problem ?? (typeof last === "string" ? last : undefined);
  if (typeof last === "object") {
    await whileOpening("chat", last, async () => {
      if (choice === undefined) await load(last);
    });
  }
  // A person who has chosen a model meanwhile wants that one.
  if (model !== undefined || loads.isGoing || (choice !== undefined && choice !== last)) return;
  if (typeof last === "object") {
    problem ??= `${last.label} could not be reopened, so the story model is here instead. What went wrong: ${byId("error-detail").textContent || "it was cancelled"}`;
  }
  await load(BUILTIN);
  if (problem !== undefined) showNotice({ code: "start", message: problem });
}

await Promise.all([begin(), startFirstScreen((next) => void load(next))]);
// The page opens without a network from now on. Later than the model, which should not wait for it.
navigator.serviceWorker?.register("sw.js").catch((error: unknown) => console.info("this page will need a network to open:", error));
