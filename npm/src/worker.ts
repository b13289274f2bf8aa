/** The worker: owns the engine in WASM and its device, loads models, encoders and cross-encoders, runs them. Everything comes and goes as messages. */

import type { BenchKernel, BenchProbe, BenchProgress, BenchReport } from "./bench.js";
import { codeOf, isTrap, messageOf, TilewrightError, toWire, type ErrorCode } from "./errors.js";
import { inspectGpu, requestSubgroups } from "./gpu.js";
import { importHidden, isNode, wasmAt } from "./platform.js";
import {
  PEFT_FILES, type CallName, type Calls, type DeviceRequest, type EmbedderRequest, type FromWorker, type KeptTensor, type KeptVectors, type LoadRequest,
  type ModelRequest, type Operand, type Prompt, type RerankerRequest, type ToWorker,
} from "./protocol.js";
import { FetchClient } from "./fetching.js";
import { CHAT_FILES, damaged, isUseless, openFiles, readAll, SENTENCE_FILES, type KeptCopy, type ModelFile } from "./source.js";
import { common, openSessions, storing, type FoundSession, type Sessions } from "./sessions.js";
import { openStore, type Store } from "./store.js";
import * as text from "./text.js";
import init, {
  Device, Index, Loader, Mol, Sha256, type Adapter, type DeviceTensor, type Embedder, type EngineOptions, type FileInfo, type Model,
  type Reranker, type Session,
} from "./tilewright.js";
import { readTuning, tuningKey, writeTuning } from "./tuning.js";
import type {
  AvailableDevice, DeviceInfo, GenerateResult, IndexInfo, KeptSession, MemoryInfo, MolInfo, NoticeCode, Piece, Progress, TokenLogprob,
} from "./types.js";

/** What a call may use while it runs. */
interface CallContext<K extends CallName> {
  signal: AbortSignal;
  emit(value: Calls[K]["event"]): void;
}

type Handlers = { [K in CallName]: (args: Calls[K]["args"], context: CallContext<K>) => Calls[K]["reply"] | Promise<Calls[K]["reply"]> };

/** The other end of the line: `self` in a browser, the parent port in Node. */
interface Port {
  post(message: FromWorker, transfer: Transferable[]): void;
  listen(receive: (message: ToWorker) => void): void;
}

/** Codes of errors after which another device may still do. */
const GPU_FAILURES: ReadonlySet<ErrorCode> = new Set<ErrorCode>(["webgpu_unavailable", "device_lost", "out_of_memory", "gpu", "no_adapter"]);
/** Milliseconds between two reports of progress. */
const REPORT_MS = 100;
/** Milliseconds between two looks whether anything is asked of the worker. */
const IDLE_MS = 50;
/** Milliseconds over which the rate is measured. */
const RATE_MS = 3000;

let port: Port;

function post(message: FromWorker, transfer: Transferable[] = []): void {
  port.post(message, transfer);
}

function notify(code: NoticeCode, message: string): void {
  post({ type: "notice", notice: { code, message } });
}

/** Where requests go if the caller has a `fetch` of its own. */
const fetching = new FetchClient((message) => post(message));

/** The engine's WASM module, started on first use. */
let started: Promise<WebAssembly.Memory> | undefined;

/** Where the WASM modules are, if not beside this file. */
let files: { wasm?: string | undefined; textWasm?: string | undefined } = {};

function start(): Promise<WebAssembly.Memory> {
  started ??= (async () => {
    try {
      const other = await wasmAt(files.wasm, "tilewright_bg.wasm");
      return (await (other === undefined ? init() : init({ module_or_path: other }))).memory;
    } catch (error) {
      const place = files.wasm === undefined ? "beside worker.js" : `at ${files.wasm}`;
      throw new TilewrightError("network", `the engine's tilewright_bg.wasm, expected ${place}, could not be started: ${messageOf(error)}`, { cause: error });
    }
  })();
  return started;
}

/** Opens a device. Under `auto` a GPU that is there and fails is a reason to take the CPU. */
async function openDevice({ choice, tier, subgroups }: DeviceRequest): Promise<Device> {
  await start();
  if (choice === "cpu") {
    return Device.open("cpu", undefined, tier);
  }
  const report = await inspectGpu();
  if (report.adapter === undefined) {
    if (choice === "gpu") {
      throw new TilewrightError("webgpu_unavailable", `a GPU was demanded, and there is none: ${report.reason}`);
    }
    return openCpu(report.reason);
  }
  requestSubgroups(subgroups);
  // The engine must not ask for what the device will not have.
  const adapter: Adapter = { ...report.adapter, hasSubgroups: report.adapter.hasSubgroups && subgroups };
  let device: Device;
  try {
    device = await Device.open(choice, adapter, tier);
  } catch (error) {
    if (choice === "gpu" || isTrap(error) || codeOf(error) === "option") {
      throw error;
    }
    return openCpu(`${adapter.name} could not be opened (${messageOf(error)})`);
  }
  if (choice === "auto" && !device.isGpu()) {
    notify("cpu_fallback", `running on the CPU: ${device.info().reason}`);
  }
  return device;
}

/** Why a device was taken that was not the first choice. The engine only knows that it was told to. */
const reasons = new WeakMap<Device, string>();

async function openCpu(reason: string): Promise<Device> {
  const device = await Device.open("cpu", undefined);
  reasons.set(device, reason);
  notify("cpu_fallback", `running on the CPU: ${reason}`);
  return device;
}

function infoOf(device: Device): DeviceInfo {
  const info = device.info();
  return { ...info, reason: reasons.get(device) ?? info.reason };
}

