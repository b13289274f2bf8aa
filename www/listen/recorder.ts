// The microphone: its samples, as they come.

/** A recording, until `stop`. */
export class Recorder {
  private parts: Float32Array[] = [];
  /** Samples before those of `parts`, which were dropped. */
  private nDropped = 0;
  private nSamples = 0;

  private constructor(private readonly stream: MediaStream, private readonly context: AudioContext) {}

  /** Begins, once the user has allowed it. Throws a `DOMException` without a microphone or the permission. */
  static async start(): Promise<Recorder> {
    if (navigator.mediaDevices === undefined) throw new DOMException("browsers give a microphone to pages with https alone", "NotAllowedError");
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: false } });
    const context = new AudioContext();
    const recorder = new Recorder(stream, context);
    try {
      await context.audioWorklet.addModule(new URL("./listen-worklet.js", import.meta.url));
      const node = new AudioWorkletNode(context, "tilewright-microphone", { numberOfOutputs: 0 });
      node.port.onmessage = ({ data }: MessageEvent<Float32Array>) => {
        recorder.parts.push(data);
        recorder.nSamples += data.length;
      };
      context.createMediaStreamSource(stream).connect(node);
      await context.resume();
      return recorder;
    } catch (error) {
      await recorder.stop();
      throw error;
    }
  }

  get sampleRate(): number {
    return this.context.sampleRate;
  }

  /** Seconds so far. */
  get seconds(): number {
    return this.nSamples / this.sampleRate;
  }

  /** Called if the microphone is gone. */
  onGone(done: () => void): void {
    this.stream.getTracks().forEach((track) => track.addEventListener("ended", done, { once: true }));
  }

  /** Samples from a time on. Earlier ones are forgotten, but for a part that it is in. */
  from(seconds: number): Float32Array {
    let first = Math.round(seconds * this.sampleRate) - this.nDropped;
    while (this.parts[0] !== undefined && this.parts[0].length <= first) {
      first -= this.parts[0].length;
      this.nDropped += this.parts.shift()?.length ?? 0;
    }
    const samples = new Float32Array(Math.max(0, this.nSamples - this.nDropped - first));
    let end = -first;
    for (const part of this.parts) {
      const own = end < 0 ? part.subarray(-end) : part;
      samples.set(own, Math.max(0, end));
      end += part.length;
    }
    return samples;
  }

  /** Ends it, and lets the microphone go. */
  async stop(): Promise<void> {
    this.stream.getTracks().forEach((track) => track.stop());
    if (this.context.state !== "closed") await this.context.close();
  }
}
