// The page's diagrams: bars and strips of elements, points of SVG, lines of uPlot. Each has its numbers as a table beside it.
import uPlot from "uplot";
import { make } from "../dom.js";

/** Colours that diagrams tell things apart by: `hue-0` to `hue-5` in the style. */
const HUES = 6;
export const hue = (n: number): string => `hue-${n % HUES}`;

/** A number with the digits that matter. */
export const digits = (value: number, n = 3): string => {
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return value.toLocaleString("en", Math.abs(value) >= 10 ** n ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: n });
};
const UNITS: readonly (readonly [number, string])[] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
/** A number with the prefix of its thousands, in front of a unit: 3.2 G, 15 M. */
export const prefixed = (value: number): string => {
  const [factor, prefix] = UNITS.find(([factor]) => Math.abs(value) >= 0.9995 * factor) ?? [1, ""];
  return `${digits(value / factor)} ${prefix}`;
};
export const percent = (share: number): string => `${(100 * share).toLocaleString("en", { maximumFractionDigits: share < 0.1 ? 1 : 0 })} %`;
/** Seconds in the unit that suits them. */
export function time(seconds: number): string {
  if (seconds < 0.9995e-3) return `${digits(seconds * 1e6)} µs`;
  return seconds < 0.9995 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds)} s`;
}

export function table(head: readonly string[], body: readonly (readonly string[])[]): HTMLElement {
  const row = (cells: readonly string[], scope: "col" | "row"): HTMLTableRowElement =>
    make("tr", {}, ...cells.map((cell, i) => (scope === "col" || i === 0 ? make("th", { scope }, cell) : make("td", {}, cell))));
  const rows = body.map((cells) => row(cells, "row"));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, row(head, "col")), make("tbody", {}, ...rows)));
}

/** A table that is opened on demand. */
export const numbers = (head: readonly string[], body: readonly (readonly string[])[]): HTMLElement =>
  make("details", {}, make("summary", {}, "Numbers"), table(head, body));

export interface Bar {
  readonly label: string;
  readonly value: number;
  /** The value as it is told. */
  readonly text: string;
  /** Number of its colour. */
  readonly hue?: number;
}

/** Where something lies on the scale of bars. */
export interface Mark {
  readonly value: number;
  readonly text: string;
}

/** Bars from the left, each with its name and its value. With `log` their lengths are by the logarithm. */
export function bars(rows: readonly Bar[], { log = false, mark, most }: { log?: boolean; mark?: Mark; most?: number } = {}): HTMLElement {
  const values = [...rows.map(({ value }) => value), ...(mark === undefined ? [] : [mark.value])].filter((value) => value > 0);
  const highest = most ?? Math.max(...values, 1e-30);
  const lowest = log ? Math.min(...values) / 2 : 0;
  const share = (value: number): number => {
    if (value <= lowest) return 0;
    return Math.min(log ? Math.log(value / lowest) / Math.log(highest / lowest) : value / highest, 1);
  };
  const list = make("ul", { className: "bars" }, ...rows.map(({ label, value, text, hue: number = 0 }) => {
    const bar = make("span", { className: `bar ${hue(number)}`, ariaHidden: "true" });
    bar.style.width = `${100 * share(value)}%`;
    const track = make("span", { className: "track" }, bar);
    if (mark !== undefined) {
      const line = make("span", { className: "mark", ariaHidden: "true" });
      line.style.left = `${100 * share(mark.value)}%`;
      track.append(line);
    }
    return make("li", {}, make("span", { className: "name" }, label), track, make("span", { className: "value" }, text));
  }));
  return make("div", {}, list, ...(mark === undefined ? [] : [make("p", { className: "help marked" }, mark.text)]));
}

/** A strip whose parts are as wide as their values, with what each is. */
export function strip(label: string, parts: readonly Bar[], total?: number): HTMLElement {
  const all = total ?? parts.reduce((sum, { value }) => sum + value, 0);
  const row = make("div", { className: "strip", ariaHidden: "true" }, ...parts.map(({ label, value, text, hue: number = 0 }) => {
    const element = make("span", { className: hue(number), title: `${label}: ${text}` });
    element.style.width = `${all > 0 ? (100 * value) / all : 0}%`;
    return element;
  }));
  return make("div", { className: "stripped" }, make("p", {}, label), row);
}

/** What the colours stand for. */
export const legend = (names: readonly string[]): HTMLElement =>
  make("ul", { className: "legend" }, ...names.map((name, i) => make("li", {}, make("span", { className: `swatch ${hue(i)}`, ariaHidden: "true" }), name)));

export interface Point {
  readonly x: number;
  readonly y: number;
  readonly text: string;
  readonly hue: number;
  /** Number of its shape: a disc, a square, or a ring. */
  readonly shape?: number;
}

export interface Scale {
  readonly label: string;
  readonly log: boolean;
  readonly show: (value: number) => string;
  /** Ends that are not those of the points. */
  readonly range?: readonly [number, number];
}

function svgOf(tag: string, attributes: Readonly<Record<string, string | number>>, ...children: (Node | string)[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Ends of a scale: whole decades, or a little more than there is. */
function ends(values: readonly number[], { log, range }: Scale): readonly [number, number] {
  if (range !== undefined) return range;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
  return [Math.min(low, 0), high * 1.08 || 1];
}

function ticks([low, high]: readonly [number, number], log: boolean): number[] {
  if (log) {
    const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const step = Math.ceil((to - from) / 7) || 1;
    return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => 10 ** (from + i * step));
  }
  const raw = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = ([1, 2, 5].find((n) => n * unit >= raw) ?? 10) * unit;
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/** Draws again when the width of an element changes, so that text keeps its size. */
function whenSized(element: HTMLElement, draw: (width: number) => void): HTMLElement {
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry?.contentRect.width ?? 0);
    if (width > 0 && width !== drawn) draw((drawn = width));
  }).observe(element);
  return element;
}

/** Points over two scales, below lines that are given by their points. */
export function scatter(label: string, points: readonly Point[], x: Scale, y: Scale, lines: readonly (readonly (readonly [number, number])[])[] = []): HTMLElement {
  const HEIGHT = 300;
  const [left, right, top, bottom] = [64, 12, 10, 44];
  const figure = make("div", { className: "scatter" });
  return whenSized(figure, (width) => {
    const [xs, ys] = [ends(points.map(({ x }) => x), x), ends(points.map(({ y }) => y), y)];
    const at = (value: number, [low, high]: readonly [number, number], log: boolean): number =>
      log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const toX = (value: number): number => left + (width - left - right) * at(value, xs, x.log);
    const toY = (value: number): number => HEIGHT - bottom - (HEIGHT - top - bottom) * at(value, ys, y.log);
    const picture = svgOf("svg", { width, height: HEIGHT, role: "img", "aria-label": label });
    for (const tick of ticks(xs, x.log)) {
      picture.append(
        svgOf("line", { x1: toX(tick), x2: toX(tick), y1: top, y2: HEIGHT - bottom, class: "grid" }),
        svgOf("text", { x: toX(tick), y: HEIGHT - bottom + 16, "text-anchor": "middle" }, x.show(tick)),
      );
    }
    for (const tick of ticks(ys, y.log)) {
      picture.append(
        svgOf("line", { x1: left, x2: width - right, y1: toY(tick), y2: toY(tick), class: "grid" }),
        svgOf("text", { x: left - 6, y: toY(tick) + 4, "text-anchor": "end" }, y.show(tick)),
      );
    }
    picture.append(
      svgOf("text", { x: (left + width - right) / 2, y: HEIGHT - 6, "text-anchor": "middle", class: "axis" }, x.label),
      svgOf("text", { x: 12, y: (HEIGHT - bottom + top) / 2, "text-anchor": "middle", class: "axis", transform: `rotate(-90 12 ${(HEIGHT - bottom + top) / 2})` }, y.label),
    );
    for (const line of lines) {
      const path = line.map(([px, py]) => `${toX(px).toFixed(1)},${toY(py).toFixed(1)}`).join(" ");
      picture.append(svgOf("polyline", { points: path, class: "roof" }));
    }
    for (const { x: px, y: py, text, hue: number, shape = 0 } of points) {
      const [cx, cy] = [toX(px), toY(py)];
      const title = svgOf("title", {}, text);
      picture.append(shape === 1
        ? svgOf("rect", { x: cx - 4, y: cy - 4, width: 8, height: 8, class: `point ${hue(number)}` }, title)
        : svgOf("circle", { cx, cy, r: shape === 2 ? 6.5 : 4.5, class: `point ${hue(number)}${shape === 2 ? " ring" : ""}` }, title));
    }
    figure.replaceChildren(picture);
  });
}

/** What the style has for a colour's name, as a canvas takes it. */
function coloured(name: string, within: HTMLElement): string {
  const probe = make("span", { className: name });
  within.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

export interface Line {
  readonly label: string;
  readonly values: readonly (number | null)[];
}

export interface LineOptions {
  readonly label: string;
  /** Seconds since 1970, or plain numbers. */
  readonly isTime?: boolean;
  /** Powers of two alike far apart. */
  readonly log2?: boolean;
  readonly show: (value: number) => string;
  readonly showX?: (value: number) => string;
  /** What plain numbers are. */
  readonly nameX?: string;
  readonly dots?: boolean;
  readonly logY?: boolean;
}

/** Lines over a common scale; `set` has them follow what comes. */
export function lines(xs: readonly number[], all: readonly Line[], options: LineOptions): { element: HTMLElement; set: (xs: readonly number[], all: readonly Line[]) => void } {
  const HEIGHT = 220;
  const figure = make("div", { className: "lines", role: "img", ariaLabel: options.label });
  let plot: uPlot | undefined;
  let data: uPlot.AlignedData = [[...xs], ...all.map(({ values }) => [...values])];
  let width = 0;
  const draw = (): void => {
    if (width === 0 || !figure.isConnected) return;
    plot?.destroy();
    const [ink, grid] = [coloured("ink", figure), coloured("grid", figure)];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const showX = options.showX ?? ((value: number) => digits(value));
    plot = new uPlot({
      width, height: HEIGHT,
      padding: [10, 14, 0, 0],
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: options.isTime ?? false, ...(options.log2 ? { distr: 3, log: 2 } : {}) }, y: options.logY ? { distr: 3 } : { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, ...(options.isTime ? {} : { values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : showX(tick))) }) },
        { ...axis, size: 66, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : options.show(tick))) },
      ],
      series: [
        options.isTime ? {} : { label: options.nameX ?? "", value: (_, value) => (value === null ? "" : showX(value)) },
        ...all.map(({ label }, i) => ({
          label, stroke: coloured(hue(i), figure), width: 2, spanGaps: true, points: { show: options.dots ?? false, size: 6 },
          value: (_: uPlot, value: number | null) => (value === null ? "" : options.show(value)),
        })),
      ],
    }, data, figure);
  };
  whenSized(figure, (found) => {
    width = found;
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return {
    element: figure,
    set(xs, all) {
      data = [[...xs], ...all.map(({ values }) => [...values])];
      plot?.setData(data);
    },
  };
}
