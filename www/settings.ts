// The settings: tables of fields, from which the form, the checks and what is remembered follow.
import type { DeviceChoice } from "./tilewright/index.js";
import { byId, make } from "./dom.js";
import { recall, remember } from "./start/storage.js";

/** Tokens whose probabilities are shown beside one that was written. */
export const TOP_LOGPROBS = 5;

/** What the form says. A number that is missing is the model's or the engine's to choose. */
export interface Settings {
  temperature: number;
  topK: number;
  topP: number;
  minP: number;
  repeatPenalty: number;
  presencePenalty: number;
  frequencyPenalty: number;
  maxTokens: number;
  seed?: number;
  contextLength?: number;
  device: DeviceChoice;
  systemPrompt: string;
  /** Whether each token of an answer says how likely it was. */
  probabilities: boolean;
  /** Whether models are loaded with their vision encoders. */
  pictures: boolean;
  /** Whether the last model is opened again on the next visit. */
  reopen: boolean;
}

interface NumberField {
  kind: "slider" | "number";
  key: "temperature" | "topK" | "topP" | "minP" | "repeatPenalty" | "presencePenalty" | "frequencyPenalty" | "maxTokens" | "seed" | "contextLength";
  label: string;
  help: string;
  min: number;
  max: number;
  step: number;
  /** Undefined: may be left empty, and is at first. */
  initial: number | undefined;
  /** The model has to be loaded again for it. */
  reloads?: true;
}

const NUMBERS: NumberField[] = [
  { kind: "slider", key: "temperature", label: "Temperature", help: "Higher is more varied; 0 always takes the most likely word.", min: 0, max: 2, step: 0.05, initial: 0.8 },
  { kind: "slider", key: "topP", label: "Top-p", help: "Keeps the likeliest words that together have this share.", min: 0.05, max: 1, step: 0.05, initial: 0.95 },
  { kind: "slider", key: "minP", label: "Min-p", help: "Drops words less likely than this share of the likeliest.", min: 0, max: 0.5, step: 0.01, initial: 0.05 },
  { kind: "slider", key: "repeatPenalty", label: "Repeat penalty", help: "Above 1, recent words become less likely.", min: 1, max: 2, step: 0.05, initial: 1 },
  { kind: "slider", key: "presencePenalty", label: "Presence penalty", help: "Above 0, words that came before become less likely.", min: -2, max: 2, step: 0.1, initial: 0 },
  { kind: "slider", key: "frequencyPenalty", label: "Frequency penalty", help: "The same, as often as they came.", min: -2, max: 2, step: 0.1, initial: 0 },
  { kind: "number", key: "topK", label: "Top-k", help: "Keeps this many words; 0 keeps all.", min: 0, max: 100000, step: 1, initial: 40 },
  { kind: "number", key: "maxTokens", label: "Longest answer", help: "In tokens; a word is one or two.", min: 1, max: 100000, step: 1, initial: 512 },
  { kind: "number", key: "seed", label: "Seed", help: "The same seed gives the same text. Empty: a new one each time.", min: 0, max: 2 ** 32 - 1, step: 1, initial: undefined },
  { kind: "number", key: "contextLength", label: "Context length", help: "In tokens. Empty: what the model suggests.", min: 16, max: 1 << 20, step: 1, initial: undefined, reloads: true },
];

const SWITCHES: { key: "probabilities" | "pictures" | "reopen"; label: string; help: string; initial: boolean }[] = [
  { key: "probabilities", label: "Show probabilities", help: "Of each token, under “Inside”. Answers take longer.", initial: false },
  { key: "pictures", label: "Pictures", help: "Loads a model’s vision encoder, too, where it has one: a further download, and memory.", initial: true },
  { key: "reopen", label: "Reopen the last model", help: "When you come back, if this device keeps all of it.", initial: true },
];

const DEVICES: Record<DeviceChoice, string> = { auto: "Automatic", gpu: "GPU (WebGPU)", cpu: "CPU (WebAssembly)" };
const STORAGE_KEY = "tilewright.settings";

type Field = HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement;

/** The form in #settings. `onReload` is called when the user wants the model loaded again with what was changed. */
export class SettingsForm {
  private readonly form = byId<HTMLFormElement>("settings-form");
  private readonly fields = new Map<keyof Settings, Field>();
  private readonly reload = make("button", { type: "button", id: "settings-reload", className: "primary", hidden: true }, "Load the model again with this");
  private readonly unsaved = make("p", { className: "help", hidden: true }, "This browser does not let the page remember settings.");

