// The status strip under the prompt, and the facts about device and model in the panel.
import type { GenerateResult, Model } from "./tilewright/index.js";
import { byId, formatBytes, formatRate, formatSeconds, make } from "./dom.js";

/** How fast the last generation was, or the one that runs. */
export interface Speed {
  /** Tokens per second while writing. */
  decode?: number | undefined;
  /** Tokens per second while reading the prompt. */
  prefill?: number | undefined;
  /** Seconds from sending to the first piece. */
  firstToken?: number | undefined;
}

let facts = new Map<string, string>();

function show(list: Map<string, string>): void {
  for (const id of ["facts-list", "inside-facts"]) showFacts(id, list);
}

/** Shows names and values in the list `#id`. */
export function showFacts(id: string, list: Iterable<readonly [string, string]>): void {
  byId(id).replaceChildren(...Array.from(list, ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

/** The speed that a result shows. Parts of the prompt that were kept from the last time were not read again. */
export function speedOf(result: GenerateResult, firstToken: number | undefined): Speed {
  const read = result.promptTokens - result.cachedTokens;
  return {
    firstToken,
    prefill: read > 0 && result.prefillSeconds > 0 ? read / result.prefillSeconds : undefined,
    decode: result.generatedTokens > 0 && result.decodeSeconds > 0 ? result.generatedTokens / result.decodeSeconds : undefined,
  };
}

export function showSpeed({ decode, prefill, firstToken }: Speed): void {
  const parts: string[] = [];
  if (decode !== undefined) parts.push(`${formatRate(decode)} tokens/s`);
  if (firstToken !== undefined) parts.push(`first after ${formatSeconds(firstToken)}`);
  byId("status-speed").textContent = parts.join(", ") || "–";
  if (decode !== undefined) facts.set("Writing", `${formatRate(decode)} tokens/s`);
  if (prefill !== undefined) facts.set("Reading the prompt", `${formatRate(prefill)} tokens/s`);
  if (firstToken !== undefined) facts.set("First token after", formatSeconds(firstToken));
  show(facts);
}

/** Shows what runs the model and what it takes. Asked again after each generation, because a device can be replaced. */
export async function showModel(model: Model): Promise<void> {
  const { device, info } = model;
  const memory = await model.memory();
  const gpu = device.backend === "webgpu";
  byId("status-device").replaceChildren(
    ...(gpu ? [`${device.name} (WebGPU)`] : ["CPU in WebAssembly", make("span", {}, `: ${device.reason}`)]),
  );
  byId("status-device").dataset["backend"] = device.backend;
  const total = gpu ? memory.totalBytes + memory.wasmHeapBytes : Math.max(memory.totalBytes, memory.wasmHeapBytes);
  byId("status-memory").textContent = formatBytes(total);
  byId("status-memory").title = `weights ${formatBytes(memory.weightsBytes)}, cache ${formatBytes(memory.cacheBytes)}, WASM heap ${formatBytes(memory.wasmHeapBytes)}`;
  const rows: [string, string][] = [
    ["Device", device.name],
    ["Runs on", gpu ? "GPU, through WebGPU" : "CPU, in WebAssembly"],
    ["Why", device.reason],
    ["Driver", device.driver],
    ["Kernels", gpu ? device.tier : ""],
    ["Weights", formatBytes(memory.weightsBytes)],
    ["Cache", formatBytes(memory.cacheBytes)],
    ["Activations", formatBytes(memory.activationsBytes)],
    ["WASM heap", formatBytes(memory.wasmHeapBytes)],
    ["Model", info.name],
    ["Architecture", info.architecture],
    ["Layers", String(info.nLayers)],
    ["Width", String(info.dim)],
    ["Heads", info.nHeads === info.nKvHeads ? String(info.nHeads) : `${info.nHeads}, keys and values ${info.nKvHeads}`],
    ["Vocabulary", info.vocabSize.toLocaleString("en")],
    ["Context", `${info.contextLength.toLocaleString("en")} of ${info.maxContextLength.toLocaleString("en")} tokens`],
    ["Weight types", info.weightTypes.join(", ")],
    ["File", formatBytes(info.fileBytes)],
    ["Chat template", info.chatTemplate],
  ];
  const speeds = ["Writing", "Reading the prompt", "First token after"];
  const kept = [...facts].filter(([name]) => speeds.includes(name));
  facts = new Map([...rows.filter(([, value]) => value !== ""), ...kept]);
  show(facts);
}

/** There is no model. */
export function showNothing(device: string): void {
  facts = new Map();
  show(facts);
  byId("status-device").textContent = device;
  delete byId("status-device").dataset["backend"];
  byId("status-memory").textContent = "–";
  byId("status-memory").removeAttribute("title");
  byId("status-speed").textContent = "–";
}
