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
export { Generation, Model } from "./model.js";
export { Mol, type MolOptions, type MolSearchOptions } from "./mol.js";
export {
  createChatCompletion, type ChatCompletion, type ChatCompletionCallOptions, type ChatCompletionChunk, type ChatCompletionDelta,
  type ChatCompletionLogprobs, type ChatCompletionMessageParam, type ChatCompletionRequest, type ChatCompletionTokenLogprob,
  type ChatCompletionTool, type ChatCompletionToolCall, type CompletionUsage, type FinishReason,
} from "./openai.js";
export { Reranker } from "./reranker.js";
export { sessions } from "./sessions.js";
export type * from "./types.js";
