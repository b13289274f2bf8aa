// Generated from src/generate/options.rs by `scripts/check-docs --write`.

/** Numeric sampling options. */
export interface SamplingNumbers {
  /** Sampling temperature; 0 always takes the most likely token. Range: 0, or 0.001 to 100. Default 0. */
  temperature?: number | undefined;
  /** Sample from the K most likely tokens; 0 disables. Range: 0 or more. Default 40. */
  topK?: number | undefined;
  /** Sample from the most likely tokens whose probabilities add up to P; 1 disables. Range: above 0 to 1. Default 0.95. */
  topP?: number | undefined;
  /** Sample from tokens with at least P times the highest probability; 0 disables. Range: 0 to 1. Default 0.05. */
  minP?: number | undefined;
  /** Divide positive and multiply negative logits of recent tokens by X; 1 disables. Range: 0.01 to 100. Default 1. */
  repeatPenalty?: number | undefined;
  /** Number of latest tokens that the repetition penalty covers. Range: 0 or more. Default 64. */
  repeatLastN?: number | undefined;
  /** Subtract X from the logit of every token generated before; 0 disables. Range: -100 to 100. Default 0. */
  presencePenalty?: number | undefined;
  /** Subtract X from a token's logit for each time it was generated before; 0 disables. Range: -100 to 100. Default 0. */
  frequencyPenalty?: number | undefined;
}

/** Their least and greatest values. */
export const BOUNDS = {
  temperature: [0, 100], topK: [0, 4294967295], topP: [0, 1], minP: [0, 1], repeatPenalty: [0, 100],
  repeatLastN: [0, 4294967295], presencePenalty: [-100, 100], frequencyPenalty: [-100, 100],
} as const;
