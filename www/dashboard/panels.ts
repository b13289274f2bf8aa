// The panels that show what benches measured: one for each question, with the command that answers it where nothing is there yet.
import { formatBytes, make } from "../dom.js";
import { bars, digits, legend, lines, numbers, percent, prefixed, scatter, strip, table, time, type Bar, type Point } from "./charts.js";
import type { Data, KernelRow, ServeRow, Trial } from "./data.js";

export interface Panel {
  readonly id: string;
  readonly title: string;
  readonly help: string;
  /** Which command gives its data. */
  readonly command: string;
  /** What it shows; undefined where its data is not there. */
  readonly draw: (data: Data) => Node[] | undefined;
}

/** What the measurements should reach. The figures are those that a GPU server is often planned with. */
const TARGETS = { utilisation: 0.8, memory: 0.9, intensity: 8, hits: 0.7, p95: 0.03, p99: 0.05 };

/** Kernels that run once in a pass, whatever the number of layers. */
const ONCE = ["embed", "last row", "head", "greedy choice", "draw", "next token"];
const rate = (work: number, seconds: number): number => (seconds > 0 ? work / seconds : 0);
const pass = (n_tokens: number): string => (n_tokens === 1 ? "one token" : `${n_tokens} tokens`);

/** One row for each operation of a pass: with 4-bit weights, where there are several. */
function perOperation(rows: readonly KernelRow[]): KernelRow[] {
  const chosen = new Map<string, KernelRow>();
  for (const row of rows) {
    const key = `${row.operation} ${row.n_tokens}`;
    const isPacked = row.kernel.includes(".Q4_0");
    if (!chosen.has(key) || isPacked) chosen.set(key, row);
  }
  return [...chosen.values()];
}

const ofPrompt = (rows: readonly KernelRow[]): KernelRow[] => perOperation(rows).filter(({ n_tokens }) => n_tokens > 1);
const named = ({ operation, n_tokens }: KernelRow): string => `${operation}, ${pass(n_tokens)}`;

/** Operations for each byte of all products of a prompt. */
function intensity(rows: readonly KernelRow[]): number | undefined {
  const layer = ofPrompt(rows).filter(({ operation }) => !ONCE.includes(operation));
  const [flop, bytes] = [layer.reduce((sum, row) => sum + row.flop, 0), layer.reduce((sum, row) => sum + row.bytes, 0)];
  return bytes > 0 ? flop / bytes : undefined;
}

