/** Indices and mixtures of logits on a device. */

import { TilewrightError } from "../errors.js";
import type { Calls } from "../protocol.js";
import { Index, Mol } from "../tilewright.js";
import type { IndexInfo, MolInfo } from "../types.js";
import { withContents } from "./files.js";
import { Held, hold, placeOf } from "./held.js";
import type { Place } from "./place.js";
import type { CallContext } from "./port.js";

/** An index. */
export class HeldIndex extends Held {
  readonly index: Index;

  constructor(place: Place, index: Index) {
    super(place);
    this.index = index;
  }

  /** What it says, without what it does not know. */
  info(): IndexInfo {
    const { model, pooling, ...info } = this.index.info();
    return { ...info, ...(model === null ? {} : { model }), ...(pooling === null ? {} : { pooling }) };
  }

  protected override release(): void {
    this.index.free();
  }
}

/** A mixture with its items. */
export class HeldMol extends Held {
  readonly mol: Mol;

  constructor(place: Place, mol: Mol) {
    super(place);
    this.mol = mol;
  }

  /** What it says, without what it does not know. */
  info(): MolInfo {
    const { model, ...info } = this.mol.info();
    return { ...info, ...(model === null ? {} : { model }) };
  }

  protected override release(): void {
    this.mol.free();
  }
}

/** Makes something in a place, which is given back if that fails. */
async function make<T extends HeldIndex | HeldMol>(
  { target, caller }: Pick<CallContext<"createIndex">, "target" | "caller">, where: Calls["createIndex"]["args"]["where"], work: (place: Place) => Promise<T>,
): Promise<{ info: ReturnType<T["info"]>; device: ReturnType<Place["info"]> }> {
  const place = await placeOf(where, caller);
  let made: T;
  try {
    made = await work(place);
  } catch (error) {
    place.release();
    throw error;
  }
  hold(target, made);
  return { info: made.info() as ReturnType<T["info"]>, device: place.info() };
}

export function createIndex({ where, settings }: Calls["createIndex"]["args"], context: CallContext<"createIndex">): Promise<Calls["createIndex"]["reply"]> {
  return make(context, where, async (place) => new HeldIndex(place, Index.create(place.device, settings)));
}

export function loadIndex({ where, bytes, expected }: Calls["loadIndex"]["args"], context: CallContext<"loadIndex">): Promise<Calls["loadIndex"]["reply"]> {
  return make(context, where, async (place) => {
    const index = await Index.load(place.device, bytes);
    try {
      if (expected !== undefined) {
        index.expect(expected);
      }
    } catch (error) {
      index.free();
      throw error;
    }
    return new HeldIndex(place, index);
  });
}

export function loadMol({ where, storage, ...request }: Calls["loadMol"]["args"], context: CallContext<"loadMol">): Promise<Calls["loadMol"]["reply"]> {
  return make(context, where, (place) => withContents(request, context, (files) => {
    const [file] = files;
    if (file === undefined || files.length > 1) {
      throw new TilewrightError("option", `source has ${files.length} files, expected one`);
    }
    return new HeldMol(place, Mol.load(place.device, file.bytes, storage));
  }));
}
