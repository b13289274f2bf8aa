// Which models to offer to a device, and what can be said of each before it is fetched. No DOM in here.
// Times to load come from a measured download alone: what browsers guess of a connection is off by a factor of ten.
import type { KnownModel } from "../tilewright/index.js";

/** What a browser tells of the device and its line. What it does not tell is missing. */
export interface Told {
  /** Bytes of the device's memory, as a power of two that browsers round to and cap. */
  memoryBytes?: number | undefined;
  isPhone: boolean;
  /** The largest buffer of the GPU. */
  maxBufferBytes?: number | undefined;
  /** Bytes per second of the last large download of this page. */
  measuredRate?: number | undefined;
}

export type Fit = "yes" | "no" | "unknown";

/** What the first screen says of a model. */
export interface Offer {
  model: KnownModel;
  needsBytes: number;
  fits: Fit;
  /** Why it fits or not. */
  why: string;
  /** To download it, at the rate of the last large download. */
  seconds?: number;
}

/** Tokens of a context that is not chosen. */
const CONTEXT = 4096;
/** Of the device's memory, what a model may take beside everything else. */
const SHARE = 0.5;
/** What a page may have where the browser does not tell and there is little: phones' browsers end pages that take more. */
const LITTLE_BYTES = 1e9;
/** A GPU whose buffers are smaller has little memory. */
const SMALL_BUFFER_BYTES = 2 ** 30;
const N_OFFERS = 3;

const gigabytes = (bytes: number): string => `${(bytes / 1e9).toFixed(1)} GB`;

/** Bytes that a model may take here; undefined where nothing is known. */
export function budgetOf({ memoryBytes, isPhone, maxBufferBytes = Infinity }: Told): number | undefined {
  if (memoryBytes !== undefined) return memoryBytes * SHARE;
  return isPhone || maxBufferBytes < SMALL_BUFFER_BYTES ? LITTLE_BYTES : undefined;
}

function offerOf(model: KnownModel, told: Told): Offer {
  const needsBytes = model.sizeBytes + CONTEXT * (model.cacheBytesPerToken ?? 0);
  const budget = budgetOf(told);
  const fits = budget === undefined ? "unknown" : needsBytes <= budget ? "yes" : "no";
  const needs = `needs ${gigabytes(needsBytes)} of memory`;
  const has = told.memoryBytes === undefined ? "browsers of such devices give a page about 1 GB" : `this device has ${gigabytes(told.memoryBytes)}`;
  const why = {
    yes: `fits your device: ${needs}`,
    no: `may be too large: ${needs}, and ${has}`,
    unknown: `${needs}; this browser does not say how much there is`,
  }[fits];
  const rate = told.measuredRate;
  return { model, needsBytes, fits, why, ...(rate === undefined ? {} : { seconds: model.sizeBytes / rate }) };
}

/** Three models for a device: of those that fit the smallest, one from the middle and the largest; then the smallest that do not. */
export function offers(models: readonly KnownModel[], told: Told): Offer[] {
  const all = models.filter(({ use }) => use === "chat").map((model) => offerOf(model, told)).sort((a, b) => a.needsBytes - b.needsBytes);
  // Where nothing is known, the small ones are the likeliest to fit.
  if (budgetOf(told) === undefined) return all.slice(0, N_OFFERS);
  const fitting = all.filter(({ fits }) => fits === "yes");
  if (fitting.length < N_OFFERS) return all.slice(0, N_OFFERS);
  const last = fitting.length - 1;
  return [0, Math.floor(last / 2), last].flatMap((at) => fitting[at] ?? []);
}
