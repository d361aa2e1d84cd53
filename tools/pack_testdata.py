#!/usr/bin/env python3
"""Packs tiny checkpoints and goldens into testdata/ (see testdata/README.md).

    tools/pack_testdata.py MODELS_DIR GOLDEN_DIR OUT_DIR

Weights are close to random, so a general compressor finds little in them. What there is lies in the
high bytes (sign and exponent). model.safetensors is therefore stored as planes: plane i of n holds
bytes i, i + n, i + 2n, ... Each plane is deflated with and without string matching, and the smaller
one is kept. The output depends on the input alone.
"""
import json
import pathlib
import struct
import sys
import zipfile
import zlib

MODELS = """tiny-llama tiny-llama-rope-scaling tiny-mistral tiny-qwen2 tiny-qwen3 tiny-gemma2 tiny-gemma3
tiny-phi3 tiny-olmo2 tiny-qwen3-moe tiny-gpt-oss tiny-deepseek-v2-yarn tiny-mamba2
tiny-bamba tiny-nemotron-h tiny-falcon-h1 tiny-granitemoehybrid tiny-gemma4 tiny-bert tiny-roberta tiny-bart
tiny-fp8-output""".split()
REAL = ["smollm2-135m-instruct-q4_1", "gemma3-270m-q4_k_m", "qwen2.5-coder-0.5b-instruct-q4_k_m"]
SIZES = {"F32": 4, "BF16": 2, "F16": 2}


def plane_count(safetensors):
    """Bytes of the element type that holds most of the file."""
    n = struct.unpack("<Q", safetensors[:8])[0]
    header = json.loads(safetensors[8 : 8 + n])
    held = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            held[t["dtype"]] = held.get(t["dtype"], 0) + end - begin
    return SIZES[max(held, key=held.get)]


def deflated_size(data, strategy):
    c = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return len(c.compress(data) + c.flush())


def add(archive, name, data):
    strategy = min((zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY), key=lambda s: deflated_size(data, s))
    # zipfile has no parameter for the strategy; this is the function that it makes compressors with.
    original = zipfile._get_compressor
    zipfile._get_compressor = lambda *_: zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    try:
        info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = 0o644 << 16
        archive.writestr(info, data)
    finally:
        zipfile._get_compressor = original


def pack_model(source, target):
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(p for p in source.iterdir() if p.is_file()):
            data = path.read_bytes()
            if path.suffix == ".safetensors":
                n = plane_count(data)
                for i in range(n):
                    add(archive, f"{path.name}.plane{i}of{n}", data[i::n])
            else:
                add(archive, path.name, data)


def main():
    models, goldens, out = map(pathlib.Path, sys.argv[1:])
    (out / "models").mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        pack_model(models / name, out / "models" / f"{name}.zip")
    with zipfile.ZipFile(out / "golden.zip", "w") as archive:
        for name in sorted(MODELS + REAL):
            for path in (goldens / f"{name}.json", goldens / f"{name}.tokenizer.json"):
                if path.exists():
                    add(archive, path.name, path.read_bytes())
    total = sum(p.stat().st_size for p in out.rglob("*.zip"))
    print(f"{total} bytes = {total / 2**20:.2f} MiB of 12 MiB")


if __name__ == "__main__":
    main()
