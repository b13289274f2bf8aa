// The view that listens: a file or the microphone becomes text with times. Loaded when the tab is first shown.
//
// Elements that tests and scripts may rely on:
//
//     html[data-listen]     empty (no model), loading, ready, hearing (a file) or recording
//     #speech-name          the loaded model's name
//     #listen-models        a button for each known model, of the view; #speech-models in the panel has the same
//     #listen-load          shown while a model is loaded, with #listen-load-bar, -text and -stop
//     #listen-record #listen-file #listen-language #listen-translate
//     #listen-progress      shown while a sound is heard, with #listen-progress-bar, -text and -stop
//     #listen-segments      an li for each segment, with its time and .text; .tail if it may change
//     #listen-copy #listen-txt #listen-srt #listen-vtt
//     #listen-note          what was heard, and how fast
//     #listen-device[data-backend] #listen-speed #listen-memory
import { Model, Transcriber, type KnownModel, type TimedText, type TranscribeOptions } from "../tilewright/index.js";
import { download } from "../chat/sidebar.js";
import { copy } from "../chat/turn-view.js";
import { byId, formatBytes, formatSeconds, make } from "../dom.js";
import { announce, hideError, isFatal, showError, showNotice } from "../messages.js";
import { loadBegins, loadShown, Newest, showProgress } from "../progress.js";
import type { Settings } from "../settings.js";
import { choiceOfAddress, located, type ModelChoice } from "../sources.js";
import { tellNotice } from "../start/device.js";
import { lastModel, rememberLast, whileOpening } from "../start/last.js";
import { showFacts } from "../status.js";
import { LiveTranscript } from "./live.js";
import { Recorder } from "./recorder.js";

/** Seconds of new sound after which a recording is heard again. */
const STEP = 1.5;
const LANGUAGE_NAMES = new Intl.DisplayNames(["en"], { type: "language" });

type State = "empty" | "loading" | "ready" | "hearing" | "recording";

/** The page, as this view uses it. */
export interface ListenHost {
  settings(): Settings;
  /** A load has ended, which may have stored a model. */
  changed(): void;
  /** Loads a model that was chosen here. */
  choose(choice: ModelChoice): void;
}

export class Listen {
  private readonly loads = new Newest();
  private readonly work = new Newest();
  private readonly list = byId<HTMLOListElement>("listen-segments");
  private readonly recordButton = byId<HTMLButtonElement>("listen-record");
  private readonly language = byId<HTMLSelectElement>("listen-language");
  private readonly translate = byId<HTMLInputElement>("listen-translate");
  private choice: ModelChoice | undefined;
  private transcriber: Transcriber | undefined;
  private recorder: Recorder | undefined;
  private segments: TimedText[] = [];
  private name = "transcript";
  /** A file that waits for a model. */
  private waiting: File | undefined;

  constructor(private readonly host: ListenHost) {
    const known = Model.list().filter(({ use }) => use === "speech");
    byId("listen-models").append(...known.slice(0, 3).map((model) => this.chip(model)));
    byId("speech-models").append(...known.map((model) => this.row(model)));
    byId("listen-form").addEventListener("submit", (event) => event.preventDefault());
    const file = byId<HTMLInputElement>("listen-file");
    file.addEventListener("change", () => {
      const [first] = file.files ?? [];
      if (first) this.hear(first);
      // Choosing the same file again is a change, too.
      file.value = "";
    });
    this.recordButton.addEventListener("click", () => void (this.recorder ? this.stop() : this.record()));
    byId("listen-load-stop").addEventListener("click", () => void this.loads.stop());
    byId("listen-progress-stop").addEventListener("click", () => void this.stop());
    byId("listen-copy").addEventListener("click", ({ currentTarget }) => void copy(this.text(), currentTarget as HTMLButtonElement, this.list));
    byId("listen-txt").addEventListener("click", () => download(`${this.name}.txt`, `${this.text()}\n`));
    for (const format of ["srt", "vtt"] as const) byId(`listen-${format}`).addEventListener("click", () => void this.save(format));
    addEventListener("pagehide", () => void this.recorder?.stop());
    this.refresh();
    void this.reopen();
  }

  /** Whether a sound is being heard. */
  get isBusy(): boolean {
    return this.work.isGoing;
  }

  private async reopen(): Promise<void> {
    const last = this.host.settings().reopen ? await lastModel("listen") : undefined;
    if (typeof last === "string") showNotice({ code: "start", message: last });
    else if (last !== undefined) {
      await whileOpening("listen", last, async () => {
        if (!this.transcriber && !this.loads.isGoing) await this.load(last);
      });
    }
  }