  constructor(onReload: () => void) {
    for (const field of NUMBERS.filter(({ kind }) => kind === "slider")) this.form.append(this.numberRow(field));
    const pairs = make("div", { className: "pairs for-chat" });
    for (const field of NUMBERS.filter(({ kind }) => kind === "number")) pairs.append(this.numberRow(field));
    const device = make("select", { id: "setting-device" });
    for (const [value, text] of Object.entries(DEVICES)) device.append(make("option", { value }, text));
    const system = make("textarea", { id: "setting-systemPrompt", rows: 3, placeholder: "You are a helpful assistant." });
    const reset = make("button", { type: "button", id: "settings-reset" }, "Reset");
    this.form.append(
      pairs,
      this.row("device", "Device", "Automatic takes the GPU if there is a real one.", device),
      this.row("systemPrompt", "System prompt", "Tells a chat model how to behave. Story models ignore it.", system),
      ...SWITCHES.map(({ key, label, help }) => this.row(key, label, help, make("input", { id: `setting-${key}`, type: "checkbox" }))),
      this.reload,
      this.unsaved,
      make("div", { className: "row" }, reset),
    );

    this.fill(remembered());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.showValue(event.target as Field));
    this.form.addEventListener("change", (event) => {
      const field = event.target as Field;
      // A value out of range stays visible with the browser's explanation; the initial one is used until it is mended.
      if (field.reportValidity()) this.save();
      if (field.dataset["reloads"]) this.reload.hidden = false;
    });
    reset.addEventListener("click", () => {
      const { device: oldDevice, contextLength } = this.values();
      this.fill({});
      this.save();
      if (oldDevice !== "auto" || contextLength !== undefined) this.reload.hidden = false;
    });
    this.reload.addEventListener("click", () => {
      this.applied();
      onReload();
    });
  }

  /** The loaded model has these settings, or there is none. */
  applied(): void {
    this.reload.hidden = true;
  }

  values(): Settings {
    const numbers = Object.fromEntries(
      NUMBERS.map(({ key, initial }) => {
        const field = this.fields.get(key) as HTMLInputElement;
        return [key, field.value !== "" && field.validity.valid ? field.valueAsNumber : initial];
      }),
    ) as Pick<Settings, NumberField["key"]>;
    const isOn = (key: keyof Settings): boolean => (this.fields.get(key) as HTMLInputElement).checked;
    return {
      ...numbers,
      probabilities: isOn("probabilities"),
      pictures: isOn("pictures"),
      reopen: isOn("reopen"),
      device: (this.fields.get("device") as HTMLSelectElement).value as DeviceChoice,
      systemPrompt: (this.fields.get("systemPrompt") as HTMLTextAreaElement).value.trim(),
    };
  }

  private numberRow({ kind, key, label, help, min, max, step, reloads }: NumberField): HTMLElement {
    const input = make("input", {
      id: `setting-${key}`,
      type: kind === "slider" ? "range" : "number",
      min: String(min),
      max: String(max),
      step: String(step),
    });
    if (kind === "number") input.inputMode = "numeric";
    if (reloads) input.dataset["reloads"] = "true";
    return this.row(key, label, help, input);
  }

  private row(key: keyof Settings, label: string, help: string, field: Field): HTMLElement {
    this.fields.set(key, field);
    if (key === "device" || key === "pictures") field.dataset["reloads"] = "true";
    const helpId = `${field.id}-help`;
    field.setAttribute("aria-describedby", helpId);
    const head = make("div", { className: "row spread" }, make("label", { htmlFor: field.id }, label));
    if (field.type === "range") head.append(make("span", { className: "value", ariaHidden: "true" }));
    if (field.type === "checkbox") head.append(field);
    // The device and what is reopened are settings of both views.
    const isShared = key === "device" || key === "reopen";
    return make("div", { className: isShared ? "setting" : "setting for-chat" }, head, ...(field.type === "checkbox" ? [] : [field]), make("p", { id: helpId, className: "help" }, help));
  }

  /** Writes values into the form; what is missing gets its initial value. */
  private fill(values: Partial<Record<keyof Settings, unknown>>): void {
    for (const { key, initial } of NUMBERS) {
      const field = this.fields.get(key) as HTMLInputElement;
      const value = values[key];
      const start = initial === undefined ? "" : String(initial);
      field.value = typeof value === "number" ? String(value) : start;
      if (!field.validity.valid) field.value = start;
    }
    for (const { key, initial } of SWITCHES) {
      const value = values[key];
      (this.fields.get(key) as HTMLInputElement).checked = typeof value === "boolean" ? value : initial;
    }
    const { device, systemPrompt } = values;
    (this.fields.get("device") as HTMLSelectElement).value = typeof device === "string" && device in DEVICES ? device : "auto";
    (this.fields.get("systemPrompt") as HTMLTextAreaElement).value = typeof systemPrompt === "string" ? systemPrompt : "";
    for (const field of this.fields.values()) this.showValue(field);
  }

  private showValue(field: Field): void {
    // Seen beside a slider; a screen reader hears the slider's own value.
    const shown = field.parentElement?.querySelector(".value");
    if (shown) shown.textContent = Number(field.value).toFixed(2);
  }

  private save(): void {
    this.unsaved.hidden = remember(STORAGE_KEY, this.values());
  }
}

/** What was remembered: whatever is there, for `fill` to judge. */
function remembered(): Partial<Record<keyof Settings, unknown>> {
  const value = recall(STORAGE_KEY);
  return typeof value === "object" && value !== null ? value : {};
}