function summary(data: Data): Node[] | undefined {
  const { model, kernels, serve, embed } = data;
  if (model === undefined && kernels === undefined && serve === undefined && embed === undefined) return undefined;
  const decoding = model?.rows.find(({ phase }) => phase === "decode");
  const prompt = model?.rows.find(({ phase }) => phase === "prefill")?.flop_share;
  const ai = kernels === undefined ? undefined : intensity(kernels.rows);
  const used = model?.memory === undefined || !model.free_bytes ? undefined : Object.values(model.memory).reduce((sum, bytes) => sum + bytes, 0) / model.free_bytes;
  const [few] = serve?.rows ?? [];
  const known = serve?.rows.reduce((sum, row) => ({ all: sum.all + row.prompt_tokens, cached: sum.cached + row.cached_tokens }), { all: 0, cached: 0 });
  const vectors = embed?.rows[0]?.latency_seconds;
  const rows: [string, string, number | undefined, (value: number) => string, (value: number) => boolean][] = [
    ["Memory bandwidth that decoding uses", `above ${percent(TARGETS.utilisation)}`, decoding?.bandwidth_share, percent, (value) => value > TARGETS.utilisation],
    ["Arithmetic that prompts use", `above ${percent(TARGETS.utilisation)}`, prompt, percent, (value) => value > TARGETS.utilisation],
    ["Operations for each byte, prompts", `above ${TARGETS.intensity}`, ai, (value) => digits(value), (value) => value > TARGETS.intensity],
    ["Memory, of what was free", `below ${percent(TARGETS.memory)}`, used, percent, (value) => value < TARGETS.memory],
    ["Buffers created while decoding", "none", decoding?.buffers_created, (value) => digits(value), (value) => value === 0],
    ["Prompt tokens that were computed before", `above ${percent(TARGETS.hits)}`, known && known.all > 0 ? known.cached / known.all : undefined, percent,
      (value) => value > TARGETS.hits],
    ["From token to token, 95 of 100", `below ${time(TARGETS.p95)}`, few?.between_tokens_seconds.p95, time, (value) => value < TARGETS.p95],
    ["From token to token, 99 of 100", `below ${time(TARGETS.p99)}`, few?.between_tokens_seconds.p99, time, (value) => value < TARGETS.p99],
    ["A batch of vectors, 95 of 100", `below ${time(TARGETS.p95)}`, vectors?.p95, time, (value) => value < TARGETS.p95],
    ["A batch of vectors, 99 of 100", `below ${time(TARGETS.p99)}`, vectors?.p99, time, (value) => value < TARGETS.p99],
  ];
  const body = rows.map(([what, target, value, show, isMet]) => {
    const met = value === undefined ? undefined : isMet(value);
    const verdict = make("span", { className: met === undefined ? "verdict" : met ? "verdict met" : "verdict missed" }, met === undefined ? "no data" : met ? "met" : "missed");
    return make("tr", {}, make("th", { scope: "row" }, what), make("td", {}, target), make("td", {}, value === undefined ? "" : show(value)), make("td", {}, verdict));
  });
  const head = make("tr", {}, ...["What", "Target", "Measured", "Verdict"].map((name) => make("th", { scope: "col" }, name)));
  return [make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)))];
}

function roofline({ kernels }: Data): Node[] | undefined {
  if (kernels === undefined) return undefined;
  const { probes } = kernels;
  const rows = kernels.rows.filter(({ flop }) => flop > 0);
  const points: Point[] = rows.map((row) => ({
    x: row.flop / row.bytes, y: rate(row.flop, row.seconds),
    text: `${row.kernel}, ${named(row)}: ${digits(row.flop / row.bytes)} FLOP/byte, ${prefixed(rate(row.flop, row.seconds))}FLOP/s`,
    hue: row.n_tokens === 1 ? 0 : 1, shape: row.n_tokens === 1 ? 0 : 1,
  }));
  if (points.length === 0) return undefined;
  const ridge = probes.flop_per_second / probes.copy_bytes_per_second;
  const low = Math.min(...points.map(({ x }) => x), ridge) / 2;
  const high = Math.max(...points.map(({ x }) => x), ridge) * 2;
  const bottom = Math.min(...points.map(({ y }) => y), low * probes.copy_bytes_per_second) / 2;
  const top = Math.max(...points.map(({ y }) => y), probes.flop_per_second) * 2;
  return [
    legend(["one token", "a prompt"]),
    scatter(
      "Operations per second of each kernel by its operations for each byte, below what the probes reach", points,
      { label: "operations for each byte", log: true, show: (value) => digits(value), range: [low, high] },
      { label: "operations a second", log: true, show: prefixed, range: [bottom, top] },
      [[[low, low * probes.copy_bytes_per_second], [ridge, probes.flop_per_second], [high, probes.flop_per_second]]],
    ),
    numbers(["Kernel", "Operation", "Tokens", "Time", "FLOP/byte", "FLOP/s", "Bytes/s", "Of the roof"], rows.map((row) => [
      row.kernel, row.operation, String(row.n_tokens), time(row.seconds), digits(row.flop / row.bytes), prefixed(rate(row.flop, row.seconds)),
      prefixed(rate(row.bytes, row.seconds)),
      percent(Math.max(row.bytes / probes.copy_bytes_per_second, row.flop / probes.flop_per_second) / row.seconds),
    ])),
  ];
}