  private chip({ name, address, sizeBytes }: KnownModel): HTMLElement {
    const button = make("button", { type: "button", className: "chip" }, `Load ${name}, ${formatBytes(sizeBytes)} from Hugging Face`);
    button.addEventListener("click", () => this.host.choose(choiceOfAddress(address, document.baseURI)));
    return button;
  }

  private row({ name, address, sizeBytes }: KnownModel): HTMLElement {
    const what = `${formatBytes(sizeBytes)} from Hugging Face, ${/\.en$/.test(address) ? "for English" : "for 99 languages"}`;
    const button = make("button", { type: "button", className: "wide" }, make("strong", {}, name), make("span", {}, what));
    button.addEventListener("click", () => this.host.choose(choiceOfAddress(address, document.baseURI)));
    return button;
  }

  /** Loads a model in place of the one that is there. */
  async load(choice: ModelChoice): Promise<void> {
    await this.loads.run((signal) => this.loadNow(choice, signal));
    this.refresh();
    this.host.changed();
    const { waiting } = this;
    this.waiting = undefined;
    if (waiting && this.transcriber) this.hear(waiting);
  }

  /** Loads the model again, with settings that were changed. */
  reload(): void {
    if (this.choice) void this.load(this.choice);
  }

  private async loadNow(choice: ModelChoice, signal: AbortSignal): Promise<void> {
    await this.drop();
    this.choice = choice;
    hideError();
    const progress = showProgress("listen-load", loadBegins(choice.label));
    this.refresh("loading");
    let transcriber: Transcriber | undefined;
    try {
      const { label, source } = await located(choice, signal);
      if (source === "builtin") throw new Error("there is no built-in speech model");
      this.choice = { label, source };
      transcriber = await Transcriber.load(source, {
        device: this.host.settings().device,
        signal,
        onProgress: (it) => progress.update(loadShown(label, it)),
        onNotice: tellNotice,
      });
      // A model that arrived together with the click on "Cancel".
      signal.throwIfAborted();
      this.transcriber = transcriber;
      this.showLanguages(transcriber);
      rememberLast("listen", { label, source });
      announce(`${label} is ready.`);
      await this.showDevice(transcriber);
    } catch (error) {
      await transcriber?.[Symbol.asyncDispose]();
      this.transcriber = undefined;
      if (!signal.aborted) showError(error, () => void this.load(choice));
    } finally {
      progress.end();
    }
  }

  /** Lets the model go, and resolves when its memory is free. */
  private async drop(): Promise<void> {
    await this.stop();
    const gone = this.transcriber?.[Symbol.asyncDispose]();
    this.transcriber = undefined;
    showFacts("listen-facts-list", []);
    this.refresh();
    await gone;
  }

  private showLanguages({ info }: Transcriber): void {
    const isOne = info.languages.length === 1;
    const named = info.languages.map((code) => ({ code, name: nameOfLanguage(code) })).sort((a, b) => a.name.localeCompare(b.name));
    const before = this.language.value;
    this.language.replaceChildren(
      ...(isOne ? [] : [make("option", { value: "" }, "Detected")]), ...named.map(({ code, name }) => make("option", { value: code }, name)),
    );
    if (info.languages.includes(before)) this.language.value = before;
    if (!info.translates) this.translate.checked = false;
  }

  private get options(): TranscribeOptions {
    return {
      ...(this.language.value === "" ? {} : { language: this.language.value }),
      task: this.translate.checked ? "translate" : "transcribe",
    };
  }

  /** Writes down what is said in a file. */
  hear(file: File): void {
    hideError();
    if (!this.transcriber) {
      this.waiting = file;
      this.refresh();
      byId("listen-note").textContent = `${file.name} is heard as soon as there is a model.`;
      return;
    }
    void this.work.run((signal) => this.hearNow(file, signal)).then(() => this.refresh());
  }

  private async hearNow(file: File, signal: AbortSignal): Promise<void> {
    const { transcriber } = this;
    if (!transcriber) return;
    const title = `Listening to ${file.name}`;
    const progress = showProgress("listen-progress", { title, text: "" });
    const startedAt = performance.now();
    this.begin(file.name.replace(/\.[^.]*$/, ""));
    this.refresh("hearing");
    try {
      const found = await transcriber.transcribe(file, {
        ...this.options,
        signal,
        onSegment: (segment) => {
          this.segments.push(segment);
          this.show(this.segments, []);
          progress.update({ title, text: `${clock(segment.end)} so far` });
        },
      });
      this.segments = found.segments;
      this.show(found.segments, []);
      this.showResult(found.seconds, (performance.now() - startedAt) / 1000, found.language);
    } catch (error) {
      if (!signal.aborted) this.failed(error, () => this.hear(file));
    } finally {
      progress.end();
    }
  }

