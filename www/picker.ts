// The ways to choose a model: built in, file, drag and drop, address, stored on this device. It chooses; main.ts loads.
import { cache, Model } from "./tilewright/index.js";
import { byId, formatBytes, make } from "./dom.js";
import { showError } from "./messages.js";
import { TEXT_FILE } from "./passages.js";
import { PICTURE_FILE } from "./search/pictures.js";
import { BUILTIN, choiceOfAddress, choiceOfFiles, MINILM, SIGLIP, storedModels, type ModelChoice, type StoredModel } from "./sources.js";

const MODEL_FILE = /\.(gguf|safetensors|json)$/;
/** The folder of one of sentence-transformers' modules. */
const MODULE_FOLDER = /^\d+_[A-Z]\w*$/;

/** Who takes other files that are dropped. */
interface Readers {
  texts(files: File[]): void;
  images(files: File[]): void;
  sound(file: File): void;
}

/** Connects every way to choose a model with `choose`. */
export function startPicker(choose: (choice: ModelChoice) => void, read: Readers): void {
  for (const id of ["model-builtin", "inside-intro-builtin"]) byId(id).addEventListener("click", () => choose(BUILTIN));
  for (const id of ["model-hub", "search-intro-hub"]) byId(id).addEventListener("click", () => choose(MINILM));
  for (const id of ["model-pictures", "search-intro-pictures"]) byId(id).addEventListener("click", () => choose(SIGLIP));

  const chooseFiles = (files: File[]): void => {
    const choice = choiceOfFiles(files);
    if (choice) choose(choice);
  };
  for (const id of ["model-file", "model-folder"]) {
    const input = byId<HTMLInputElement>(id);
    input.addEventListener("change", () => {
      chooseFiles([...(input.files ?? [])]);
      // Choosing the same file again is a change, too.
      input.value = "";
    });
  }
  startDrop((files) => {
    // A model's folder may have a vocab.txt and a README.md.
    const isModel = files.some(({ name }) => /\.(gguf|safetensors)$/.test(name));
    const texts = files.filter(({ name }) => TEXT_FILE.test(name));
    const images = files.filter(({ name, type }) => type.startsWith("image/") || PICTURE_FILE.test(name));
    const [sound, ...others] = files.filter(({ type }) => /^(audio|video)\//.test(type));
    if (sound !== undefined && others.length + 1 === files.length) read.sound(sound);
    else if (images.length > 0 && images.length === files.length) read.images(images);
    else if (texts.length > 0 && !isModel) {
      read.texts(texts);
      if (images.length > 0) read.images(images);
    }
    else chooseFiles(files);
  });

  for (const { name, address, sizeBytes } of Model.list().filter(({ use }) => use === "chat")) {
    byId("known-models").append(make("option", { value: address.replace(/^hf:/, ""), label: `${name}, ${formatBytes(sizeBytes)}` }));
  }
  const address = byId<HTMLInputElement>("model-url");
  byId("url-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (address.value.trim() === "") {
      address.focus();
      return;
    }
    try {
      const choice = choiceOfAddress(address.value, document.baseURI);
      address.setCustomValidity("");
      choose(choice);
    } catch {
      address.setCustomValidity("This is no address of a file. It begins with https:// and ends in .gguf, or in / for a folder; on Hugging Face, owner/name is enough, and owner/name:Q8_0 chooses among GGUF files.");
      address.reportValidity();
    }
  });
  address.addEventListener("input", () => address.setCustomValidity(""));

  onStoredChoice = choose;
}

let onStoredChoice: (choice: ModelChoice) => void = () => {};

let listings = 0;

/** Shows what is stored now. */
export async function showStored(): Promise<void> {
  const listing = ++listings;
  const models = storedModels(await cache.list());
  // What another call has begun to list since is newer.
  if (listing !== listings) return;
  byId("cached").hidden = models.length === 0;
  byId("cache-list").replaceChildren(...models.map(storedRow));
}

function storedRow(model: StoredModel): HTMLElement {
  const size = formatBytes(model.storedBytes);
  const load = make(
    "button",
    { type: "button", className: "wide" },
    make("strong", {}, model.label),
    make("span", {}, model.complete ? size : `${size} so far; loading it goes on from there`),
  );
  load.addEventListener("click", () => onStoredChoice(model));
  const remove = make("button", { type: "button", className: "quiet", ariaLabel: `Delete ${model.label} from this device` }, "Delete");
  remove.addEventListener("click", async () => {
    remove.disabled = true;
    try {
      for (const url of model.urls) await cache.delete(url);
    } catch (error) {
      showError(error);
    }
    await showStored();
    // The button is gone, and the focus would be lost with it.
    (byId("cache-list").querySelector("button") ?? byId("model-url")).focus();
  });
  const row = make("li", {}, load, remove);
  row.title = model.urls.join("\n");
  return row;
}

/** Files and folders may be dropped anywhere on the page. */
function startDrop(choose: (files: File[]) => void): void {
  const target = byId("drop");
  const hasFiles = (event: DragEvent): boolean => event.dataTransfer?.types.includes("Files") ?? false;
  const hide = (): void => {
    target.hidden = true;
  };
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    target.hidden = false;
  });
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    if (event.dataTransfer) event.dataTransfer.dropEffect = "copy";
  });
  // Entering a child leaves its parent; only leaving the window has nothing on the other side.
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) hide();
  });
  addEventListener("drop", async (event) => {
    hide();
    if (!event.dataTransfer || !hasFiles(event)) return;
    event.preventDefault();
    try {
      choose(await droppedFiles(event.dataTransfer));
    } catch (error) {
      showError(error);
    }
  });
}

/** The files that were dropped; of a folder, those that belong to a model, or are texts or pictures. */
async function droppedFiles(transfer: DataTransfer): Promise<File[]> {
  // Entries have to be taken before the first `await`: the list is empty afterwards.
  const files = [...transfer.files];
  const folders = [...transfer.items]
    .map((item) => item.webkitGetAsEntry())
    .filter((entry): entry is FileSystemDirectoryEntry => entry?.isDirectory ?? false);
  const [folder] = folders;
  if (!folder) return files;
  const inside = await filesIn(folder);
  if (inside.length === 0) throw new Error(`the folder ${folder.name} holds no .gguf, .safetensors or .json file, no text and no picture`);
  return inside;
}

/** Folders in folders, as deep as people look; a link may lead back to where it stands. */
const DEEPEST = 12;

/** The files of a folder that are read: those of a model in it and in its modules' folders, and texts and pictures in all folders that are not hidden. */
async function filesIn(folder: FileSystemDirectoryEntry, inside: File[] = [], depth = 0): Promise<File[]> {
  const reader = folder.createReader();
  const isModels = depth === 0 || (depth === 1 && MODULE_FOLDER.test(folder.name));
  // A reader gives a hundred entries at most in one go, and none at the end.
  for (;;) {
    const entries = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (entries.length === 0) return inside;
    for (const entry of entries) {
      if (entry.isDirectory) {
        const isHidden = entry.name.startsWith(".") || entry.name === "node_modules";
        if (!isHidden && depth < DEEPEST) await filesIn(entry as FileSystemDirectoryEntry, inside, depth + 1);
      } else if (TEXT_FILE.test(entry.name) || PICTURE_FILE.test(entry.name) || (isModels && MODEL_FILE.test(entry.name))) {
        const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
        // Its path, which browsers tell of picked files only, says to which module a file belongs.
        inside.push(Object.defineProperty(file, "webkitRelativePath", { value: entry.fullPath.slice(1) }));
      }
    }
  }
}
