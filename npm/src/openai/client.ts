/** OpenAI's client and its HTTP API, over loaded models. */

import type { Embedder } from "../embedder.js";
import { ensure, messageOf } from "../errors.js";
import { decoded } from "../helpers.js";
import type { Model } from "../model.js";
import { known } from "../options.js";
import type { RequestOptions } from "../types.js";
import {
  createChatCompletion, type ChatCompletion, type ChatCompletionChunk, type ChatCompletionRequest,
} from "./chat.js";
import { CompletionStream } from "./common.js";
import { createCompletion, type Completion, type CompletionRequest } from "./completions.js";
import { createEmbeddings, type EmbeddingRequest, type EmbeddingResponse } from "./embeddings.js";
import { ensureValid, errorResponse, type ErrorBody } from "./errors.js";

/** A model as the API lists it. */
export interface ModelEntry {
  id: string;
  object: "model";
  /** When the client was made, in seconds since 1970. */
  created: number;
  owned_by: "local";
}

export type ClientChatRequest = ChatCompletionRequest & { model: string };

/** Responds at once or, with `stream: true`, by chunks. */
export interface Create<Request, Response, Chunk> {
  (request: Request & { stream: true }, options?: RequestOptions): Promise<CompletionStream<Chunk>>;
  (request: Request & { stream?: false | null }, options?: RequestOptions): Promise<Response>;
  (request: Request, options?: RequestOptions): Promise<Response | CompletionStream<Chunk>>;
}

/** A client of {@link createClient}. Errors are {@link TilewrightError}s, `model_not_found` for an unknown model. */
export interface Client {
  chat: { completions: { create: Create<ClientChatRequest, ChatCompletion, ChatCompletionChunk> } };
  completions: { create: Create<CompletionRequest, Completion, Completion> };
  embeddings: { create(request: EmbeddingRequest, options?: RequestOptions): Promise<EmbeddingResponse> };
  models: {
    list(): Promise<{ object: "list"; data: ModelEntry[] }>;
    retrieve(name: string): Promise<ModelEntry>;
  };
  /**
   * Serves other clients in place of the network: `new OpenAI({ baseURL: "http://local/v1", fetch: client.fetch })`.
   * It supports `chat/completions`, `completions`, `embeddings` and `models` under `/v1/` of any host.
   */
  fetch(input: string | URL | Request, init?: RequestInit): Promise<Response>;
}

/** Options of {@link createClient}. */
export interface ClientOptions {
  /** Models by name. Each request looks its field `model` up, so later additions count. */
  models: Readonly<Record<string, Model | Embedder>>;
}

/**
 * Makes a client.
 *
 * ```ts
 * const client = createClient({ models: { story: model, minilm: embedder } });
 * const answer = await client.chat.completions.create({ model: "story", messages: [{ role: "user", content: "Hello!" }] });
 * ```
 *
 * @throws {@link TilewrightError} `option` for anything but models.
 */
export function createClient(options: ClientOptions): Client {
  const { models } = known("createClient", options);
  const created = Math.floor(Date.now() / 1000);
  ensureValid(typeof models === "object" && models !== null, "models", models, "an object of models by their names");
  for (const [name, model] of Object.entries(models)) {
    ensure(isChat(model) || isEncoder(model),
      "option", `models[${JSON.stringify(name)}] is neither a Model nor an Embedder`);
  }
  const entryOf = (id: string): ModelEntry => ({ id, object: "model", created, owned_by: "local" });
  const find = (name: unknown): Model | Embedder => {
    ensureValid(typeof name === "string", "model", name, "the name of a model");
    const model = Object.hasOwn(models, name) ? models[name] : undefined;
    ensure(model !== undefined,
      "model_not_found", `there is no model ${JSON.stringify(name)}`, { param: "model" });
    return model;
  };
  type Named = { model?: string };
  type IsKind<T extends Model | Embedder> = (model: Model | Embedder) => model is T;
  const findKind = <T extends Model | Embedder>(request: Named, isKind: IsKind<T>, problem: string): T => {
    const model = find(request?.model);
    ensure(isKind(model), "option", `${request.model} ${problem}`, { param: "model" });
    return model;
  };
  const chatModel = (request: Named): Model => findKind(request, isChat, "is an encoder and cannot generate text");
  const encoder = (request: Named): Embedder => findKind(request, isEncoder, "is not an encoder and cannot compute embeddings");
  const calls: Omit<Client, "fetch"> = {
    chat: {
      completions: {
        create: (async (request, options) => createChatCompletion(chatModel(request), request, options)) as Client["chat"]["completions"]["create"],
      },
    },
    completions: { create: (async (request, options) => createCompletion(chatModel(request), request, options)) as Client["completions"]["create"] },
    embeddings: { create: async (request, options) => createEmbeddings(encoder(request), request, options) },
    models: {
      list: async () => ({ object: "list", data: Object.keys(models).map(entryOf) }),
      retrieve: async (name) => {
        find(name);
        return entryOf(name);
      },
    },
  };
  return { ...calls, fetch: fetchFrom(calls) };
}