function ridge({ kernels }: Data): Node[] | undefined {
  if (kernels === undefined) return undefined;
  const at = kernels.probes.flop_per_second / kernels.probes.copy_bytes_per_second;
  const rows = perOperation(kernels.rows).filter(({ flop }) => flop > 0);
  const all: Bar[] = rows.map((row) => ({ label: named(row), value: row.flop / row.bytes, text: digits(row.flop / row.bytes), hue: row.n_tokens === 1 ? 0 : 1 }));
  return [bars(all, { log: true, mark: { value: at, text: `The line is this device's ridge, ${digits(at)} operations for each byte: left of it memory is the limit, right of it arithmetic. Lengths are logarithms.` } })];
}

function bandwidth({ kernels }: Data): Node[] | undefined {
  const reads = kernels?.reads;
  if (kernels === undefined || reads === undefined) return undefined;
  const all: [string, number][] = [
    ["copy", kernels.probes.copy_bytes_per_second], ["one after the other", reads.sequential_bytes_per_second],
    ["one of each 128 bytes", reads.strided_bytes_per_second], ["anywhere", reads.scattered_bytes_per_second],
  ];
  return [bars(all.map(([label, value], i) => ({ label, value, text: `${prefixed(value)}B/s`, hue: i })))];
}

function throughput({ kernels }: Data): Node[] | undefined {
  if (kernels === undefined) return undefined;
  const rows = perOperation(kernels.rows);
  const group = (title: string, found: readonly KernelRow[], work: "flop" | "bytes", unit: string): Node[] =>
    found.length === 0 ? [] : [make("h3", {}, title), bars(found.map((row) => {
      const value = rate(row[work], row.seconds);
      return { label: named(row), value, text: `${prefixed(value)}${unit}`, hue: row.n_tokens === 1 ? 0 : 1 };
    }))];
  return [
    ...group("Products", rows.filter(({ flop }) => flop > 0), "flop", "FLOP/s"),
    ...group("All other kernels", rows.filter(({ flop }) => flop === 0), "bytes", "B/s"),
  ];
}

function shares({ kernels }: Data): Node[] | undefined {
  const layer = kernels === undefined ? [] : ofPrompt(kernels.rows).filter(({ operation }) => !ONCE.includes(operation));
  if (layer.length === 0) return undefined;
  const products = layer.filter(({ flop }) => flop > 0);
  const names = products.map(({ operation }) => operation);
  const [flop, seconds] = [layer.reduce((sum, row) => sum + row.flop, 0), layer.reduce((sum, row) => sum + row.seconds, 0)];
  const others = layer.filter((row) => !products.includes(row)).reduce((sum, row) => sum + row.seconds, 0);
  const part = (of: (row: KernelRow) => number): Bar[] => products.map((row, i) => ({ label: row.operation, value: of(row), text: percent(of(row)), hue: i }));
  const rest: Bar = { label: "all other kernels", value: others / seconds, text: percent(others / seconds), hue: names.length };
  return [
    legend([...names, "all other kernels"]),
    strip("Operations", part((row) => row.flop / flop), 1),
    strip("Time", [...part((row) => row.seconds / seconds), rest], 1),
    numbers(["Operation", "Of all operations", "Of the time"], [
      ...products.map((row) => [row.operation, percent(row.flop / flop), percent(row.seconds / seconds)]), ["all other kernels", percent(0), percent(others / seconds)],
    ]),
  ];
}