  /** Whether there is a model. */
  get isReady(): boolean {
    return this.transcriber !== undefined;
  }

  /** The text of what is said until the next call. */
  async dictate(): Promise<string> {
    if (this.recorder) {
      await this.stop();
      return "";
    }
    await this.record();
    return this.text().replaceAll("\n", " ");
  }

  /** Writes down what is said into the microphone, until `stop`. */
  private async record(): Promise<void> {
    const { transcriber } = this;
    if (!transcriber || this.isBusy) return;
    hideError();
    let recorder: Recorder;
    try {
      recorder = await Recorder.start();
    } catch (error) {
      showNotice({ code: "microphone", message: whyNoMicrophone(error) });
      return;
    }
    this.recorder = recorder;
    recorder.onGone(() => void this.stop());
    this.begin(`recording ${new Date().toISOString().slice(0, 16).replace(/[T:]/g, "-")}`);
    this.refresh("recording");
    announce("Recording.");
    await this.work.run((signal) => this.hearRecording(transcriber, recorder, signal));
    await recorder.stop();
    this.recorder = undefined;
    this.refresh();
  }

  /** Hears what is new again and again, and once more at the end. */
  private async hearRecording(transcriber: Transcriber, recorder: Recorder, signal: AbortSignal): Promise<void> {
    const live = new LiveTranscript();
    const { sampleRate } = recorder;
    const ended = new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve()));
    let [heardAt, computing] = [0, 0];
    const hear = async (): ReturnType<Transcriber["transcribe"]> => {
      const startedAt = performance.now();
      const found = await transcriber.transcribe(recorder.from(live.heardUntil), { ...this.options, sampleRate, prompt: live.prompt });
      computing += (performance.now() - startedAt) / 1000;
      return found;
    };
    try {
      while (!signal.aborted) {
        byId("listen-note").textContent = `Recording: ${clock(recorder.seconds)}`;
        if (recorder.seconds - heardAt < STEP) {
          await Promise.race([ended, new Promise((resolve) => setTimeout(resolve, 200))]);
          continue;
        }
        heardAt = recorder.seconds;
        live.add((await hear()).segments, heardAt);
        this.segments = live.segments;
        this.show(live.settled, live.tail);
      }
      // Nothing more is recorded while the rest is heard.
      await recorder.stop();
      const { language } = await hear().then((found) => {
        live.end(found.segments);
        return found;
      });
      this.segments = live.segments;
      this.show(live.settled, []);
      this.showResult(recorder.seconds, computing, language);
    } catch (error) {
      this.failed(error);
    }
  }

  /** Stops transcribing. The rest of a recording is transcribed first. */
  async stop(): Promise<void> {
    await this.work.stop();
  }

  private failed(error: unknown, again?: () => void): void {
    if (isFatal(error)) {
      showError(error, () => this.reload());
      void this.drop();
    } else {
      showError(error, again);
    }
  }

  private begin(name: string): void {
    this.name = name;
    this.segments = [];
    this.show([], []);
    byId("listen-note").textContent = "";
  }

  /** Shows segments, and those that may change. Rows that stay are left alone, so that a selection stays. */
  private show(settled: readonly TimedText[], tail: readonly TimedText[]): void {
    const isAtEnd = this.isAtEnd();
    const all = [...settled, ...tail];
    all.forEach(({ start, end, text }, i) => {
      const time = clock(start);
      const row = this.list.children[i] ?? this.list.appendChild(make("li", {}, make("time", {}), make("span", { className: "text" })));
      const [timed, said] = row.children as unknown as [HTMLTimeElement, HTMLElement];
      if (timed.textContent !== time) timed.textContent = time;
      timed.title = `${time} to ${clock(end)}`;
      if (said.textContent !== text.trim()) said.textContent = text.trim();
      row.classList.toggle("tail", i >= settled.length);
    });
    while (this.list.children.length > all.length) this.list.lastElementChild?.remove();
    byId("listen-actions").hidden = all.length === 0;
    if (isAtEnd) byId("listen-scroll").scrollTop = byId("listen-scroll").scrollHeight;
    byId("listen-intro").hidden = this.transcriber !== undefined || all.length > 0;
  }

  private isAtEnd(): boolean {
    const { scrollTop, scrollHeight, clientHeight } = byId("listen-scroll");
    return scrollHeight - scrollTop - clientHeight < 40;
  }

  private text(): string {
    return this.segments.map(({ text }) => text.trim()).join("\n");
  }

  private async save(format: "srt" | "vtt"): Promise<void> {
    const transcript = { segments: this.segments };
    try {
      const text = await (format === "srt" ? this.transcriber?.toSrt(transcript) : this.transcriber?.toVtt(transcript));
      if (text !== undefined) download(`${this.name}.${format}`, text);
    } catch (error) {
      this.failed(error);
    }
  }

  private showResult(seconds: number, took: number, language: string): void {
    const spoken = language === "" || this.transcriber?.info.languages.length === 1 ? [] : [nameOfLanguage(language)];
    const heard = this.segments.length === 0 ? ["Nobody speaks in it"] : [];
    byId("listen-note").textContent = [...heard, `${formatSeconds(seconds)} heard in ${formatSeconds(took)}`, ...spoken].join(" · ");
    byId("listen-speed").textContent = took > 0 ? `${(seconds / took).toFixed(1)} × real time` : "–";
    announce(this.segments.length === 0 ? "Nobody speaks in it." : "The transcript is ready.");
  }

  private async showDevice(transcriber: Transcriber): Promise<void> {
    const { device, info } = transcriber;
    const gpu = device.backend === "webgpu";
    const memory = await transcriber.memory();
    byId("listen-device").textContent = gpu ? `${device.name} (WebGPU)` : "CPU in WebAssembly";
    byId("listen-device").dataset["backend"] = device.backend;
    byId("listen-memory").textContent = formatBytes(gpu ? memory.totalBytes + memory.wasmHeapBytes : Math.max(memory.totalBytes, memory.wasmHeapBytes));
    showFacts("listen-facts-list", [
      ["Device", device.name],
      ["Runs on", gpu ? "GPU, through WebGPU" : "CPU, in WebAssembly"],
      ["Why", device.reason],
      ["Weights", formatBytes(memory.weightsBytes)],
      ["WASM heap", formatBytes(memory.wasmHeapBytes)],
      ["Model", info.name],
      ["Layers", `${info.nEncoderLayers} of the encoder, ${info.nDecoderLayers} of the decoder`],
      ["Languages", String(info.languages.length)],
      ["File", formatBytes(info.fileBytes)],
    ]);
  }

  private refresh(state: State = this.recorder ? "recording" : this.isBusy ? "hearing" : this.transcriber ? "ready" : this.loads.isGoing ? "loading" : "empty"): void {
    document.documentElement.dataset["listen"] = state;
    const isReady = state === "ready";
    const isRecording = state === "recording";
    byId("speech-name").textContent = this.transcriber?.info.name ?? "none";
    byId("listen-intro").hidden = this.transcriber !== undefined || this.segments.length > 0;
    this.recordButton.disabled = !isReady && !isRecording;
    for (const button of [this.recordButton, byId("dictate")]) button.ariaPressed = String(isRecording);
    byId("listen-record-text").textContent = isRecording ? "Stop" : "Record";
    byId<HTMLInputElement>("listen-file").disabled = isRecording || state === "hearing";
    this.language.disabled = !isReady || this.language.options.length < 2;
    this.translate.disabled = !isReady || this.transcriber?.info.translates !== true;
    for (const format of ["srt", "vtt"]) byId<HTMLButtonElement>(`listen-${format}`).disabled = this.transcriber === undefined || isRecording;
    if (!this.transcriber) {
      for (const id of ["listen-device", "listen-speed", "listen-memory"]) byId(id).textContent = "–";
      delete byId("listen-device").dataset["backend"];
    }
  }
}

function nameOfLanguage(code: string): string {
  try {
    return LANGUAGE_NAMES.of(code) ?? code;
  } catch {
    // Not a code that browsers know.
    return code;
  }
}

/** Minutes and seconds: 0:07, 12:30, 1:02:30. */
function clock(seconds: number): string {
  const whole = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (n: number): string => String(n).padStart(2, "0");
  return hours > 0 ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function whyNoMicrophone(error: unknown): string {
  const name = error instanceof DOMException ? error.name : "";
  if (name === "NotAllowedError") return "The microphone was not allowed. The browser's settings for this page change that.";
  if (name === "NotFoundError") return "There is no microphone.";
  return `The microphone cannot be used: ${error instanceof Error ? error.message : String(error)}`;
}
