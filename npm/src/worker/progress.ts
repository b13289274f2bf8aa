/** Progress of a load. */

import { sumOf } from "../helpers.js";
import type { ModelFile } from "../source.js";
import type { Progress } from "../types.js";
import type { Caller } from "./port.js";

const REPORT_MS = 100;
/** Milliseconds over which the rate is measured. */
const RATE_MS = 3000;

export class ProgressMeter {
  files: ModelFile[] = [];
  readonly #samples: { time: number; loaded: number }[] = [];
  #reported = -Infinity;

  constructor(private readonly caller: Caller) {}

  report(phase: Progress["phase"], force: boolean): void {
    const time = performance.now();
    if (!force && time - this.#reported < REPORT_MS) {
      return;
    }
    this.#reported = time;
    const loaded = this.files.reduce((sum, file) => sum + file.arrived, 0);
    const total = sumOf(this.files.map(({ size }) => size));
    this.#samples.push({ time, loaded });
    while (this.#samples.length > 2 && time - (this.#samples[0]?.time ?? time) > RATE_MS) {
      this.#samples.shift();
    }
    const first = this.#samples[0];
    const seconds = first === undefined ? 0 : (time - first.time) / 1000;
    const bytesPerSecond = first === undefined || seconds === 0 ? 0 : (loaded - first.loaded) / seconds;
    const progress: Progress = { phase, loaded, bytesPerSecond };
    if (total !== undefined) {
      progress.total = total;
      if (bytesPerSecond > 0) {
        progress.secondsLeft = (total - loaded) / bytesPerSecond;
      }
    }
    this.caller.send({ type: "progress", progress });
  }
}
