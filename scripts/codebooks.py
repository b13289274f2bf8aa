#!/usr/bin/env python3
"""Writes src/formats/block/codebooks.bin: the tables of the IQ types, which are facts of the formats.

    scripts/codebooks.py [OUT]

They come from PyPI's `gguf` (0.19.0). An entry is a 16-bit number: eight numbers of two bits, or in the IQ3 types four
of three, the first in the lowest bits. Entries ascend, so each is stored as its difference from the previous one:
seven bits per byte, lowest first, with the eighth set in all but the last. Tables start from 0 and are concatenated:
IQ2_XXS 256, IQ2_XS 512, IQ2_S 1024, IQ3_XXS 256, IQ3_S 512, IQ1 2048 entries.
"""

import pathlib
import sys

from gguf import quants


def entries(quant):
    quant.init_grid()
    levels = {level: i for i, level in enumerate(quant.grid_map)}
    bits = 3 if len(levels) > 4 else 2
    return [sum(levels[value] << (bits * i) for i, value in enumerate(row)) for row in quant.grid.reshape(quant.grid_shape)]


def steps(quant):
    data, last = bytearray(), 0
    for entry in entries(quant):
        step, last = entry - last, entry
        assert step >= 0
        while step > 127:
            data.append(step & 127 | 128)
            step >>= 7
        data.append(step)
    return bytes(data)


def main():
    usual = pathlib.Path(__file__).parent.parent / "src/formats/block/codebooks.bin"
    out = sys.argv[1] if len(sys.argv) > 1 else usual
    tables = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S]
    data = b"".join(map(steps, tables))
    pathlib.Path(out).write_bytes(data)
    print(f"{out}: {len(data)} bytes")


if __name__ == "__main__":
    main()
