// What the page tells people: errors, notices, and words for screen readers.
import { TilewrightError, type ErrorCode, type Notice } from "./tilewright/index.js";
import { byId, make } from "./dom.js";

/** One sentence for each code that says what happened, and one that says what to do. */
const SENTENCES: Record<ErrorCode, string> = {
  format: "This file is damaged, or is not a model in GGUF or safetensors format. Downloading it again may help.",
  unsupported: "This model uses something that tilewright does not support. It chats with models of the Llama family, searches with encoders of the BERT family, and listens with Whisper.",
  config: "The model's configuration is incomplete or contradicts itself.",
  adapter: "This adapter is for another model, or is none.",
  out_of_memory: "The graphics device has no memory left for this. Close other pages, choose a smaller context length, or the CPU in the settings.",
  memory: "The model needs more memory than there is. A smaller model, a smaller context length or stronger quantisation (Q4_0) may fit.",
  option: "One of the settings is outside of what the model can use.",
  constraint: "The text was to match something that cannot be used, or that the model cannot write.",
  context_full: "The conversation no longer fits into the model's context. Clear it, or choose a larger context length in the settings.",
  busy: "Too many texts are waiting already. Try again in a moment.",
  stopped: "The engine that was writing this is gone. Load the model again.",
  tokenizer: "The model's vocabulary contradicts itself, so text cannot be turned into tokens.",
  template: "The model's chat template cannot be used for these messages. Removing the system prompt may help.",
  device_lost: "The graphics device stopped working and could not be started again. Load the model again, or choose the CPU in the settings.",
  gpu: "The graphics device reported an error. Choosing the CPU in the settings may help.",
  no_adapter: "This browser found no graphics device. Choose “automatic” or the CPU in the settings.",
  limit: "The model is larger than this graphics device allows. Choose the CPU in the settings, or a smaller model.",
  non_finite: "The model computed something that is not a number, so its text would be nonsense. The file may be damaged.",
  truncated: "The file ends too early: it was not downloaded or copied completely.",
  shape: "The model's parts do not fit together. The file may be damaged.",
  operand: "The engine was given a value that it cannot compute with.",
  index: "These vectors do not fit the ones that are searched. Load the model again.",
  network: "The server could not be reached, or the connection broke off. You may be offline, or it may not allow other sites to load its files (CORS). What has arrived is kept.",
  http: "The server has no such file, or does not hand it out. Check the address, and whether the file needs a login.",
  not_a_sound: "This file is in no format of sound that this browser knows, or it is damaged. WAV, MP3, M4A and FLAC usually work.",
  not_a_model: "There is a web page at this address and not a model. Use the address of the file itself.",
  range: "The file changed on the server, or the server sent the wrong part of it. Try again.",
  digest: "The file is another one than the hub names, so it was not used. Try again; if that does not help, the server's copy is damaged.",
  quota: "The browser's storage is full. Delete a stored model, and try again.",
  storage: "The browser's storage failed, or a stored file was damaged. Try again: damaged files are downloaded anew.",
  aborted: "This was cancelled.",
  worker_crashed: "The engine stopped unexpectedly, probably for lack of memory. Load the model again.",
  webgpu_unavailable: "This browser has no WebGPU here. Choose “automatic” or the CPU in the settings.",
  model_not_found: "There is no model of this name here.",
  disposed: "This model is no longer loaded. Load it again.",
  internal: "The engine made a mistake. Loading the model again may help; a report with the technical message certainly does.",
  unsupported_platform: "This browser lacks something that tilewright needs. A current Chrome, Edge, Firefox or Safari has it.",
};

/** Codes after which the model cannot be used any more. */
const FATAL: ReadonlySet<ErrorCode> = new Set<ErrorCode>(["device_lost", "worker_crashed", "disposed"]);

/** Whether the loaded model is of no more use after this error. */
export function isFatal(error: unknown): boolean {
  return error instanceof TilewrightError && FATAL.has(error.code);
}

const section = byId("error");
const closeButton = byId<HTMLButtonElement>("error-close");
const retryButton = byId<HTMLButtonElement>("error-retry");
let retry: (() => void) | undefined;
let onClose: () => void = () => {};

/** Shows an error. `again`, if given, is what the button "Try again" does. */
export function showError(error: unknown, again?: () => void): void {
  const known = error instanceof TilewrightError;
  const code = known ? error.code : "unknown";
  section.dataset["code"] = code;
  byId("error-text").textContent = known ? SENTENCES[error.code] : "Something unexpected went wrong in this page.";
  byId("error-code").textContent = code;
  byId("error-detail").textContent = error instanceof Error ? error.message : String(error);
  byId<HTMLDetailsElement>("error-detail").closest("details")?.removeAttribute("open");
  retry = again;
  retryButton.hidden = again === undefined;
  section.hidden = false;
}

export function hideError(): void {
  section.hidden = true;
  delete section.dataset["code"];
}

/** Says what happens when an error or a notice is dismissed: where one goes on. */
export function onErrorClosed(then: () => void): void {
  onClose = then;
}

closeButton.addEventListener("click", () => {
  hideError();
  onClose();
});
retryButton.addEventListener("click", () => {
  hideError();
  retry?.();
});

/** What can be done about a notice. */
interface Remedy {
  label: string;
  run(): void;
}

/** Adds a message that can be dismissed. The same message is not shown twice; of messages with a remedy, only the last one is. */
export function showNotice(notice: Pick<Notice, "message"> & { code: string }, remedy?: Remedy): void {
  const list = byId("notice");
  const text = sentence(notice.message);
  if (remedy) list.querySelector(`[data-code="${notice.code}"]`)?.remove();
  for (const shown of list.children) if (shown.firstChild?.textContent === text) return;
  const close = make("button", { type: "button", className: "quiet", ariaLabel: "Dismiss this notice" }, "Dismiss");
  const item = make("div", { className: "notice" }, make("p", {}, text), close);
  item.dataset["code"] = notice.code;
  if (remedy) {
    const button = make("button", { type: "button", className: "quiet" }, remedy.label);
    button.addEventListener("click", () => {
      item.remove();
      remedy.run();
    });
    close.before(button);
  }
  close.addEventListener("click", () => {
    item.remove();
    onClose();
  });
  list.append(item);
}

/** The package's messages are parts of sentences; an address at the beginning stays as it is. */
function sentence(message: string): string {
  const start = /^https?:/.test(message) ? message : message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

/** Takes away notices of a model. Those of conversations and of the search stay, and so does the question whether to load the model of a link. */
export function clearNotices(): void {
  for (const notice of byId("notice").querySelectorAll(".notice:not([data-code=conversations], [data-code=deleted], [data-code=kept], [data-code=link], [data-code=text], [data-code=picture], [data-code=microphone])")) notice.remove();
}

/** Has screen readers speak a text once they are free. */
export function announce(text: string): void {
  const region = byId("announce");
  // A few stay, because a reader that is still busy takes up only what is there when it gets to it.
  while (region.childElementCount > 3) region.firstElementChild?.remove();
  region.append(make("p", {}, text));
}