function utilisation({ model, kernels, embed }: Data): Node[] | undefined {
  const all: Bar[] = [];
  for (const { test, phase, bandwidth_share, flop_share } of model?.rows ?? []) {
    const value = phase === "decode" ? bandwidth_share : flop_share;
    if (value !== undefined) all.push({ label: `${test}, of ${phase === "decode" ? "bandwidth" : "arithmetic"}`, value, text: percent(value), hue: phase === "decode" ? 0 : 1 });
  }
  for (const { n_texts, flop_share } of embed?.rows ?? []) all.push({ label: `batch of ${n_texts} texts, of arithmetic`, value: flop_share, text: percent(flop_share), hue: 2 });
  if (kernels !== undefined) {
    const { probes } = kernels;
    for (const row of perOperation(kernels.rows).filter(({ flop }) => flop > 0)) {
      const value = Math.max(row.bytes / probes.copy_bytes_per_second, row.flop / probes.flop_per_second) / row.seconds;
      all.push({ label: named(row), value, text: percent(value), hue: 3 });
    }
  }
  if (all.length === 0) return undefined;
  return [bars(all, {
    most: Math.max(1, ...all.map(({ value }) => value)),
    mark: { value: TARGETS.utilisation, text: `The line is ${percent(TARGETS.utilisation)}. Above 100 % operands fit a cache, or a kernel multiplies in fewer bits than the probe.` },
  })];
}

function tokens({ model }: Data): Node[] | undefined {
  const pieces = (model?.pieces ?? []).filter(({ seconds }) => seconds.length > 1);
  const timeline = model?.timeline;
  if (pieces.length === 0 && !timeline) return undefined;
  const nodes: Node[] = [];
  if (pieces.length > 0) {
    const most = Math.max(...pieces.map(({ seconds }) => seconds.length));
    const xs = Array.from({ length: most }, (_, i) => i + 1);
    const all = pieces.map(({ test, seconds }) => ({ label: test, values: xs.map((_, i) => (i === 0 || seconds[i] === undefined ? null : seconds[i] - (seconds[i - 1] ?? 0))) }));
    nodes.push(
      make("h3", {}, "From one token to the next"),
      lines(xs, all, { label: "Time from one token to the next, by their number", show: time, nameX: "token" }).element,
      numbers(["Test", "Median", "Highest"], all.map(({ label, values }) => {
        const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
        return [label, time(sorted[Math.floor(sorted.length / 2)] ?? 0), time(sorted.at(-1) ?? 0)];
      })),
    );
  }
  if (timeline && timeline.dispatches.length > 0) {
    const total = timeline.dispatches.reduce((sum, { seconds }) => sum + seconds, 0);
    const kernels = new Map<string, { calls: number; seconds: number }>();
    for (const { kernel, seconds } of timeline.dispatches) {
      const found = kernels.get(kernel) ?? { calls: 0, seconds: 0 };
      kernels.set(kernel, { calls: found.calls + 1, seconds: found.seconds + seconds });
    }
    const slowest = [...kernels].sort(([, a], [, b]) => b.seconds - a.seconds);
    const hues = new Map(slowest.map(([kernel], i) => [kernel, Math.min(i, 5)]));
    const shown = timeline.dispatches.map(({ kernel, variant, layer, seconds }) => ({
      label: `${variant}${layer === null ? "" : `, layer ${layer}`}`, value: seconds, text: time(seconds), hue: hues.get(kernel) ?? 0,
    }));
    const names = slowest.map(([kernel]) => kernel);
    nodes.push(
      make("h3", {}, "The kernels of one token, in order"),
      legend(names.length > 6 ? [...names.slice(0, 5), "others"] : names),
      strip(`${timeline.dispatches.length} dispatches, ${time(total)}`, shown, total),
      numbers(["Kernel", "Calls", "Time", "Share"], slowest.map(([kernel, { calls, seconds }]) => [kernel, String(calls), time(seconds), percent(total > 0 ? seconds / total : 0)])),
    );
  }
  return nodes;
}

const KINDS = ["weights", "cache", "activations"];

