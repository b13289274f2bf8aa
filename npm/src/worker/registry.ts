/** Objects of the WASM module that outlive a call, by number. */

import { ensure } from "../errors.js";

export class Registry<T extends { free(): void }> {
  readonly #objects = new Map<number, T>();
  #last = 0;

  constructor(private readonly what: string) {}

  put(object: T): number {
    this.#last += 1;
    this.#objects.set(this.#last, object);
    return this.#last;
  }

  all(): T[] {
    return [...this.#objects.values()];
  }

  get(id: number): T {
    const object = this.#objects.get(id);
    ensure(object !== undefined, "disposed", `the ${this.what} was freed`);
    return object;
  }

  free(id: number): void {
    this.get(id).free();
    this.#objects.delete(id);
  }

  clear(): void {
    this.#objects.forEach((object) => object.free());
    this.#objects.clear();
  }
}
