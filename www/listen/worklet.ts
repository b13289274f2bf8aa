// Passes the microphone's samples to the page, in a script of its own: it runs in the thread of sound. The first channel alone, which is
// what microphones have.

// The members of the worklet's scope that are used; types of the DOM lack them.
declare class AudioWorkletProcessor {
  readonly port: MessagePort;
}
declare function registerProcessor(name: string, kind: new () => AudioWorkletProcessor): void;

/** Samples of a message: an eighth of a second at 48 kHz. */
const N_SAMPLES = 6144;

registerProcessor("tilewright-microphone", class extends AudioWorkletProcessor {
  private samples = new Float32Array(N_SAMPLES);
  private n = 0;

  process([input]: Float32Array[][]): boolean {
    for (const sample of input?.[0] ?? []) {
      this.samples[this.n] = sample;
      this.n += 1;
      if (this.n === N_SAMPLES) {
        this.port.postMessage(this.samples, [this.samples.buffer]);
        this.samples = new Float32Array(N_SAMPLES);
        this.n = 0;
      }
    }
    return true;
  }
});
