#!/usr/bin/env python3
"""Makes tiny-fp8-output: a Llama of random weights whose output projections are in fp8 with static scales.

    tools/make_fp8_checkpoint.py MODELS_DIR

As published checkpoints of `quant_method` fp8 with `activation_scheme` static have them: `o_proj.weight` as e4m3 codes,
`weight_scale` the largest magnitude over 448, `input_scale` what an input is divided by before it is rounded to e4m3.
All other layers are bfloat16 and named in `ignored_layers`. Needs nothing but Python; the output depends on the seed alone.
"""
import json
import pathlib
import random
import struct
import sys

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, LAYERS = 32, 2, 1, 16, 48, 256, 2
INPUT_SCALE = 1 / 128


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def value(code):
    """Of an e4m3 code without its sign."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = [value(code) for code in range(0x7F)]


def e4m3(x):
    """The nearest code, ties to even; beyond the largest the largest."""
    code = min(range(0x7F), key=lambda c: (abs(VALUES[c] - abs(x)), c & 1))
    return code | (0x80 if x < 0 else 0)


def tensors():
    r = random.Random(20261130)

    def normal(shape, deviation):
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        return [f32(r.gauss(0.0, deviation)) for _ in range(n)]

    def dense(name, shape, deviation, mean=0.0):
        data = b"".join(struct.pack("<H", bf16(mean + x)) for x in normal(shape, deviation))
        yield name, "BF16", shape, data

    def coded(module, shape, deviation):
        values = normal(shape, deviation)
        scale = f32(max(map(abs, values)) / 448)
        yield f"{module}.weight", "F8_E4M3", shape, bytes(e4m3(f32(x / scale)) for x in values)
        yield f"{module}.weight_scale", "F32", [], struct.pack("<f", scale)
        yield f"{module}.input_scale", "F32", [], struct.pack("<f", INPUT_SCALE)

    yield from dense("model.embed_tokens.weight", [VOCAB, HIDDEN], 0.5)
    yield from dense("model.norm.weight", [HIDDEN], 0.1, 1.0)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        yield from dense(layer + "input_layernorm.weight", [HIDDEN], 0.1, 1.0)
        yield from dense(layer + "post_attention_layernorm.weight", [HIDDEN], 0.1, 1.0)
        for name, rows in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]:
            yield from dense(f"{layer}self_attn.{name}_proj.weight", [rows * HEAD, HIDDEN], 0.2)
        yield from coded(layer + "self_attn.o_proj", [HIDDEN, HEADS * HEAD], 0.2)
        yield from dense(layer + "mlp.gate_proj.weight", [INNER, HIDDEN], 0.2)
        yield from dense(layer + "mlp.up_proj.weight", [INNER, HIDDEN], 0.2)
        yield from dense(layer + "mlp.down_proj.weight", [HIDDEN, INNER], 0.2)


def main():
    folder = pathlib.Path(sys.argv[1]) / "tiny-fp8-output"
    folder.mkdir(parents=True, exist_ok=True)
    header, body, dense = {}, b"", ["lm_head"]
    for name, dtype, shape, data in tensors():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
        if dtype == "BF16" and name.endswith("_proj.weight"):
            dense.append(name.removesuffix(".weight"))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": dense,
        },
    }
    # As the two layouts of configs have them.
    later = {k: v for k, v in config.items() if k not in ("rope_theta", "torch_dtype")}
    later |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    files = {
        "config.json": config,
        "config.v5.json": later,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