/** Measures how bytes arrive and reports it, not too often. */
class ProgressMeter {
  files: ModelFile[] = [];
  readonly #samples: { time: number; loaded: number }[] = [];
  #reported = -Infinity;

  report(phase: Progress["phase"], force: boolean): void {
    const time = performance.now();
    if (!force && time - this.#reported < REPORT_MS) {
      return;
    }
    this.#reported = time;
    const loaded = this.files.reduce((sum, file) => sum + file.arrived, 0);
    const total = this.files.reduce<number | undefined>(
      (sum, { size }) => sum === undefined || size === undefined ? undefined : sum + size, 0);
    this.#samples.push({ time, loaded });
    while (this.#samples.length > 2 && time - (this.#samples[0]?.time ?? time) > RATE_MS) {
      this.#samples.shift();
    }
    const first = this.#samples[0];
    const seconds = first === undefined ? 0 : (time - first.time) / 1000;
    const bytesPerSecond = first === undefined || seconds === 0 ? 0 : (loaded - first.loaded) / seconds;
    const progress: Progress = { phase, loaded, bytesPerSecond };
    if (total !== undefined) {
      progress.total = total;
      if (bytesPerSecond > 0) {
        progress.secondsLeft = (total - loaded) / bytesPerSecond;
      }
    }
    post({ type: "progress", progress });
  }
}

/** Something that this worker can hold. */
type Resident = Model | Embedder | Reranker;

/** What is asked for, and how it is loaded. */
interface Recipe<T extends Resident> {
  request: LoadRequest;
  /** Names of files that its folder may have besides. */
  extras: readonly string[];
  begin(device: Device, files: FileInfo[]): Loader<T>;
  /** What is to be done once all bytes are there. */
  prepare(loader: Loader<T>, device: Device): Promise<void>;
  /** What is added to it then. */
  complete(resident: T, signal: AbortSignal): Promise<void>;
}

function modelRecipe(request: ModelRequest): Recipe<Model> {
  return {
    request,
    extras: CHAT_FILES,
    begin: (device, files) => Loader.model(device, files, request.settings),
    prepare: async (loader, device) => {
      if (device.isGpu()) {
        await tune(loader, device.info(), request.tune);
      }
    },
    complete: async (model, signal) => {
      if (request.adapter !== undefined) {
        await useAdapter(model, { ...request, ...request.adapter }, signal);
      }
    },
  };
}

function embedderRecipe(request: EmbedderRequest): Recipe<Embedder> {
  return {
    request,
    extras: SENTENCE_FILES,
    begin: (device, files) => Loader.embedder(device, files, request.settings),
    prepare: async () => {},
    complete: async () => {},
  };
}

function rerankerRecipe(request: RerankerRequest): Recipe<Reranker> {
  return {
    request,
    extras: [],
    begin: (device, files) => Loader.reranker(device, files, request.settings),
    prepare: async () => {},
    complete: async () => {},
  };
}

/** Opens what is to be loaded, and notes which copies of earlier loads it is read from. */
async function open(
  request: Pick<LoadRequest, "source" | "cache" | "ownFetch">, extras: readonly string[], signal: AbortSignal, copies: KeptCopy[],
  onBytes: (file: ModelFile) => void,
): Promise<ModelFile[]> {
  return openFiles(request.source, {
    signal, extras, onBytes,
    ...(request.ownFetch === true ? { fetch: fetching.fetch } : {}),
    onCopy: (copy) => copies.push(copy),
    onStored: (bytes) => post({ type: "stored", bytes }),
    store: request.cache && request.source.kind !== "builtin" ? await openStoreIfAny(request) : undefined,
    newDigest: () => new Sha256(),
    notify: (notice) => post({ type: "notice", notice }),
  });
}

/**
 * Does something with files, noting the kept copies among them. If it fails because one of them is damaged, that one is deleted, and it is
 * done once more.
 */
async function withCopies<R>(signal: AbortSignal, work: (copies: KeptCopy[]) => Promise<R>): Promise<R> {
  const copies: KeptCopy[] = [];
  try {
    return await work(copies);
  } catch (error) {
    // What is not supported was read well enough to know that.
    if (!isUseless(error) || codeOf(error) === "unsupported" || !await deleteDamaged(copies, signal, async () => signal.throwIfAborted(), true)) {
      throw error;
    }
    return await work([]);
  }
}

/** Does something with the contents of small files. What is made of them could not be taken back, so copies are checked before. */
function withContents<R>(
  request: Pick<LoadRequest, "source" | "cache" | "ownFetch">, signal: AbortSignal, work: (files: { name: string; bytes: Uint8Array }[]) => R,
): Promise<R> {
  return withCopies(signal, async (copies) => {
    const files = await open(request, [], signal, copies, () => {});
    let useless = false;
    try {
      const contents: { name: string; bytes: Uint8Array }[] = [];
      for (const file of files) {
        contents.push({ name: file.name, bytes: await readAll(file) });
        await file.finish();
      }
      for (const copy of copies) {
        if (await copy.check(async () => signal.throwIfAborted()) !== "good") {
          throw new TilewrightError("storage", `the kept copy of ${copy.url} is damaged`);
        }
      }
      return work(contents);
    } catch (error) {
      useless = isUseless(error);
      throw error;
    } finally {
      await Promise.all(files.map((file) => file.close(useless)));
    }
  });
}

