"""Writes a GGUF file with random weights, to time engines on the same file.

usage: make_gguf.py SHAPE TYPE OUT.gguf

SHAPE: 134m, llama-3.2-1b or llama-3.1-8b, language models, or minilm or qwen3-embedding-0.6b, text encoders
TYPE: Q4_0, Q4_K_M, Q8_0, F16 or F32

Needs `pip install gguf`. Tensors have the types that llama.cpp's quantiser gives them: Q4_0 and Q4_K_M have a head in
Q6_K, and Q4_K_M has some of `attn_v` and `ffn_down` in it. Blocks are random bits behind a fixed scale, and the same
65,521 of them over and over: the number is prime, so rows differ, and a file takes as long as writing it.
The vocabulary is SentencePiece's: all bytes, a few characters and filler. That of minilm is WordPiece's, all filler.
"""
import argparse
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType, TokenType

N_BLOCKS = 65_521
# Standard deviation of the weights. Norms keep activations in bounds whatever it is.
STD = 0.02


@dataclass(frozen=True)
class Shape:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float
    is_tied: bool
    architecture: str = "llama"
    head_dim: int = 64
    context_length: int = 131_072

    def kv_dim(self):
        return self.n_kv_heads * self.head_dim

    def q_dim(self):
        return self.n_heads * self.head_dim


SHAPES = {
    "134m": Shape(1024, 12, 16, 4, 2816, 4096, 1e4, is_tied=False),
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 8192, 128_256, 5e5, is_tied=True),
    "llama-3.1-8b": Shape(4096, 32, 32, 8, 14_336, 128_256, 5e5, is_tied=False, head_dim=128),
    "minilm": Shape(384, 6, 12, 12, 1536, 30_522, 0, True, "bert", 32, 512),
    "qwen3-embedding-0.6b": Shape(1024, 28, 16, 8, 3072, 151_669, 1e6, True, "qwen3", 128, 32_768),
}
# How text encoders pool.
POOLING = {"bert": gguf.PoolingType.MEAN, "qwen3": gguf.PoolingType.LAST}
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


FLOATS = {Type.F32: np.float32, Type.F16: np.float16}


def blocks(kind):
    """Random blocks of a type, [N_BLOCKS, bytes of a block]; layouts by ggml-common.h."""
    rng = np.random.default_rng(0)
    if kind in FLOATS:
        return rng.normal(0, STD, (N_BLOCKS, 1)).astype(FLOATS[kind]).view(np.uint8)
    size_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    found = rng.integers(0, 256, (N_BLOCKS, size_bytes), dtype=np.uint8)

    def half(offset, value):
        found[:, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)

    # Divided by the standard deviation of the integers that the scale multiplies.
    if kind == Type.Q4_0:
        half(0, STD / 4.6)
    elif kind == Type.Q8_0:
        half(0, STD / 73.9)
    elif kind == Type.Q4_K:
        # Mins that take off what scales and quants add on average.
        half(0, STD / 256)
        half(2, 7.5 * STD / 256)
    elif kind == Type.Q6_K:
        # Scales of four bits, so that the half is no subnormal.
        found[:, 192:208] = (found[:, 192:208] % 16 - 8).astype(np.int8).view(np.uint8)
        half(208, STD / (18.5 * 4.6))
    else:
        raise ValueError(f"no blocks of {kind.name}")
    return found


def tensors(shape, file_type):
    """Name, rows, columns and type of each tensor, in the order of a file. Norms and biases have no rows."""
    base = Type.Q4_K if file_type == "Q4_K_M" else Type[file_type]
    head = Type.Q6_K if file_type in ["Q4_0", "Q4_K_M"] else base
    return bert_tensors(shape, base) if shape.architecture == "bert" else llama_tensors(shape, file_type, base, head)


def llama_tensors(shape, file_type, base, head):
    def has_more_bits(layer_idx):
        eighth = shape.n_layers // 8
        in_ends = layer_idx < eighth or layer_idx >= 7 * shape.n_layers // 8
        return file_type == "Q4_K_M" and (in_ends or (layer_idx - eighth) % 3 == 2)

    yield "token_embd.weight", shape.vocab_size, shape.dim, head if shape.is_tied else base
    for i in range(shape.n_layers):
        more = Type.Q6_K if has_more_bits(i) else base
        for name, rows, cols, kind in [
            ("attn_norm", None, shape.dim, Type.F32),
            ("attn_q", shape.q_dim(), shape.dim, base),
            ("attn_k", shape.kv_dim(), shape.dim, base),
            ("attn_v", shape.kv_dim(), shape.dim, more),
            ("attn_output", shape.dim, shape.q_dim(), base),
            ("ffn_norm", None, shape.dim, Type.F32),
            ("ffn_gate", shape.ffn_dim, shape.dim, base),
            ("ffn_up", shape.ffn_dim, shape.dim, base),
            ("ffn_down", shape.dim, shape.ffn_dim, more),
        ]:
            yield f"blk.{i}.{name}.weight", rows, cols, kind
        if shape.architecture == "qwen3":
            for name in ["attn_q_norm", "attn_k_norm"]:
                yield f"blk.{i}.{name}.weight", None, shape.head_dim, Type.F32
    yield "output_norm.weight", None, shape.dim, Type.F32
    if not shape.is_tied:
        yield "output.weight", shape.vocab_size, shape.dim, head


