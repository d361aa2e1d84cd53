#!/usr/bin/env python3
"""Makes the tiny checkpoints of layers that share caches, of encoders and of cross-attention, and their
goldens (see testdata/README.md).

    tools/make_tiny_models.py MODELS_DIR GOLDEN_DIR [NAME ...]

Needs torch and transformers. Weights come from a seeded generator and lie in bfloat16; the reference
widens them to float32 and computes with eager attention, one sequence at a time, on the CPU. Prompts
are drawn until every greedy step's margin is at least 0.02.
"""
import json
import math
import pathlib
import sys

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

NEW, MARGIN, SEED = 24, 0.02, 20261130


def gemma4():
    config = transformers.Gemma4TextConfig(
        vocab_size=128, vocab_size_per_layer_input=128, hidden_size=32, intermediate_size=32,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True, sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512, final_logit_softcapping=30.0, tie_word_embeddings=True,
    )
    return transformers.Gemma4ForCausalLM(config), "Gemma4ForCausalLM", (
        "layers 3 to 5 read the caches of layers 1 and 2; heads of 8 (window 16) and 16; per-layer embeddings, "
        "proportional rope, wider feed-forwards in sharing layers"
    )


def roberta():
    config = transformers.RobertaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=162, type_vocab_size=1, hidden_act="gelu", pad_token_id=1,
    )
    return transformers.RobertaModel(config), "RobertaModel", "an encoder whose positions begin at row 2"


def bart():
    config = transformers.BartConfig(
        vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=200,
        activation_function="gelu", scale_embedding=True,
    )
    return transformers.BartForConditionalGeneration(config), "BartForConditionalGeneration", (
        "an encoder and a decoder that attends to it; inputs of the encoder of several lengths"
    )


def bert():
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=160, hidden_act="gelu",
    )
    return transformers.BertModel(config), "BertModel", (
        "an encoder: hidden states of a whole input, averaged and of its first token"
    )


MODELS = {"tiny-gemma4": (gemma4, [15, 16, 19, 50]), "tiny-bart": (bart, [])}
# Tokens of the encoder's input beside prompts of these lengths.
ENCODED = {1: 40, 2: 1, 7: 16, 17: 100, 33: 5, 130: 150}
ENCODERS = {"tiny-bert": (bert, [64, 65]), "tiny-roberta": (roberta, [64, 65])}


def fill(model, generator):
    """Every parameter and buffer that is saved, in bfloat16's precision."""
    with torch.no_grad():
        for name, p in model.state_dict().items():
            x = torch.randn(p.shape, generator=generator)
            if name.endswith("layer_scalar") or "norm" in name.lower() and name.endswith("weight"):
                x = 1 + 0.2 * x
            elif p.dtype != torch.float32:
                continue
            elif p.dim() == 1:
                x = 0.2 * x
            elif "embed" in name:
                x = 2 * x / math.sqrt(p.shape[-1])
            else:
                x = x / math.sqrt(p.shape[-1])
            p.copy_(x.to(torch.bfloat16))


def logits_of(model, ids, encoded=None):
    with torch.no_grad():
        if encoded is None:
            return model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        inputs = {"input_ids": torch.tensor([encoded]), "decoder_input_ids": torch.tensor([ids])}
        return model(**inputs, use_cache=False).logits[0, -1].float()


def greedy(model, prompt, encoded=None):
    """Ids, their margins, and the prompt's own logits; None where a margin is too small."""
    ids, margins, first = list(prompt), [], None
    for _ in range(NEW):
        logits = logits_of(model, ids, encoded)
        first = logits if first is None else first
        top = torch.topk(logits, 2)
        margins.append(float(top.values[0] - top.values[1]))
        if margins[-1] < MARGIN:
            return None
        ids.append(int(top.indices[0]))
    return ids[len(prompt):], margins, first


def cached(model, prompt, encoded=None):
    """The prompt's logits, and those of the second token with a cache."""
    with torch.no_grad():
        if encoded is not None:
            inputs = {"input_ids": torch.tensor([encoded]), "decoder_input_ids": torch.tensor([prompt])}
            out = model(**inputs, use_cache=True)
            token = int(out.logits[0, -1].argmax())
            inputs["decoder_input_ids"] = torch.tensor([[token]])
            second = model(**inputs, past_key_values=out.past_key_values, use_cache=True)
            return prompt + [token], second.logits[0, -1].float()
        out = model(torch.tensor([prompt]), use_cache=True)
        token = int(out.logits[0, -1].argmax())
        second = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return prompt + [token], second.logits[0, -1].float()


def rounded(x, digits=6):
    return [float(f"{v:.{digits}g}") for v in x]


def hidden(model, prompt, encoded=None):
    with torch.no_grad():
        if encoded is None:
            states = model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states
        else:
            inputs = {"input_ids": torch.tensor([encoded]), "decoder_input_ids": torch.tensor([prompt])}
            states = model(**inputs, use_cache=False, output_hidden_states=True).decoder_hidden_states
    n = len(states) - 1
    layers = []
    for i, s in enumerate(states):
        at = "embed" if i == 0 else "final_norm" if i == n else f"layer.{i - 1}"
        last = s[0, -1]
        layers.append({"at": at, "last_l2": float(last.norm()), "all_l2": float(s[0].norm()),
                       "last_head8": rounded(last[:8].tolist())})
    return layers


