/** The type of a client. */

import type { RequestOptions } from "../types.js";
import type { ChatCompletion, ChatCompletionChunk, ChatCompletionRequest } from "./chat.js";
import type { CompletionStream } from "./common.js";
import type { Completion, CompletionRequest } from "./completions.js";
import type { EmbeddingRequest, EmbeddingResponse } from "./embeddings.js";

/** A model as the API lists it. */
export interface ModelEntry {
  id: string;
  object: "model";
  /** When the client was made, in seconds since 1970. */
  created: number;
  owned_by: "local";
}

export type ClientChatRequest = ChatCompletionRequest & { model: string };

/** A client of {@link createClient}. Errors are {@link TilewrightError}s, `model_not_found` for an unknown model. */
export interface Client {
  chat: {
    completions: {
      create(request: ClientChatRequest & { stream: true }, options?: RequestOptions): Promise<CompletionStream<ChatCompletionChunk>>;
      create(request: ClientChatRequest & { stream?: false | null }, options?: RequestOptions): Promise<ChatCompletion>;
      create(request: ClientChatRequest, options?: RequestOptions): Promise<ChatCompletion | CompletionStream<ChatCompletionChunk>>;
    };
  };
  completions: {
    create(request: CompletionRequest & { stream: true }, options?: RequestOptions): Promise<CompletionStream<Completion>>;
    create(request: CompletionRequest & { stream?: false | null }, options?: RequestOptions): Promise<Completion>;
    create(request: CompletionRequest, options?: RequestOptions): Promise<Completion | CompletionStream<Completion>>;
  };
  embeddings: { create(request: EmbeddingRequest, options?: RequestOptions): Promise<EmbeddingResponse> };
  models: {
    list(): Promise<{ object: "list"; data: ModelEntry[] }>;
    retrieve(name: string): Promise<ModelEntry>;
  };
  /**
   * Serves other clients in place of the network: `new OpenAI({ baseURL: "http://local/v1", fetch: client.fetch })`. It supports
   * `chat/completions`, `completions`, `embeddings` and `models` under `/v1/` of any host.
   */
  fetch(input: string | URL | Request, init?: RequestInit): Promise<Response>;
}
