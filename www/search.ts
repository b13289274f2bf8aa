// Search by meaning: texts become passages, passages vectors, and what suits a query best is found as one types.
//
//     passages   all that were added; the id of a passage's vector is its place in the list
//     index      the vectors of the first `nDone` of them, on the encoder's device
//     mixture    the same vectors once more, if there is a learned similarity for this encoder
import { Embedder, Index, type Hit } from "./tilewright/index.js";
import { byId, formatBytes, formatRate, formatSeconds, make } from "./dom.js";
import { announce, hideError, isFatal, showError, showNotice } from "./messages.js";
import { Mixture } from "./mixture.js";
import { passagesOf } from "./passages.js";
import { loadBegins, loadShown, Newest, showProgress } from "./progress.js";
import { SAMPLE } from "./sample.js";
import type { Settings } from "./settings.js";
import { located, type ModelChoice } from "./sources.js";
import { showFacts } from "./status.js";

/** Passages that are embedded together. Queries come in between, so that a search waits for a second at most. */
const GROUP = { webgpu: 64, cpu: 8 };
const N_RESULTS = 10;
/** Hits by cosine among which those of the mixture have a rank: as many as an index gives. */
const N_RANKS = 1024;
/** Milliseconds without a key before a search begins. */
const PAUSE_MS = 120;

/** A stretch of a text. */
interface Passage {
  text: string;
  source: string;
  /** Counted from 1 in its text. */
  number: number;
}

/** An encoder, the index beside it, and a mixture for it or why there is none. */
interface Loaded {
  embedder: Embedder;
  index: Index;
  mixture: Mixture | string;
}

/** What a search found. */
interface Found {
  query: string;
  hits: Hit[];
  /** By the mixture. */
  learned: Hit[];
  /** Each passage's place by cosine, from 1 on. */
  ranks: Map<number, number>;
}

const NOTHING: Found = { query: "", hits: [], learned: [], ranks: new Map() };

