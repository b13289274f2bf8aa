#!/usr/bin/env python3
"""Writes tests/data/quant-vectors/more.safetensors: random blocks of every quantised GGML type, and their values.

    scripts/block_vectors.py LLAMA_CPP [OUT]

LLAMA_CPP is as for `quantize_vectors.py`, whose build of `ggml-quants.c` this uses: its `dequantize_row_*` compute the
values. `<T>.blocks` is U8 [blocks, bytes], `<T>.values` F32 [blocks, elements]. Every entry of every codebook occurs;
f16 scales are finite, every fifth zero or subnormal.
"""

import ctypes
import json
import pathlib
import random
import struct
import sys
import tempfile

import quantize_vectors

# Elements and bytes per block, offsets of f16 numbers, blocks.
TYPES = {
    "Q4_0": (32, 18, [0], 16),
    "Q4_1": (32, 20, [0, 2], 16),
    "Q5_0": (32, 22, [0], 16),
    "Q5_1": (32, 24, [0, 2], 16),
    "Q8_0": (32, 34, [0], 16),
    "Q2_K": (256, 84, [80, 82], 4),
    "Q3_K": (256, 110, [108], 4),
    "Q4_K": (256, 144, [0, 2], 4),
    "Q5_K": (256, 176, [0, 2], 4),
    "Q6_K": (256, 210, [208], 4),
    "IQ4_NL": (32, 18, [0], 16),
    "IQ4_XS": (256, 136, [0], 4),
    "IQ3_S": (256, 110, [0], 8),
    "IQ3_XXS": (256, 98, [0], 4),
    "IQ2_S": (256, 82, [0], 32),
    "IQ2_XS": (256, 74, [0], 16),
    "IQ2_XXS": (256, 66, [0], 8),
    "IQ1_S": (256, 50, [0], 64),
    "IQ1_M": (256, 56, [], 4),
    "TQ1_0": (256, 54, [52], 4),
    "TQ2_0": (256, 66, [64], 4),
    "MXFP4": (32, 17, [], 16),
    "NVFP4": (64, 36, [], 8),
    "Q2_0": (64, 18, [0], 8),
    "Q1_0": (128, 18, [0], 4),
}


def half(rng):
    exponent = 0 if rng.randrange(5) == 0 else rng.randrange(4, 20)
    return struct.pack("<H", rng.randrange(2) << 15 | exponent << 10 | rng.randrange(1024))


def put_index(name, block, i, entry):
    """Sets group `i` of a super-block to codebook entry `entry`."""
    if name in ("IQ3_S", "IQ3_XXS"):
        block[2 + i] = entry & 255
        if name == "IQ3_S":
            block[66 + i // 8] = block[66 + i // 8] & ~(1 << i % 8) | entry >> 8 << i % 8
    elif name == "IQ2_XXS":
        block[2 + i // 4 * 8 + i % 4] = entry
    elif name == "IQ2_XS":
        block[2 + 2 * i] = entry & 255
        block[3 + 2 * i] = block[3 + 2 * i] & 0xFE | entry >> 8
    elif name == "IQ2_S":
        block[2 + i] = entry & 255
        block[66 + i // 4] = block[66 + i // 4] & ~(3 << 2 * (i % 4)) | entry >> 8 << 2 * (i % 4)
    elif name == "IQ1_S":
        block[2 + i] = entry & 255
        at = 34 + i // 4 * 2
        word = block[at] | block[at + 1] << 8
        word = word & ~(7 << 3 * (i % 4)) | entry >> 8 << 3 * (i % 4)
        block[at], block[at + 1] = word & 255, word >> 8


def blocks(name, rng):
    _, n_bytes, halves, n_blocks = TYPES[name]
    found = []
    for number in range(n_blocks):
        block = bytearray(rng.randbytes(n_bytes))
        for at in halves:
            block[at : at + 2] = half(rng)
        if name == "IQ1_M":  # the f16 is in the upper nibbles of four words
            for i, bits in enumerate(half(rng)):
                block[49 + 4 * i] = block[49 + 4 * i] & 15 | (bits & 15) << 4
                block[51 + 4 * i] = block[51 + 4 * i] & 15 | bits & 0xF0
        if name == "MXFP4":
            block[0] = [0, 1, 2, rng.randrange(90, 160)][min(number, 3)]
        if name == "NVFP4":
            block[0] = [0, 0x7F, 0xFF, 3][number % 4]
        groups = 64 if name.startswith("IQ3") else 32
        for i in range(groups):
            put_index(name, block, i, number * groups + i)
        found.append(bytes(block))
    return b"".join(found)


def main():
    usual = pathlib.Path(__file__).parent.parent / "tests/data/quant-vectors/more.safetensors"
    out = sys.argv[2] if len(sys.argv) > 2 else usual
    rng = random.Random(2026)
    header, data = {}, b""

    def add(name, dtype, shape, content):
        nonlocal data
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content

    with tempfile.TemporaryDirectory() as folder:
        library = quantize_vectors.build(sys.argv[1], folder)
        library.ggml_quantize_init(29)  # computes the table of f16 values
        for name, (n_elements, n_bytes, _, n_blocks) in TYPES.items():
            content = blocks(name, rng)
            values = (ctypes.c_float * (n_blocks * n_elements))()
            function = getattr(library, f"dequantize_row_{name.lower().replace('_k', '_K')}")
            function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
            function.restype = None
            function(content, values, len(values))
            add(f"{name}.blocks", "U8", [n_blocks, n_bytes], content)
            add(f"{name}.values", "F32", [n_blocks, n_elements], bytes(values))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(out).write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{out}: {len(header)} tensors, {len(data)} bytes")


if __name__ == "__main__":
    main()