/** Deletes the copies that are not what was downloaded. Returns whether there were any. */
async function deleteDamaged(copies: KeptCopy[], signal: AbortSignal, turn: () => Promise<void>, unreadable: boolean): Promise<boolean> {
  let found = false;
  for (const copy of copies) {
    const state = await copy.check(turn);
    if (state === "damaged" || (state === "unreadable" && unreadable)) {
      found = true;
      await copy.delete(signal);
      post({ type: "notice", notice: damaged(copy.url, state === "damaged" ? "its SHA-256 is another one" : "it cannot be read") });
    }
  }
  return found;
}

/** Streams a model's files into a device. */
function loadOnto<T extends Resident>(device: Device, recipe: Recipe<T>, signal: AbortSignal): Promise<Omit<Loaded<T>, "device">> {
  return withCopies(signal, (copies) => loadOnce(device, recipe, signal, copies));
}

async function loadOnce<T extends Resident>(
  device: Device, recipe: Recipe<T>, signal: AbortSignal, copies: KeptCopy[],
): Promise<Omit<Loaded<T>, "device">> {
  const { request, extras } = recipe;
  const meter = new ProgressMeter();
  const files = await open(request, extras, signal, copies, (file) => meter.report(file.phase, false));
  meter.files = files;
  let useless = false;
  let loader: Loader<T> | undefined;
  try {
    meter.report(files[0]?.phase ?? "file", true);
    loader = recipe.begin(device, files.map(describe));
    if (request.source.name !== undefined) {
      loader.setFolder(request.source.name);
    }
    await feed(loader, files, meter, signal);
    meter.report("prepare", true);
    await recipe.prepare(loader, device);
    const finishing = loader;
    // From here on the loader belongs to the engine, also when it fails.
    loader = undefined;
    const resident = await finishing.finish();
    try {
      await recipe.complete(resident, signal);
    } catch (error) {
      if (!isTrap(error)) {
        resident.free();
      }
      throw error;
    }
    return { resident, fileBytes: files.reduce((sum, file) => sum + file.arrived, 0), copies };
  } catch (error) {
    useless = isUseless(error);
    if (isTrap(error)) {
      loader = undefined;
    }
    throw error;
  } finally {
    loader?.free();
    await Promise.all(files.map((file) => file.close(useless)));
  }
}

/** Has a model use an adapter. */
async function useAdapter(
  model: Model, { scale, ...request }: Pick<LoadRequest, "source" | "cache" | "ownFetch"> & { scale: number }, signal: AbortSignal,
): Promise<void> {
  await withContents(request, signal, (files) => {
    const config = files.find(({ name }) => name === PEFT_FILES[0]);
    const [weights, ...others] = files.filter((file) => file !== config);
    if (weights === undefined || others.length > 0) {
      throw new TilewrightError("option", `adapter.source has ${files.length} files, expected a GGUF file, or ${PEFT_FILES.join(" and ")}`);
    }
    model.useAdapter(weights.bytes, config?.bytes, scale);
  });
}

/** Makes a model follow what was measured on this device, now or in an earlier visit. */
async function tune(loader: Loader<Model>, { name, tier }: DeviceInfo, anew: boolean): Promise<void> {
  const key = tuningKey(name, tier);
  const stored = await readTuning(key);
  const why = stored === undefined ? undefined : loader.useTuning(stored);
  if (why !== undefined) {
    notify("tuning_ignored", `what was measured on ${name} before is not used: ${why}`);
  }
  if (anew) {
    const tuned = await loader.tune();
    try {
      await writeTuning(key, tuned);
    } catch (error) {
      notify("tuning_ignored", `what was measured on ${name} is not kept for the next time: ${messageOf(error)}`);
    }
  }
}

async function feed(loader: Loader<Resident>, files: ModelFile[], meter: ProgressMeter, signal: AbortSignal): Promise<void> {
  let current: ModelFile | undefined;
  for (let wanted; (wanted = loader.want()) !== undefined;) {
    signal.throwIfAborted();
    const file = files[wanted.file];
    if (file === undefined) {
      throw new TilewrightError("internal", `the engine wants file ${wanted.file} of ${files.length}`);
    }
    if (file !== current) {
      current?.pause();
      current = file;
    }
    const chunk = await file.read(wanted.offset);
    if (chunk === undefined) {
      loader.end();
    } else {
      meter.report(file.phase, false);
      await loader.push(chunk);
    }
  }
  for (const file of files) {
    signal.throwIfAborted();
    await file.finish();
  }
  meter.report(current?.phase ?? "file", true);
}

/** A file as the engine gets to know it. Servers may compress JSON on the way, so its announced size is not to be trusted. */
function describe({ name, size }: ModelFile): FileInfo {
  return size === undefined || name.endsWith(".json") ? { name } : { name, size };
}

/** The storage for downloads, when there is something to download. */
async function openStoreIfAny({ source }: Pick<LoadRequest, "source">): Promise<Store | undefined> {
  const remote = source.kind === "folder" || (source.kind === "files" && source.files.some((file) => file.kind === "url" && file.url.startsWith("http")));
  if (!remote || isNode) {
    return undefined;
  }
  try {
    return await openStore();
  } catch (error) {
    notify("not_cached", `the model will not be kept for the next time: ${messageOf(error)}`);
    return undefined;
  }
}

/** What was loaded, with the device that it is on. */
interface Loaded<T extends Resident> {
  device: Device;
  resident: T;
  /** Bytes of the model's files. */
  fileBytes: number;
  /** Kept copies that it was loaded from. */
  copies: KeptCopy[];
}

/**
 * Opens a device and loads onto it. Unless a GPU is demanded, one that fails meanwhile is a reason to take the CPU, if that can hold the
 * model.
 */
