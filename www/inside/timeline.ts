// How long each kernel of a pass takes: a strip of all dispatches in order, and a table by kernel.
import type { Model, Timeline, TimelineDispatch } from "../tilewright/index.js";
import { make } from "../dom.js";
import { explorer, report, title } from "./explorer.js";

/** Kernels that have a colour of their own; the others share the last one. */
const COLOURS = 6;

let shown: Model | undefined;

/** Draws what times the kernels of a model into an element; without a model there is nothing. */
export function showTimeline(into: HTMLElement, model: Model | undefined): void {
  into.hidden = model === undefined;
  if (model === shown) return;
  shown = model;
  if (model === undefined) {
    into.replaceChildren();
    return;
  }
  const note = make("p", { role: "status", className: "help" }, "The pass over the latest token is computed once more, one kernel at a time.");
  const result = make("div", {});
  const button = make("button", { type: "button" }, "Time the kernels");
  button.addEventListener("click", () => void report(button, note, async () => {
    const timeline = await model.timeline();
    note.textContent = summary(timeline);
    result.replaceChildren(...drawn(timeline));
  }));
  into.replaceChildren(title(into, "Time of each kernel"), note, make("div", { className: "row" }, button), result);
}

/** Microseconds with the digits that matter. */
function time(micros: number): string {
  return micros < 999.5 ? `${micros.toLocaleString("en", { maximumSignificantDigits: 3 })} µs` : `${(micros / 1000).toLocaleString("en", { maximumSignificantDigits: 3 })} ms`;
}

const CLOCKS: Readonly<Record<Timeline["clock"], string>> = {
  gpu: "by the GPU's timestamps, which a browser rounds",
  cpu: "by the processor's clock",
  roundTrip: "each with the way to the GPU and back, as this GPU tells no times",
};

function summary({ clock, position, micros, dispatches }: Timeline): string {
  return `${dispatches.length} dispatches for token ${(position + 1).toLocaleString("en")} take ${time(micros)}, ${CLOCKS[clock]}.`;
}

/** A kernel's calls and time, the slowest kernel first. */
function byKernel({ dispatches }: Timeline): { kernel: string; calls: number; micros: number }[] {
  const kernels = new Map<string, { kernel: string; calls: number; micros: number }>();
  for (const { kernel, micros } of dispatches) {
    const row = kernels.get(kernel) ?? { kernel, calls: 0, micros: 0 };
    kernels.set(kernel, { kernel, calls: row.calls + 1, micros: row.micros + micros });
  }
  return [...kernels.values()].sort((a, b) => b.micros - a.micros || b.calls - a.calls);
}

function drawn(timeline: Timeline): HTMLElement[] {
  const rows = byKernel(timeline);
  const colours = new Map(rows.map(({ kernel }, at) => [kernel, `kernel-${Math.min(at, COLOURS - 1)}`]));
  const head = make("tr", {}, ...["Kernel", "Calls", "Time", "Share"].map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map(({ kernel, calls, micros }) => {
    const share = timeline.micros > 0 ? micros / timeline.micros : 0;
    const swatch = make("span", { className: `swatch ${colours.get(kernel) ?? ""}`, ariaHidden: "true" });
    return make("tr", {}, make("th", { scope: "row" }, swatch, kernel), ...[calls.toLocaleString("en"), time(micros), `${(100 * share).toFixed(1)} %`]
      .map((text) => make("td", {}, text)));
  });
  const table = make("table", { className: "kernels" }, make("caption", { className: "hidden" }, "Time by kernel"), make("thead", {}, head), make("tbody", {}, ...body));
  return [...strip(timeline, colours), table];
}

/** Dispatches side by side, as wide as they take long. */
function strip(timeline: Timeline, colours: ReadonlyMap<string, string>): HTMLElement[] {
  const { dispatches } = timeline;
  const [width, height] = [1000, 32];
  const svg = svgOf("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "strip", "aria-hidden": "true" });
  // Where a clock is too coarse for all of them, they are drawn alike.
  const lengths = timeline.micros > 0 ? dispatches.map(({ micros }) => micros / timeline.micros) : dispatches.map(() => 1 / dispatches.length);
  let x = 0;
  const bars = dispatches.map(({ kernel }, at) => {
    const length = width * (lengths[at] ?? 0);
    const bar = svgOf("rect", { x: String(x), y: "0", width: String(length), height: String(height), class: colours.get(kernel) ?? "" });
    x += length;
    return bar;
  });
  svg.append(...bars);
  const ends = lengths.map((_, at) => lengths.slice(0, at + 1).reduce((sum, length) => sum + length, 0));
  let marked: Element | undefined;
  const { element, detail } = explorer({
    label: "Dispatch", picture: svg, n: dispatches.length, vertical: false,
    at: (share) => ends.findIndex((end) => share <= end),
    tell(at) {
      marked?.classList.remove("marked");
      marked = bars[at];
      marked?.classList.add("marked");
      const dispatch = dispatches[at];
      return dispatch === undefined ? "" : told(dispatch, at, dispatches.length);
    },
  });
  return [element, detail];
}

function told({ kernel, variant, layer, grid, micros }: TimelineDispatch, at: number, n: number): string {
  const where = layer === undefined ? "outside of the layers" : `layer ${layer}`;
  return `Dispatch ${at + 1} of ${n}: ${kernel} (${variant}), ${where}, ${grid.join(" × ")} workgroups, ${time(micros)}.`;
}

function svgOf(tag: string, attributes: Record<string, string>): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
