/** The table of known models, `assets/models.json`, which the build converts to a module. */

import type { KnownModel } from "./types.js";

type Row = Omit<KnownModel, "sizeBytes" | "cacheBytesPerToken" | "maxContextLength"> & {
  size_bytes: number; cache_bytes_per_token: number | null; max_context_length: number;
};

declare const table: { about: string; models: Row[] };
export default table;
