// What screen readers hear of an answer while it is written.
import { announce } from "../messages.js";

/** Gives an answer to screen readers in sentences: single tokens would interrupt each other. */
export class Speech {
  private waiting = "";

  say(text: string): void {
    this.waiting += text;
    // About two sentences at a time.
    if (this.waiting.length < 120) return;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.waiting.lastIndexOf(mark)));
    if (end < 0) return;
    announce(this.waiting.slice(0, end + 1));
    this.waiting = this.waiting.slice(end + 1);
  }

  end(): void {
    if (this.waiting.trim() !== "") announce(this.waiting);
  }
}