def save(model, folder, architecture):
    folder.mkdir(parents=True, exist_ok=True)
    tied = set(getattr(model, "_tied_weights_keys", None) or {})
    tied &= model.state_dict().keys()
    if not model.config.tie_word_embeddings:
        tied = set()
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k not in tied}
    tensors = {k: v for k, v in tensors.items() if not k.endswith("position_ids")}
    if "model.shared.weight" in tensors:
        tensors = {k: v for k, v in tensors.items() if not k.endswith("embed_tokens.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config["architectures"], config["dtype"] = [architecture], "bfloat16"
    config.pop("_name_or_path", None)
    # The hub's layout has one field for the heads of all full layers.
    for layer in config.pop("per_layer_config", {}).values():
        config["global_head_dim"] = layer["head_dim"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def reference():
    return {"transformers": transformers.__version__, "torch": torch.__version__,
            "tokenizers": tokenizers.__version__, "compute_dtype": "float32"}


def described(name, architecture, model, note):
    parameters = sum(p.numel() for p in model.parameters())
    return {"name": name, "architecture": architecture, "config_model_type": model.config.model_type,
            "weights_dtype": "bfloat16", "vocab_size": model.config.vocab_size, "parameters": parameters,
            "seed": SEED, "note": note}


def filled(make_model, name, models):
    """A model with its weights, saved."""
    generator = torch.Generator().manual_seed(SEED)
    model, architecture, note = make_model()
    model = model.float().eval()
    model.set_attn_implementation("eager")
    fill(model, generator)
    model.tie_weights()
    save(model, models / name, architecture)
    return model, architecture, note, generator


def encode(name, models, goldens):
    make_model, lengths = ENCODERS[name]
    model, architecture, note, generator = filled(make_model, name, models)
    cases = []
    for n in sorted({1, 2, 7, 17, 33, 130, *lengths}):
        prompt = torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist()
        states = hidden_states(model, prompt)
        cases.append({"name": f"len{n}", "prompt_len": n, "prompt_ids": prompt, "first": rounded(states[0].tolist()),
                      "last": rounded(states[-1].tolist()), "mean": rounded(states.mean(0).tolist())})
    half = model.to(torch.bfloat16)
    bf16 = max(float((hidden_states(half, c["prompt_ids"]).mean(0) - torch.tensor(c["mean"])).abs().max())
               for c in cases)
    golden = {"format": "headway-golden/1", "model": described(name, architecture, model, note),
              "reference": reference(), "bf16_compute_max_abs": bf16}
    write(goldens / f"{name}.json", golden, cases)
    print(name, bf16, golden["model"]["parameters"])


def hidden_states(model, prompt):
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0].float()


def make(name, models, goldens):
    make_model, lengths = MODELS[name]
    model, architecture, note, generator = filled(make_model, name, models)
    vocab = model.config.vocab_size
    cases = []
    for n in sorted({1, 2, 7, 17, 33, 130, *lengths}):
        for _ in range(200):
            prompt = torch.randint(3, vocab, (n,), generator=generator).tolist()
            encoded = None
            if model.config.is_encoder_decoder:
                encoded = torch.randint(3, vocab, (ENCODED[n],), generator=generator).tolist()
            if (found := greedy(model, prompt, encoded)) is not None:
                break
        ids, margins, logits = found
        top = torch.topk(logits, 2)
        cases.append({
            "name": f"len{n}", "prompt_len": n, "prompt_ids": prompt, "argmax": int(top.indices[0]),
            "margin": float(top.values[0] - top.values[1]), "logsumexp": float(logits.logsumexp(0)),
            "greedy_ids": ids, "greedy_min_margin": min(margins), "greedy_margins": rounded(margins),
            "logits": rounded(logits.tolist()),
        })
        if encoded is not None:
            cases[-1]["encoder_ids"] = encoded
    far, spread = 0.0, []
    for c in cases:
        ids, second = cached(model, c["prompt_ids"], c.get("encoder_ids"))
        far = max(far, float((second - logits_of(model, ids, c.get("encoder_ids"))).abs().max()))
        spread += c["logits"]
    case = cases[2]
    layers = hidden(model, case["prompt_ids"], case.get("encoder_ids"))
    half = model.to(torch.bfloat16)
    bf16 = max(
        float((logits_of(half, c["prompt_ids"], c.get("encoder_ids")) - torch.tensor(c["logits"])).abs().max())
        for c in cases
    )
    golden = {
        "format": "headway-golden/1", "model": described(name, architecture, model, note),
        "reference": reference(),
        "numerics": {"logit_std": float(torch.tensor(spread).std()), "cached_vs_full_max_abs": far,
                     "bf16_compute_max_abs": bf16},
        "hidden": {"case": case["name"], "layers": layers},
    }
    write(goldens / f"{name}.json", golden, cases)
    print(name, golden["numerics"], golden["model"]["parameters"])


def write(path, golden, cases):
    """One case a line."""
    head = json.dumps(golden, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(c) for c in cases)
    path.write_text(f'{head},\n "cases": [\n{lines}\n ]\n}}\n')


def main():
    models, goldens = map(pathlib.Path, sys.argv[1:3])
    goldens.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[3:] or [*MODELS, *ENCODERS]:
        (make if name in MODELS else encode)(name, models, goldens)


if __name__ == "__main__":
    main()
