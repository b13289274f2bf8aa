/** What the package exports. */

// Users need not have it among the `lib` of their own.
/// <reference lib="esnext.disposable" preserve="true" />

export {
  bench, type BenchAdapter, type BenchKernel, type BenchModel, type BenchOptions, type BenchProbe, type BenchProgress, type BenchReport,
  type BenchTest,
} from "./bench.js";
export { cache } from "./cache.js";
export { configure, type ConfigureOptions } from "./configure.js";
export { Embedder } from "./embedder.js";
export { Embeddings } from "./embeddings.js";
export { TilewrightError, type ErrorCode } from "./errors.js";
export { Index, type IndexOptions, type LoadIndexOptions, type SearchOptions } from "./vector-index.js";
export {
  attention, devices, Kernels, layerNorm, matmul, rmsNorm, rope, softmax, type AttentionOptions, type DeviceTensor, type KernelOperand,
  type KernelOptions, type RopeOptions,
} from "./kernels.js";
export { type KeptOptions } from "./kept.js";
export { Generation } from "./generation.js";
export { Model } from "./model.js";
export { Mol, type MolOptions, type MolSearchOptions } from "./mol.js";
export { type CompletionStream, type CompletionUsage, type FinishReason } from "./openai/answer.js";
export {
  createChatCompletion, type ChatCompletion, type ChatCompletionChunk, type ChatCompletionDelta, type ChatCompletionLogprobs,
  type ChatCompletionMessageParam, type ChatCompletionRequest, type ChatCompletionTokenLogprob, type ChatCompletionTool, type ChatCompletionToolCall,
} from "./openai/chat.js";
export { createClient, type Client, type ClientChatRequest, type ClientOptions, type ModelEntry } from "./openai/client.js";
export { type Completion, type CompletionLogprobs, type CompletionRequest } from "./openai/completions.js";
export { type EmbeddingRequest, type EmbeddingResponse } from "./openai/embeddings.js";
export { type RequestOptions, type SamplingFields } from "./openai/request.js";
export { Reranker } from "./reranker.js";
export { sessions } from "./sessions.js";
export { Engine } from "./texts.js";
export type * from "./types.js";
