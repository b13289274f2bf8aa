/** Speech to text. */

import { ensure } from "./errors.js";
import { defined } from "./helpers.js";
import type { TranscriberOptions } from "./load-options.js";
import { loadInto } from "./load.js";
import { Loaded } from "./loaded.js";
import { known } from "./options.js";
import type { SubtitleFormat } from "./protocol.js";
import { samplesOf } from "./sound.js";
import { specOf } from "./spec.js";
import type { DetectedLanguage, DetectLanguageOptions, ModelSource, SoundSource, TimedText, Transcript, TranscribeOptions, TranscriberInfo } from "./types.js";

/**
 * A speech model (Whisper), loaded onto a device in a worker of its own, whose engine is fetched for it: 0.83 MB compressed.
 *
 * ```ts
 * const transcriber = await Transcriber.load("hf:openai/whisper-tiny.en");
 * const { text } = await transcriber.transcribe(file, { onSegment: ({ start, text }) => console.log(start, text) });
 * transcriber.free();
 * ```
 *
 * Calls run in turn.
 */
export class Transcriber extends Loaded<TranscriberInfo> {
  /**
   * Loads a speech model: a Hugging Face folder of Whisper, or a file of whisper.cpp (`ggml-*.bin`).
   *
   * @throws {@link TilewrightError}, `unsupported` for another kind of model; or the reason of `options.signal`.
   */
  static async load(source: ModelSource, options: TranscriberOptions = {}): Promise<Transcriber> {
    const { kvType, memoryLimit, ...common } = known("Transcriber.load", options);
    const settings = defined({ kvType, memoryLimit });
    return new Transcriber(await loadInto("loadTranscriber", await specOf(source, common.signal, common, "speech"), { settings }, common));
  }

  /**
   * The text of a sound. Silence has no segments.
   *
   * @throws {@link TilewrightError}, `option` for an option or a sound that it cannot take, `not_a_sound` for a file
   * that the browser cannot decode; or the reason of `options.signal`.
   */
  async transcribe(sound: SoundSource, options: TranscribeOptions = {}): Promise<Transcript> {
    const { sampleRate, signal, onSegment, ...settings } = known("transcribe", options);
    const samples = await samplesOf(sound, sampleRate, signal);
    return this.call("transcribe", { samples, settings: defined(settings) }, {
      signal, transfer: [samples.buffer], onEvent: onSegment && ((segments) => segments.forEach((segment) => onSegment(segment))),
    });
  }

  /**
   * The likeliest language of a sound's first window that is not silent. `null` for silence, and for a model of English
   * alone.
   *
   * @throws As {@link Transcriber.transcribe}.
   */
  async detectLanguage(sound: SoundSource, options: DetectLanguageOptions = {}): Promise<DetectedLanguage | null> {
    const { sampleRate, signal } = known("detectLanguage", options);
    const samples = await samplesOf(sound, sampleRate, signal);
    return this.call("detectLanguage", { samples }, { signal, transfer: [samples.buffer] });
  }

  /** A transcript as subtitles in the format of SubRip. */
  toSrt(transcript: { segments: readonly TimedText[] }): Promise<string> {
    return this.#subtitles(transcript, "srt");
  }

  /** A transcript as subtitles in the format WebVTT. */
  toVtt(transcript: { segments: readonly TimedText[] }): Promise<string> {
    return this.#subtitles(transcript, "vtt");
  }

  async #subtitles({ segments }: { segments: readonly TimedText[] }, format: SubtitleFormat): Promise<string> {
    ensure(Array.isArray(segments), "option", `segments is ${typeof segments}, expected those of a transcript`);
    return this.call("subtitles", { segments: segments.map(({ start, end, text }) => ({ start, end, text })), format });
  }
}
