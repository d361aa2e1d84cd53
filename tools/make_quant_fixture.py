#!/usr/bin/env python3
"""Makes crates/headway-tensor/tests/data/quant_blocks.bin: GGUF blocks and what they decode to.

The expected values come from the `gguf` package (PyPI, MIT licence, by the ggml authors), whose
`gguf.quants` are the reference Python (de)quantisers. Run:

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0
    venv/bin/python tools/make_quant_fixture.py crates/headway-tensor/tests/data/quant_blocks.bin

The file is a sequence of little-endian records:
    u32 ggml type, u32 kind, u32 byte count, u32 float count, the block bytes, the float32 values
kind 0: random valid blocks, and the values they decode to
kind 1: values, and the blocks that the reference quantiser makes of them
"""
import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType as T, GGML_QUANT_SIZES, quants

# Where the half-precision scales lie in a block.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}
ENCODED = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]
BLOCKS = 6


def random_blocks(kind, rng):
    _, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for row in range(BLOCKS):
        for at in HALVES[kind]:
            # ordinary scales of both signs, one subnormal, one zero, one large
            value = [rng.normal() * 0.02, -abs(rng.normal()), 3e-7, 0.0, 1000.0, rng.normal()][row]
            blocks[row, at:at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks


def record(out, kind, what, data, values):
    values = np.ascontiguousarray(values, np.float32)
    assert np.isfinite(values).all()
    out.write(struct.pack("<IIII", int(kind), what, data.nbytes, values.size))
    out.write(data.tobytes())
    out.write(values.tobytes())


def main(path):
    rng = np.random.default_rng(20240)
    with open(path, "wb") as out:
        for kind in HALVES:
            blocks = random_blocks(kind, rng)
            record(out, kind, 0, blocks, quants.dequantize(blocks, kind))
        for kind in ENCODED:
            spread = [[1], [0.01], [30], [1], [0], [1e-3]]
            values = (rng.standard_normal((BLOCKS, 32)) * spread + 0.0).astype(np.float32)  # + 0.0: no -0
            record(out, kind, 1, quants.quantize(values, kind), values)


if __name__ == "__main__":
    main(sys.argv[1])
