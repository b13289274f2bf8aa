// Checks reports of `tilewright bench --report` and of www/bench.html, version 1 (README.md has the fields):
//
//     node benches/record/community/check.mjs [FILE..]    the files, or all reports in this folder
//
// Prints what is wrong, a line for each problem, and exits with 1 if there is any. Tests import `problems`.

import { readdirSync, readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { fileURLToPath } from "node:url";

export const SCHEMA = "tilewright-bench/1";

/** A report has some hundred rows; more bytes are something else. */
const MOST_BYTES = 256 * 1024;
/** Rates are computed from what stands beside them, and rounded when they are written. */
const TOLERANCE = 1e-3;
/** No machine moves so many bytes or does so many operations in a second: what claims it was not timed. */
const MOST_BYTES_PER_SECOND = 1e14;
const MOST_FLOP_PER_SECOND = 1e17;
/** Caches and half precision let kernels pass a probe, but not by so much. */
const MOST_SHARE = 100;

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isWhole = (value) => Number.isSafeInteger(value) && value >= 0;
const text = (most = 200, least = 1) => (value) =>
  typeof value === "string" && value.length >= least && value.length <= most && !/[\u0000-\u001f]/.test(value) ? undefined
    : `a text of ${least} to ${most} characters in one line`;
const orNull = (check) => (value, path, report) => value === null ? undefined : check(value, path, report);
const oneOf = (...values) => (value) => values.includes(value) ? undefined : values.map((it) => JSON.stringify(it)).join(" or ");
const whole = (least, most) => (value) => isWhole(value) && value >= least && value <= most ? undefined : `a whole number from ${least} to ${most}`;
const positive = (most) => (value) => isNumber(value) && value > 0 && value <= most ? undefined : `a number above 0, at most ${most}`;
const rate = (most) => (value) => isNumber(value) && value >= 0 && value <= most ? undefined : `a number from 0 to ${most}`;

/** What the members of an object must be; each is there, and no other. */
const object = (members) => (value, path, found) => {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return "an object";
  for (const name of Object.keys(value)) if (!Object.hasOwn(members, name)) found.push(`${path}.${name} is not a field of ${SCHEMA}`);
  for (const [name, check] of Object.entries(members)) look(check, value[name], `${path}.${name}`, found);
  return undefined;
};
const list = (check, least, most) => (value, path, found) => {
  if (!Array.isArray(value) || value.length < least || value.length > most) return `a list of ${least} to ${most}`;
  value.forEach((item, i) => look(check, item, `${path}[${i}]`, found));
  return undefined;
};
/** Any names of WebGPU, each with a number. */
const limits = (value, path, found) => {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return "an object";
  for (const [name, limit] of Object.entries(value)) {
    if (!/^[a-zA-Z][a-zA-Z0-9]{2,60}$/.test(name) || !isWhole(limit)) found.push(`${path}.${name} is ${JSON.stringify(limit)}, expected a limit's name and a whole number`);
  }
  return Object.keys(value).length > 0 && Object.keys(value).length <= 80 ? undefined : "1 to 80 limits";
};

function look(check, value, path, found) {
  const expected = check(value, path, found);
  if (expected !== undefined) found.push(`${path} is ${value === undefined ? "missing" : JSON.stringify(value)?.slice(0, 60)}, expected ${expected}`);
}

const WORK = {
  seconds: positive(60), bytes: whole(1, 2 ** 40), flop: whole(0, 2 ** 50),
  bytes_per_second: rate(MOST_BYTES_PER_SECOND), flop_per_second: rate(MOST_FLOP_PER_SECOND),
};
const SPREAD = object({ lowest: positive(1e7), median: positive(1e7), highest: positive(1e7) });
const REPORT = object({
  schema: oneOf(SCHEMA),
  tilewright: (value) => typeof value === "string" && /^\d+\.\d+\.\d+[\w.+-]*$/.test(value) ? undefined : "a version",
  source: oneOf("cli", "web"),
  unix_time: whole(1_760_000_000, 4_000_000_000),
  host: object({ os: orNull(text(40)), arch: orNull(text(40)), browser: orNull(text(400)) }),
  device: object({
    name: text(), backend: oneOf("vulkan", "metal", "dx12", "webgpu", "cpu"), driver: text(200, 0),
    tier: oneOf("none", "baseline", "f16", "subgroups", "scalar", "matrix8", "matrix16"), is_software: oneOf(true, false),
  }),
  adapter: orNull(object({
    vendor: text(80, 0), architecture: text(80, 0), description: text(200, 0),
    kind: oneOf("discrete", "integrated", "virtual", "other", "software"),
    features: list(text(60), 0, 80),
    limits,
  })),
  settings: object({
    quick: oneOf(true, false), dim: whole(64, 16_384), n_prompt: whole(2, 4096), n_cached: whole(0, 65_536), cold_bytes: whole(1, 2 ** 34),
  }),
  probes: list(object({
    probe: oneOf("copy", "read", "read_strided", "read_random", "reduce", "fma_f32", "fma_f16", "matrix_f16"), kernel: text(60), ...WORK,
  }), 6, 8),
  kernels: list(object({
    kernel: text(60), operation: text(40), n_tokens: whole(1, 4096), ...WORK, copy_share: rate(MOST_SHARE), fma_share: rate(MOST_SHARE),
  }), 1, 200),
  models: list(object({
    name: text(), architecture: text(60), weight_types: list(text(20), 1, 40), weights_bytes: whole(1, 2 ** 42), kv_type: oneOf("f32", "f16", "q8_0"),
    tests: list(object({
      test: text(40), phase: oneOf("prefill", "decode"), n_tokens: whole(1, 1 << 20), depth: whole(0, 1 << 20), tokens_per_second: SPREAD,
    }), 1, 200),
  }), 0, 10),
});

const isNear = (a, b) => Math.abs(a - b) <= TOLERANCE * Math.max(Math.abs(a), Math.abs(b));

/** What does not follow from the numbers beside it, in a report whose fields are as they must be. */
function contradictions(report) {
  const found = [];
  const same = (path, value, expected) => {
    if (!isNear(value, expected)) found.push(`${path} is ${value}, and the numbers beside it give ${expected}`);
  };
  const probe = (name) => report.probes.find((row) => row.probe === name);
  const unique = (path, names) => {
    const twice = names.find((name, i) => names.indexOf(name) < i);
    if (twice !== undefined) found.push(`${path} has ${twice} twice`);
  };
  unique("report.probes", report.probes.map((row) => row.probe));
  unique("report.kernels", report.kernels.map((row) => `${row.kernel} ${row.operation} ${row.n_tokens}`));
  for (const name of ["copy", "read", "read_strided", "read_random", "reduce", "fma_f32"]) {
    if (probe(name) === undefined) found.push(`report.probes lacks ${name}`);
  }
  for (const [part, rows] of [["probes", report.probes], ["kernels", report.kernels]]) {
    for (const [i, row] of rows.entries()) {
      const path = `report.${part}[${i}]`;
      same(`${path}.bytes_per_second`, row.bytes_per_second, row.bytes / row.seconds);
      same(`${path}.flop_per_second`, row.flop_per_second, row.flop / row.seconds);
      if (part === "probes" && row.flop > 0 !== /^(fma|matrix)_/.test(row.probe)) found.push(`${path}.flop is ${row.flop} of the probe ${row.probe}`);
      if (part === "kernels" && probe("copy") !== undefined && probe("fma_f32") !== undefined) {
        same(`${path}.copy_share`, row.copy_share, row.bytes_per_second / probe("copy").bytes_per_second);
        same(`${path}.fma_share`, row.fma_share, row.flop_per_second / probe("fma_f32").flop_per_second);
      }
    }
  }
  for (const [i, { tests }] of report.models.entries()) {
    unique(`report.models[${i}].tests`, tests.map(({ test }) => test));
    for (const [j, { test, phase, n_tokens, depth, tokens_per_second: { lowest, median, highest } }] of tests.entries()) {
      const path = `report.models[${i}].tests[${j}]`;
      if (!(lowest <= median && median <= highest)) found.push(`${path}.tokens_per_second is not in order: ${lowest}, ${median}, ${highest}`);
      const name = `${phase === "prefill" ? "pp" : "tg"}${n_tokens}${depth > 0 ? ` @ d${depth}` : ""}`;
      if (test !== name && !test.startsWith(`${name} b`)) found.push(`${path}.test is ${test}, expected ${name}`);
    }
  }
  const isCpu = report.device.backend === "cpu";
  if (isCpu !== (report.adapter === null)) found.push(`report.adapter is ${report.adapter === null ? "missing" : "there"}, and the backend is ${report.device.backend}`);
  if (isCpu !== (report.device.tier === "none")) found.push(`report.device.tier is ${report.device.tier}, and the backend is ${report.device.backend}`);
  if (report.source === "web" && !["webgpu", "cpu"].includes(report.device.backend)) found.push(`report.device.backend is ${report.device.backend} in a browser`);
  if ((report.source === "web") !== (report.host.browser !== null)) found.push(`report.host.browser is ${JSON.stringify(report.host.browser)}, and the source is ${report.source}`);
  return found;
}

/** What is wrong with a report's text, a sentence for each problem; none if it is a good one. */
export function problems(json) {
  if (Buffer.byteLength(json) > MOST_BYTES) return [`${Buffer.byteLength(json)} bytes, expected at most ${MOST_BYTES}`];
  let report;
  try {
    report = JSON.parse(json);
  } catch (error) {
    return [`no JSON: ${error.message}`];
  }
  // Of another version nothing else can be said.
  if (report?.schema !== SCHEMA) return [`report.schema is ${JSON.stringify(report?.schema)}, expected ${JSON.stringify(SCHEMA)}`];
  const found = [];
  look(REPORT, report, "report", found);
  return found.length > 0 ? found : contradictions(report);
}

/** What is wrong with a file's name here, if anything. */
export function badName(name) {
  return /^\d{4}-\d{2}-\d{2}-[a-z0-9][a-z0-9.-]{1,80}\.json$/.test(name) ? undefined
    : "the name is not YYYY-MM-DD-device.json, in small letters, digits, dots and hyphens";
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const folder = fileURLToPath(new URL(".", import.meta.url));
  const given = process.argv.slice(2);
  const own = readdirSync(folder).filter((name) => name.endsWith(".json")).map((name) => join(folder, name));
  const files = given.length > 0 ? given : own;
  for (const path of files) {
    const name = given.length > 0 ? undefined : badName(basename(path));
    let found;
    try {
      found = [...(name === undefined ? [] : [name]), ...problems(readFileSync(path, "utf8"))];
    } catch (error) {
      found = [error.message];
    }
    for (const problem of found) console.log(`${path}: ${problem}`);
    if (found.length > 0) process.exitCode = 1;
  }
  if (process.exitCode !== 1) console.log(`${files.length} ${files.length === 1 ? "report is" : "reports are"} as they should be`);
}
