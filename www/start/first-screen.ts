// What the page shows before the first message: what it is, three models to choose from, and what will run them.
//
//     #start          with #start-models, each .start-model[data-fits], and #start-device
import { cache, Model, type CacheEntry, type DeviceInfo } from "../tilewright/index.js";
import { formatBytes, formatSeconds, make } from "../dom.js";
import { choiceOfAddress, type ModelChoice } from "../sources.js";
import { toldHere } from "./device.js";
import { offers, type Offer } from "./fits.js";

const list = make("ul", { id: "start-models" });
const device = make("p", { id: "start-device", className: "help" });
list.setAttribute("aria-label", "Models to begin with");

/** The part of the first screen that is not about the model that is loaded. */
export const firstScreen = make(
  "section",
  { id: "start", ariaLabel: "This page and its models" },
  make("p", { id: "start-what" }, "tilewright runs language models in this browser, on your own GPU or processor: nothing is installed, and nothing you write leaves this device."),
  list,
  device,
);

let choose: (choice: ModelChoice) => void = () => {};

/** Shows the models, and says what to do with the one that is chosen. */
export async function startFirstScreen(chosen: (choice: ModelChoice) => void): Promise<void> {
  choose = chosen;
  await refreshFirstScreen();
}

/** Shows the models anew: what is stored may have changed, and how fast the line is. */
export async function refreshFirstScreen(): Promise<void> {
  const found = offers(Model.list(), await toldHere());
  const show = (stored: CacheEntry[]): void => list.replaceChildren(...found.map((offer) => make("li", {}, card(offer, isStored(offer, stored)))));
  // What is stored is known a little later, and the first screen should be whole when it is first seen.
  if (list.childElementCount === 0) show([]);
  show(await cache.list().catch(() => []));
}

/** What runs models here, from what ran the one that was loaded. */
export function showFirstDevice({ name, backend, reason }: DeviceInfo): void {
  device.textContent = backend === "webgpu" ? `Your GPU: ${name}.` : `No GPU is used: ${reason}. Models run on the processor.`;
}

function card({ model: { name, address, sizeBytes, licence }, fits, why, seconds }: Offer, stored: boolean): HTMLElement {
  const time = stored ? "stored on this device"
    : seconds === undefined ? undefined : `about ${roughly(seconds)} at the rate of your last download`;
  const button = make(
    "button",
    { type: "button", className: "wide start-model" },
    make("strong", {}, name),
    make("span", {}, [formatBytes(sizeBytes), ...(time === undefined ? [] : [time]), licence].join(" · ")),
    make("span", { className: "fit" }, why),
  );
  button.dataset["fits"] = fits;
  button.addEventListener("click", () => choose(choiceOfAddress(address, document.baseURI)));
  return button;
}

/** A duration of which nobody knows the seconds. */
function roughly(seconds: number): string {
  return seconds < 60 ? formatSeconds(Math.ceil(seconds / 5) * 5) : seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 360) / 10} h`;
}

/** Whether a model's file is kept completely. */
function isStored({ model: { address, quantisation } }: Offer, entries: CacheEntry[]): boolean {
  const repository = address.replace(/^hf:/, "").replace(/:.*$/, "");
  return entries.some(({ url, complete }) => complete && url.includes(`/${repository}/resolve/`) && url.toLowerCase().includes(quantisation?.toLowerCase() ?? ""));
}
