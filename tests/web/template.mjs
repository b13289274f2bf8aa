// The built-in model with a chat template, for tests of conversations.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { repository } from "./server.mjs";

const stories = readFileSync(join(repository, "assets/stories.gguf"));

/** The story model with a chat template put in front of its other keys, padded so that the weights keep their alignment. */
export function withTemplate(template) {
  const key = Buffer.from("tokenizer.chat_template");
  const fixed = 8 + key.length + 4 + 8;
  // The padding is a comment of the template, so it renders to nothing.
  const unpadded = Buffer.byteLength(`${template}{##}`);
  const padded = Buffer.from(`${template}{#${" ".repeat((32 - ((fixed + unpadded) % 32)) % 32)}#}`);
  const entry = Buffer.alloc(fixed);
  entry.writeBigUInt64LE(BigInt(key.length));
  key.copy(entry, 8);
  entry.writeUInt32LE(8, 8 + key.length);
  entry.writeBigUInt64LE(BigInt(padded.length), 12 + key.length);
  const start = Buffer.from(stories.subarray(0, 24));
  start.writeBigUInt64LE(start.readBigUInt64LE(16) + 1n, 16);
  return Buffer.concat([start, entry, padded, stories.subarray(24)]);
}
