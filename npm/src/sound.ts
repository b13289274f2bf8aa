/** Sounds in the caller's thread: to samples of one channel at 16 kHz. */

import { isArrayOf } from "./arguments.js";
import { ensure, messageOf, TilewrightError } from "./errors.js";
import { orAborted } from "./helpers.js";
import type { DecodedSound, SoundSource } from "./types.js";

/** The members that are used. Types that only pages have are unknown here. */
interface OfflineContext {
  readonly destination: unknown;
  decodeAudioData(bytes: ArrayBuffer): Promise<DecodedSound>;
  createBuffer(channels: number, length: number, rate: number): DecodedSound & { copyToChannel(samples: Float32Array, channel: number): void };
  createBufferSource(): { buffer: DecodedSound | null; connect(to: unknown): void; start(): void };
  startRendering(): Promise<DecodedSound>;
}

/** Samples in a second as speech models read them. */
export const SAMPLE_RATE = 16_000;
/** As natively. */
const MAX_SECONDS = 4 * 60 * 60;
const MAX_RATE = 768_000;

const EXPECTED = "a Float32Array of samples, an AudioBuffer, a Blob, the bytes of a file, or an address";

/**
 * A copy of the samples, resampled and decoded by the browser.
 *
 * @throws {@link TilewrightError}: `option` for what is no sound or too long, or needs what this platform does not have;
 * `not_a_sound` for a file that the browser cannot decode, `http` or `network` for an address; or the signal's reason.
 */
export async function samplesOf(
  sound: SoundSource, sampleRate: number | undefined, signal: AbortSignal | undefined,
): Promise<Float32Array<ArrayBuffer>> {
  if (isArrayOf("Float32Array", sound)) {
    const rate = sampleRate ?? SAMPLE_RATE;
    ensure(Number.isInteger(rate) && rate >= 1 && rate <= MAX_RATE, "option", `sampleRate is ${rate}, expected 1 to ${MAX_RATE}`);
    const samples = new Float32Array(sound as Float32Array);
    checkLength(samples.length / rate);
    return rate === SAMPLE_RATE || samples.length === 0 ? samples : resampled([samples], rate, signal);
  }
  ensure(sampleRate === undefined, "option", "sampleRate is for samples, and the sound has a rate of its own");
  if (isDecoded(sound)) {
    checkLength(sound.duration);
    const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
    return sound.sampleRate === SAMPLE_RATE ? mean(channels) : resampled(channels, sound.sampleRate, signal);
  }
  const kind = Object.prototype.toString.call(sound).slice(8, -1);
  const isFile = sound instanceof Blob || ["Blob", "File", "ArrayBuffer"].includes(kind) || isArrayOf("Uint8Array", sound);
  ensure(isFile || typeof sound === "string" || kind === "URL", "option", `sound is ${kind}, expected ${EXPECTED}`);
  const context = offline(1, 1, SAMPLE_RATE, `sound is ${kind === "String" ? "an address" : kind}`);
  const bytes = await orAborted(isFile ? bytesOf(sound as Blob | ArrayBuffer | Uint8Array) : fetched(String(sound), signal), signal);
  let decoded: DecodedSound;
  try {
    decoded = await orAborted(context.decodeAudioData(bytes), signal);
  } catch (error) {
    signal?.throwIfAborted();
    throw new TilewrightError("not_a_sound", `the sound cannot be decoded: it is in no format that this browser knows, or damaged (${messageOf(error)})`, { cause: error });
  }
  return samplesOf(decoded, undefined, signal);
}

function isDecoded(sound: unknown): sound is DecodedSound {
  return typeof (sound as Partial<DecodedSound> | null)?.getChannelData === "function";
}

function checkLength(seconds: number): void {
  ensure(seconds <= MAX_SECONDS, "option", `the sound has ${Math.ceil(seconds)} seconds, expected at most ${MAX_SECONDS}`);
}

/** `what`: why it is needed, for the error where there is none. */
function offline(channels: number, length: number, rate: number, what: string): OfflineContext {
  const { OfflineAudioContext } = globalThis as { OfflineAudioContext?: new (channels: number, length: number, rate: number) => OfflineContext };
  ensure(OfflineAudioContext !== undefined,
    "option", `${what}, expected a Float32Array of samples at ${SAMPLE_RATE} Hz: here is no OfflineAudioContext, which decodes and resamples`);
  return new OfflineAudioContext(channels, length, rate);
}

/** A copy: decoding detaches it. */
async function bytesOf(sound: Blob | ArrayBuffer | Uint8Array): Promise<ArrayBuffer> {
  return "arrayBuffer" in sound ? sound.arrayBuffer() : new Uint8Array(sound as Uint8Array).slice().buffer;
}

async function fetched(url: string, signal: AbortSignal | undefined): Promise<ArrayBuffer> {
  let response: Response;
  try {
    response = await fetch(url, signal === undefined ? {} : { signal });
  } catch (error) {
    signal?.throwIfAborted();
    throw new TilewrightError("network", `${url} could not be fetched (${messageOf(error)})`, { cause: error });
  }
  ensure(response.ok, "http", `${url} is an error (HTTP status ${response.status})`, { status: response.status });
  return response.arrayBuffer();
}

/** The mean of the channels. */
function mean(channels: readonly Float32Array[]): Float32Array<ArrayBuffer> {
  const [first = new Float32Array()] = channels;
  const sum = new Float32Array(first);
  for (const channel of channels.slice(1)) {
    channel.forEach((sample, i) => {
      sum[i] = (sum[i] ?? 0) + sample;
    });
  }
  return channels.length > 1 ? sum.map((sample) => sample / channels.length) : sum;
}

async function resampled(channels: readonly Float32Array[], rate: number, signal: AbortSignal | undefined): Promise<Float32Array<ArrayBuffer>> {
  const samples = mean(channels);
  const context = offline(1, Math.max(1, Math.round(samples.length * SAMPLE_RATE / rate)), SAMPLE_RATE, `the samples have ${rate} Hz`);
  const buffer = context.createBuffer(1, samples.length, rate);
  buffer.copyToChannel(samples, 0);
  const source = context.createBufferSource();
  source.buffer = buffer;
  source.connect(context.destination);
  source.start();
  return new Float32Array((await orAborted(context.startRendering(), signal)).getChannelData(0));
}
