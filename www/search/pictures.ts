// Pictures in the search: an encoder that embeds them in the space of texts finds them by words.
//
//     #pictures       shown with such an encoder, and with pictures: #pictures-file, -folder, -go-on, -clear and -summary
//     #picture-results[data-query]    a .picture-result[data-id] for each picture, best first, or as they were added without a query
//
// Pictures stay where they are, and their vectors last as long as the page.
import { Index, TilewrightError, type Embedder, type Hit } from "../tilewright/index.js";
import { byId, make } from "../dom.js";
import { announce, isFatal, showNotice } from "../messages.js";
import { count, counted } from "./passage.js";

/** Pictures that are embedded together. Queries come in between. */
const GROUP = { webgpu: 16, cpu: 2 };
/** Pictures that are shown, at most. */
const N_SHOWN = 48;

/** Files of pictures, by the ends of their names. */
export const PICTURE_FILE = /\.(png|jpe?g|webp|gif)$/i;

/** The search, as the pictures use it. */
export interface PicturesHost {
  /** There are others, which have no vectors yet. */
  added(): void;
  /** Ends work on them, and forgets them. */
  clear(): void;
  /** Embeds those that have none. */
  goOn(): void;
}

export class Pictures {
  /** All that were added and can be read, those with vectors first: the id of a vector is its picture's place. */
  #files: File[] = [];
  #nDone = 0;
  #index: Index | undefined;
  #embedder: Embedder | undefined;
  /** Addresses of those that are shown. */
  #addresses: string[] = [];

  constructor(private readonly host: PicturesHost) {
    for (const id of ["pictures-file", "pictures-folder"]) {
      const input = byId<HTMLInputElement>(id);
      input.addEventListener("change", () => {
        this.add([...(input.files ?? [])].filter(({ name }) => PICTURE_FILE.test(name)));
        // Choosing the same file again is a change, too.
        input.value = "";
      });
    }
    byId("pictures-go-on").addEventListener("click", () => host.goOn());
    byId("pictures-clear").addEventListener("click", () => host.clear());
  }

  get nDone(): number {
    return this.#nDone;
  }

  /** Whether some have no vectors yet and can have them. */
  get areWaiting(): boolean {
    return this.#embedder !== undefined && this.#nDone < this.#files.length;
  }

  add(files: readonly File[]): void {
    if (files.length === 0) {
      showNotice({ code: "picture", message: "There is no picture among these files: PNG, JPEG, WebP and GIF are read." });
      return;
    }
    this.#files = [...this.#files, ...files];
    announce(`${counted(files.length, "picture")} added.`);
    // Results need the room.
    for (const id of ["texts", "pictures"]) byId<HTMLDetailsElement>(id).open = false;
    if (this.#embedder === undefined) {
      showNotice({ code: "picture", message: "These pictures can be searched as soon as an encoder for pictures is loaded, such as SigLIP: the encoder that is loaded embeds texts alone, or there is none." });
    }
    this.host.added();
  }

  /** Uses an encoder, or none; all vectors are made anew. The old index was freed with its encoder. */
  use(embedder: Embedder | undefined): void {
    this.#embedder = embedder?.info.takesImages === true ? embedder : undefined;
    this.#index = undefined;
    this.#nDone = 0;
  }

  /** Forgets all. Must not run during `embed`. */
  clear(): void {
    this.#files = [];
    this.renew();
  }

  /** Makes all vectors anew, of the pictures that there are. */
  renew(): void {
    this.#index?.free();
    this.use(this.#embedder);
  }

  /** Makes the vectors of those that have none. Those that cannot be read are left out, and named in a notice. */
  async embed(signal: AbortSignal, progress: (done: number, total: number) => void): Promise<void> {
    const embedder = this.#embedder;
    if (embedder === undefined) return;
    const index = this.#index ??= await Index.create({ on: embedder });
    const group = GROUP[embedder.device.backend];
    const broken: string[] = [];
    while (this.#nDone < this.#files.length) {
      signal.throwIfAborted();
      const first = this.#nDone;
      const files = this.#files.slice(first, first + group);
      const found = await embedded(embedder, files, signal, broken);
      if (found.length > 0) await index.append(Float32Array.from(found.flatMap(({ vector }) => [...vector])));
      this.#files.splice(first, files.length, ...found.map(({ file }) => file));
      this.#nDone += found.length;
      progress(this.#nDone, this.#files.length);
    }
    if (broken.length > 0) {
      const others = broken.length > 1 ? ` So were ${counted(broken.length - 1, "more picture")}.` : "";
      showNotice({ code: "picture", message: `A picture was left out: ${broken[0]}.${others}` });
    }
  }

  /** Pictures by their cosine with a text's vector; none without any. */
  async search(vector: Float32Array, signal: AbortSignal): Promise<Hit[]> {
    if (this.#index === undefined || this.#nDone === 0) return [];
    const [hits = []] = await this.#index.search(vector, N_SHOWN, { signal });
    return hits;
  }

  /** Shows what was found; without a query the first pictures. */
  show(query: string, hits: readonly Hit[]): void {
    const list = byId("picture-results");
    this.#addresses.splice(0).forEach((address) => URL.revokeObjectURL(address));
    const shown = query === "" ? this.#files.slice(0, N_SHOWN).map((_, id) => ({ id, score: undefined })) : hits;
    list.replaceChildren(...shown.flatMap(({ id, score }) => {
      const file = this.#files[id];
      return file === undefined ? [] : [this.#row(file, id, score)];
    }));
    list.dataset["query"] = query;
  }

  #row(file: File, id: number, score: number | undefined): HTMLElement {
    const name = file.webkitRelativePath || file.name;
    const address = URL.createObjectURL(file);
    this.#addresses.push(address);
    const image = make("img", { src: address, alt: name, loading: "lazy", decoding: "async" });
    const marks = score === undefined ? [] : [make("span", { className: "score" }, score.toFixed(2))];
    const row = make("li", { className: "picture-result" }, image, make("p", { title: name }, ...marks, make("span", { className: "source" }, file.name)));
    row.dataset["id"] = String(id);
    return row;
  }

  /** Words and buttons follow from the state. */
  refresh(isBusy: boolean): void {
    const n = this.#files.length;
    byId("pictures").hidden = this.#embedder === undefined && n === 0;
    byId("pictures-clear").hidden = n === 0;
    byId("pictures-go-on").hidden = isBusy || !this.areWaiting;
    byId("pictures-summary").textContent = n === 0 ? "none yet" : `${counted(n, "picture")}${this.#nDone < n ? `, ${count(this.#nDone)} searchable` : ""}`;
  }
}

/** The vectors of files that can be read. The others are added to `broken`, with the reason. */
async function embedded(embedder: Embedder, files: readonly File[], signal: AbortSignal, broken: string[]): Promise<{ file: File; vector: Float32Array }[]> {
  try {
    const vectors = await embedder.embedImages(files, { signal });
    return files.flatMap((file, i) => {
      const vector = vectors.at(i);
      return vector === undefined ? [] : [{ file, vector }];
    });
  } catch (error) {
    if (signal.aborted || isFatal(error) || !(error instanceof TilewrightError)) throw error;
    if (files.length > 1) {
      const found = [];
      for (const file of files) found.push(...await embedded(embedder, [file], signal, broken));
      return found;
    }
    broken.push(`${files[0]?.name ?? ""}, ${error.message.replace(/^images\[0\]: /, "")}`);
    return [];
  }
}
