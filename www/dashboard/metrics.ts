// What a running server measures: its `/metrics`, read again and again, and what follows from two readings.

/** One line: a name, its labels, and a value. */
export interface Sample {
  readonly name: string;
  readonly labels: ReadonlyMap<string, string>;
  readonly value: number;
}

/** A reading of all measures. */
export interface Reading {
  /** Milliseconds by the page's clock. */
  readonly time: number;
  readonly samples: readonly Sample[];
}

/** A server has some hundred lines. */
const MOST_BYTES = 4_000_000;
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Reads the text of Prometheus or OpenMetrics; lines that are neither are left out. */
export function parse(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const line of text.slice(0, MOST_BYTES).split("\n")) {
    const [, name, labels = "", number = ""] = LINE.exec(line) ?? [];
    const value = number === "+Inf" ? Infinity : Number(number);
    if (name === undefined || Number.isNaN(value)) continue;
    const unescaped = (text: string): string => text.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character));
    samples.push({ name, labels: new Map([...labels.matchAll(LABEL)].map(([, key = "", text = ""]) => [key, unescaped(text)])), value });
  }
  return samples;
}

/** The sum of a measure over all labels that are not named. */
export function sum({ samples }: Reading, name: string, labels: Readonly<Record<string, string>> = {}): number {
  const wanted = Object.entries(labels);
  const isWanted = (sample: Sample): boolean => sample.name === name && wanted.every(([key, value]) => sample.labels.get(key) === value);
  return samples.filter(isWanted).reduce((total, { value }) => total + value, 0);
}

/** Values of a measure by one of its labels. */
export function by({ samples }: Reading, name: string, label: string): Map<string, number> {
  const values = new Map<string, number>();
  for (const sample of samples) {
    const key = sample.labels.get(label);
    if (sample.name === name && key !== undefined) values.set(key, (values.get(key) ?? 0) + sample.value);
  }
  return values;
}

/** How much a measure grew each second between two readings. A server that began anew counts from zero. */
export function rate(before: Reading, after: Reading, name: string, labels: Readonly<Record<string, string>> = {}): number {
  const grown = sum(after, name, labels) - sum(before, name, labels);
  const seconds = (after.time - before.time) / 1000;
  return seconds > 0 && grown >= 0 ? grown / seconds : 0;
}

/**
 * The value below which a share of what a histogram counted between two readings lies, linear within a bucket; undefined if it counted
 * nothing. What lies above the last bound is told as that bound.
 */
export function quantile(before: Reading | undefined, after: Reading, name: string, share: number): number | undefined {
  const counts = (reading: Reading): Map<number, number> =>
    new Map([...by(reading, `${name}_bucket`, "le")].map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count]));
  const earlier = before === undefined ? new Map<number, number>() : counts(before);
  const buckets = [...counts(after)].map(([bound, count]) => ({ bound, count: count - (earlier.get(bound) ?? 0) })).sort((a, b) => a.bound - b.bound);
  const total = buckets.at(-1)?.count ?? 0;
  if (total <= 0) return undefined;
  let [bound, below] = [0, 0];
  for (const bucket of buckets) {
    if (bucket.count >= share * total) {
      if (bucket.bound === Infinity) return bound;
      return bound + ((bucket.bound - bound) * (share * total - below)) / Math.max(bucket.count - below, 1e-12);
    }
    [bound, below] = [bucket.bound, bucket.count];
  }
  return bound;
}