function isChat(model: Model | Embedder): model is Model {
  return typeof (model as Partial<Model> | null)?.chat === "function";
}

function isEncoder(model: Model | Embedder): model is Embedder {
  return typeof (model as Partial<Embedder> | null)?.embed === "function";
}

/** A path's handlers, by method. */
type Route = Partial<Record<string, (body: object, signal: AbortSignal, rest: string) => Promise<unknown>>>;

/** A `fetch` over these calls. */
function fetchFrom(client: Omit<Client, "fetch">): Client["fetch"] {
  const routes: [path: RegExp, route: Route][] = [
    [/^chat\/completions$/, { POST: (body, signal) => client.chat.completions.create(body as never, { signal }) }],
    [/^completions$/, { POST: (body, signal) => client.completions.create(body as never, { signal }) }],
    [/^embeddings$/, { POST: (body, signal) => client.embeddings.create(body as never, { signal }) }],
    [/^models$/, { GET: () => client.models.list() }],
    [/^models\/(.+)$/, { GET: (_, __, name) => client.models.retrieve(decoded(name)) }],
  ];
  return async (input, init) => {
    const request = new Request(input, init);
    const { method, signal, url } = request;
    const path = /\/v1\/(.+)$/.exec(new URL(url).pathname)?.[1] ?? "";
    const [pattern, route] = routes.find(([pattern]) => pattern.test(path)) ?? [];
    if (pattern === undefined || route === undefined) {
      return refusal(404, `nothing answers ${method} ${url} here`, "unknown_url");
    }
    const handler = route[method];
    if (handler === undefined) {
      return refusal(405, `${url} takes ${Object.keys(route).join()}, and not ${method}`, "method_not_allowed");
    }
    let body: unknown = {};
    if (method === "POST") {
      const type = request.headers.get("content-type") ?? "application/json";
      if (!type.startsWith("application/json")) {
        return refusal(415, `the request is ${type}, expected application/json`, "unsupported_media_type");
      }
      try {
        body = await request.json();
      } catch (error) {
        signal.throwIfAborted();
        return refusal(400, `the request is not valid JSON: ${messageOf(error)}`, "invalid_json");
      }
    }
    try {
      const value = await handler(body as object, signal, pattern.exec(path)?.[1] ?? "");
      return value instanceof CompletionStream ? eventsOf(value, signal) : Response.json(value);
    } catch (error) {
      signal.throwIfAborted();
      const { status, body } = errorResponse(error);
      return failed(status, body);
    }
  };
}

/** Clients must not retry: the response would be the same. */
function failed(status: number, body: ErrorBody): Response {
  return Response.json(body, { status, headers: { "x-should-retry": "false" } });
}

function refusal(status: number, message: string, code: string): Response {
  return failed(status, { error: { message, type: "invalid_request_error", param: null, code } });
}

function eventsOf(stream: CompletionStream<unknown>, signal: AbortSignal): Response {
  const encoder = new TextEncoder();
  const event = (data: string): Uint8Array => encoder.encode(`data: ${data}\n\n`);
  const body = new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const { done, value } = await stream.next();
        controller.enqueue(event(done === true ? "[DONE]" : JSON.stringify(value)));
        if (done === true) {
          controller.close();
        }
      } catch (error) {
        if (signal.aborted) {
          controller.error(signal.reason);
        } else {
          // The status has been sent, so an error is the last event.
          controller.enqueue(event(JSON.stringify(errorResponse(error).body)));
          controller.close();
        }
      }
    },
    async cancel() {
      await stream.return();
    },
  }, { highWaterMark: 0 });
  return new Response(body, { headers: { "content-type": "text/event-stream", "cache-control": "no-store" } });
}
