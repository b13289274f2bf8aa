// The panel of a running server: reads `/metrics` of the page's own origin every two seconds while the page can be seen.
import { formatBytes, make } from "../dom.js";
import { digits, lines, percent, table, time } from "./charts.js";
import { by, parse, quantile, rate, sum, type Reading } from "./metrics.js";

const EVERY_MS = 2000;
/** Where there is no server, it is asked less often. */
const PAUSE_MS = 15_000;
/** Ten minutes. */
const MOST_READINGS = 300;
/** Readings that percentiles are of: those of a minute. */
const WINDOW = 30;

export type State = "waiting" | "live" | "none" | "locked";

/** Reads measures, and shows them in an element. */
export class Live {
  readonly #into: HTMLElement;
  readonly #onState: (state: State) => void;
  #readings: Reading[] = [];
  #key = "";
  #timer: ReturnType<typeof setTimeout> | undefined;
  #charts: readonly { set: () => void }[] | undefined;
  #facts = make("div", {});

  constructor(into: HTMLElement, onState: (state: State) => void) {
    this.#into = into;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.start();
    });
  }

  /** Begins, or begins again at once. */
  start(): void {
    clearTimeout(this.#timer);
    void this.#read().then((state) => {
      this.#onState(state);
      clearTimeout(this.#timer);
      if (!document.hidden && state !== "locked") this.#timer = setTimeout(() => this.start(), state === "live" ? EVERY_MS : PAUSE_MS);
    });
  }

  /** Goes on with a key that the server knows. */
  unlock(key: string): void {
    this.#key = key;
    this.start();
  }

  async #read(): Promise<State> {
    try {
      const headers: Record<string, string> = this.#key === "" ? {} : { authorization: `Bearer ${this.#key}` };
      const response = await fetch("metrics", { cache: "no-store", headers, signal: AbortSignal.timeout(10_000) });
      if (response.status === 401) return "locked";
      if (!response.ok) return "none";
      const samples = parse(await response.text());
      if (!samples.some(({ name }) => name.startsWith("tilewright_"))) return "none";
      this.#readings = [...this.#readings, { time: Date.now(), samples }].slice(-MOST_READINGS);
      this.#show();
      return "live";
    } catch {
      return "none";
    }
  }

  #show(): void {
    this.#charts ??= this.#made();
    for (const chart of this.#charts) chart.set();
    this.#facts.replaceChildren(...facts(this.#readings));
  }

  #made(): { set: () => void }[] {
    const charts = CHARTS.map(({ title, show, series }) => {
      const data = (): { xs: number[]; all: { label: string; values: (number | null)[] }[] } => ({
        xs: this.#readings.map(({ time }) => time / 1000),
        all: series.map(({ label, of }) => ({ label, values: this.#readings.map((reading, i) => of(reading, this.#readings.slice(Math.max(0, i - WINDOW), i))) })),
      });
      const { xs, all } = data();
      const chart = lines(xs, all, { label: title, isTime: true, show });
      return { node: make("div", {}, make("h3", {}, title), chart.element), set: () => chart.set(data().xs, data().all) };
    });
    this.#into.replaceChildren(make("div", { className: "charts" }, ...charts.map(({ node }) => node)), this.#facts);
    return charts;
  }
}

interface Chart {
  readonly title: string;
  readonly show: (value: number) => string;
  /** Each by a reading and those of the minute before it. */
  readonly series: readonly { readonly label: string; readonly of: (now: Reading, before: readonly Reading[]) => number | null }[];
}

const grown = (name: string, labels = {}) => (now: Reading, before: readonly Reading[]): number | null => {
  const last = before.at(-1);
  return last === undefined ? null : rate(last, now, name, labels);
};
const now = (name: string) => (reading: Reading): number => sum(reading, name);
const within = (name: string, share: number) => (reading: Reading, [first]: readonly Reading[]): number | null => quantile(first, reading, name, share) ?? null;
const FIRST = "tilewright_time_to_first_token_seconds";
const BETWEEN = "tilewright_time_between_tokens_seconds";

const CHARTS: readonly Chart[] = [
  {
    title: "Tokens a second", show: (value) => digits(value), series: [
      { label: "generated", of: grown("tilewright_engine_generated_tokens_total") }, { label: "of prompts", of: grown("tilewright_engine_prompt_tokens_total") },
    ],
  },
  {
    title: "Requests", show: (value) => digits(value), series: [
      { label: "computed", of: now("tilewright_requests_running") }, { label: "waiting", of: now("tilewright_requests_queued") },
    ],
  },
  { title: "Time to the first token, last minute", show: time, series: [0.5, 0.95, 0.99].map((share) => ({ label: `p${100 * share}`, of: within(FIRST, share) })) },
  { title: "Time between tokens, last minute", show: time, series: [0.5, 0.95, 0.99].map((share) => ({ label: `p${100 * share}`, of: within(BETWEEN, share) })) },
];

/** What is told in numbers. */
function facts(readings: readonly Reading[]): Node[] {
  const last = readings.at(-1);
  if (last === undefined) return [];
  const of = (name: string, labels = {}): number => sum(last, name, labels);
  const share = (part: number, all: number): string => (all > 0 ? percent(part / all) : "");
  const pages = of("tilewright_cache_pages");
  const [hits, misses] = [of("tilewright_pool_hits_total"), of("tilewright_pool_misses_total")];
  const [cached, computed] = [of("tilewright_engine_cached_tokens_total"), of("tilewright_engine_prompt_tokens_total")];
  const passes = of("tilewright_engine_decode_passes_total");
  const first = readings.length > 1 ? readings.at(-1 - WINDOW) ?? readings[0] : undefined;
  const times = (name: string): string => {
    const found = [0.5, 0.95, 0.99].flatMap((share) => quantile(first, last, name, share) ?? []);
    return found.map(time).join(" / ");
  };
  const rows: [string, string][] = [
    ["First token, p50 / p95 / p99 of the last minute", times(FIRST)],
    ["Between tokens, p50 / p95 / p99 of the last minute", times(BETWEEN)],
    ["Time that engines computed, last minute", first === undefined ? "" : percent(rate(first, last, "tilewright_engine_busy_seconds_total"))],
    ["Connections", String(of("tilewright_connections"))],
    ...[...by(last, "tilewright_http_requests_total", "status")].map(([status, n]): [string, string] => [`Answers with status ${status}`, n.toLocaleString("en")]),
    ["Sequences of a pass, on average", passes > 0 ? digits(of("tilewright_engine_generated_tokens_total") / passes) : ""],
    ["Pages of the cache in use", pages > 0 ? `${share(pages - of("tilewright_cache_free_pages") - of("tilewright_cache_kept_pages"), pages)} of ${pages.toLocaleString("en")}` : ""],
    ["Prompt tokens that were computed before", share(cached, cached + computed)],
    ["Buffers that the pool had", share(hits, hits + misses)],
    ...[...by(last, "tilewright_memory_bytes", "kind")].map(([kind, bytes]): [string, string] => [`Memory, ${kind}`, formatBytes(bytes)]),
  ];
  return [table(["What", "Now"], rows.filter(([, value]) => value !== ""))];
}