function memory({ model, memory }: Data): Node[] | undefined {
  const plans = [
    ...(model?.memory === undefined ? [] : [{ name: model.model, ...model.memory }]),
    ...(memory?.rows ?? []).map(({ model, weights, ...plan }) => ({ name: `${model}, ${weights}`, ...plan })),
  ];
  if (plans.length === 0) return undefined;
  const parts = (plan: (typeof plans)[number]): number[] => [plan.weights_bytes, plan.cache_bytes, plan.activations_bytes];
  const total = (plan: (typeof plans)[number]): number => parts(plan).reduce((sum, bytes) => sum + bytes, 0);
  const own = model?.memory === undefined ? [] : [legend(KINDS), ...plans.slice(0, 1).map((plan) => strip(
    `${plan.name}: ${formatBytes(total(plan))}`, parts(plan).map((value, i) => ({ label: KINDS[i] ?? "", value, text: formatBytes(value), hue: i })),
  ))];
  const types = [...new Set(memory?.rows.map(({ weights }) => weights))];
  const bySize = memory === undefined ? [] : [
    make("h3", {}, "Models by size and type of their weights"),
    legend(types),
    bars(memory.rows.map((row) => ({ label: `${row.model}, ${row.weights}`, value: row.total_bytes, text: formatBytes(row.total_bytes), hue: types.indexOf(row.weights) })), { log: true }),
    make("p", { className: "help" }, `One session of ${memory.context_length.toLocaleString("en")} tokens, keys and values in ${memory.kv_type}. Lengths are logarithms.`),
  ];
  return [
    ...own,
    ...bySize,
    numbers(["Model", ...KINDS, "All"], plans.map((plan) => [plan.name, ...parts(plan).map(formatBytes), formatBytes(total(plan))])),
  ];
}

const together = (rows: readonly ServeRow[]): (ServeRow & { concurrency: number })[] =>
  rows.flatMap((row) => (row.concurrency === undefined ? [] : [{ ...row, concurrency: row.concurrency }])).sort((a, b) => a.concurrency - b.concurrency);

function scaling({ serve, embed }: Data): Node[] | undefined {
  const nodes: Node[] = [];
  const show = (value: number): string => `${digits(value)}×`;
  const curve = (title: string, label: string, xs: readonly number[], rates: readonly number[], unit: string): void => {
    const [first = 1] = rates;
    if (xs.length < 2) return;
    nodes.push(
      make("h3", {}, title),
      lines(xs, [{ label: "of the first", values: rates.map((rate) => rate / first) }], { label, log2: true, show, dots: true, nameX: "at once" }).element,
      numbers(["At once", unit, "Of the first", "For each"], xs.map((x, i) => {
        const ratio = (rates[i] ?? 0) / first;
        return [String(x), digits(rates[i] ?? 0), show(ratio), percent((ratio * (xs[0] ?? 1)) / x)];
      })),
    );
  };
  const rows = together(serve?.rows ?? []);
  curve("Tokens a second by requests at once", "Tokens a second by requests at once, of those with the fewest", rows.map(({ concurrency }) => concurrency), rows.map((row) => row.tokens_per_second), "Tokens/s");
  const batches = embed?.rows ?? [];
  curve("Vectors a second by texts in a batch", "Vectors a second by texts in a batch, of those with the fewest", batches.map(({ n_texts }) => n_texts), batches.map((row) => row.texts_per_second.median), "Texts/s");
  return nodes.length === 0 ? undefined : nodes;
}

/** Amounts are small. */
const dollars = (value: number): string => value.toLocaleString("en", { maximumSignificantDigits: 3 });
const load = ({ concurrency, rate }: ServeRow): string => (concurrency === undefined ? `${rate ?? ""}/s` : `${concurrency} at once`);

