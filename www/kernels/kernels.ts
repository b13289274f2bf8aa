// The tab that measures a device: runs the package's `bench` and a model, shows what comes, and makes a report of it. Loaded when the tab
// is first shown.
//
// Elements that tests and scripts may rely on:
//
//     html[data-bench]      idle, running, done (there is a report), stopped or error
//     #bench-run-form       #bench-device-gpu, #bench-device-cpu, #bench-quick, input[name=model], #bench-model-file; #bench-run, #bench-stop
//     #bench-no-webgpu      shown where there is no GPU, with why
//     #bench-progress       shown while it measures, with #bench-progress-bar and #bench-progress-text
//     #bench-probes #bench-kernels #bench-models   tables with a row for each result
//     #bench-adapter-facts #bench-adapter-features #bench-adapter-limits
//     #bench-json           the report; #bench-copy, and #bench-issue, a link to a new issue, where the repository's address is known
//     #bench-error #bench-outcome
import { bench, devices, Model, type BenchKernel, type BenchModel, type BenchProbe, type BenchReport, type BenchTest } from "../tilewright/index.js";
import { byId, formatBytes, formatRate, formatSeconds, make } from "../dom.js";

type State = "idle" | "running" | "done" | "stopped" | "error";

const PROBES: Record<string, string> = {
  copy: "copy", read: "read in sequence", read_strided: "read one word of each 128 bytes", read_random: "read anywhere", reduce: "sums of rows",
  fma_f32: "multiply and add, f32", fma_f16: "multiply and add, f16", matrix_f16: "cooperative matrices",
};
/** What an address may hold is not agreed on; GitHub takes 8 kB. */
const LONGEST_URL = 6000;

let running: AbortController | undefined;

function setState(state: State): void {
  document.documentElement.dataset["bench"] = state;
  const isRunning = state === "running";
  byId("bench-progress").hidden = !isRunning;
  byId("bench-stop").hidden = !isRunning;
  byId<HTMLButtonElement>("bench-run").disabled = isRunning;
  for (const fieldset of byId("bench-run-form").querySelectorAll("fieldset")) fieldset.disabled = isRunning;
}

function showProgress(text: string, done?: number, total?: number): void {
  const bar = byId<HTMLProgressElement>("bench-progress-bar");
  if (done === undefined || total === undefined) bar.removeAttribute("value");
  else {
    bar.max = total;
    bar.value = done;
  }
  byId("bench-progress-text").textContent = text;
}

const percent = (share: number): string => `${(100 * share).toLocaleString("en", { maximumFractionDigits: share < 0.1 ? 1 : 0 })} %`;
const giga = (perSecond: number): string => {
  const value = perSecond / 1e9;
  return value.toLocaleString("en", { maximumSignificantDigits: value < 1 ? 2 : 3, useGrouping: true });
};

/** Adds a row of which the first cell is its header. */
function addRow(table: string, name: string, ...cells: string[]): void {
  const row = make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, cell)));
  byId<HTMLTableElement>(table).tBodies[0]?.append(row);
}

function showProbe({ probe, seconds, bytes_per_second, flop_per_second }: BenchProbe): void {
  const isArithmetic = flop_per_second > 0;
  addRow("bench-probes", PROBES[probe] ?? probe, isArithmetic ? "" : giga(bytes_per_second), isArithmetic ? giga(flop_per_second) : "", (1e3 * seconds).toFixed(3));
}

function showKernel({ kernel, operation, n_tokens, bytes_per_second, copy_share, flop, flop_per_second, fma_share }: BenchKernel): void {
  const arithmetic = flop > 0 ? [giga(flop_per_second), percent(fma_share)] : ["", ""];
  addRow("bench-kernels", kernel, operation, String(n_tokens), giga(bytes_per_second), percent(copy_share), ...arithmetic);
}

function showModel(model: BenchModel, copy: number): void {
  byId("bench-model-region").hidden = false;
  byId("bench-models-caption").textContent = `${model.name} (${model.weight_types.join(" ")}, weights ${formatBytes(model.weights_bytes)})`;
  for (const { test, phase, tokens_per_second: { lowest, median, highest } } of model.tests) {
    // A token reads all weights; a prompt's do so together.
    const share = phase === "decode" && copy > 0 ? percent(median * model.weights_bytes / copy) : "";
    addRow("bench-models", test, formatRate(median), `${formatRate(lowest)} to ${formatRate(highest)}`, share);
  }
}

