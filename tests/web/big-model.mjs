// Llamas in GGUF. Most have only zeros. One of these has any size, with bytes generated as they are read after a real
// header; its logits are zero as well, so it generates token 0; it tests loading of large files. Another has a published
// vocabulary.

const ALIGNMENT = 32;
const Q8_0 = { id: 8, blockBytes: 34, blockLength: 32 };
const F32 = { id: 0, blockBytes: 4, blockLength: 1 };
const UINT32 = 4;
const INT32 = 5;
const FLOAT32 = 6;
const STRING = 8;
const ARRAY = 9;
const CHUNK = 1 << 20;

/** Collects little-endian values (GGUF specification, version 3). */
class Writer {
  parts = [];

  number(bytes, method, value) {
    const part = Buffer.alloc(bytes);
    part[method](value);
    this.parts.push(part);
  }

  u32(value) {
    this.number(4, "writeUInt32LE", value);
  }

  u64(value) {
    this.number(8, "writeBigUInt64LE", BigInt(value));
  }

  text(value) {
    const bytes = Buffer.from(value);
    this.u64(bytes.length);
    this.parts.push(bytes);
  }

  value(type, value) {
    if (type === STRING) this.text(value);
    else if (type === FLOAT32) this.number(4, "writeFloatLE", value);
    else if (type === INT32) this.number(4, "writeInt32LE", value);
    else this.u32(value);
  }

  key(key, type, value) {
    this.text(key);
    if (Array.isArray(value)) {
      this.u32(ARRAY);
      this.u32(type);
      this.u64(value.length);
      for (const item of value) this.value(type, item);
    } else {
      this.u32(type);
      this.value(type, value);
    }
  }
}

const aligned = (bytes) => Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;

/**
 * The start of a GGUF file with these keys and tensors, up to the tensors' data, and the data's size. `more` are
 * encoded keys.
 */
function start(keys, table, more = []) {
  const writer = new Writer();
  writer.parts.push(Buffer.from("GGUF"));
  writer.u32(3);
  writer.u64(table.length);
  writer.u64(keys.length + more.length);
  for (const key of keys) writer.key(...key);
  writer.parts.push(...more);
  let dataBytes = 0;
  for (const tensor of table) {
    const [name, shape, type] = tensor;
    writer.text(`${name}.weight`);
    writer.u32(shape.length);
    for (const dimension of shape) writer.u64(dimension);
    writer.u32(type.id);
    writer.u64(dataBytes);
    dataBytes = aligned(dataBytes + bytesOf(tensor));
  }
  const written = Buffer.concat(writer.parts);
  return { header: Buffer.concat([written, Buffer.alloc(aligned(written.length) - written.length)]), dataBytes };
}

const bytesOf = ([, shape, type]) => (shape.reduce((a, b) => a * b) / type.blockLength) * type.blockBytes;

/** The tensors of one layer. */
const layerOf = (dim, ffn, type = Q8_0) => [
  ["attn_norm", [dim], F32], ["ffn_norm", [dim], F32],
  ["attn_q", [dim, dim], type], ["attn_k", [dim, dim], type], ["attn_v", [dim, dim], type], ["attn_output", [dim, dim], type],
  ["ffn_gate", [dim, ffn], type], ["ffn_up", [dim, ffn], type], ["ffn_down", [ffn, dim], type],
];

/** The keys of a model without a vocabulary. */
const keysOf = ({ layers, dim, ffn, heads, vocabSize }) => [
  ["general.architecture", STRING, "llama"],
  ["general.name", STRING, "zeros"],
  ["general.alignment", UINT32, ALIGNMENT],
  ["llama.block_count", UINT32, layers],
  ["llama.context_length", UINT32, 512],
  ["llama.embedding_length", UINT32, dim],
  ["llama.feed_forward_length", UINT32, ffn],
  ["llama.attention.head_count", UINT32, heads],
  ["llama.attention.head_count_kv", UINT32, heads],
  ["llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5],
  ["llama.rope.dimension_count", UINT32, dim / heads],
  ["llama.rope.freq_base", FLOAT32, 10000],
  ["llama.vocab_size", UINT32, vocabSize],
];

/** Encoded keys of a GGUF file whose names have this prefix, and the number of its tokens. */
function keysIn(file, prefix) {
  const SIZES = [1, 1, 2, 2, 4, 4, 4, 1, undefined, undefined, 8, 8, 8];
  let at = 24;
  const text = () => {
    const length = Number(file.readBigUInt64LE(at));
    at += 8 + length;
    return file.toString("utf8", at - length, at);
  };
  const skip = (type) => {
    if (type === STRING) text();
    else at += SIZES[type];
  };
  const keys = [];
  let vocabSize;
  for (let n = Number(file.readBigUInt64LE(16)); n > 0; n--) {
    const begin = at;
    const name = text();
    const type = file.readUInt32LE(at);
    at += 4;
    if (type === ARRAY) {
      const [itemType, length] = [file.readUInt32LE(at), Number(file.readBigUInt64LE(at + 4))];
      at += 12;
      for (let i = 0; i < length; i++) skip(itemType);
      if (name === "tokenizer.ggml.tokens") vocabSize = length;
    } else {
      skip(type);
    }
    if (name.startsWith(prefix)) keys.push(file.subarray(begin, at));
  }
  return { keys, vocabSize };
}

/** The smallest model with this GGUF file's vocabulary. */
export function smallModel(vocabulary) {
  const { keys, vocabSize } = keysIn(vocabulary, "tokenizer.");
  const [dim, ffn, heads, layers] = [32, 32, 1, 1];
  const table = [["token_embd", [dim, vocabSize], Q8_0], ["output_norm", [dim], F32]];
  table.push(...layerOf(dim, ffn).map(([name, ...rest]) => [`blk.0.${name}`, ...rest]));
  const { header, dataBytes } = start(keysOf({ layers, dim, ffn, heads, vocabSize }), table, keys);
  return Buffer.concat([header, Buffer.alloc(dataBytes)]);
}

/**
 * A model of one layer and 20 tokens with matrices of these blocks: `type` is that of GGUF, `blocks` have `length` weights
 * each. Its embeddings are whole numbers without a pattern.
 */
export function modelOfBlocks(type, blocks, length) {
  const [dim, ffn, heads, layers, vocabSize] = length === 256 ? [256, 512, 4, 1, 20] : [224, 352, 7, 1, 20];
  const matrix = { id: type, blockBytes: blocks[0].length, blockLength: length };
  const table = [["token_embd", [dim, vocabSize], F32], ["output", [dim, vocabSize], matrix], ["output_norm", [dim], F32]];
  table.push(...layerOf(dim, ffn, matrix).map(([name, ...rest]) => [`blk.0.${name}`, ...rest]));
  const { header } = start(keysOf({ layers, dim, ffn, heads, vocabSize }), table);
  let state = 7;
  const next = (n) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return (state >>> 8) % n;
  };
  const data = table.map((tensor) => {
    const [, shape, type] = tensor;
    const bytes = Buffer.alloc(aligned(bytesOf(tensor)));
    for (let at = 0; at < bytesOf(tensor); at += type.blockBytes) {
      if (type === matrix) bytes.set(blocks[next(blocks.length)], at);
      else bytes.writeFloatLE(shape.length === 1 ? 1 : next(101) - 50, at);
    }
    return bytes;
  });
  return Buffer.concat([header, ...data]);
}

