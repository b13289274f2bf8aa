/** OpenAI's client over loaded models. */

import type { Embedder } from "../embedder.js";
import { ensure } from "../errors.js";
import type { Model } from "../model.js";
import { known } from "../options.js";
import type { RequestOptions } from "../types.js";
import { createChatCompletion } from "./chat.js";
import type { Client, ClientChatRequest, ModelEntry } from "./client-types.js";
import { createCompletion, type CompletionRequest } from "./completions.js";
import { createEmbeddings } from "./embeddings.js";
import { ensureValid } from "./errors.js";
import { fetchFrom } from "./fetch.js";

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
    ensure(isChat(model) || isEncoder(model), "option", `models[${JSON.stringify(name)}] is neither a Model nor an Embedder`);
  }
  const entryOf = (id: string): ModelEntry => ({ id, object: "model", created, owned_by: "local" });
  const find = (name: unknown): Model | Embedder => {
    ensureValid(typeof name === "string", "model", name, "the name of a model");
    const model = Object.hasOwn(models, name) ? models[name] : undefined;
    ensure(model !== undefined, "model_not_found", `there is no model ${JSON.stringify(name)} here`, { param: "model" });
    return model;
  };
  const findKind = <T extends Model | Embedder>(request: { model?: string }, isKind: (model: Model | Embedder) => model is T, problem: string): T => {
    const model = find(request?.model);
    ensure(isKind(model), "option", `${request.model} ${problem}`, { param: "model" });
    return model;
  };
  const chatModel = (request: { model?: string }): Model => findKind(request, isChat, "is an encoder and generates nothing");
  const encoder = (request: { model?: string }): Embedder => findKind(request, isEncoder, "is no encoder and makes no vectors");
  const calls: Omit<Client, "fetch"> = {
    chat: {
      completions: {
        create: (async (request: ClientChatRequest, options?: RequestOptions) =>
          createChatCompletion(chatModel(request), request, options)) as Client["chat"]["completions"]["create"],
      },
    },
    completions: {
      create: (async (request: CompletionRequest, options?: RequestOptions) =>
        createCompletion(chatModel(request), request, options)) as Client["completions"]["create"],
    },
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