async function openAndLoad<T extends Resident>(recipe: Recipe<T>, choice: DeviceRequest, signal: AbortSignal): Promise<Loaded<T>> {
  let device = await openDevice(choice);
  try {
    signal.throwIfAborted();
    try {
      return { device, ...await loadOnto(device, recipe, signal) };
    } catch (error) {
      if (choice.choice === "gpu" || !device.isGpu() || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      device.free();
      const failure = `the GPU failed while the model was loaded (${messageOf(error)})`;
      device = await openCpu(failure);
      try {
        return { device, ...await loadOnto(device, recipe, signal) };
      } catch (second) {
        throw codeOf(second) === "memory"
          ? new TilewrightError("memory", `${failure}, and the CPU cannot hold it either: ${messageOf(second)}`, { cause: error })
          : second;
      }
    }
  } catch (error) {
    if (!isTrap(error)) {
      device.free();
    }
    throw error;
  }
}

/** What this worker has loaded, and its device. */
abstract class Engine<T extends Resident> {
  readonly #recipe: Recipe<T>;
  readonly fileBytes: number;
  protected resident: T;
  #device: Device;
  /** What was lost with a device, while something may still hold it. */
  protected lost: { free(): void }[] = [];

  constructor(recipe: Recipe<T>, { device, resident, fileBytes }: Loaded<T>) {
    this.#recipe = recipe;
    this.#device = device;
    this.resident = resident;
    this.fileBytes = fileBytes;
    post({ type: "device", device: infoOf(device) });
  }

  get device(): Device {
    return this.#device;
  }

  /** What was asked for. */
  protected get request(): LoadRequest {
    return this.#recipe.request;
  }

  /** What the model's files say. */
  info(): ReturnType<T["info"]> & { fileBytes: number } {
    const info = this.resident.info() as ReturnType<T["info"]>;
    return { ...info, fileBytes: this.fileBytes };
  }

  async memory(): Promise<MemoryInfo> {
    return { ...this.resident.memory(), wasmHeapBytes: (await start()).buffer.byteLength + await text.memoryBytes() };
  }

  /** Frees everything; the worker ends afterwards. */
  close(): void {
    this.freeLost();
    this.release();
    this.#device.free();
  }

  /** Loads the model again, onto the same device. If that fails there is none any more. */
  async reload(signal: AbortSignal): Promise<void> {
    this.release();
    this.resident = (await loadOnto(this.#device, this.#recipe, signal)).resident;
  }

  /** Frees what is loaded. */
  protected release(): void {
    this.resident.free();
  }

  /** Opens a device in the place of the lost one and loads the model again. */
  protected async rebuild(lost: unknown, signal: AbortSignal): Promise<T> {
    const { request } = this.#recipe;
    let loaded: Loaded<T>;
    try {
      loaded = await openAndLoad(this.#recipe, request.device, signal);
    } catch (error) {
      if (request.device.choice !== "gpu" || !GPU_FAILURES.has(codeOf(error))) {
        throw error;
      }
      loaded = await openAndLoad(this.#recipe, { choice: "cpu", subgroups: false }, signal);
      reasons.set(loaded.device, `the GPU was lost and could not be opened again (${messageOf(error)})`);
    }
    this.lost.push(this.#device);
    this.#device = loaded.device;
    const device = infoOf(loaded.device);
    post({ type: "device", device });
    notify("device_rebuilt", `the device was lost (${messageOf(lost)}); the model was loaded again onto ${device.name}`);
    return loaded.resident;
  }

  protected freeLost(): void {
    for (const object of this.lost.splice(0)) {
      object.free();
    }
  }
}

/** A model and its one sequence of tokens. */
class TextEngine extends Engine<Model> {
  #session: Session | undefined;
  /** Those that the browser keeps; nothing where it keeps none. */
  #kept: Promise<Sessions | undefined> | undefined;

  get model(): Model {
    return this.resident;
  }

  async generate({ prompt, options: given, answer: asked }: Calls["generate"]["args"], context: CallContext<"generate">): Promise<GenerateResult> {
    const ids = this.#encode(prompt);
    const options: EngineOptions = prompt.kind === "chat" ? this.#endingTurns(given) : given;
    const endIds = options.ignoreEos === true ? new Uint32Array() : Uint32Array.from([...this.resident.endIds(), ...options.stopIds ?? []]);
    const answer = await text.answerOf(() => this.resident, asked, prompt, ids, endIds, context.signal);
    try {
      return await this.#run(ids, options, answer, context);
    } catch (error) {
      if (codeOf(error) !== "device_lost") {
        throw error;
      }
      // The device was lost before the sequence could begin, so nothing was given out that would come twice.
      const model = await this.rebuild(error, context.signal);
      this.lost.push(this.resident, ...(this.#session === undefined ? [] : [this.#session]));
      this.resident = model;
      this.#session = undefined;
      return await this.#run(ids, options, answer, context);
    } finally {
      answer?.free();
      this.freeLost();
    }
  }

  /** Keeps the session in the browser's storage. */
  async saveSession({ maxBytes }: Calls["saveSession"]["args"]): Promise<KeptSession> {
    const session = this.#session;
    if (session === undefined || session.nCached() === 0) {
      throw new TilewrightError("option", "saveSession keeps what was generated, and nothing was so far");
    }
    if (!this.request.cache) {
      throw new TilewrightError("option", "saveSession needs the browser's storage, and the model was loaded with `cache: false`");
    }
    return storing(async () => {
      const kept = await openSessions();
      this.#kept = Promise.resolve(kept);
      const bytes = await session.save();
      return kept.save(this.resident.digest(), session.tokens(), bytes, maxBytes);
    });
  }

  /** Goes on with a kept session, if one has more of the prompt than the latest sequence has. */
  async #reopen(session: Session, ids: Uint32Array): Promise<void> {
    if (!this.request.cache) {
      return;
    }
    const dropped = (why: string): void => notify("session_dropped", `a kept session is not used: ${why}`);
    this.#kept ??= openSessions().catch(() => undefined);
    const kept = await this.#kept;
    let found: FoundSession | undefined;
    try {
      const nKnown = Math.min(common(session.tokens(), ids), session.nCached());
      const limits = { mostTokens: this.resident.info().contextLength, mostBack: this.resident.mostBack() ?? Infinity };
      found = await kept?.find(this.resident.digest(), ids, nKnown, limits, () => dropped("its SHA-256 is another one"));
      if (found !== undefined) {
        session.restore(found.bytes);
      }
    } catch (error) {
      if (isTrap(error) || codeOf(error) === "device_lost") {
        throw error;
      }
      // What this machine has no room for now is no fault of the session's.
      if (USELESS.has(codeOf(error))) {
        await found?.drop().catch(() => {});
      }
      dropped(messageOf(error));
    }
  }

  protected override release(): void {
    this.#session?.free();
    this.#session = undefined;
    text.forget();
    super.release();
  }

  async #run(
    ids: Uint32Array, options: EngineOptions, answer: text.Answer | undefined, { signal, emit }: CallContext<"generate">,
  ): Promise<GenerateResult> {
    const session = this.#session ??= this.resident.session();
    await this.#reopen(session, ids);
    signal.throwIfAborted();
    const cancel = (): void => session.cancel();
    signal.addEventListener("abort", cancel, { once: true });
    const onPiece = async (id: number, text: string, isLast: boolean, logprobs: string | undefined): Promise<boolean> => {
      const piece = answer === undefined ? { id, text } : answer.piece(id, text, isLast);
      emit(logprobs === undefined ? piece : { ...piece, ...likelihoods(logprobs) });
      await nextTask();
      return !signal.aborted;
    };
    try {
      // The session takes the new model over. The old one stays here: it has the vocabulary, which needs no device.
      const outcome = await session.generate(ids, options, answer?.guide, onPiece, (error) => this.rebuild(error, signal));
      return { ...outcome, ...answer?.result ?? { thinking: "", toolCalls: [] } };
    } catch (error) {
      throw answer?.failure ?? error;
    } finally {
      signal.removeEventListener("abort", cancel);
    }
  }

  #encode(prompt: Prompt): Uint32Array {
    switch (prompt.kind) {
      case "text":
        return this.resident.tokenize(prompt.text, true);
      case "tokens":
        return prompt.ids;
      case "chat":
        return this.resident.chatTokens(prompt.messages, { ...prompt.told, now: Math.floor(Date.now() / 1000) });
    }
  }

  /** Options that also end where the assistant's turn does. */
  #endingTurns(options: EngineOptions): EngineOptions {
    const { ids, texts } = this.resident.chatStops();
    return { ...options, stopIds: ids, stop: [...(options.stop ?? []), ...texts] };
  }
}

/** Codes of sessions that no attempt will read. */
const USELESS: ReadonlySet<ErrorCode> = new Set(["format", "unsupported", "truncated", "context_full", "shape", "operand"]);

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** How likely a token was, and the likeliest ones, as the engine says it. */
function likelihoods(json: string): Pick<Piece, "logprob" | "topLogprobs"> {
  const told = JSON.parse(json) as Omit<TokenLogprob, "text">[];
  const [logprob, ...topLogprobs] = told.map((token): TokenLogprob => ({ ...token, text: decoder.decode(Uint8Array.from(token.bytes)) }));
  return logprob === undefined ? {} : { logprob, topLogprobs };
}

/** What a call computes from its texts alone: when a device is lost, another one computes it anew. */
abstract class BatchEngine<T extends Embedder | Reranker> extends Engine<T> {
  /** What `work` gives, which is nothing once it is cancelled. */
  async run<R>(signal: AbortSignal, work: (resident: T) => Promise<R | undefined>): Promise<R> {
    try {
      return await this.#once(signal, work);
    } catch (error) {
      if (codeOf(error) !== "device_lost") {
        throw error;
      }
      const resident = await this.rebuild(error, signal);
      this.lost.push(this.resident);
      this.resident = resident;
      return await this.#once(signal, work);
    } finally {
      this.freeLost();
    }
  }

  async #once<R>(signal: AbortSignal, work: (resident: T) => Promise<R | undefined>): Promise<R> {
    const { resident } = this;
    const cancel = (): void => resident.cancel();
    signal.addEventListener("abort", cancel, { once: true });
    try {
      const result = await work(resident);
      if (result === undefined) {
        throw signal.reason;
      }
      return result;
    } finally {
      signal.removeEventListener("abort", cancel);
    }
  }
}

/** An encoder. */
class VectorEngine extends BatchEngine<Embedder> {
  encode({ text, prompt }: Calls["encode"]["args"]): Uint32Array {
    return this.resident.encode(text, prompt);
  }
}

/** A cross-encoder. */
class ScoreEngine extends BatchEngine<Reranker> {}

/** Lets messages in, such as one that aborts; cheaper than a timer. */
const tasks = new MessageChannel();
function nextTask(): Promise<void> {
  return new Promise((resolve) => {
    tasks.port1.onmessage = () => resolve();
    tasks.port2.postMessage(undefined);
  });
}

let engine: TextEngine | VectorEngine | ScoreEngine | undefined;
let kernelDevice: Device | undefined;
/** Settled, unless the model is being loaded again. */
let reloading: Promise<void> = Promise.resolve();

/** The engine, of the kind that a call needs. */
function loaded<E>(kind: abstract new (...given: never[]) => E): E {
  if (!(engine instanceof kind)) {
    throw new TilewrightError("disposed", "no model is loaded");
  }
  return engine;
}

/** The same for calls that do not wait for their turn. */
async function present<E>(kind: abstract new (...given: never[]) => E): Promise<E> {
  await reloading;
  return loaded(kind);
}

function kernels(): Device {
  if (kernelDevice === undefined) {
    throw new TilewrightError("disposed", "no device is open");
  }
  return kernelDevice;
}

/** The device of whatever is here. */
function currentDevice(): Device {
  return engine?.device ?? kernels();
}

/** Objects of the engine that outlive a call, by their numbers. */
class Shelf<T extends { free(): void }> {
  readonly #objects = new Map<number, T>();
  readonly #what: string;
  #last = 0;

  constructor(what: string) {
    this.#what = what;
  }

  put(object: T): number {
    this.#last += 1;
    this.#objects.set(this.#last, object);
    return this.#last;
  }

  get(id: number): T {
    const object = this.#objects.get(id);
    if (object === undefined) {
      throw new TilewrightError("internal", `there is no ${this.#what} ${id}`);
    }
    return object;
  }

  free(id: number): undefined {
    this.get(id).free();
    this.#objects.delete(id);
  }

  clear(): void {
    this.#objects.forEach((object) => object.free());
    this.#objects.clear();
  }
}

/** Of `kernelDevice`. */
const tensors = new Shelf<DeviceTensor>("tensor");
const indices = new Shelf<Index>("index");
const mixtures = new Shelf<Mol>("mixture");

function remember(tensor: DeviceTensor): KeptTensor {
  return { kept: tensors.put(tensor), shape: [...tensor.shape()] };
}

/** What an index says, without what it does not know. */
function indexInfo(index: Index): IndexInfo {
  const { model, pooling, ...info } = index.info();
  return { ...info, ...(model === null ? {} : { model }), ...(pooling === null ? {} : { pooling }) };
}

function rememberIndex(index: Index): KeptVectors<IndexInfo> {
  return { kept: indices.put(index), info: indexInfo(index) };
}

/** What a mixture says, without what it does not know. */
function molInfo(mol: Mol): MolInfo {
  const { model, ...info } = mol.info();
  return { ...info, ...(model === null ? {} : { model }) };
}

async function loadMol(request: Calls["loadMol"]["args"], signal: AbortSignal): Promise<KeptVectors<MolInfo>> {
  return withContents(request, signal, (files) => {
    const [file] = files;
    if (file === undefined || files.length > 1) {
      throw new TilewrightError("option", `source has ${files.length} files, expected one`);
    }
    const mol = Mol.load(currentDevice(), file.bytes, request.storage);
    return { kept: mixtures.put(mol), info: molInfo(mol) };
  });
}

async function loadIndex({ bytes, expected }: Calls["loadIndex"]["args"]): Promise<KeptVectors<IndexInfo>> {
  const index = await Index.load(currentDevice(), bytes);
  try {
    if (expected !== undefined) {
      index.expect(expected);
    }
  } catch (error) {
    index.free();
    throw error;
  }
  return rememberIndex(index);
}

/** Runs a kernel on tensors that are kept and numbers that came along, and keeps or reads its result. */
async function compute<const Operands extends readonly Operand[]>(
  operands: Operands,
  keep: boolean,
  kernel: (device: Device, ...tensors: { [I in keyof Operands]: DeviceTensor }) => DeviceTensor,
): Promise<Float32Array | KeptTensor> {
  const device = kernels();
  let ours: DeviceTensor[] = [];
  try {
    const operandTensors: DeviceTensor[] = [];
    for (const operand of operands) {
      if (typeof operand === "number") {
        operandTensors.push(tensors.get(operand));
      } else {
        const tensor = await device.upload(operand);
        ours.push(tensor);
        operandTensors.push(tensor);
      }
    }
    const result = kernel(device, ...operandTensors as { [I in keyof Operands]: DeviceTensor });
    ours.push(result);
    if (!keep) {
      return await result.read();
    }
    result.compute();
    // From here on it is the caller's.
    ours.pop();
    return remember(result);
  } catch (error) {
    if (isTrap(error)) {
      ours = [];
    }
    throw error;
  } finally {
    ours.forEach((tensor) => tensor.free());
  }
}

/** Measures the device that is open, and completes what the engine says of it to a report. */
async function measure({ quick }: Calls["bench"]["args"], emit: (progress: BenchProgress) => void): Promise<BenchReport> {
  const device = kernels();
  const report = device.isGpu() ? await inspectGpu() : undefined;
  const adapter = report?.adapter === undefined ? undefined : report;
  // What the usual tier leaves unused needs a device of its own. Without one there is a probe less.
  const half = adapter?.adapter.hasF16 ? await Device.open("gpu", adapter.adapter, "f16").catch(() => undefined) : undefined;
  const probes: BenchProbe[] = [];
  const rows: BenchKernel[] = [];
  const onRow = (json: string, done: number, total: number): void => {
    const row = JSON.parse(json) as Pick<BenchProgress, "probe" | "kernel">;
    probes.push(...row.probe === undefined ? [] : [row.probe]);
    rows.push(...row.kernel === undefined ? [] : [row.kernel]);
    emit({ ...row, done, total });
  };
  const head = JSON.parse(await device.bench(half, quick, onRow)) as Pick<BenchReport, "schema" | "tilewright" | "device" | "settings">;
  return {
    schema: head.schema,
    tilewright: head.tilewright,
    source: "web",
    unix_time: Math.floor(Date.now() / 1000),
    host: { os: null, arch: null, browser: globalThis.navigator?.userAgent ?? null },
    device: head.device,
    adapter: adapter?.described ?? null,
    settings: head.settings,
    probes,
    kernels: rows,
    models: [],
  };
}

/** Runs calls that use the device's compute one after the other. */
let queue: Promise<unknown> = Promise.resolve();
function inTurn<T>(signal: AbortSignal, action: () => T | Promise<T>): Promise<T> {
  const turn = queue.then(() => {
    signal.throwIfAborted();
    return action();
  });
  // A failure is its caller's; the next in line does not care.
  queue = turn.catch(() => {});
  return turn;
}

/** Opens a device, loads onto it what this worker is for, and says what that is. */
function load<T extends Resident, E extends Engine<T> & NonNullable<typeof engine>>(
  kind: new (recipe: Recipe<T>, loaded: Loaded<T>) => E,
  recipe: Recipe<T>,
  signal: AbortSignal,
): Promise<ReturnType<E["info"]>> {
  return inTurn(signal, async () => {
    const parts = await openAndLoad(recipe, recipe.request.device, signal);
    const loaded = new kind(recipe, parts);
    engine = loaded;
    if (recipe.request.verify) {
      void verify(parts.copies, loaded);
    }
    return loaded.info() as ReturnType<E["info"]>;
  });
}

/** Compares the copies that something was loaded from with their digests. If one is damaged, all is loaded again. */
async function verify(copies: KeptCopy[], loaded: Engine<Resident>): Promise<void> {
  const { signal } = new AbortController();
  try {
    if (await deleteDamaged(copies, signal, idle, false)) {
      await inTurn(signal, () => {
        reloading = loaded.reload(signal);
        return reloading;
      });
    }
  } catch (error) {
    const why = new TilewrightError(codeOf(error), `the model was loaded from a damaged copy and could not be loaded again: ${messageOf(error)}`);
    post({ type: "fatal", error: { ...toWire(why), fatal: true } });
  }
}

/** Resolves as soon as nothing is asked of the worker. */
async function idle(): Promise<void> {
  while (running.size > 0) {
    await new Promise((resolve) => setTimeout(resolve, IDLE_MS));
  }
}

const handlers: Handlers = {
  loadModel: (request, { signal }) => load(TextEngine, modelRecipe(request), signal),
  loadEmbedder: (request, { signal }) => load(VectorEngine, embedderRecipe(request), signal),
  loadReranker: (request, { signal }) => load(ScoreEngine, rerankerRecipe(request), signal),
  generate: (args, context) => inTurn(context.signal, () => loaded(TextEngine).generate(args, context)),
  saveSession: (args, { signal }) => inTurn(signal, () => loaded(TextEngine).saveSession(args)),
  tokenize: async ({ text, addSpecial }) => (await present(TextEngine)).model.tokenize(text, addSpecial),
  detokenize: async ({ ids }) => (await present(TextEngine)).model.detokenize(ids),
  embed: ({ texts, prompt }, { signal, emit }) =>
    inTurn(signal, () => loaded(VectorEngine).run(signal, (embedder) => embedder.embed(texts, prompt, emit))),
  encode: async (args) => (await present(VectorEngine)).encode(args),
  rerank: ({ query, documents, topK }, { signal, emit }) =>
    inTurn(signal, () => loaded(ScoreEngine).run(signal, (reranker) => reranker.rerank(query, documents, topK, emit))),
  memory: async () => (await present(Engine<Resident>)).memory(),
  counters: () => currentDevice().counters(),
  destroyDevice() {
    currentDevice().destroy();
    return undefined;
  },
  close: (_, { signal }) => inTurn(signal, () => {
    indices.clear();
    mixtures.clear();
    tensors.clear();
    engine?.close();
    engine = undefined;
    kernelDevice?.free();
    kernelDevice = undefined;
    return undefined;
  }),
  async devices(): Promise<AvailableDevice[]> {
    const { adapter } = await inspectGpu();
    const cpu: AvailableDevice = { choice: "cpu", name: "CPU", isSoftware: false, hasSubgroups: false, hasF16: false };
    return adapter === undefined ? [cpu] : [{ choice: "gpu", ...adapter }, cpu];
  },
  openDevice: (request, { signal }) => inTurn(signal, async () => {
    kernelDevice = await openDevice(request);
    return infoOf(kernelDevice);
  }),
  bench: (args, { signal, emit }) => inTurn(signal, () => measure(args, emit)),
  keepTensor: ({ data, shape }, { signal }) => inTurn(signal, async () => remember(await kernels().upload(data, Uint32Array.from(shape)))),
  readTensor: ({ kept: id }, { signal }) => inTurn(signal, () => tensors.get(id).read()),
  freeTensor: ({ kept: id }, { signal }) => inTurn(signal, () => tensors.free(id)),
  createIndex: ({ settings }, { signal }) => inTurn(signal, () => rememberIndex(Index.create(currentDevice(), settings))),
  loadIndex: (args, { signal }) => inTurn(signal, () => loadIndex(args)),
  appendVectors: ({ kept: id, vectors }, { signal }) => inTurn(signal, async () => {
    const index = indices.get(id);
    return { first: await index.append(vectors), info: indexInfo(index) };
  }),
  deleteVectors: ({ kept: id, ids }, { signal }) => inTurn(signal, () => {
    const index = indices.get(id);
    return { deleted: index.delete(ids), info: indexInfo(index) };
  }),
  searchVectors: ({ kept: id, queries, k, filter }, { signal }) => inTurn(signal, () => indices.get(id).search(queries, k, filter)),
  saveIndex: ({ kept: id }, { signal }) => inTurn(signal, () => indices.get(id).save()),
  freeIndex: ({ kept: id }, { signal }) => inTurn(signal, () => indices.free(id)),
  loadMol: (args, { signal }) => inTurn(signal, () => loadMol(args, signal)),
  appendItems: ({ kept: id, vectors }, { signal }) => inTurn(signal, async () => {
    const mol = mixtures.get(id);
    return { first: await mol.append(vectors), info: molInfo(mol) };
  }),
  searchItems: ({ kept: id, queries, k, method, users }, { signal }) =>
    inTurn(signal, () => mixtures.get(id).search(queries, k, method, users)),
  freeMol: ({ kept: id }, { signal }) => inTurn(signal, () => mixtures.free(id)),
  matmul: ({ operands: { a, b }, options: { m, n, k }, keep }, { signal }) =>
    inTurn(signal, () => compute([a, b], keep, (device, a, b) => device.matmul(a, b, m, n, k))),
  rmsNorm: ({ operands: { x, weight }, options: { eps }, keep }, { signal }) =>
    inTurn(signal, () => compute([x, weight], keep, (device, x, weight) => device.rmsNorm(x, weight, eps))),
  layerNorm: ({ operands: { x, weight, bias }, options: { eps }, keep }, { signal }) =>
    inTurn(signal, () => compute([x, weight, bias], keep, (device, x, weight, bias) => device.layerNorm(x, weight, bias, eps))),
  softmax: ({ operands: { x }, options: { columns }, keep }, { signal }) =>
    inTurn(signal, () => compute([x], keep, (device, x) => device.softmax(x, columns))),
  rope: ({ operands: { x }, options: { nHeads, headDim, firstPos, theta, style }, keep }, { signal }) =>
    inTurn(signal, () => compute([x], keep, (device, x) => device.rope(x, nHeads, headDim, firstPos, theta, style))),
  attention: ({ operands: { q, k, v }, options: { nHeads, nKvHeads, headDim }, keep }, { signal }) =>
    inTurn(signal, () => compute([q, k, v], keep, (device, q, k, v) => device.attention(q, k, v, nHeads, nKvHeads, headDim))),
};

const running = new Map<number, AbortController>();

function receive(message: ToWorker): void {
  switch (message.type) {
    case "files":
      files = message;
      text.findAt(message.textWasm);
      break;
    case "abort":
      running.get(message.id)?.abort();
      break;
    case "call":
      void handle(message.id, message.name, message.args);
      break;
    default:
      fetching.receive(message);
  }
}

async function handle<K extends CallName>(id: number, name: K, args: Calls[K]["args"]): Promise<void> {
  const controller = new AbortController();
  running.set(id, controller);
  try {
    const value = await handlers[name](args, { signal: controller.signal, emit: (event) => post({ type: "event", id, value: event }) });
    for (const notice of (engine?.device ?? kernelDevice)?.takeNotices() ?? []) {
      notify("shader_replaced", notice);
    }
    post({ type: "reply", id, value }, value instanceof Float32Array || value instanceof Uint8Array ? [value.buffer as ArrayBuffer] : []);
  } catch (error) {
    post({ type: "fail", id, error: toWire(error) });
  } finally {
    running.delete(id);
  }
}

/** What no call caught: a panic of the engine in the middle of something asynchronous. Nobody would ever get an answer. */
function reportFatal(error: unknown): void {
  const wire = toWire(error);
  post({ type: "fatal", error: { ...wire, code: "worker_crashed", fatal: true } });
}

async function main(): Promise<void> {
  if (isNode) {
    const { parentPort } = await importHidden<typeof import("node:worker_threads")>("node:worker_threads");
    if (parentPort === null) {
      throw new Error("worker.js is the engine's worker and does nothing by itself; import the package instead");
    }
    port = {
      post: (message, transfer) => parentPort.postMessage(message, transfer as import("node:worker_threads").Transferable[]),
      listen: (listener) => parentPort.on("message", listener),
    };
    process.on("uncaughtException", reportFatal);
    process.on("unhandledRejection", reportFatal);
  } else {
    const scope = self as unknown as DedicatedWorkerGlobalScope;
    port = {
      post: (message, transfer) => scope.postMessage(message, transfer),
      listen: (listener) => scope.addEventListener("message", (event) => listener(event.data as ToWorker)),
    };
    scope.addEventListener("error", (event) => reportFatal(event.error));
    scope.addEventListener("unhandledrejection", (event) => reportFatal(event.reason));
  }
  port.listen(receive);
  const lock = await holdLock();
  post(lock === undefined ? { type: "ready" } : { type: "ready", lock });
}

/** Takes a lock that the browser gives back when the worker is gone, however that came about. */
function holdLock(): Promise<string | undefined> {
  if (globalThis.navigator?.locks === undefined) {
    return Promise.resolve(undefined);
  }
  const name = `tilewright/worker/${crypto.randomUUID()}`;
  return new Promise((resolve) => {
    navigator.locks.request(name, () => {
      resolve(name);
      return new Promise(() => {});
    }).catch(() => resolve(undefined)); // Where a page may not use locks, the worker's own events have to do.
  });
}

void main();
