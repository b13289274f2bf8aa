/** OpenAI's embeddings. */

import type { Embedder } from "../embedder.js";
import type { RequestOptions } from "../types.js";
import { ensureValid, unsupported } from "./errors.js";
import { anything, checked, optionsOf, whole, type Fields } from "./request.js";

/** A request. The API's other fields are the error `unsupported`, unless they are `null`. */
export interface EmbeddingRequest {
  model: string;
  /** One text, or up to 2048. Token ids are unsupported: they depend on the encoder. */
  input: string | string[];
  /** Numbers, or their bytes as little-endian 32-bit floats. Default `float`. */
  encoding_format?: "float" | "base64" | null;
  /** Elements to keep of each vector, which is then normalised again. Default: all. */
  dimensions?: number | null;
  /** Ignored. */
  user?: string | null;
}

/** Vectors, in the order of the texts. */
export interface EmbeddingResponse {
  object: "list";
  data: { object: "embedding"; index: number; embedding: number[] | string }[];
  model: string;
  usage: { prompt_tokens: number; total_tokens: number };
}

const FIELDS: Fields<EmbeddingRequest> = {
  model: anything, input: anything, dimensions: whole(1, 2 ** 31 - 1), user: anything,
  encoding_format: (param, value) => ensureValid(value === "float" || value === "base64", param, value, '"float" or "base64"'),
};

/** Most texts per request, as in OpenAI's API. */
const MOST_TEXTS = 2048;

/** Embeds texts with the given model, whatever the request names. */
export async function createEmbeddings(embedder: Embedder, given: EmbeddingRequest, options: RequestOptions = {}): Promise<EmbeddingResponse> {
  const { signal } = optionsOf("embeddings.create", options);
  const request = checked(given, FIELDS);
  const { input, encoding_format: format, dimensions } = request;
  const most = embedder.info.dims;
  ensureValid(dimensions === undefined || dimensions <= most, "dimensions", dimensions, `1 to ${most}, the size of the model's vectors`);
  const texts = textsOf(input);
  const vectors = await embedder.embed(texts, { signal, dimensions });
  const lengths = await Promise.all(texts.map(async (text) => (await embedder.tokenize(text)).length));
  const n = lengths.reduce((sum, length) => sum + length, 0);
  return {
    object: "list",
    data: [...vectors].map((vector, index) => ({ object: "embedding", index, embedding: format === "base64" ? base64Of(vector) : [...vector] })),
    model: request.model,
    usage: { prompt_tokens: n, total_tokens: n },
  };
}

function textsOf(input: unknown): string[] {
  const all: unknown[] = Array.isArray(input) ? input : [input];
  if (all.length > 0 && all.every((one) => typeof one === "number" || Array.isArray(one))) {
    throw unsupported("input", "input has token ids; only texts are supported");
  }
  ensureValid(all.length !== 0 && all.length <= MOST_TEXTS && all.every((one) => typeof one === "string"),
    "input", input, `a text or a list of 1 to ${MOST_TEXTS} texts`);
  return all;
}

function base64Of(vector: Float32Array): string {
  const bytes = new DataView(new ArrayBuffer(4 * vector.length));
  vector.forEach((number, at) => bytes.setFloat32(4 * at, number, true));
  return btoa(Array.from(new Uint8Array(bytes.buffer), (byte) => String.fromCharCode(byte)).join(""));
}
