/** Indices and mixtures of logits on a device. */

import { Index, Loader } from "../classes.js";
import { ensure } from "../errors.js";
import { orFree } from "../helpers.js";
import type { Calls } from "../protocol.js";
import type { FileInfo, Mol, Saving } from "../tilewright.js";
import type { IndexInfo, MolInfo } from "../types.js";
import { checkCopies, type FilesRequest } from "./files.js";
import { Handle, placeOf, register } from "./handles.js";
import { loadOnto, type Streaming } from "./load.js";
import type { Place } from "./place.js";
import type { CallContext } from "./port.js";
import { Registry } from "./registry.js";

export abstract class VectorsHandle<T extends Index | Mol> extends Handle {
  constructor(place: Place, readonly vectors: T) {
    super(place);
  }

  /** Their facts without those that are unknown, which are `null`. */
  info(): T extends Index ? IndexInfo : MolInfo {
    return Object.fromEntries(Object.entries(this.vectors.info()).filter(([, value]) => value !== null)) as never;
  }

  override bytes(): number {
    return this.vectors.info().sizeBytes;
  }

  protected override release(): void {
    this.vectors.free();
  }
}

export class MolHandle extends VectorsHandle<Mol> {}

export class IndexHandle extends VectorsHandle<Index> {
  /** Files that are being written. */
  readonly saves = new Registry<Saving>("save");

  protected override release(): void {
    this.saves.clear();
    super.release();
  }
}

/** Makes an object on a device, which is released if that fails. */
async function make<T extends IndexHandle | MolHandle>(
  { target, caller }: Pick<CallContext<"createIndex">, "target" | "caller">, where: Calls["createIndex"]["args"]["where"], work: (place: Place) => Promise<T>,
): Promise<{ info: ReturnType<T["info"]>; device: ReturnType<Place["info"]> }> {
  const place = await placeOf(where, caller);
  const made = register(target, await orFree(place, () => work(place)));
  return { info: made.info() as ReturnType<T["info"]>, device: place.info() };
}

export function createIndex({ where, settings }: Calls["createIndex"]["args"], context: CallContext<"createIndex">): Promise<Calls["createIndex"]["reply"]> {
  return make(context, where, async (place) => new IndexHandle(place, Index.create(place.device, settings)));
}

/** How vectors are streamed from their one file. An object from a damaged copy is not used. */
function fromFile<T extends Index | Mol>(request: FilesRequest, begin: (size: number | undefined) => Loader<T>, check: (made: T) => void): Streaming<T> {
  return {
    request: { ...request, settings: {} },
    extras: [],
    begin: (_, [file, ...others]: FileInfo[]) => {
      ensure(file !== undefined && others.length === 0,
        "option", `source has ${others.length + 1} files, expected one`);
      return begin(file.size);
    },
    complete: async (made, requester, copies) => {
      await checkCopies(copies, requester);
      check(made);
    },
  };
}

export function loadIndex(
  { where, expected, ...request }: Calls["loadIndex"]["args"], context: CallContext<"loadIndex">,
): Promise<Calls["loadIndex"]["reply"]> {
  return make(context, where, async (place) => {
    const check = (index: Index): void => expected && index.expect(expected);
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
