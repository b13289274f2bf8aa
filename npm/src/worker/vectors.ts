/** Indices and mixtures of logits on a device. */

import { TilewrightError } from "../errors.js";
import type { Calls } from "../protocol.js";
import { Index, Loader, type FileInfo, type Mol, type Saving } from "../tilewright.js";
import type { IndexInfo, MolInfo } from "../types.js";
import { checkCopies, type FilesRequest } from "./files.js";
import { Handle, placeOf, register } from "./handles.js";
import { loadOnto, type Streaming } from "./load.js";
import type { Place } from "./place.js";
import type { CallContext } from "./port.js";
import { Registry } from "./registry.js";

/** An index. */
export class IndexHandle extends Handle {
  readonly index: Index;
  /** Files of it that are being written. */
  readonly saves = new Registry<Saving>("save");

  constructor(place: Place, index: Index) {
    super(place);
    this.index = index;
  }

  /** What it says, without what it does not know. */
  info(): IndexInfo {
    const { model, pooling, ...info } = this.index.info();
    return { ...info, ...(model === null ? {} : { model }), ...(pooling === null ? {} : { pooling }) };
  }

  override bytes(): number {
    return this.index.info().sizeBytes;
  }

  protected override release(): void {
    this.saves.clear();
    this.index.free();
  }
}

/** A mixture with its items. */
export class MolHandle extends Handle {
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

  override bytes(): number {
    return this.mol.info().sizeBytes;
  }

  protected override release(): void {
    this.mol.free();
  }
}

/** Makes something in a place, which is given back if that fails. */
async function make<T extends IndexHandle | MolHandle>(
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
  register(target, made);
  return { info: made.info() as ReturnType<T["info"]>, device: place.info() };
}

export function createIndex({ where, settings }: Calls["createIndex"]["args"], context: CallContext<"createIndex">): Promise<Calls["createIndex"]["reply"]> {
  return make(context, where, async (place) => new IndexHandle(place, Index.create(place.device, settings)));
}

/** How the one file of what holds vectors is streamed into it. What was made of a damaged copy is not used. */
function fromFile<T extends Index | Mol>(request: FilesRequest, begin: (size: number | undefined) => Loader<T>, check: (made: T) => void): Streaming<T> {
  return {
    request: { ...request, settings: {} },
    extras: [],
    expect: async () => {},
    begin: (_, [file, ...others]: FileInfo[]) => {
      if (file === undefined || others.length > 0) {
        throw new TilewrightError("option", `source has ${others.length + 1} files, expected one`);
      }
      return begin(file.size);
    },
    prepare: async () => {},
    complete: async (made, asked, copies) => {
      await checkCopies(copies, asked);
      check(made);
    },
  };
}

export function loadIndex(
  { where, expected, ...request }: Calls["loadIndex"]["args"], context: CallContext<"loadIndex">,
): Promise<Calls["loadIndex"]["reply"]> {
  return make(context, where, async (place) => {
    const check = (index: Index): void => expected === undefined ? undefined : index.expect(expected);
    const { loaded } = await loadOnto(place.device, fromFile(request, (size) => Loader.index(place.device, size), check), context);
    return new IndexHandle(place, loaded);
  });
}

export function loadMol({ where, storage, ...request }: Calls["loadMol"]["args"], context: CallContext<"loadMol">): Promise<Calls["loadMol"]["reply"]> {
  return make(context, where, async (place) => {
    const { loaded } = await loadOnto(place.device, fromFile(request, (size) => Loader.mol(place.device, size, storage), () => {}), context);
    return new MolHandle(place, loaded);
  });
}
