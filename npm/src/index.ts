/** What the package exports. */

// Users need not have it among the `lib` of their own.
/// <reference lib="esnext.disposable" preserve="true" />

export type * from "./bench-types.js";
export { cache } from "./cache.js";
export { configure } from "./configure.js";
export { Embedder } from "./embedder.js";
export { Embeddings } from "./embeddings.js";
export { TilewrightError, type ErrorCode } from "./errors.js";
export { attention, bench, devices, Kernels, layerNorm, matmul, rmsNorm, rope, softmax, type DeviceTensor, type KernelOperand } from "./kernels.js";
export { Generation } from "./generation.js";
export type * from "./load-options.js";
export { Model } from "./model.js";
export { type CompletionStream, type CompletionUsage, type FinishReason } from "./openai/common.js";
export {
  createChatCompletion, type ChatCompletion, type ChatCompletionChunk, type ChatCompletionContentPart, type ChatCompletionDelta, type ChatCompletionLogprobs,
  type ChatCompletionMessageParam, type ChatCompletionRequest, type ChatCompletionTokenLogprob, type ChatCompletionTool, type ChatCompletionToolCall,
} from "./openai/chat.js";
export {
  createClient, type Client, type ClientChatRequest, type ClientOptions, type ModelEntry,
} from "./openai/client.js";
export { type Completion, type CompletionLogprobs, type CompletionRequest } from "./openai/completions.js";
export { type EmbeddingRequest, type EmbeddingResponse } from "./openai/embeddings.js";
export { type SamplingFields } from "./openai/request.js";
export { Reranker } from "./reranker.js";
export { sessions } from "./sessions.js";
export { Engine } from "./engine.js";
export { Transcriber } from "./transcriber.js";
export type * from "./types.js";
export { Index, Mol } from "./vectors.js";
