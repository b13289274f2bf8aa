// What goes on inside: tokens of the last answer with their probabilities, memory by kind, kernels and heads. Loaded when the tab is first shown.
//
//     #inside-tokens     a .token for each, [data-id]; #inside-token has the likeliest ones of that which is pointed at or focused
//     #inside-memory     a row for each kind
//     #inside-intro      what the view is for, instead of its sections: while there is neither a model nor an answer
//
// Device and model are beside them, by status.ts.
import type { DeviceInfo, MemoryInfo, Model, ModelInfo, Piece, TokenLogprob } from "../tilewright/index.js";
import { byId, formatBytes, make, perFrame } from "../dom.js";
import { showAttention } from "./attention.js";
import { onRecord, recorded } from "./record.js";
import { showTimeline } from "./timeline.js";

const tokens = byId("inside-tokens");
const detail = byId("inside-token");

/** The element of each piece that is shown. */
let shown: { piece: Piece; element: HTMLElement }[] = [];

/** Draws tokens that came since the last frame; all anew when another answer began. */
const draw = perFrame(() => {
  const pieces = recorded();
  if (shown.length > pieces.length || shown[0]?.piece !== pieces[0]) {
    shown = [];
    tokens.replaceChildren();
    detail.textContent = "";
  }
  for (const piece of pieces.slice(shown.length)) {
    const element = tokenOf(piece);
    shown.push({ piece, element });
    tokens.append(element);
  }
  const hasProbabilities = pieces.some(({ logprob }) => logprob !== undefined);
  byId("inside-tokens-note").textContent = pieces.length === 0 ? "Nothing was written so far. An answer in the chat is shown here token by token."
    : hasProbabilities ? "The stronger its colour, the less likely a token was. Point at one, or move to it with Tab and the arrow keys, to see what else could have stood there."
    : "To see how likely each token was, turn on “Show probabilities” in the settings, and ask again.";
});

/** A token's own text, or what stands for one that has none. */
function textOf({ logprob, text, thinking = "" }: Piece): string {
  return logprob?.text ?? (text + thinking);
}

const percent = (logprob: number): string => `${(100 * Math.exp(logprob)).toLocaleString("en", { maximumSignificantDigits: 3 })} %`;

/** A token for reading: line ends and spaces at its ends are seen. */
function visible(text: string): string {
  return text === "" ? "∅" : text.replaceAll("\n", "↵").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

function tokenOf(piece: Piece): HTMLElement {
  const element = make("button", { type: "button", className: "token" }, visible(textOf(piece)));
  element.dataset["id"] = String(piece.id);
  element.tabIndex = shown.length === 0 ? 0 : -1;
  if (piece.logprob !== undefined) {
    // Four steps, from hardly likely to nearly sure.
    element.dataset["likely"] = String([-0.1, -0.7, -2.3].filter((edge) => (piece.logprob?.logprob ?? 0) >= edge).length);
  }
  return element;
}

function showDetail(at: number): void {
  const piece = shown[at]?.piece;
  if (piece === undefined) return;
  const { id, logprob, topLogprobs = [] } = piece;
  const name = `Token ${(at + 1).toLocaleString("en")}, “${visible(textOf(piece))}” (number ${id})`;
  if (logprob === undefined) {
    detail.textContent = `${name}.`;
    return;
  }
  const others = topLogprobs.map((it) => make("li", { className: it.id === id ? "chosen" : "" }, bar(it)));
  detail.replaceChildren(`${name}: ${percent(logprob.logprob)}. The likeliest there:`, make("ul", {}, ...others));
}

function bar({ text, logprob }: TokenLogprob): HTMLElement {
  const meter = make("meter", { min: 0, max: 1, value: Math.exp(logprob), ariaLabel: percent(logprob) });
  return make("span", { className: "row" }, make("code", {}, visible(text)), meter, make("span", { className: "score" }, percent(logprob)));
}

/** The number of the token that an event is about. */
function tokenAt({ target }: Event): number {
  return shown.findIndex(({ element }) => element === target);
}

for (const kind of ["pointerover", "focusin"]) tokens.addEventListener(kind, (event) => showDetail(tokenAt(event)));
// Tab goes to one token; the arrows go from there to the others.
tokens.addEventListener("keydown", (event) => {
  const at = tokenAt(event);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  const target = next === undefined ? undefined : shown[next];
  if (at < 0 || target === undefined) return;
  event.preventDefault();
  for (const { element } of shown) element.tabIndex = -1;
  target.element.tabIndex = 0;
  target.element.focus();
});
onRecord(draw.ask);
draw.now();

/** Shows what a model takes; undefined: there is none. */
export async function showInside(model: Model | undefined): Promise<void> {
  draw.now();
  byId("inside-intro").hidden = model !== undefined || recorded().length > 0;
  showTimeline(byId("inside-timeline"), model);
  showAttention(byId("inside-attention"), model);
  const memory = await model?.memory();
  if (model === undefined || memory === undefined) {
    byId("inside-memory-note").textContent = "No model is loaded.";
    byId("inside-memory").replaceChildren();
    return;
  }
  showMemory(memory, model.device, model.info);
}

function showMemory({ weightsBytes, cacheBytes, activationsBytes, totalBytes, wasmHeapBytes }: MemoryInfo, { backend }: DeviceInfo, { contextLength }: ModelInfo): void {
  const gpu = backend === "webgpu";
  const kinds: [string, number][] = [
    ["Weights", weightsBytes],
    [`Keys and values of ${contextLength.toLocaleString("en")} tokens`, cacheBytes],
    ["Activations", activationsBytes],
    [gpu ? "WASM heap, beside the GPU's memory" : "WASM heap, which holds all of it", wasmHeapBytes],
  ];
  const most = Math.max(...kinds.map(([, bytes]) => bytes));
  byId("inside-memory-note").textContent = `${formatBytes(totalBytes)} ${gpu ? "on the GPU" : "in the WASM heap"}.`;
  byId("inside-memory").replaceChildren(...kinds.map(([name, bytes]) => make(
    "div", {},
    make("dt", {}, name),
    make("dd", {}, make("meter", { min: 0, max: most, value: bytes, ariaLabel: name }), make("span", { className: "score" }, formatBytes(bytes))),
  )));
}