/** The search view. `changed` is called when a load has ended, which may have stored a model. */
export class Search {
  private readonly input = byId<HTMLTextAreaElement>("texts-input");
  private readonly query = byId<HTMLInputElement>("query");
  private readonly note = byId("results-note");
  private readonly results = byId("results");
  private readonly loads = new Newest();
  private readonly work = new Newest();
  private readonly queries = new Newest();
  private choice: ModelChoice | undefined;
  private loaded: Loaded | undefined;
  private passages: Passage[] = [];
  private nTexts = 0;
  private nDone = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly settings: () => Settings,
    private readonly changed: () => void,
  ) {
    byId("texts-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.addText(`Pasted text ${this.nTexts + 1}`, this.input.value);
      this.input.value = "";
      this.refresh();
    });
    this.input.addEventListener("input", () => this.refresh());
    const file = byId<HTMLInputElement>("texts-file");
    file.addEventListener("change", () => {
      void this.addFiles([...(file.files ?? [])]);
      // Choosing the same file again is a change, too.
      file.value = "";
    });
    byId("texts-sample").addEventListener("click", () => this.addText("Sample", SAMPLE));
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

  /** Stops embedding; what has a vector can be found. */
  async stop(): Promise<void> {
    await this.work.stop();
    this.query.focus();
  }

  /** Loads an encoder in place of the one that is there, and makes the vectors of all passages anew. */
  async load(choice: ModelChoice): Promise<void> {
    await this.loads.run((signal) => this.loadNow(choice, signal));
    this.refresh();
    this.changed();
    await this.indexAll();
  }

  /** Loads the encoder again, with settings that were changed. */
  reload(): void {
    if (this.choice) void this.load(this.choice);
  }

  /** Adds the texts of files. */
  async addFiles(files: File[]): Promise<void> {
    hideError();
    for (const file of files) {
      try {
        this.addText(file.name, await file.text());
      } catch (error) {
        showNotice({ code: "text", message: `This file was not added: ${error instanceof Error ? error.message : String(error)}` });
      }
    }
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
        device: this.settings().device,
        signal,
        onProgress: (it) => progress.update(loadShown(label, it)),
        onNotice: showNotice,
      });
      const index = await Index.create({ on: embedder, model: label });
      const mixture = await Mixture.load(embedder, signal);
      // An encoder that arrived together with the click on "Cancel".
      signal.throwIfAborted();
      this.loaded = { embedder, index, mixture };
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
    showFacts("search-facts-list", []);
    this.showResults(NOTHING);
    this.refresh();
    await gone;
  }

  private addText(name: string, text: string): void {
    const found = passagesOf(name, text);
    if (found.length === 0) {
      showNotice({ code: "text", message: `${name} holds no text.` });
      return;
    }
    this.nTexts += 1;
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
    hideError();
    this.showResults(NOTHING);
    await this.renew();
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
    await this.work.run((signal) => this.indexNow(signal));
    this.refresh();
    if (this.loaded) await this.showDevice(this.loaded).catch((error: unknown) => this.failed(error));
  }

  private async indexNow(signal: AbortSignal): Promise<void> {
    const { loaded } = this;
    if (!loaded || this.nDone === this.passages.length) return;
    const group = GROUP[loaded.embedder.device.backend];
    const startedAt = performance.now();
    const first = this.nDone;
    const shown = (done: number): { title: string; text: string; done: number; total: number } => {
      const seconds = (performance.now() - startedAt) / 1000;
      const [n, rate, total] = [done - first, (done - first) / seconds, this.passages.length];
      const left = n > 0 ? [`${formatRate(rate)} passages/s`, `${formatSeconds((total - done) / rate)} left`] : [];
      if (n > 0) byId("search-speed").textContent = `${formatRate(rate)} passages/s`;
      return { title: "Making passages searchable", text: [`${count(done)} of ${count(total)}`, ...left].join(" · "), done, total };
    };
    const progress = showProgress("search-progress", shown(first));
    this.refresh();
    try {
      while (this.nDone < this.passages.length) {
        const start = this.nDone;
        const texts = this.passages.slice(start, start + group).map(({ text }) => text);
        const vectors = await loaded.embedder.embed(texts, { signal, onProgress: ({ done }) => progress.update(shown(start + done)) });
        await loaded.index.append(vectors);
        if (loaded.mixture instanceof Mixture) await loaded.mixture.add(vectors.vectors);
        this.nDone = start + texts.length;
        progress.update(shown(this.nDone));
        this.refresh();
        // What is new may suit the query better.
        if (this.query.value.trim() !== "" && !this.queries.isGoing) this.searchNow();
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
    if (!loaded || query === "" || this.nDone === 0) {
      this.showResults(NOTHING);
      this.refresh();
      return;
    }
    const startedAt = performance.now();
    try {
      const vector = await loaded.embedder.embed(query, { signal });
      const { index, mixture } = loaded;
      const isLearned = mixture instanceof Mixture;
      const [ranked = []] = await index.search(vector, isLearned ? N_RANKS : N_RESULTS, { signal });
      const learned = isLearned ? await mixture.search(vector, N_RESULTS, signal) : [];
      const elapsed = formatSeconds((performance.now() - startedAt) / 1000);
      const hits = ranked.slice(0, N_RESULTS);
      this.showResults({ query, hits, learned, ranks: new Map(ranked.map(({ id }, i) => [id, i + 1])) });
      this.note.textContent = `The best ${count(hits.length)} of ${counted(loaded.index.length, "passage")} · ${elapsed}`;
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
      showError(error, () => void this.renew().then(() => this.indexAll()));
    }
  }

  private showResults({ query, hits, learned, ranks }: Found): void {
    const words = wordsOf(query);
    const rows = (hits: Hit[], marks: (hit: Hit) => HTMLElement[]): HTMLElement[] => hits.flatMap((hit) => {
      const passage = this.passages[hit.id];
      return passage ? [this.resultRow(passage, hit.id, marks(hit), words)] : [];
    });
    this.results.replaceChildren(...rows(hits, ({ score }) => {
      const rounded = score.toFixed(2);
      const meter = make("meter", { min: 0, max: 1, value: Math.max(0, score), ariaLabel: `Cosine ${rounded}` });
      return [meter, make("span", { className: "score" }, rounded)];
    }));
    byId("learned-results").replaceChildren(...rows(learned, ({ id, score }) => {
      const rank = ranks.get(id);
      const place = rank === undefined ? `not among the first ${count(N_RANKS)} by cosine` : `number ${count(rank)} by cosine`;
      return [make("span", { className: "score" }, score.toFixed(2)), make("span", { className: "rank" }, place)];
    }));
    // Last, so that who waits for the query's results finds both lists.
    this.results.dataset["query"] = query;
  }

  private resultRow({ text, source, number }: Passage, id: number, marks: HTMLElement[], words: RegExp | undefined): HTMLElement {
    const head = make("p", { className: "result-head" }, ...marks, make("span", { className: "source" }, `${source}, passage ${count(number)}`));
    const row = make("li", { className: "result" }, head, make("p", { className: "passage" }, ...marked(text, words)));
    const near = [this.passages[id - 1], this.passages[id + 1]].filter((it) => it?.source === source);
    if (near.length > 0) {
      const before = near.filter((it) => it && it.number < number).map((it) => make("p", {}, it?.text ?? ""));
      const after = near.filter((it) => it && it.number > number).map((it) => make("p", {}, it?.text ?? ""));
      row.append(make("details", {}, make("summary", {}, "Around it"), ...before, make("p", { className: "here" }, text), ...after));
    }
    row.dataset["id"] = String(id);
    return row;
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
    byId("texts-clear").hidden = passages.length === 0;
    byId("texts-sample").hidden = passages.length > 0;
    byId("texts-go-on").hidden = !this.loaded || isBusy || nDone === passages.length;
    byId("texts-summary").textContent = passages.length === 0 ? "none yet"
      : `${counted(passages.length, "passage")} of ${counted(nTexts, "text")}${nDone < passages.length ? `, ${count(nDone)} searchable` : ""}`;
    this.query.placeholder = !this.loaded ? "Waiting for an encoder…" : passages.length === 0 ? "Add a text first…" : "What are you looking for?";
    if (this.query.value.trim() === "" || nDone === 0) {
      this.note.textContent = nDone > 0 ? "Results appear as you type. They are found by meaning, not by the words themselves." : "";
    }
    if (!this.loaded) {
      byId("search-device").textContent = "–";
      byId("search-memory").textContent = "–";
      byId("search-speed").textContent = "–";
    }
  }
}

function count(n: number): string {
  return n.toLocaleString("en");
}

function counted(n: number, what: string): string {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

/** Matches the words of a query, and what begins with them; undefined if it has none that say something. */
function wordsOf(query: string): RegExp | undefined {
  const words = (query.match(/[\p{L}\p{N}]{3,}/gu) ?? []).filter((word) => !STOP_WORDS.has(word.toLowerCase()));
  return words.length === 0 ? undefined : new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.join("|")})[\\p{L}\\p{N}]*`, "giu");
}

/** Words that are everywhere and would be marked everywhere. */
const STOP_WORDS: ReadonlySet<string> = new Set(
  "about and are but can did does for from had has have how into its not than that the their them then there they this was were what when where which who why will with you your".split(" "),
);

/** A text with the words marked. */
function marked(text: string, words: RegExp | undefined): (Node | string)[] {
  if (!words) return [text];
  const parts: (Node | string)[] = [];
  let end = 0;
  for (const match of text.matchAll(words)) {
    parts.push(text.slice(end, match.index), make("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}
