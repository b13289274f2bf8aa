#!/usr/bin/env python3
"""Writes tests/data/quantize/vectors.safetensors: llama.cpp's quantised rows for each type.

    scripts/quantize_vectors.py LLAMA_CPP [OUT]

LLAMA_CPP is a source tree of llama.cpp; the crate `llama-cpp-sys-2` has one in its folder `llama.cpp` (the
file here is from 0.1.161). Its `ggml-quants.c` and `ggml.c` are compiled with `cc`, for plain x86-64 as by llama.cpp:
without fused multiply-adds, which round differently.

`tests/quantize.rs` repeats the formula for the rows, so only results are stored: `<type>.plain`, and
`<type>.important` with an importance matrix if the type uses one. Each has ROWS rows of 512 values.
"""

import ctypes
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

ROW = 512
TYPES = {
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
}
# Types affected by an importance matrix.
WEIGHED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
MASK = (1 << 64) - 1


class SplitMix:
    def __init__(self, seed):
        self.state = seed

    def unit(self):
        """A multiple of 2^-23 in [-1, 1)."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) >> 40) / 2.0**23 - 1.0


def rows():
    """The rows, in f64; each number is rounded to f32 once."""
    found = []
    for kind in range(12):
        rng = SplitMix(1000 + kind)
        row = [rng.unit() for _ in range(ROW)]
        more = [[rng.unit() for _ in range(ROW)] for _ in range(3)]
        if kind == 1:  # bell-shaped
            row = [(a + b + c + d) * 0.02 for a, b, c, d in zip(row, *more)]
        elif kind == 2:  # heavy tails
            row = [a * a * a * a * a for a in row]
        elif kind == 3:  # zeros, except one block of 256
            row = [0.0] * 256 + row[256:]
        elif kind == 4:  # one outlier
            row = [a * 0.01 for a in row]
            row[300] = 12.5
        elif kind == 5:  # scales that are subnormal in f16
            row = [a * 2.0**-18 for a in row]
        elif kind == 6:  # scales that are 0 in f16
            row = [a * 2.0**-40 for a in row]
        elif kind == 7:  # large
            row = [a * 4096.0 for a in row]
        elif kind == 8:  # all positive
            row = [a + 3.0 for a in row]
        elif kind == 9:  # all negative
            row = [a * 0.1 - 0.5 for a in row]
        elif kind == 10:  # one repeated value
            row = [0.37] * ROW
        elif kind == 11:  # few values, for ties
            row = [float(round(a * 4.0)) / 4.0 for a in row]
        found.append(row)
    return found


def importances():
    """One row: large and small numbers, and some zeros."""
    rng = SplitMix(7)
    found = []
    for i in range(ROW):
        a = rng.unit()
        found.append(0.0 if i % 37 == 5 else a * a * a * a * 10.0)
    return found


def build(source, folder):
    ggml = pathlib.Path(source) / "ggml"
    library = pathlib.Path(folder) / "libquants.so"
    # llama.cpp's own build generates this file.
    version = '#define GGML_VERSION "none"\n#define GGML_COMMIT "none"\n'
    (pathlib.Path(folder) / "ggml-version.h").write_text(version)
    # Functions of other files referenced by `ggml.c`, all unused here.
    absent = ["backend_buffer_get_usage", "backend_tensor_memset", "backend_tensor_set"]
    absent += ["critical_section_start", "critical_section_end"]
    stubs = pathlib.Path(folder) / "stubs.c"
    stubs.write_text("".join(f"void ggml_{name}(void) {{}}\n" for name in absent))
    sources = [ggml / "src" / "ggml-quants.c", ggml / "src" / "ggml.c", stubs]
    command = ["cc", "-O2", "-std=gnu11", "-shared", "-fPIC", "-D_GNU_SOURCE"]
    command += ["-I", folder, "-I", ggml / "include", "-I", ggml / "src", *sources, "-o", library]
    command += ["-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


FUNCTION_NAMES = {name: f"quantize_{name.lower().replace('_k', '_K')}" for name in TYPES}


def quantize(library, name, row, importance):
    _, block_len, block_bytes = TYPES[name]
    values = (ctypes.c_float * ROW)(*row)
    out = ctypes.create_string_buffer(ROW // block_len * block_bytes)
    if name in ("F16", "BF16"):
        function = getattr(library, f"ggml_fp32_to_{'fp16_row' if name == 'F16' else 'bf16_row_ref'}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
        function(values, out, ROW)
        return out.raw
    function = getattr(library, FUNCTION_NAMES[name])
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    weights = (ctypes.c_float * ROW)(*importance) if importance else None
    written = function(values, out, 1, ROW, weights)
    assert written == len(out), (name, written)
    return out.raw


def main():
    usual = pathlib.Path(__file__).parent.parent / "tests/data/quantize/vectors.safetensors"
    out = sys.argv[2] if len(sys.argv) > 2 else usual
    header, data = {}, b""
    with tempfile.TemporaryDirectory() as folder:
        library = build(sys.argv[1], folder)
        for name in TYPES:
            for kind, importance in [("plain", None), ("important", importances())]:
                if importance and name not in WEIGHED:
                    continue
                blocks = [quantize(library, name, row, importance) for row in rows()]
                begin = len(data)
                data += b"".join(blocks)
                shape = [len(blocks), len(blocks[0])]
                header[f"{name}.{kind}"] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(out).write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{out}: {len(header)} tensors, {len(data)} bytes")


if __name__ == "__main__":
    main()
