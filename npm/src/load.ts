/** Loads: in which worker, onto which device, and whether other tabs share the model. */

import type { Connection } from "./connection.js";
import { ensure } from "./errors.js";
import { defined } from "./helpers.js";
import type { CommonLoadOptions, KeptOptions } from "./load-options.js";
import type { Parts } from "./loaded.js";
import type { Calls, CommonRequest, LoadName, SourceSpec } from "./protocol.js";
import { canShare, SharedConnection } from "./shared.js";
import { WorkerConnection, type WorkerKind } from "./worker-connection.js";

type ConnectionOptions = Pick<CommonLoadOptions, "on" | "fetch" | "onProgress" | "onNotice">;

/** Loads in the worker of `on`, or in a new one. `own`: the arguments of this call alone. */
export async function loadInto<K extends LoadName>(
  call: K, source: SourceSpec, own: Omit<Calls[K]["args"], keyof CommonRequest>,
  { signal, shared = false, device, tier, cache = true, verify = true, subgroups, threads, ...options }: CommonLoadOptions,
): Promise<Parts<Calls[K]["reply"]>> {
  signal?.throwIfAborted();
  const { on, fetch, onNotice } = options;
  const common: CommonRequest = { source, ...placeOf({ on, device, tier, subgroups, threads }), cache, verify, ownFetch: fetch !== undefined };
  if (shared && canShare) {
    const isNamed = source.kind === "builtin" || source.kind === "folder" || (source.kind === "files" && source.files.every(({ kind }) => kind === "url"));
    ensure(isNamed, "option", "shared is for what other tabs can load too, expected an address as the source");
    ensure(on === undefined, "option", "shared is given besides `on`, expected one of them");
  } else if (shared && "document" in globalThis) {
    onNotice?.({ code: "not_shared", message: "sharing a model with other tabs needs https; this page loads its own" });
  }
  const connection = await connectionFor(options, shared && canShare, call === "loadTranscriber" ? "speech" : "engine");
  return connection.orClose("the model was not loaded", async () =>
    ({ connection, info: await connection.load(call, { ...common, ...own } as Calls[K]["args"], { signal }) }));
}

/** Makes one call in the worker of `on`, or in a new one. */
export async function callOnce<K extends "inspect" | "prefetch" | "devices">(
  name: K, args: Calls[K]["args"], { signal, ...options }: ConnectionOptions & { signal?: AbortSignal | undefined } = {},
): Promise<Calls[K]["reply"]> {
  signal?.throwIfAborted();
  const connection = await connectionFor(options);
  try {
    return await connection.call(name, args, { signal });
  } finally {
    connection.onProgress = undefined;
    void connection.close("it was done");
  }
}

/** The requested device. Throws `option` for both a device to share and options of a new one. */
export function placeOf({ on, device, tier, subgroups, threads }: KeptOptions): Pick<CommonRequest, "device" | "on"> {
  const [given] = Object.entries({ device, tier, subgroups, threads }).find(([, value]) => value !== undefined) ?? [];
  ensure(on === undefined || given === undefined,
    "option", `${given} is given besides \`on\`, whose device is taken, expected one of them`);
  ensure(threads === undefined || (Number.isInteger(threads) && threads >= 1), "option", `threads is ${threads}, expected a whole number from 1`);
  return { device: { choice: device ?? "auto", subgroups: subgroups ?? true, ...defined({ tier, threads }) }, ...defined({ on: on?.connection.target }) };
}

/** A connection to a new object: one of all tabs, or in the worker of `on`, or in a new one. */
export async function connectionFor(
  { on, fetch, onNotice, onProgress }: ConnectionOptions, isShared = false, kind: WorkerKind = "engine",
): Promise<Connection> {
  const connection = isShared ? new SharedConnection() : on === undefined ? await WorkerConnection.open(kind) : on.connection.sibling();
  connection.onNotice = onNotice;
  connection.onProgress = onProgress;
  if (fetch !== undefined) {
    connection.useFetch(fetch);
  }
  return connection;
}