def bert_tensors(shape, base):
    yield "token_embd.weight", shape.vocab_size, shape.dim, base
    yield "position_embd.weight", shape.context_length, shape.dim, Type.F32
    yield "token_types.weight", 2, shape.dim, Type.F32
    yield from norm("token_embd_norm", shape.dim)
    for i in range(shape.n_layers):
        for name, rows, cols in [
            ("attn_q", shape.dim, shape.dim),
            ("attn_k", shape.dim, shape.dim),
            ("attn_v", shape.dim, shape.dim),
            ("attn_output", shape.dim, shape.dim),
            ("ffn_up", shape.ffn_dim, shape.dim),
            ("ffn_down", shape.dim, shape.ffn_dim),
        ]:
            yield f"blk.{i}.{name}.weight", rows, cols, base
            yield f"blk.{i}.{name}.bias", None, rows, Type.F32
        yield from norm(f"blk.{i}.attn_output_norm", shape.dim)
        yield from norm(f"blk.{i}.layer_output_norm", shape.dim)


def norm(name, dim):
    yield f"{name}.weight", None, dim, Type.F32
    yield f"{name}.bias", None, dim, Type.F32


def add_vocabulary(writer, vocab_size):
    pieces = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    pieces += [(chr(code), TokenType.NORMAL) for code in range(ord("!"), 127)]
    pieces += [(f"▁w{i}", TokenType.NORMAL) for i in range(len(pieces), vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([-float(i) for i in range(len(pieces))])
    writer.add_token_types([int(kind) for _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def add_word_pieces(writer, vocab_size):
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*control, *(f"▁w{i}" for i in range(len(control), vocab_size))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces)
    writer.add_token_types([int(TokenType.CONTROL if piece in control else TokenType.NORMAL) for piece in pieces])
    writer.add_token_type_count(2)
    for add, piece in [
        (writer.add_pad_token_id, "[PAD]"),
        (writer.add_unk_token_id, "[UNK]"),
        (writer.add_bos_token_id, "[CLS]"),
        (writer.add_sep_token_id, "[SEP]"),
        (writer.add_mask_token_id, "[MASK]"),
    ]:
        add(control.index(piece))


def write(shape_name, file_type, path):
    shape = SHAPES[shape_name]
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"{shape_name}, random {file_type}")
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    if shape.architecture in POOLING:
        writer.add_pooling_type(POOLING[shape.architecture])
    if shape.architecture == "bert":
        writer.add_causal_attention(False)
        writer.add_layer_norm_eps(1e-12)
        add_word_pieces(writer, shape.vocab_size)
    else:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_theta)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(shape.vocab_size)
        add_vocabulary(writer, shape.vocab_size)

    content, patterns = [], {}
    for name, rows, cols, kind in tensors(shape, file_type):
        if rows is None:
            writer.add_tensor_info(name, [cols], np.dtype(np.float32), 4 * cols)
            is_bias = name.endswith(".bias")
            values = (np.zeros if is_bias else np.ones)(cols, np.float32)
            content.append((4 * cols, values.view(np.uint8)))
            continue
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind not in patterns:
            patterns[kind] = blocks(kind).reshape(-1)
        row_bytes = cols // block_len * block_bytes
        if kind in FLOATS:
            writer.add_tensor_info(name, [rows, cols], np.dtype(FLOATS[kind]), rows * row_bytes)
        else:
            writer.add_tensor_info(name, [rows, row_bytes], np.dtype(np.uint8), rows * row_bytes, raw_dtype=kind)
        content.append((rows * row_bytes, patterns[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for size_bytes, pattern in content:
        writer.write_tensor_data(np.resize(pattern, size_bytes))
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=FILE_TYPES)
    parser.add_argument("out")
    args = parser.parse_args()
    write(args.shape, args.type, args.out)
