// What the browser and the engine tell of this device, and how fast downloads of the page were.
import type { Notice, Progress } from "../tilewright/index.js";
import { showNotice } from "../messages.js";
import type { Told } from "./fits.js";
import { recall, remember } from "./storage.js";

/** What some browsers have, and the DOM's types lack. */
interface Hints {
  deviceMemory?: number;
  userAgentData?: { mobile?: boolean };
  gpu?: { requestAdapter(): Promise<{ limits: { maxBufferSize: number } } | null> };
}

const RATE_KEY = "tilewright.rate";
/** Shorter downloads tell little of the line. */
const TELLING_BYTES = 4e6;

/** What the browser tells. The GPU is asked only where it says nothing of its memory. */
export async function toldHere(): Promise<Told> {
  const { deviceMemory, userAgentData, gpu } = navigator as Navigator & Hints;
  const limits = deviceMemory === undefined ? (await gpu?.requestAdapter().catch(() => null))?.limits : undefined;
  const rate = recall(RATE_KEY);
  return {
    memoryBytes: deviceMemory === undefined ? undefined : deviceMemory * 2 ** 30,
    isPhone: userAgentData?.mobile ?? /Mobi|Android|iPhone|iPad/.test(navigator.userAgent),
    maxBufferBytes: limits?.maxBufferSize,
    measuredRate: typeof rate === "number" && rate > 0 && Number.isFinite(rate) ? rate : undefined,
  };
}

/** Remembers how fast a download is: of the last progress that says so. */
export class RateWatch {
  private latest: Progress | undefined;

  see(progress: Progress): void {
    if (progress.phase === "download") this.latest = progress;
  }

  /** The load is over. */
  end(): void {
    if (this.latest !== undefined && this.latest.loaded >= TELLING_BYTES && this.latest.bytesPerSecond > 0) {
      remember(RATE_KEY, this.latest.bytesPerSecond);
    }
  }
}

/** Tells of what a load decided. That it runs on the CPU, and why, stands on the first screen and under the prompt. */
export function tellNotice(notice: Notice): void {
  if (notice.code !== "cpu_fallback") showNotice(notice);
}
