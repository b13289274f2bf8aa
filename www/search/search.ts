// Search by meaning: texts become passages, passages vectors, and what suits a query best is found as one types.
//
//     passages   all that were added; the id of a passage's vector is its place in the list
//     index      the vectors of the first `nDone` of them, on the encoder's device
//     mixture    the same vectors once more, if there is a learned similarity for this encoder
//     pictures   with vectors in the space of the texts', if the encoder embeds them
//
// Passages and vectors are kept by kept.ts, and opened again when the view is first shown.
import { Embedder, Index, TilewrightError, type Model } from "../tilewright/index.js";
import { byId, formatBytes, formatRate, formatSeconds } from "../dom.js";
import { announce, hideError, isFatal, showError, showNotice } from "../messages.js";
import { passagesOf, TEXT_FILE } from "../passages.js";
import { loadBegins, loadShown, Newest, showProgress, type Shown } from "../progress.js";
import type { Settings } from "../settings.js";
import { located, type ModelChoice } from "../sources.js";
import { tellNotice } from "../start/device.js";
import { lastModel, rememberLast, whileOpening } from "../start/last.js";
import { showFacts } from "../status.js";
import { Answer } from "./answer.js";
import { DamagedError, forgetKept, forgetVectors, keepTexts, keepVectors, keptTexts, keptVectors, mayKeep, OtherVersionError, vectorsIn } from "./kept.js";
import { Mixture } from "./mixture.js";
import { count, counted, type Passage } from "./passage.js";
import { Pictures } from "./pictures.js";
import { N_RERANKED, Reranking } from "./reranking.js";
import { N_RANKS, NOTHING, showResults, type Found } from "./results.js";
import { SAMPLE } from "./sample.js";

/** Passages that are embedded together. Queries come in between, so that a search waits for a second at most. */
const GROUP = { webgpu: 64, cpu: 8 };
const N_RESULTS = 10;
/** Milliseconds without a key before a search begins. */
const PAUSE_MS = 120;

/** An encoder, the index beside it, and a mixture for it or why there is none. */
interface Loaded {
  embedder: Embedder;
  index: Index;
  mixture: Mixture | string;
}

/** What the search asks of the page. */
export interface SearchHost {
  settings(): Settings;
  /** A load has ended, which may have stored a model. */
  changed(): void;
  /** The model of the chat, which answers from passages. */
  chatModel(): Model | undefined;
  showChat(): void;
}

/** The search view. */
export class Search {
  private readonly input = byId<HTMLTextAreaElement>("texts-input");
  private readonly query = byId<HTMLInputElement>("query");
  private readonly note = byId("results-note");
  private readonly loads = new Newest();
  private readonly work = new Newest();
  private readonly queries = new Newest();
  private choice: ModelChoice | undefined;
  private loaded: Loaded | undefined;
  private passages: Passage[] = [];
  private nTexts = 0;
  private nDone = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly reranking: Reranking;
  private readonly answer: Answer;
  private readonly pictures: Pictures;
  /** Writes to the browser's storage, one after the other. */
  private keeping = Promise.resolve();
  /** Whether one of them waits, which will keep all that is there by then. */
  private isKeepWaiting = false;
  /** Whether the texts are others than those that are kept. */
  private areTextsNew = false;
  /** Resolves when the texts of the last visit are there. */
  private opening: Promise<void> | undefined;

