"""convert.py MODEL.gguf FOLDER OUT.gguf: the file's weights in bfloat16, as a Hugging Face folder and as a GGUF.

Every engine then has the same numbers: each weight is dequantised once, to float32, and rounded once. Norms of
one dimension stay float32 in the GGUF, as llama.cpp's own converter leaves them, and become bfloat16 in the folder.
Runs in the peers' environment (gguf, torch, safetensors)."""

import json
import pathlib
import re
import sys

import gguf
import torch
from safetensors.torch import save_file

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main(source, folder, out):
    reader = gguf.GGUFReader(source)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    arch = keys["general.architecture"]
    if arch not in NORMS:
        raise SystemExit(f"convert.py: {source}: architecture {arch}; {', '.join(NORMS)} are known")
    weights = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    write_gguf(reader, weights, arch, out)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = lambda name: keys[f"{arch}.{name}"]
    tied = "output.weight" not in weights
    (folder / "config.json").write_text(json.dumps(config(arch, own, weights, keys, tied), indent=1))
    save_file(dict(tensor(arch, own, n, w) for n, w in weights.items()), folder / "model.safetensors", {"format": "pt"})
    from transformers import AutoTokenizer

    path = pathlib.Path(source)
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


def tensor(arch, own, name, w):
    """The weight under its name in the folder, in the order of rows that Hugging Face's models want."""
    w = torch.tensor(w)
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block:
        part = block[2]
        target = f"model.layers.{block[1]}.{ {**BLOCK, **NORMS[arch]}[part] }.weight"
    else:
        part = name.removesuffix(".weight")
        target = f"{TOP[part]}.weight"
    if arch == "llama" and part in ("attn_q", "attn_k"):
        # The file pairs rotated channels beside one another, the folder a half apart.
        heads = own("attention.head_count" if part == "attn_q" else "attention.head_count_kv")
        w = w.reshape(heads, -1, 2, w.shape[-1]).transpose(1, 2).reshape(w.shape)
    if arch == "gemma3" and part.endswith("norm"):
        w = w - 1  # the folder's models add one
    return target, w.to(torch.bfloat16).contiguous()


def config(arch, own, weights, keys, tied):
    hidden, heads = own("embedding_length"), own("attention.head_count")
    shared = {
        "hidden_size": hidden,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv"),
        "max_position_embeddings": own("context_length"),
        "rms_norm_eps": float(f"{own('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": own("rope.freq_base"),
        "vocab_size": weights["token_embd.weight"].shape[0],
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    if arch == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "head_dim": hidden // heads,
            **shared,
        }
    size = own("attention.key_length")
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(own("block_count"))]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": size,
        "query_pre_attn_scalar": size,
        "sliding_window": own("attention.sliding_window"),
        "layer_types": kinds,
        "rope_local_base_freq": 10000.0,
        **shared,
    }


def write_gguf(reader, weights, arch, out):
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    bf16 = gguf.GGMLQuantizationType.BF16
    for name, w in weights.items():
        if w.ndim > 1:
            writer.add_tensor(name, gguf.quantize(w, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(name, w.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
