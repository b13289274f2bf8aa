// A second look at what a search found: a cross-encoder reads the query together with each passage.
//
//     #rerank-on      turns it on; #rerank-url has the address, #rerank-note says what is there
import { Reranker, type Hit } from "../tilewright/index.js";
import { byId } from "../dom.js";
import { loadBegins, loadShown, showProgress, Newest } from "../progress.js";
import type { Settings } from "../settings.js";
import { choiceOfAddress, located } from "../sources.js";
import { tellNotice } from "../start/device.js";
import { recall, remember } from "../start/storage.js";
import { counted, type Passage } from "./passage.js";

/** Passages by cosine that are read again. */
export const N_RERANKED = 30;
const ADDRESS_KEY = "tilewright.reranker";
const ADDRESS = "cross-encoder/ms-marco-MiniLM-L6-v2";

export class Reranking {
  private readonly toggle = byId<HTMLInputElement>("rerank-on");
  private readonly address = byId<HTMLInputElement>("rerank-url");
  private readonly note = byId("rerank-note");
  private readonly loads = new Newest();
  private reranker: Reranker | undefined;

  /** `changed` is called when passages are put in order in another way from now on. */
  constructor(private readonly settings: () => Settings, private readonly changed: () => void) {
    const known = recall(ADDRESS_KEY);
    this.address.value = typeof known === "string" ? known : ADDRESS;
    byId("rerank-form").addEventListener("submit", (event) => event.preventDefault());
    this.toggle.addEventListener("change", () => void this.renew());
    this.address.addEventListener("change", () => {
      if (this.toggle.checked) void this.renew();
    });
    byId("search-load-stop").addEventListener("click", () => void this.loads.stop());
  }

  get isOn(): boolean {
    return this.reranker !== undefined;
  }

  /** The hits in the order of the cross-encoder, with its scores; undefined if it was turned off meanwhile, or failed, which is told here. */
  async rerank(query: string, hits: readonly Hit[], passages: readonly Passage[], k: number, signal: AbortSignal): Promise<Hit[] | undefined> {
    const { reranker } = this;
    const texts = hits.map(({ id }) => passages[id]?.text ?? "");
    try {
      const ranked = await reranker?.rerank(query, texts, { topK: k, signal });
      return ranked?.flatMap(({ index, score }) => {
        const hit = hits[index];
        return hit === undefined ? [] : [{ id: hit.id, score }];
      });
    } catch (error) {
      if (!signal.aborted && reranker === this.reranker) {
        this.refuse(error);
        await this.drop();
      }
      return undefined;
    }
  }

  /** Lets the cross-encoder go. What still waits for it fails. */
  private async drop(): Promise<void> {
    const gone = this.reranker;
    this.reranker = undefined;
    await gone?.[Symbol.asyncDispose]();
  }

  private refuse(error: unknown): void {
    this.toggle.checked = false;
    this.note.textContent = `This cross-encoder cannot be used: ${error instanceof Error ? error.message : String(error)}.`;
  }

  /** Loads what the form says, or lets go what is there. */
  private async renew(): Promise<void> {
    await this.loads.run(async (signal) => {
      await this.drop();
      this.note.textContent = "";
      if (this.toggle.checked) await this.load(signal);
    });
    this.changed();
  }

  private async load(signal: AbortSignal): Promise<void> {
    const typed = this.address.value.trim();
    try {
      const { label, source } = await located(choiceOfAddress(typed, document.baseURI), signal);
      if (source === "builtin") throw new Error("there is no built-in cross-encoder");
      const progress = showProgress("search-load", loadBegins(label));
      try {
        this.reranker = await Reranker.load(source, {
          device: this.settings().device, signal, onProgress: (it) => progress.update(loadShown(label, it)), onNotice: tellNotice,
        });
      } finally {
        progress.end();
      }
      remember(ADDRESS_KEY, typed);
      this.note.textContent = `${label} reads the first ${counted(N_RERANKED, "passage")} again.`;
    } catch (error) {
      this.refuse(error);
      if (signal.aborted) this.note.textContent = "";
    }
  }
}
