/** Loads: in which worker, onto which device, and whether other tabs share the model. */

import type { Connection } from "./connection.js";
import { ensure } from "./errors.js";
import { defined } from "./helpers.js";
import type { CommonLoadOptions } from "./load-options.js";
import type { Parts } from "./loaded.js";
import type { Calls, CommonRequest, LoadName, SourceSpec } from "./protocol.js";
import { canShare, SharedConnection } from "./shared.js";
import type { DeviceInfo } from "./types.js";
import { WorkerConnection } from "./worker-connection.js";

/** Loads in the worker of `on`, or in a new one. `own`: the arguments of this call alone. */
export async function loadInto<K extends LoadName>(
  call: K,
  source: SourceSpec,
  own: Omit<Calls[K]["args"], keyof CommonRequest>,
  { signal, onProgress, onNotice, on, shared = false, device, tier, cache = true, verify = true, subgroups, fetch }: CommonLoadOptions,
): Promise<Parts<Calls[K]["reply"]>> {
  signal?.throwIfAborted();
  const where = placeOf({ on, device, tier, subgroups });
  const common: CommonRequest = { source, ...where, cache, verify, ownFetch: fetch !== undefined };
  const connection = shared && canShare ? shareable(source, on) : await connectionFor(on);
  if (shared && !canShare && "document" in globalThis) {
    onNotice?.({ code: "not_shared", message: "this page cannot share a model with other tabs, which needs https; it has one of its own" });
  }
  if (fetch !== undefined) {
    connection.useFetch(fetch);
  }
  let current: DeviceInfo | undefined;
  connection.onNotice = onNotice;
  connection.onProgress = onProgress;
  connection.onDevice = (info) => {
    current = info;
  };
  return connection.orClose("the model was not loaded", async () => {
    const info = await connection.load(call, { ...common, ...own } as Calls[K]["args"], { signal });
    ensure(current !== undefined, "internal", "the engine did not say which device it runs on");
    return { connection, info, device: current };
  });
}

/** Makes one call in the worker of `on`, or in a new one. */
export async function callOnce<K extends "inspect" | "prefetch">(
  name: K,
  args: Calls[K]["args"],
  { signal, on, fetch, onProgress, onNotice }: Pick<CommonLoadOptions, "on" | "fetch" | "onProgress" | "onNotice"> & { signal?: AbortSignal | undefined },
): Promise<Calls[K]["reply"]> {
  signal?.throwIfAborted();
  const connection = await connectionFor(on);
  if (fetch !== undefined) {
    connection.useFetch(fetch);
  }
  connection.onNotice = onNotice;
  connection.onProgress = onProgress;
  try {
    return await connection.call(name, args, { signal });
  } finally {
    connection.onProgress = undefined;
    void connection.close("it was done");
  }
}

type DeviceOptions = Pick<CommonLoadOptions, "device" | "tier" | "subgroups" | "on">;

/** The requested device. Throws `option` for both a device to share and options of a new one. */
export function placeOf({ on, device, tier, subgroups }: DeviceOptions): Pick<CommonRequest, "device" | "on"> {
  const [given] = Object.entries({ device, tier, subgroups }).find(([, value]) => value !== undefined) ?? [];
  ensure(on === undefined || given === undefined,
    "option", `${given} is given besides \`on\`, whose device is taken, expected one of them`);
  return { device: { choice: device ?? "auto", subgroups: subgroups ?? true, ...defined({ tier }) }, ...defined({ on: on?.connection.target }) };
}

/** A connection to a new object in the worker of `on`, or in a new one. */
export async function connectionFor(on: CommonLoadOptions["on"]): Promise<Connection> {
  return on === undefined ? WorkerConnection.open() : on.connection.sibling();
}

/** A connection to a model that tabs of the site share. */
function shareable(source: SourceSpec, on: CommonLoadOptions["on"]): Connection {
  const isNamed = source.kind === "builtin" || source.kind === "folder" || (source.kind === "files" && source.files.every(({ kind }) => kind === "url"));
  ensure(isNamed, "option", "shared is for what other tabs can load too, expected an address as the source");
  ensure(on === undefined, "option", "shared is given besides `on`, expected one of them");
  return new SharedConnection();
}
