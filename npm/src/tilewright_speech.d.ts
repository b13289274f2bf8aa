/** The exports of the WASM module for speech that this package uses. */

import type { DetectedLanguage, TimedText, Transcript, TranscriberInfo, TranscriptSegment, Counters, DeviceChoice, DeviceInfo, MemoryInfo, Tier } from "./types.js";
import type { TranscribeSettings, TranscriberRequest } from "./protocol.js";
import type { Adapter, FileInfo } from "./tilewright.js";

export default function init(input?: { module_or_path: BufferSource | string | URL }): Promise<{ memory: WebAssembly.Memory }>;

/** As the engine's, without kernels. */
export class Device {
  private constructor();
  static open(choice: DeviceChoice, adapter: Adapter | undefined, tier?: Tier): Promise<Device>;
  info(): DeviceInfo;
  counters(): Counters;
  isGpu(): boolean;
  availableBytes(): number | undefined;
  takeNotices(): string[];
  destroy(): void;
  free(): void;
}

/** As the engine's. */
export class Loader<Loaded> {
  private constructor();
  static transcriber(device: Pick<Device, "info">, files: FileInfo[], options: TranscriberRequest["settings"]): Loader<Transcriber>;
  setFolder(name: string): void;
  want(): { file: number; offset: number } | undefined;
  push(bytes: Uint8Array): Promise<void>;
  end(): void;
  finish(): Promise<Loaded>;
  free(): void;
}

export class Transcriber {
  private constructor();
  info(): Omit<TranscriberInfo, "fileBytes">;
  memory(): Omit<MemoryInfo, "wasmHeapBytes">;
  /** `undefined` if cancelled. */
  transcribe(
    samples: Float32Array, options: TranscribeSettings, onSegments: (segments: TranscriptSegment[]) => void,
  ): Promise<Transcript | undefined>;
  /** `null` for silence and for a model of English alone, `undefined` if cancelled. */
  detectLanguage(samples: Float32Array): Promise<DetectedLanguage | null | undefined>;
  cancel(): void;
  subtitles(segments: TimedText[], format: string): string;
  free(): void;
}

export class Sha256 {
  constructor();
  update(bytes: Uint8Array): void;
  hex(): string;
  free(): void;
}
