// What a head looks at: a picture of the weights that the latest tokens give to all of them, and each token's largest ones in words.
import type { HeadWeights, Model } from "../tilewright/index.js";
import { make } from "../dom.js";
import { explorer, report, title } from "./explorer.js";

/** Rows of the picture. */
const QUERIES = 64;
/** About how wide it is drawn. */
const PIXELS = 960;
/** Weights that are told in words. */
const TOLD = 5;

let shown: Model | undefined;
/** Draws the picture once more in the colours that count now. */
let redraw: () => void = () => {};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
new MutationObserver(() => redraw()).observe(document.documentElement, { attributeFilter: ["data-theme"] });

/** Draws what shows a model's attention into an element; without a model there is nothing. */
export function showAttention(into: HTMLElement, model: Model | undefined): void {
  into.hidden = model === undefined;
  if (model === shown) return;
  shown = model;
  redraw = () => {};
  if (model === undefined) {
    into.replaceChildren();
    return;
  }
  const layer = picker("Layer", model.info.nLayers, Math.floor(model.info.nLayers / 2));
  const head = picker("Head", model.info.nHeads, 0);
  const note = make("p", { role: "status", className: "help" }, "Which of the tokens before it each of the latest tokens takes from, in one head of one layer.");
  const result = make("div", {});
  const button = make("button", { type: "button" }, "Show the head");
  const show = (): Promise<void> => report(button, note, async () => {
    const weights = await model.attention({ layer: layer.select.selectedIndex, head: head.select.selectedIndex, lastQueries: QUERIES });
    note.textContent = `Rows: the last ${weights.rows} tokens, the latest one below. Columns: all ${weights.columns}. The stronger the colour, the larger the weight.`;
    result.replaceChildren(...drawn(weights));
  });
  button.addEventListener("click", () => void show());
  into.replaceChildren(title(into, "Attention"), note, make("div", { className: "row" }, layer.element, head.element, button), result);
}

function picker(name: string, n: number, first: number): { element: HTMLElement; select: HTMLSelectElement } {
  const select = make("select", {}, ...Array.from({ length: n }, (_, at) => make("option", { selected: at === first }, String(at))));
  return { element: make("label", { className: "row" }, name, select), select };
}

function drawn(weights: HeadWeights): HTMLElement[] {
  const { rows, columns } = weights;
  const size = Math.max(1, Math.min(24, Math.floor(PIXELS / columns)));
  const canvas = make("canvas", { className: "weights", width: columns * size, height: rows * size, ariaHidden: "true" });
  let marked = rows - 1;
  redraw = () => draw(canvas, weights, size, marked);
  const { element, detail } = explorer({
    label: "Token", picture: canvas, n: rows, vertical: true,
    at: (share) => Math.min(rows - 1, Math.floor(share * rows)),
    tell(at) {
      marked = at;
      redraw();
      return told(weights, at);
    },
  });
  // The colours are those of the page, which the element has once it is there.
  requestAnimationFrame(() => redraw());
  return [element, detail];
}

function draw(canvas: HTMLCanvasElement, { weights, rows, columns }: HeadWeights, size: number, marked: number): void {
  const context = canvas.getContext("2d");
  if (context === null) return;
  const { color, outlineColor } = getComputedStyle(canvas);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = color;
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      // Small weights are seen as well.
      context.globalAlpha = Math.sqrt(weights[row * columns + column] ?? 0);
      if (context.globalAlpha > 0) context.fillRect(column * size, row * size, size, size);
    }
  }
  context.globalAlpha = 1;
  context.strokeStyle = outlineColor;
  context.lineWidth = 2;
  context.strokeRect(1, marked * size + 1, canvas.width - 2, Math.max(1, size - 2));
}

/** A token for reading: line ends and spaces at its ends are seen. */
function visible(text: string): string {
  return `“${text.replaceAll("\n", "↵").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length))}”`;
}

function told({ tokens, weights, rows, columns }: HeadWeights, row: number): string {
  const own = columns - rows + row;
  const largest = Array.from(weights.subarray(row * columns, (row + 1) * columns), (weight, column) => ({ weight, column }))
    .filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight).slice(0, TOLD);
  const each = largest.map(({ weight, column }) => `${column === own ? "itself" : visible(tokens[column] ?? "")} ${(100 * weight).toFixed(1)} %`);
  return `Token ${(own + 1).toLocaleString("en")}, ${visible(tokens[own] ?? "")}, takes from ${each.join(", ")}.`;
}
