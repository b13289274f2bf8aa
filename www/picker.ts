// The ways to choose a model: built in, file, drag and drop, address, stored on this device. It chooses; main.ts loads.
import { cache } from "./tilewright/index.js";
import { byId, formatBytes, make } from "./dom.js";
import { showError } from "./messages.js";
import { BUILTIN, choiceOfAddress, choiceOfFiles, storedModels, type ModelChoice, type StoredModel } from "./sources.js";

/** Connects every way to choose a model with `choose`. */
export function startPicker(choose: (choice: ModelChoice) => void): void {
  byId("model-builtin").addEventListener("click", () => choose(BUILTIN));

  const chooseFiles = (files: File[]): void => {
    const choice = choiceOfFiles(files);
    if (choice) choose(choice);
  };
  const input = byId<HTMLInputElement>("model-file");
  input.addEventListener("change", () => {
    chooseFiles([...(input.files ?? [])]);
    // Choosing the same file again is a change, too.
    input.value = "";
  });
  startDrop(chooseFiles);

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
      address.setCustomValidity("This is no address of a file. It begins with https:// and ends in .gguf, or in / for a folder.");
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
    (byId("cache-list").querySelector("button") ?? byId("model-builtin")).focus();
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

/** The files that were dropped; of a folder, those directly in it that belong to a model. */
async function droppedFiles(transfer: DataTransfer): Promise<File[]> {
  // Entries have to be taken before the first `await`: the list is empty afterwards.
  const files = [...transfer.files];
  const folders = [...transfer.items]
    .map((item) => item.webkitGetAsEntry())
    .filter((entry): entry is FileSystemDirectoryEntry => entry?.isDirectory ?? false);
  const [folder] = folders;
  if (!folder) return files;
  const inside: File[] = [];
  const reader = folder.createReader();
  // A reader gives a hundred entries at most in one go, and none at the end.
  for (;;) {
    const entries = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (entries.length === 0) break;
    for (const entry of entries) {
      if (!entry.isFile || !/\.(gguf|safetensors|json)$/.test(entry.name)) continue;
      inside.push(await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject)));
    }
  }
  if (inside.length === 0) throw new Error(`the folder ${folder.name} holds no .gguf, .safetensors or .json file`);
  return inside;
}