  constructor(private readonly host: SearchHost) {
    this.reranking = new Reranking(() => host.settings(), () => {
      this.searchNow();
      host.changed();
    });
    this.answer = new Answer({
      model: () => host.chatModel(),
      showChat: () => host.showChat(),
      failed: (error) => showError(error),
    });
    this.pictures = new Pictures({
      added: () => {
        this.showPictures();
        if (!this.work.isGoing) void this.indexAll();
      },
      clear: () => void this.clearPictures(),
      goOn: () => void this.indexAll(),
    });
    byId("texts-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.input.value;
      this.input.value = "";
      void this.opening?.then(() => this.addTextAlone(`Pasted text ${this.nTexts + 1}`, text));
    });
    this.input.addEventListener("input", () => this.refresh());
    for (const id of ["texts-file", "texts-folder"]) {
      const file = byId<HTMLInputElement>(id);
      file.addEventListener("change", () => {
        void this.addFiles([...(file.files ?? [])]);
        // Choosing the same file again is a change, too.
        file.value = "";
      });
    }
    byId("texts-sample").addEventListener("click", () => void this.opening?.then(() => this.addTextAlone("Sample", SAMPLE)));
    byId("texts-clear").addEventListener("click", () => void this.clear());
    byId("texts-go-on").addEventListener("click", () => void this.indexAll());
    byId("query-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.searchNow();
    });
    this.query.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.searchNow(), PAUSE_MS);
    });
    byId("search-load-stop").addEventListener("click", () => void this.loads.stop());
    byId("search-progress-stop").addEventListener("click", () => void this.stop());
    this.refresh();
  }

  /** Whether passages are being embedded. */
  get isBusy(): boolean {
    return this.work.isGoing;
  }

  /** Stops an answer from passages. */
  async stopAnswer(): Promise<void> {
    await this.answer.stop();
  }

  /** Stops embedding; what has a vector can be found. */
  async stop(): Promise<void> {
    await this.work.stop();
    this.query.focus();
  }

  /** The view is shown: the first time, what is kept of the last visit is opened. */
  open(): void {
    if (this.opening !== undefined) return;
    this.opening = this.reopenTexts();
    void this.opening.then(() => this.reopenEncoder());
  }

  private async reopenTexts(): Promise<void> {
    try {
      const kept = await keptTexts();
      if (kept !== undefined) {
        this.passages = kept.passages;
        this.nTexts = kept.nTexts;
        byId<HTMLDetailsElement>("texts").open = false;
        this.refresh();
      }
    } catch (error) {
      await this.lost("texts", error);
    }
  }

  private async reopenEncoder(): Promise<void> {
    const last = this.loaded || this.loads.isGoing || !this.host.settings().reopen ? undefined : await lastModel("search");
    if (typeof last === "string") showNotice({ code: "start", message: last });
    else if (last !== undefined) {
      await whileOpening("search", last, async () => {
        // A person may have chosen an encoder meanwhile.
        if (!this.loaded && !this.loads.isGoing) await this.load(last);
      });
    }
  }

  /** What was kept cannot be used: says so, and begins anew. */
  private async lost(what: "texts" | "vectors", error: unknown): Promise<void> {
    if (error instanceof OtherVersionError) {
      showNotice({ code: "kept", message: `The ${what} that are kept for the search are not used, because ${error.message}. They stay as they are, and texts that are added here are not kept.` });
      return;
    }
    if (!(error instanceof DamagedError)) {
      showNotice({ code: "kept", message: `What is kept for the search cannot be read: ${error instanceof Error ? error.message : String(error)}` });
      return;
    }
    const then = what === "texts" ? "The texts have to be added again" : "They are made anew";
    showNotice({ code: "kept", message: `The ${what} that were kept for the search are not used, because ${error.message}. ${then}.` });
    await (what === "texts" ? forgetKept() : forgetVectors()).catch(() => {});
  }

  /** Keeps what is there in the browser's storage: the texts, and their vectors if there are any. */
  private keep(): Promise<void> {
    if (!this.isKeepWaiting) {
      this.isKeepWaiting = true;
      this.keeping = this.keeping.then(() => this.keepNow());
    }
    return this.keeping;
  }

  private async keepNow(): Promise<void> {
    this.isKeepWaiting = false;
    if (!mayKeep()) return;
    const { passages, nTexts, loaded, nDone, choice, areTextsNew } = this;
    this.areTextsNew = false;
    try {
      if (passages.length === 0) return await forgetKept();
      if (areTextsNew) await keepTexts({ nTexts, passages });
      if (loaded && choice && nDone > 0) await keepVectors({ encoder: choice.label, nDone, bytes: await loaded.index.save() }, passages);
    } catch (error) {
      this.areTextsNew ||= areTextsNew;
      const what = passages.length === 0 ? "What is kept of the texts was not cleared" : "These texts will not be here on the next visit";
      showNotice({ code: "kept", message: `${what}: ${error instanceof Error ? error.message : String(error)}` });
    }
  }

  /** The index with the vectors that are kept of this encoder, and how many; undefined without any. */
  private async keptIndex(embedder: Embedder, label: string): Promise<{ index: Index; bytes: Blob; nDone: number } | undefined> {
    try {
      const kept = await keptVectors(label, this.passages);
      if (kept === undefined) return undefined;
      const { bytes, nDone } = kept;
      const index = await Index.load(bytes, { on: embedder, model: label });
      if (index.info.nIds === nDone) return { index, bytes, nDone };
      index.free();
      throw new DamagedError("they are not as many as there should be");
    } catch (error) {
      // Of another encoder of this name there is nothing to tell.
      if (error instanceof TilewrightError && error.code === "index") return undefined;
      const isBroken = error instanceof TilewrightError && !isFatal(error);
      await this.lost("vectors", isBroken ? new DamagedError(`they are damaged (${error.message})`) : error);
      return undefined;
    }
  }

  /** Loads an encoder in place of the one that is there, and makes the vectors of all passages anew. */
  async load(choice: ModelChoice): Promise<void> {
    await this.loads.run((signal) => this.loadNow(choice, signal));
    this.refresh();
    this.host.changed();
    await this.indexAll();
  }

  /** Loads the encoder again, with settings that were changed. */
  reload(): void {
    if (this.choice) void this.load(this.choice);
  }

  /** Adds pictures, which an encoder for pictures finds by words. */
  addPictures(files: File[]): void {
    hideError();
    this.pictures.add(files);
  }

  private async clearPictures(): Promise<void> {
    await Promise.all([this.work.stop(), this.queries.stop()]);
    this.pictures.clear();
    this.showPictures();
    await this.indexAll();
  }

  /** Shows the pictures that there are, for the query if there is one. */
  private showPictures(): void {
    if (this.query.value.trim() === "" || this.pictures.nDone === 0) this.pictures.show("", []);
    else this.searchNow();
    this.refresh();
  }

  /** Adds the texts of files. */
  async addFiles(files: File[]): Promise<void> {
    hideError();
    // What is kept comes first in the list.
    await this.opening;
    for (const file of files) {
      // Of a folder, only texts count.
      if (file.webkitRelativePath !== "" && !TEXT_FILE.test(file.name)) continue;
      try {
        this.addText(file.webkitRelativePath || file.name, await file.text());
      } catch (error) {
        showNotice({ code: "text", message: `This file was not added: ${error instanceof Error ? error.message : String(error)}` });
      }
    }
    // Once for all of them: each time, all texts are written.
    if (this.areTextsNew) await this.keep();
  }

  private async loadNow(choice: ModelChoice, signal: AbortSignal): Promise<void> {
    await this.drop();
    this.choice = choice;
    hideError();
    const progress = showProgress("search-load", loadBegins(choice.label));
    this.refresh();
    let embedder: Embedder | undefined;
    try {
      const { label, source } = await located(choice, signal);
      if (source === "builtin") throw new Error("there is no built-in encoder");
      this.choice = { label, source };
      embedder = await Embedder.load(source, {
        device: this.host.settings().device,
        signal,
        onProgress: (it) => progress.update(loadShown(label, it)),
        onNotice: tellNotice,
      });
      const kept = await this.keptIndex(embedder, label);
      const index = kept?.index ?? await Index.create({ on: embedder, model: label });
      const mixture = await Mixture.load(embedder, signal);
      if (kept !== undefined && mixture instanceof Mixture) await mixture.add(await vectorsIn(kept.bytes));
      // An encoder that arrived together with the click on "Cancel".
      signal.throwIfAborted();
      this.loaded = { embedder, index, mixture };
      this.pictures.use(embedder);
      this.nDone = kept?.nDone ?? 0;
      await this.finishMixture(this.loaded);
      rememberLast("search", { label, source });
      announce(`${label} is ready.`);
    } catch (error) {
      await embedder?.[Symbol.asyncDispose]();
      this.loaded = undefined;
      if (!signal.aborted) showError(error, () => void this.load(choice));
    } finally {
      progress.end();
    }
  }

  /** Lets the encoder go, and resolves when its memory is free. */
  private async drop(): Promise<void> {
    await Promise.all([this.work.stop(), this.queries.stop()]);
    const gone = this.loaded?.embedder[Symbol.asyncDispose]();
    this.loaded = undefined;
    this.nDone = 0;
    this.pictures.use(undefined);
    showFacts("search-facts-list", []);
    this.show(NOTHING);
    this.refresh();
    await gone;
  }

  private addTextAlone(name: string, text: string): void {
    this.addText(name, text);
    if (this.areTextsNew) void this.keep();
  }

  /** Adds a text, which the caller keeps. */
  private addText(name: string, text: string): void {
    const found = passagesOf(name, text);
    if (found.length === 0) {
      showNotice({ code: "text", message: `${name} holds no text.` });
      return;
    }
    this.nTexts += 1;
    this.areTextsNew = true;
    // One by one: a call cannot have a hundred thousand arguments.
    for (const [i, text] of found.entries()) this.passages.push({ text, source: name, number: i + 1 });
    announce(`${name}: ${counted(found.length, "passage")}.`);
    // Results need the room more than what was pasted does.
    byId<HTMLDetailsElement>("texts").open = false;
    // On a phone, a focused field would open the keyboard.
    if (matchMedia("(hover: hover)").matches) this.query.focus();
    this.refresh();
    if (!this.work.isGoing) void this.indexAll();
  }

  /** Forgets all texts. */
  private async clear(): Promise<void> {
    await Promise.all([this.work.stop(), this.queries.stop()]);
    this.passages = [];
    this.nTexts = 0;
    this.areTextsNew = true;
    hideError();
    this.show(NOTHING);
    await this.renew();
    await this.keep();
    byId<HTMLDetailsElement>("texts").open = true;
    this.refresh();
    this.input.focus();
  }

  /** An empty index and an empty mixture in the place of those that are there. */
  private async renew(): Promise<void> {
    this.nDone = 0;
    if (!this.loaded || !this.choice) return;
    const { embedder, index, mixture } = this.loaded;
    index.free();
    try {
      this.loaded = { embedder, index: await Index.create({ on: embedder, model: this.choice.label }), mixture };
      if (mixture instanceof Mixture) await mixture.renew();
    } catch (error) {
      this.failed(error);
    }
  }

  /** Makes the vectors of all passages that have none. */
  private async indexAll(): Promise<void> {
    const before = this.nDone;
    await this.work.run(async (signal) => {
      await this.indexNow(signal);
      await this.embedPictures(signal);
    });
    this.refresh();
    if (this.nDone > before) void this.keep();
    if (this.loaded) await this.showDevice(this.loaded).catch((error: unknown) => this.failed(error));
  }

  /** The progress of vectors after the first `first`, whose rate is shown beside the device. */
  private countFrom(title: string, unit: string, first: number): (done: number, total: number) => Shown {
    const startedAt = performance.now();
    return (done, total) => {
      const [n, seconds] = [done - first, (performance.now() - startedAt) / 1000];
      const rate = `${formatRate(n / seconds)} ${unit}/s`;
      const left = n > 0 ? [rate, `${formatSeconds((total - done) * seconds / n)} left`] : [];
      if (n > 0) byId("search-speed").textContent = rate;
      return { title, text: [`${count(done)} of ${count(total)}`, ...left].join(" · "), done, total };
    };
  }

  /** Searches again after more vectors were made, since the new ones may suit the query better. */
  private showMore(): void {
    this.refresh();
    if (this.query.value.trim() !== "" && !this.queries.isGoing) this.searchNow();
  }

  private async embedPictures(signal: AbortSignal): Promise<void> {
    if (signal.aborted || !this.pictures.areWaiting) return;
    const title = "Making pictures searchable";
    const shown = this.countFrom(title, "pictures", this.pictures.nDone);
    const progress = showProgress("search-progress", { title, text: "" });
    this.refresh();
    try {
      await this.pictures.embed(signal, (done, total) => {
        progress.update(shown(done, total));
        this.showMore();
      });
      announce(`${counted(this.pictures.nDone, "picture")} can be searched.`);
    } catch (error) {
      if (!signal.aborted) this.failed(error);
    } finally {
      progress.end();
    }
    this.showPictures();
  }

  private async indexNow(signal: AbortSignal): Promise<void> {
    const { loaded } = this;
    if (!loaded || this.nDone === this.passages.length) return;
    const group = GROUP[loaded.embedder.device.backend];
    const shown = this.countFrom("Making passages searchable", "passages", this.nDone);
    const progress = showProgress("search-progress", shown(this.nDone, this.passages.length));
    this.refresh();
    try {
      while (this.nDone < this.passages.length) {
        const start = this.nDone;
        const texts = this.passages.slice(start, start + group).map(({ text }) => text);
        const vectors = await loaded.embedder.embed(texts, { signal, onProgress: ({ done }) => progress.update(shown(start + done, this.passages.length)) });
        await loaded.index.append(vectors);
        if (loaded.mixture instanceof Mixture) await loaded.mixture.add(vectors.vectors);
        this.nDone = start + texts.length;
        progress.update(shown(this.nDone, this.passages.length));
        this.showMore();
      }
      announce(`${counted(this.nDone, "passage")} can be searched.`);
    } catch (error) {
      if (!signal.aborted) return this.failed(error);
    } finally {
      progress.end();
    }
    await this.finishMixture(loaded);
  }

  /** Makes searchable in the mixture what can be found in the index. */
  private async finishMixture({ mixture }: Loaded): Promise<void> {
    if (!(mixture instanceof Mixture)) return;
    try {
      await mixture.flush();
    } catch (error) {
      return this.failed(error);
    }
    if (this.query.value.trim() !== "") this.searchNow();
  }

  private searchNow(): void {
    clearTimeout(this.timer);
    const query = this.query.value.trim();
    void this.queries.run((signal) => this.search(query, signal));
  }

  private async search(query: string, signal: AbortSignal): Promise<void> {
    const { loaded } = this;
    if (!loaded || query === "" || (this.nDone === 0 && this.pictures.nDone === 0)) {
      this.show(NOTHING);
      this.pictures.show("", []);
      this.refresh();
      return;
    }
    const startedAt = performance.now();
    try {
      const vector = await loaded.embedder.embed(query, { signal });
      const pictures = await this.pictures.search(vector, signal);
      this.pictures.show(query, pictures);
      if (this.nDone === 0) {
        this.show({ ...NOTHING, query });
        this.note.textContent = `The best ${count(pictures.length)} of ${counted(this.pictures.nDone, "picture")} · ${formatSeconds((performance.now() - startedAt) / 1000)}`;
        return;
      }
      const { index, mixture } = loaded;
      const isLearned = mixture instanceof Mixture;
      const [ranked = []] = await index.search(vector, isLearned ? N_RANKS : N_RERANKED, { signal });
      const learned = isLearned ? await mixture.search(vector, N_RESULTS, signal) : [];
      const ranks = new Map(ranked.map(({ id }, i) => [id, i + 1]));
      const told = (n: number): string => `The best ${count(n)} of ${counted(index.length, "passage")} · ${formatSeconds((performance.now() - startedAt) / 1000)}`;
      const hits = ranked.slice(0, N_RESULTS);
      this.show({ query, hits, isReranked: false, learned, ranks });
      this.note.textContent = told(hits.length);
      if (!this.reranking.isOn) return;
      const better = await this.reranking.rerank(query, ranked.slice(0, N_RERANKED), this.passages, N_RESULTS, signal);
      if (signal.aborted || better === undefined) return;
      this.show({ query, hits: better, isReranked: true, learned, ranks });
      this.note.textContent = `${told(better.length)}, reranked`;
    } catch (error) {
      // What was aborted has made room for a newer search.
      if (!signal.aborted) this.failed(error);
    }
  }

  /** Says what went wrong. An index is lost with its device, so trying again begins with a new one. */
  private failed(error: unknown): void {
    if (isFatal(error)) {
      showError(error, () => this.reload());
      void this.drop();
    } else {
      showError(error, () => {
        this.pictures.renew();
        void this.renew().then(() => this.indexAll());
      });
    }
  }

  /** Shows what was found, and offers an answer from it. */
  private show(found: Found): void {
    showResults(found, this.passages);
    this.answer.offer(found.query, found.hits.flatMap(({ id }) => {
      const passage = this.passages[id];
      return passage === undefined ? [] : [{ passage, id }];
    }));
  }

  /** What runs the encoder, and what it says of itself. */
  private async showDevice({ embedder, index, mixture }: Loaded): Promise<void> {
    const { device, info } = embedder;
    const gpu = device.backend === "webgpu";
    const memory = await embedder.memory();
    byId("search-device").textContent = gpu ? `${device.name} (WebGPU)` : "CPU in WebAssembly";
    byId("search-device").dataset["backend"] = device.backend;
    byId("search-memory").textContent = formatBytes(gpu ? memory.totalBytes + index.info.sizeBytes + memory.wasmHeapBytes : memory.wasmHeapBytes);
    showFacts("search-facts-list", [
      ["Device", device.name],
      ["Runs on", gpu ? "GPU, through WebGPU" : "CPU, in WebAssembly"],
      ["Why", device.reason],
      ["Weights", formatBytes(memory.weightsBytes)],
      ["Vectors", formatBytes(index.info.sizeBytes)],
      ...(mixture instanceof Mixture ? [["Learned similarity", `${formatBytes(mixture.info.sizeBytes)} of components`] as const] : []),
      ["WASM heap", formatBytes(memory.wasmHeapBytes)],
      ["Model", this.choice?.label ?? info.name],
      ["Architecture", info.architecture],
      ["Layers", String(info.nLayers)],
      ["Width", String(info.dims)],
      ["Reads", `${count(info.maxTokens)} tokens of a text`],
      ["Pooling", info.pooling],
      ["Weight types", info.weightTypes.join(", ")],
      ["File", formatBytes(info.fileBytes)],
    ]);
  }

  /** Words and buttons follow from the state. */
  private refresh(): void {
    const { passages, nDone, nTexts } = this;
    const isBusy = this.work.isGoing;
    const state = this.loads.isGoing && !this.loaded ? "loading" : !this.loaded ? "empty" : isBusy ? "indexing" : "ready";
    document.documentElement.dataset["search"] = state;
    byId("encoder-name").textContent = this.loaded ? (this.choice?.label ?? "none") : "none";
    byId("search-intro").hidden = this.loaded !== undefined || state === "loading";
    const mixture = this.loaded?.mixture;
    const isLearned = mixture instanceof Mixture;
    document.documentElement.toggleAttribute("data-learned", isLearned);
    byId("results-title").hidden = byId("learned").hidden = !isLearned;
    byId("learned-note").textContent = typeof mixture === "string" ? mixture : "";
    byId<HTMLButtonElement>("texts-add").disabled = this.input.value.trim() === "";
    this.pictures.refresh(isBusy);
    const nSearchable = nDone + this.pictures.nDone;
    byId("texts-clear").hidden = passages.length === 0;
    byId("texts-sample").hidden = passages.length > 0;
    byId("texts-go-on").hidden = !this.loaded || isBusy || nDone === passages.length;
    byId("texts-summary").textContent = passages.length === 0 ? "none yet"
      : `${counted(passages.length, "passage")} of ${counted(nTexts, "text")}${nDone < passages.length ? `, ${count(nDone)} searchable` : ""}`;
    this.query.placeholder = !this.loaded ? "Waiting for an encoder…" : passages.length === 0 && this.pictures.nDone === 0 ? (this.loaded.embedder.info.takesImages ? "Add pictures first…" : "Add a text first…") : "What are you looking for?";
    if (this.query.value.trim() === "" || nSearchable === 0) {
      this.note.textContent = nSearchable > 0 ? "Results appear as you type. They are found by meaning, not by the words themselves." : "";
    }
    if (!this.loaded) {
      byId("search-device").textContent = "–";
      byId("search-memory").textContent = "–";
      byId("search-speed").textContent = "–";
    }
  }
}