/** The smallest model that can chat, which always continues with this text. */
export function parrot(text, template) {
  const [dim, ffn, heads, layers] = [32, 32, 1, 1];
  const tokens = [text, "<s>", "</s>", ...Array.from({ length: 256 }, (_, i) => `<0x${i.toString(16).toUpperCase().padStart(2, "0")}>`)];
  const keys = [
    ...keysOf({ layers, dim, ffn, heads, vocabSize: tokens.length }).map(([key, type, value]) => [key, type, key === "llama.context_length" ? 4096 : value]),
    ["tokenizer.ggml.model", STRING, "llama"],
    ["tokenizer.ggml.tokens", STRING, tokens],
    ["tokenizer.ggml.scores", FLOAT32, tokens.map(() => 0)],
    ["tokenizer.ggml.token_type", INT32, [1, 3, 3, ...Array(256).fill(6)]],
    ["tokenizer.ggml.unknown_token_id", UINT32, 0],
    ["tokenizer.ggml.bos_token_id", UINT32, 1],
    ["tokenizer.ggml.eos_token_id", UINT32, 2],
    ["tokenizer.chat_template", STRING, template],
  ];
  const table = [["token_embd", [dim, tokens.length], Q8_0], ["output_norm", [dim], F32]];
  table.push(...layerOf(dim, ffn).map(([name, ...rest]) => [`blk.0.${name}`, ...rest]));
  const { header, dataBytes } = start(keys, table);
  return Buffer.concat([header, Buffer.alloc(dataBytes)]);
}

/** A download of at least `size` bytes, for `server.files`. */
export function bigModel(size) {
  const [dim, ffn, heads] = [2048, 8192, 16];
  // Unknown, begin, end, and one token per byte: the smallest vocabulary of its kind.
  const bytes = Array.from({ length: 256 }, (_, i) => `<0x${i.toString(16).toUpperCase().padStart(2, "0")}>`);
  const tokens = ["<unk>", "<s>", "</s>", ...bytes];
  const types = [2, 3, 3, ...bytes.map(() => 6)];

  const layer = layerOf(dim, ffn);
  const layers = Math.ceil(size / layer.reduce((sum, tensor) => sum + bytesOf(tensor), 0));
  const table = [["token_embd", [dim, tokens.length], Q8_0], ["output_norm", [dim], F32]];
  for (let i = 0; i < layers; i++) table.push(...layer.map(([name, ...rest]) => [`blk.${i}.${name}`, ...rest]));

  const keys = [
    ...keysOf({ layers, dim, ffn, heads, vocabSize: tokens.length }),
    ["tokenizer.ggml.model", STRING, "llama"],
    ["tokenizer.ggml.tokens", STRING, tokens],
    ["tokenizer.ggml.scores", FLOAT32, tokens.map(() => 0)],
    ["tokenizer.ggml.token_type", INT32, types],
    ["tokenizer.ggml.unknown_token_id", UINT32, 0],
    ["tokenizer.ggml.bos_token_id", UINT32, 1],
    ["tokenizer.ggml.eos_token_id", UINT32, 2],
  ];
  const { header, dataBytes } = start(keys, table);
  const zeros = Buffer.alloc(CHUNK);
  return {
    headerBytes: header.length,
    size: header.length + dataBytes,
    etag: `"zeros-${layers}"`,
    async *read(start, end) {
      while (start < end) {
        const part = start < header.length
          ? header.subarray(start, Math.min(header.length, end))
          : zeros.subarray(0, Math.min(CHUNK, end - start));
        yield part;
        start += part.length;
      }
    },
  };
}
