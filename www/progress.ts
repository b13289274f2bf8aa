// What goes on: a bar with a title, and one piece of work at a time.
import type { Progress } from "./tilewright/index.js";
import { announce } from "./messages.js";
import { byId, formatBytes, formatSeconds, perFrame } from "./dom.js";

/** What a bar shows. Without a total it shows that something goes on, not how far it is. */
export interface Shown {
  title: string;
  text: string;
  done?: number;
  total?: number;
}

/** Shows work in the section `#id`, with `#id-title`, `#id-bar` and `#id-text`, until `end` is called. */
export function showProgress(id: string, first: Shown): { update: (shown: Shown) => void; end: () => void } {
  const section = byId(id);
  const bar = byId<HTMLProgressElement>(`${id}-bar`);
  let latest = first;
  const draw = perFrame(() => {
    byId(`${id}-title`).textContent = latest.title;
    byId(`${id}-text`).textContent = latest.text;
    if (latest.total === undefined) {
      bar.removeAttribute("value");
    } else {
      bar.max = latest.total;
      bar.value = latest.done ?? 0;
    }
  });
  draw.now();
  section.hidden = false;
  announce(`${first.title}.`);
  return {
    update: (shown) => {
      latest = shown;
      draw.ask();
    },
    end: () => {
      draw.now();
      section.hidden = true;
    },
  };
}

const PHASES: Record<Progress["phase"], string> = {
  download: "Downloading",
  cache: "Loading from this device",
  file: "Reading",
  prepare: "Preparing",
};

/** A load that begins. */
export function loadBegins(label: string): Shown {
  return { title: `Loading ${label}`, text: "" };
}

/** How far a load has come. */
export function loadShown(label: string, { phase, loaded, total, bytesPerSecond, secondsLeft }: Progress): Shown {
  const title = `${PHASES[phase]} ${label}`;
  if (phase === "prepare") return { title, text: "The device gets ready" };
  const text = [
    total === undefined ? formatBytes(loaded) : `${formatBytes(loaded)} of ${formatBytes(total)}`,
    ...(bytesPerSecond > 0 ? [`${formatBytes(bytesPerSecond)}/s`] : []),
    ...(secondsLeft === undefined ? [] : [`${formatSeconds(secondsLeft)} left`]),
  ].join(" · ");
  return total === undefined ? { title, text } : { title, text, done: loaded, total };
}

/** Work of which only the newest counts: it waits until the one before has ended, which it aborts. */
export class Newest {
  private going: { abort: AbortController; done: Promise<void> } | undefined;

  get isGoing(): boolean {
    return this.going !== undefined;
  }

  /** Resolves when the work has ended, or at once if newer work came before it began. The work tells people what went wrong in it. */
  async run(work: (signal: AbortSignal) => Promise<void>): Promise<void> {
    const abort = new AbortController();
    const before = this.going;
    before?.abort.abort();
    const done = (async () => {
      await before?.done;
      if (!abort.signal.aborted) await work(abort.signal);
    })();
    const mine = { abort, done };
    this.going = mine;
    try {
      await done;
    } finally {
      if (this.going === mine) this.going = undefined;
    }
  }

  /** Aborts what goes on, and resolves when it has ended. */
  async stop(): Promise<void> {
    this.going?.abort.abort();
    await this.going?.done;
  }
}