function waiting({ serve }: Data): Node[] | undefined {
  if (serve === undefined || serve.rows.length === 0) return undefined;
  const rows = together(serve.rows);
  const three = ({ p50, p95, p99 }: ServeRow["request_seconds"]): string => [p50, p95, p99].map(time).join(" / ");
  const chart = rows.length < 2 ? [] : [lines(rows.map(({ concurrency }) => concurrency), [
    { label: "first token, p50", values: rows.map((row) => row.first_token_seconds.p50) },
    { label: "first token, p99", values: rows.map((row) => row.first_token_seconds.p99) },
    { label: "between tokens, p50", values: rows.map((row) => row.between_tokens_seconds.p50) },
    { label: "between tokens, p99", values: rows.map((row) => row.between_tokens_seconds.p99) },
  ].map(({ label, values }) => ({ label, values: values.map((value) => (value > 0 ? value : null)) })),
  { label: "Waiting times by requests at once", log2: true, logY: true, show: time, dots: true, nameX: "at once" }).element];
  const cost = serve.rows.some(({ cost }) => cost);
  return [
    ...chart,
    table(["Load", "Answered", "Refused", "Failed", "Tokens/s", "Tokens of a pass", "First token p50 / 95 / 99", "Between tokens", "Request", ...(cost ? ["$ for 1,000", "$ for a million tokens"] : [])],
      serve.rows.map((row) => [
        load(row), ...[row.n_answered, row.n_refused, row.n_failed].map(String), digits(row.tokens_per_second),
        row.server ? digits(row.server.tokens_per_decode_pass) : "", three(row.first_token_seconds), three(row.between_tokens_seconds), three(row.request_seconds),
        ...(cost ? [row.cost ? dollars(row.cost.per_1000_requests) : "", row.cost ? dollars(row.cost.per_million_tokens) : ""] : []),
      ])),
  ];
}

function mixtures({ mol }: Data, log: boolean, of: (row: { flop: number; seconds: number }) => number, show: (value: number) => string): Node[] | undefined {
  if (mol === undefined || mol.tables.length === 0) return undefined;
  const names = [...new Set(mol.tables.flatMap(({ rows }) => rows.map(({ operation }) => operation)))];
  return [legend(names), ...mol.tables.flatMap(({ shape, rows }) => [
    make("h3", {}, `${shape.query_components} × ${shape.item_components} components of ${shape.dim}, ${shape.n_queries} queries`),
    bars(rows.map((row) => ({ label: row.operation, value: of(row), text: show(of(row)), hue: names.indexOf(row.operation) })), { log }),
  ]), ...(log ? [make("p", { className: "help" }, "Lengths are logarithms.")] : [])];
}

/** The name of a search, with what it was given. */
function searchName({ how }: Trial): string {
  if (typeof how === "string") return how.replaceAll("_", " ");
  const [[name, given] = ["search", undefined]] = Object.entries(how);
  const values = typeof given === "object" && given !== null ? Object.values(given).filter((value) => typeof value === "number") : [];
  return [name.replaceAll("_", " "), ...values.map((value) => value.toLocaleString("en"))].join(" ");
}

function recall({ mol }: Data): Node[] | undefined {
  const searches = mol?.searches;
  if (!searches || searches.trials.length === 0) return undefined;
  const { trials, best } = searches;
  const families = [...new Set(trials.map((trial) => searchName(trial).replace(/ [\d,]+.*/, "")))];
  const points: Point[] = trials.map((trial, i) => ({
    x: trial.recall, y: trial.seconds, hue: families.indexOf(searchName(trial).replace(/ [\d,]+.*/, "")), shape: i === best ? 2 : 0,
    text: `${searchName(trial)}: ${time(trial.seconds)}, recall ${digits(trial.recall)}`,
  }));
  const lowest = Math.min(...trials.map(({ recall }) => recall));
  return [
    legend(families),
    scatter("Time of each search by the share of the best items that it finds", points,
      { label: "recall", log: false, show: (value) => digits(value), range: [Math.min(lowest, 0.9) - 0.02, 1.01] },
      { label: "time of all queries", log: true, show: time }),
    make("p", { className: "help" }, `The ring is the fastest that finds enough: ${trials[best] ? searchName(trials[best]) : "none"}.`),
    numbers(["Search", "Time", "Of brute force", "Recall", "Items scored"], trials.map((trial) => [
      searchName(trial), time(trial.seconds), `${digits(trial.seconds / (trials[0]?.seconds ?? 1))}×`, digits(trial.recall, 4), digits(trial.scored),
    ])),
  ];
}

