// What the page shows: outputs of `tilewright bench .. --json`, of `tune --json` and `bench --report`, checked field by field.
import * as v from "valibot";

/** More rows than any bench has are something else. */
const MOST_ROWS = 20_000;

const number = v.pipe(v.number(), v.finite());
const rows = <T extends v.GenericSchema>(row: T) => v.pipe(v.array(row), v.maxLength(MOST_ROWS));
const device = v.object({ name: v.string(), backend: v.string(), tier: v.string() });
const probes = v.object({ copy_bytes_per_second: number, flop_per_second: number });
const spread = v.object({ lowest: number, median: number, highest: number });
const percentiles = v.object({ p50: number, p95: number, p99: number });
const plan = { weights_bytes: number, cache_bytes: number, activations_bytes: number };

const kernelRow = v.object({ kernel: v.string(), operation: v.string(), n_tokens: number, seconds: number, bytes: number, flop: number });
const reads = v.object({ sequential_bytes_per_second: number, strided_bytes_per_second: number, scattered_bytes_per_second: number });
const kernels = v.object({ bench: v.literal("kernels"), device, probes, reads: v.optional(reads), rows: rows(kernelRow) });

const modelRow = v.object({
  test: v.string(), phase: v.picklist(["prefill", "decode"]), tokens_per_second: spread,
  bandwidth_share: v.optional(number), flop_share: v.optional(number), buffers_created: v.optional(number),
});
const dispatch = v.object({ kernel: v.string(), variant: v.string(), layer: v.nullable(number), seconds: number });
const model = v.object({
  bench: v.literal("model"), model: v.string(), device, rows: rows(modelRow),
  memory: v.optional(v.object(plan)),
  free_bytes: v.nullish(number),
  pieces: v.optional(rows(v.object({ test: v.string(), seconds: rows(number) })), []),
  timeline: v.nullish(v.object({ clock: v.string(), dispatches: rows(dispatch) })),
});

const serveRow = v.object({
  concurrency: v.optional(number), rate: v.optional(number), n_answered: number, n_refused: number, n_failed: number,
  requests_per_second: number, tokens_per_second: number, prompt_tokens: number, cached_tokens: number,
  first_token_seconds: percentiles, between_tokens_seconds: percentiles, request_seconds: percentiles, refused_seconds: percentiles,
  server: v.nullish(v.object({ tokens_per_decode_pass: number })),
  cost: v.nullish(v.object({ per_1000_requests: number, per_million_tokens: number })),
});
const serve = v.object({ bench: v.literal("serve"), model: v.string(), device: v.nullish(device), rows: rows(serveRow) });

const molRow = v.object({ operation: v.string(), bytes: number, flop: number, seconds: number, least_seconds: number });
const molShape = v.object({ query_components: number, item_components: number, dim: number, n_queries: number });
const trial = v.object({ how: v.union([v.string(), v.record(v.string(), v.unknown())]), seconds: number, recall: number, scored: number });
const mol = v.object({
  bench: v.literal("mol"), device, items: number, tables: rows(v.object({ shape: molShape, rows: rows(molRow) })),
  searches: v.nullish(v.object({ trials: rows(trial), best: number })),
});

const embedRow = v.object({
  n_texts: number, texts_per_second: spread, latency_seconds: percentiles, intensity: number, flop_share: number, memory_bytes: number,
});
const embed = v.object({ bench: v.literal("embed"), model: v.string(), device, rows: rows(embedRow) });

const memoryRow = v.object({ model: v.string(), weights: v.string(), ...plan, total_bytes: number });
const memory = v.object({ bench: v.literal("memory"), device, context_length: number, kv_type: v.string(), rows: rows(memoryRow) });

const timed = v.object({ tier: v.string(), size: number, seconds: number });
const tuneRow = v.object({
  kernel: v.string(), weight: v.string(), rows: number, blocks: number, tokens: number, usual: timed, best: timed,
});
const tune = v.object({ bench: v.literal("tune"), device, rows: rows(tuneRow) });

const part = v.variant("bench", [kernels, model, serve, mol, embed, memory, tune]);
const whole = v.object({
  schema: v.literal("tilewright-dashboard/1"), tilewright: v.optional(v.string()), unix_time: v.optional(number),
  parts: v.pipe(v.array(part), v.maxLength(100)),
});

/** `bench --report`, which the page's tab “Kernels” makes as well. */
const report = v.object({
  schema: v.literal("tilewright-bench/1"), unix_time: v.optional(number), device,
  probes: rows(v.object({ probe: v.string(), bytes_per_second: number, flop_per_second: number })),
  kernels: rows(kernelRow),
  models: v.pipe(v.array(v.object({ name: v.string(), tests: rows(modelRow) })), v.maxLength(10)),
});

export type Part = v.InferOutput<typeof part>;
export type KernelRow = v.InferOutput<typeof kernelRow>;
export type ServeRow = v.InferOutput<typeof serveRow>;
export type Trial = v.InferOutput<typeof trial>;

/** The latest output of each bench. */
export type Data = { [Name in Part["bench"]]?: Extract<Part, { bench: Name }> };

/** What a text of JSON has for the page. Throws an error that names the field at fault. */
export function read(text: string): { parts: Part[]; time?: number } {
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    throw new Error(`it is not JSON: ${(error as Error).message}`);
  }
  const schema = typeof json === "object" && json !== null && "schema" in json ? json.schema : undefined;
  if (schema === "tilewright-dashboard/1") {
    const { parts, unix_time } = checked(whole, json);
    return { parts, ...(unix_time === undefined ? {} : { time: unix_time }) };
  }
  if (schema === "tilewright-bench/1") {
    const found = checked(report, json);
    return { parts: ofReport(found), ...(found.unix_time === undefined ? {} : { time: found.unix_time }) };
  }
  return { parts: [checked(part, json)] };
}

function checked<T extends v.GenericSchema>(schema: T, json: unknown): v.InferOutput<T> {
  const { success, output, issues } = v.safeParse(schema, json, { abortEarly: true });
  if (success) return output as v.InferOutput<T>;
  const at = v.getDotPath(issues[0]) ?? "it";
  throw new Error(`${at}: ${issues[0].message.charAt(0).toLowerCase()}${issues[0].message.slice(1)}`);
}

function ofReport(found: v.InferOutput<typeof report>): Part[] {
  const rate = (name: string, of: "bytes_per_second" | "flop_per_second"): number => found.probes.find(({ probe }) => probe === name)?.[of] ?? 0;
  const { device } = found;
  const probes = { copy_bytes_per_second: rate("copy", "bytes_per_second"), flop_per_second: rate("fma_f32", "flop_per_second") };
  const reads = {
    sequential_bytes_per_second: rate("read", "bytes_per_second"),
    strided_bytes_per_second: rate("read_strided", "bytes_per_second"),
    scattered_bytes_per_second: rate("read_random", "bytes_per_second"),
  };
  const [first] = found.models;
  const models: Part[] = first === undefined ? [] : [{ bench: "model", model: first.name, device, rows: first.tests, pieces: [] }];
  return [{ bench: "kernels", device, probes, reads, rows: found.kernels }, ...models];
}
