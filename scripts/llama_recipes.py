#!/usr/bin/env python3
"""Digests of the files that llama.cpp's quantiser makes from the inputs of crates/cli/tests/recipes.rs.

    cargo test -p tilewright-cli --test program recipes    # writes the inputs
    pip install llama-cpp-py-sync==0.11739 gguf            # llama.cpp, build 11739
    scripts/llama_recipes.py target/tmp/recipes 2> /dev/null > crates/cli/tests/recipes.txt
"""
import hashlib
import pathlib
import sys
import tempfile

import gguf
from llama_cpp_py_sync import _cffi_bindings as bindings

# Numbers of `enum llama_ftype` in llama.h.
RECIPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21, "IQ4_NL": 25,
    "IQ4_XS": 30, "BF16": 32, "MXFP4_MOE": 38,
}
NEEDS_IMPORTANCE = {"Q2_K_S"}
INT, STR = 0, 3

ffi, lib = bindings.get_ffi(), bindings.get_lib()


def importances(path):
    """Means of squares by tensor."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    mean = lambda name: (tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"].reshape(-1, 1)).reshape(-1)
    return {name: mean(name) for name in names}


def quantize(source, target, number, importance_file):
    """Runs llama_model_quantize with the keys that llama-quantize sets, as far as tilewright sets them."""
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, number
    kept = []
    if importance_file:
        values = importances(importance_file)
        entries = ffi.new("struct llama_model_imatrix_data[]", len(values) + 1)
        for entry, (name, mean) in zip(entries, values.items()):
            kept += [ffi.new("char[]", name.encode()), ffi.new("float[]", mean.tolist())]
            entry.name, entry.data, entry.size = kept[-2], kept[-1], len(mean)
        keys = ffi.new("struct llama_model_kv_override[]", 3)
        keys[0].tag, keys[0].key, keys[0].val_str = STR, b"quantize.imatrix.file", importance_file.name.encode()
        keys[1].tag, keys[1].key, keys[1].val_i64 = INT, b"quantize.imatrix.entries_count", len(values)
        params.imatrix, params.kv_overrides = entries, keys
        kept += [entries, keys]
    paths = [str(path).encode() for path in (source, target)]
    return lib.llama_model_quantize(*paths, ffi.new("llama_model_quantize_params *", params))


def main(folder):
    lib.llama_backend_init()
    with tempfile.TemporaryDirectory() as scratch:
        target = pathlib.Path(scratch, "out.gguf")
        for source in sorted(pathlib.Path(folder).glob("*.gguf")):
            importance_file = source.with_suffix(".imatrix")
            importance_file = importance_file if importance_file.exists() else None
            for recipe, number in RECIPES.items():
                if source.stem == "plain" or recipe in NEEDS_IMPORTANCE and not importance_file:
                    continue
                if quantize(source, target, number, importance_file):
                    sys.exit(f"{source}: llama.cpp refuses {recipe}")
                print(source.stem, recipe, hashlib.sha256(target.read_bytes()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