function tuner({ tune }: Data): Node[] | undefined {
  if (tune === undefined) return undefined;
  const way = ({ tier, size }: { tier: string; size: number }): string => (size === 1 ? tier : `${tier}, ${size}`);
  const ratio = (row: (typeof tune.rows)[number]): number => rate(row.usual.seconds, row.best.seconds);
  const gained = [...tune.rows].sort((a, b) => ratio(b) - ratio(a));
  const label = (row: (typeof tune.rows)[number]): string => `${row.kernel} ${row.weight}, ${row.rows} rows, ${pass(row.tokens)}`;
  return [
    bars(gained.slice(0, 16).map((row) => ({ label: label(row), value: ratio(row), text: `${digits(ratio(row))}×`, hue: ratio(row) > 1 ? 2 : 5 })),
      { mark: { value: 1, text: "The line is the usual way. The table has all products." } }),
    numbers(["Product", "Usual", "Time", "Best", "Time", "Gain"], gained.map((row) => [
      label(row), way(row.usual), time(row.usual.seconds), way(row.best), time(row.best.seconds), `${digits(ratio(row))}×`,
    ])),
  ];
}

export const PANELS: readonly Panel[] = [
  { id: "summary", title: "Efficiency in short", help: "What was measured, next to usual targets of a server.", command: "tilewright bench MODEL --json", draw: summary },
  { id: "roofline", title: "Roofline of every kernel", help: "Each kernel below what two probes of this device reach: copying and multiplying.", command: "tilewright bench kernels --json", draw: roofline },
  { id: "intensity", title: "Intensity against the ridge", help: "Operations for each byte of each product.", command: "tilewright bench kernels --json", draw: ridge },
  { id: "bandwidth", title: "Bandwidth by access pattern", help: "Words of 4 bytes from a tensor that no cache holds.", command: "tilewright bench kernels --json", draw: bandwidth },
  { id: "throughput", title: "Throughput by operation", help: "What each kernel of a pass reaches.", command: "tilewright bench kernels --json", draw: throughput },
  { id: "flop-share", title: "Share of operations", help: "The kernels of one layer of a prompt, each once.", command: "tilewright bench kernels --json", draw: shares },
  { id: "utilisation", title: "Utilisation", help: "Of what the probes reach on the same device: bandwidth for tokens, arithmetic for prompts.", command: "tilewright bench MODEL --json", draw: utilisation },
  { id: "tokens", title: "Each token", help: "When tokens came, and what one of them consists of.", command: "tilewright bench MODEL --json", draw: tokens },
  { id: "memory", title: "Memory", help: "By the plan that loading follows.", command: "tilewright bench memory --json", draw: memory },
  { id: "scaling", title: "Scaling", help: "How the rate grows with what is computed together.", command: "tilewright bench serve MODEL --json", draw: scaling },
  { id: "waiting", title: "Waiting times under load", help: "What clients of a server wait for.", command: "tilewright bench serve MODEL --json", draw: waiting },
  { id: "mol-time", title: "Mixtures of logits: time", help: "A mixture, the same in separate kernels, and a scan of dot products over as many bytes.", command: "tilewright bench mol --json", draw: (data) => mixtures(data, true, ({ seconds }) => seconds, time) },
  { id: "mol-flop", title: "Mixtures of logits: operations a second", help: "The same runs by what they compute.", command: "tilewright bench mol --json", draw: (data) => mixtures(data, false, ({ flop, seconds }) => rate(flop, seconds), (value) => `${prefixed(value)}FLOP/s`) },
  { id: "recall", title: "Time against recall", help: "Searches by mixtures of logits, with more and more candidates.", command: "tilewright bench mol --weights mol.safetensors --json", draw: recall },
  { id: "tuner", title: "What tuning gains", help: "The fastest way of each product against the usual one, in time.", command: "tilewright tune --model MODEL --json", draw: tuner },
];

/** Where a device is named, the first of them. */
export function deviceOf(data: Data): string | undefined {
  const found = [data.model, data.kernels, data.serve, data.embed, data.mol, data.memory, data.tune].flatMap((part) => part?.device ?? []);
  const [first] = found;
  return first === undefined ? undefined : `${first.name} (${first.backend})`;
}