function showFacts(list: string, facts: readonly (readonly [string, string])[]): void {
  byId(list).replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function showDevice({ device, adapter, host, settings }: BenchReport): void {
  byId("bench-adapter").hidden = false;
  showFacts("bench-adapter-facts", [
    ["Device", device.name],
    ["Backend", `${device.backend}, kernels of the tier ${device.tier}${device.is_software ? ", in software" : ""}`],
    ...(adapter === null ? [] : [["Vendor, architecture", [adapter.vendor, adapter.architecture].filter(Boolean).join(", ") || "not told"]] as const),
    ["Browser", host.browser ?? "not told"],
    ["Kernels' shapes", `width ${settings.dim}, prompt ${settings.n_prompt}, cache ${settings.n_cached}, ${formatBytes(settings.cold_bytes)} of operands`],
  ]);
  byId("bench-adapter-features").textContent = adapter?.features.join(", ") || "none";
  showFacts("bench-adapter-limits", Object.entries(adapter?.limits ?? {}).map(([name, value]) => [name, value.toLocaleString("en")]));
}

/** Pseudo-random ids, other ones for each seed, so that no prompt is found in the cache. */
function tokens(count: number, vocabSize: number, seed: number): number[] {
  let word = seed;
  return Array.from({ length: count }, () => {
    word = (Math.imul(word, 1664525) + 1013904223) >>> 0;
    return Math.floor(word / 2 ** 32 * vocabSize);
  });
}

/** Rates of a model's prompts and of decoding, of as many tokens as take a few seconds. */
async function measureModel(file: File | undefined, device: "gpu" | "cpu", signal: AbortSignal): Promise<BenchModel> {
  const options = { device, signal, cache: false };
  const model = await (file === undefined ? Model.builtin(options) : Model.load(file, options));
  try {
    const { name, architecture, weightTypes, kvType, vocabSize, contextLength } = model.info;
    let seed = 1;
    const run = async (prompt: number, generated: number): Promise<{ prefill: number; decode: number }> => {
      seed += 1;
      const ids = tokens(prompt, vocabSize, seed);
      const result = await model.generate(ids, { maxTokens: generated, ignoreEos: true, signal }).result;
      // The first token comes of the prompt.
      return { prefill: prompt / result.prefillSeconds, decode: (result.generatedTokens - 1) / result.decodeSeconds };
    };
    // Pipelines compile in the first runs, which also tell how many tokens there is time for.
    await run(32, 5);
    const guess = await run(32, 5);
    const most = (rate: number, sizes: readonly number[]): number =>
      sizes.find((size) => size / rate < SECONDS && size < contextLength - 1) ?? sizes.at(-1) ?? 1;
    const nPrompt = most(guess.prefill, [512, 128, 32]);
    const nGenerated = most(guess.decode, [128, 64, 32, 16]);
    await run(nPrompt, 1);
    const rates: { prefill: number[]; decode: number[] } = { prefill: [], decode: [] };
    for (let i = 0; i < REPETITIONS; i += 1) {
      showProgress(`${name}: ${i + 1} of ${REPETITIONS}`, i, REPETITIONS);
      rates.prefill.push((await run(nPrompt, 1)).prefill);
      rates.decode.push((await run(1, 1 + nGenerated)).decode);
    }
    const test = (phase: BenchTest["phase"], n_tokens: number): BenchTest => {
      const [lowest = 0, median = 0, highest = 0] = rates[phase].sort((a, b) => a - b);
      return { test: `${phase === "prefill" ? "pp" : "tg"}${n_tokens}`, phase, n_tokens, depth: 0, tokens_per_second: { lowest, median, highest } };
    };
    const { weightsBytes } = await model.memory();
    const tests = [test("prefill", nPrompt), test("decode", nGenerated)];
    return { name, architecture, weight_types: weightTypes, weights_bytes: weightsBytes, kv_type: kvType, tests };
  } finally {
    model.free();
  }
}
const REPETITIONS = 3;
/** What one repetition may take. */
const SECONDS = 2;

/** The repository's address: as the build says, or as GitHub Pages has it in its own. */
function repository(): string | undefined {
  const named = document.querySelector<HTMLMetaElement>("meta[name=repository]")?.content;
  if (named) return named;
  const [, owner] = /^([\w-]+)\.github\.io$/.exec(location.hostname) ?? [];
  const [, name = ""] = location.pathname.split("/");
  return owner === undefined ? undefined : `https://github.com/${owner}/${name.includes(".") || name === "" ? location.hostname : name}`;
}

/** The address of a new issue with a summary of the report. */
function issueAddress(base: string, report: BenchReport): string {
  const short = (text: string, length: number): string => text.length > length ? `${text.slice(0, length)}…` : text;
  const probes = report.probes.map(({ probe, bytes_per_second, flop_per_second }) =>
    `${probe}: ${flop_per_second > 0 ? `${giga(flop_per_second)} GFLOP/s` : `${giga(bytes_per_second)} GB/s`}`);
  const models = report.models.flatMap((model) => model.tests.map(({ test, tokens_per_second: { median } }) =>
    `${short(model.name, 80)} ${test}: ${formatRate(median)} tokens/s`));
  const body = [
    `Device: ${short(report.device.name, 200)} (${report.device.backend}, ${report.device.tier})`,
    `Browser: ${short(report.host.browser ?? "not told", 300)}`,
    `tilewright ${report.tilewright}, ${report.schema}`,
    "", ...probes, ...models, "",
    "The whole report (press “Copy” on the page and paste it between the lines):", "", "```json", "", "```",
  ].join("\n");
  const address = (body: string): string =>
    `${base}/issues/new?${new URLSearchParams({ title: `Measured: ${short(report.device.name, 100)}`, labels: "measured", body }).toString()}`;
  let text = body;
  while (address(text).length > LONGEST_URL) text = short(text, text.length - 100);
  return address(text);
}

function showReport(report: BenchReport): void {
  byId("bench-report").hidden = false;
  byId<HTMLTextAreaElement>("bench-json").value = `${JSON.stringify(report, undefined, 1)}\n`;
  const base = repository();
  const link = byId<HTMLAnchorElement>("bench-issue");
  link.hidden = base === undefined;
  byId("bench-issue-help").hidden = base === undefined;
  if (base !== undefined) link.href = issueAddress(base, report);
}

function clearResults(): void {
  for (const table of ["bench-probes", "bench-kernels", "bench-models"]) byId<HTMLTableElement>(table).tBodies[0]?.replaceChildren();
  for (const id of ["results", "model-region", "adapter", "report", "error"]) byId(`bench-${id}`).hidden = true;
  byId("bench-outcome").textContent = "";
  byId("bench-copied").textContent = "";
}

async function measure(): Promise<void> {
  const form = new FormData(byId<HTMLFormElement>("bench-run-form"));
  const device = form.get("device") === "cpu" ? "cpu" : "gpu";
  const quick = form.get("quick") !== null;
  const choice = form.get("model");
  const [file] = byId<HTMLInputElement>("bench-model-file").files ?? [];
  if (choice === "file" && file === undefined) {
    byId("bench-outcome").textContent = "Choose a GGUF file first.";
    byId("bench-model-file").focus();
    return;
  }
  clearResults();
  setState("running");
  showProgress("Opening the device");
  running = new AbortController();
  const { signal } = running;
  const begun = performance.now();
  try {
    const report = await bench({
      device, quick, signal,
      onProgress: ({ done, total, probe, kernel }) => {
        byId("bench-results").hidden = false;
        if (probe !== undefined) showProbe(probe);
        if (kernel !== undefined) showKernel(kernel);
        showProgress(`${done} of ${total}: ${kernel?.kernel ?? probe?.probe ?? ""}`, done, total);
      },
    });
    showDevice(report);
    if (choice !== "none") {
      showProgress("Loading the model");
      const model = await measureModel(choice === "file" ? file : undefined, device, signal);
      report.models.push(model);
      showModel(model, report.probes.find(({ probe }) => probe === "copy")?.bytes_per_second ?? 0);
    }
    showReport(report);
    setState("done");
    byId("bench-outcome").textContent = `Measured in ${formatSeconds((performance.now() - begun) / 1000)}. The report is below.`;
  } catch (error) {
    setState(signal.aborted ? "stopped" : "error");
    if (signal.aborted) byId("bench-outcome").textContent = "Stopped. What was measured until then is below; there is no report of it.";
    else {
      byId("bench-error").hidden = false;
      byId("bench-error").textContent = error instanceof Error ? error.message : String(error);
    }
  } finally {
    running = undefined;
  }
}

async function copy(): Promise<void> {
  const json = byId<HTMLTextAreaElement>("bench-json");
  try {
    await navigator.clipboard.writeText(json.value);
    byId("bench-copied").textContent = "Copied.";
  } catch {
    // Not everywhere may a page write there; what is selected can be copied by hand.
    json.focus();
    json.select();
    byId("bench-copied").textContent = "Selected: copy it with Ctrl+C or ⌘C.";
  }
}

/** Says so where there is no GPU, and leaves the CPU to choose. */
async function lookForGpu(): Promise<void> {
  const found = await devices().catch(() => []);
  if (found.some(({ choice }) => choice === "gpu")) return;
  const notice = byId("bench-no-webgpu");
  notice.hidden = false;
  notice.textContent = "navigator" in globalThis && "gpu" in navigator
    ? "This browser has WebGPU and found no adapter: the GPU or its driver may be blocked. The CPU can be measured."
    : "This browser has no WebGPU, or the page is not served over https. The CPU can be measured.";
  byId<HTMLInputElement>("bench-device-gpu").disabled = true;
  byId<HTMLInputElement>("bench-device-cpu").checked = true;
}

byId("bench-run-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === undefined) void measure();
});
byId("bench-stop").addEventListener("click", () => running?.abort());
byId("bench-copy").addEventListener("click", () => void copy());
byId("bench-model-file").addEventListener("change", () => {
  byId<HTMLInputElement>("bench-model-chosen").checked = true;
});
void lookForGpu();
setState("idle");
