// The built-in model with a chat template, for tests of conversations.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { repository } from "./server.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));
/** Token types, as numbered in GGUF files. */
const TYPES = { normal: 1, control: 3, userDefined: 4 };

/**
 * The story model with a chat template before its other keys, padded so that the weights stay aligned. `marks` become
 * tokens of the type `kind`, replacing the longest words of the vocabulary.
 */
export function withTemplate(template, marks = [], kind = "control") {
  const rest = renamed(stories.subarray(24), marks, TYPES[kind]);
  const key = Buffer.from("tokenizer.chat_template");
  const fixed = 8 + key.length + 4 + 8;
  // Pads with a comment of the template, which renders to nothing.
  const unpadded = fixed + Buffer.byteLength(`${template}{##}`) + rest.length - (stories.length - 24);
  const padded = Buffer.from(`${template}{#${" ".repeat((32 - (((unpadded % 32) + 32) % 32)) % 32)}#}`);
  const entry = Buffer.alloc(fixed);
  entry.writeBigUInt64LE(BigInt(key.length));
  key.copy(entry, 8);
  entry.writeUInt32LE(8, 8 + key.length);
  entry.writeBigUInt64LE(BigInt(padded.length), 12 + key.length);
  const start = Buffer.from(stories.subarray(0, 24));
  start.writeBigUInt64LE(start.readBigUInt64LE(16) + 1n, 16);
  return Buffer.concat([start, entry, padded, rest]);
}

/** The mark's token by number, in a file of `withTemplate`. */
export const markId = (at) => readVocabulary(stories).words[at];

/** The tokens with their offsets, the offset of their types, and ids of words, longest first. */
function readVocabulary(bytes) {
  const [begin, n] = arrayAt(bytes, "tokenizer.ggml.tokens");
  const tokens = [];
  let end = begin;
  for (let id = 0; id < n; id += 1) {
    const length = Number(bytes.readBigUInt64LE(end));
    tokens.push(bytes.subarray(end + 8, end + 8 + length));
    end += 8 + length;
  }
  const [typesAt] = arrayAt(bytes, "tokenizer.ggml.token_type");
  const words = tokens.map((_, id) => id).filter((id) => bytes.readUInt32LE(typesAt + 4 * id) === TYPES.normal);
  words.sort((a, b) => tokens[b].length - tokens[a].length || a - b);
  return { tokens, begin, end, typesAt, words };
}

/** A file's keys and the rest, with tokens renamed and their types changed. */
function renamed(bytes, marks, type) {
  if (marks.length === 0) return bytes;
  const { tokens, begin, end, typesAt, words } = readVocabulary(bytes);
  const changed = Buffer.from(bytes);
  marks.forEach((mark, at) => {
    tokens[words[at]] = Buffer.from(mark);
    changed.writeUInt32LE(type, typesAt + 4 * words[at]);
  });
  const written = tokens.flatMap((token) => {
    const length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(token.length));
    return [length, token];
  });
  return Buffer.concat([changed.subarray(0, begin), ...written, changed.subarray(end)]);
}

/** Offset of an array's elements, and their number. */
function arrayAt(bytes, key) {
  // The key, its value's type, the elements' type, and their number.
  const at = bytes.indexOf(key) + key.length + 8;
  return [at + 8, Number(bytes.readBigUInt64LE(at))];
}
