"""A step's metadata in vLLM, alone in a process: its CPU builder's `build`, and `build_attn_metadata` over KV cache groups.

Prints a JSON line a measurement. Decodes of one token with 1000 tokens before them, as `headway bench builder` has."""

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402  (after the environment that it reads)

LAYERS, LENGTH, BLOCK, WINDOW = 32, 1000, 128, 512
SAMPLES, SAMPLE_SECONDS = 15, 4e-3
# A config of an 8-billion-parameter Llama: shapes are all that a builder asks for.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def measure(call):
    """Microseconds of a call: median, least, most of samples of some milliseconds."""
    for _ in range(5):
        call()
    start = time.perf_counter()
    call()
    turns = max(3, min(2000, int(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7))))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(turns):
            call()
        samples.append((time.perf_counter() - start) / turns * 1e6)
    return {"build_us": statistics.median(samples), "build_min_us": min(samples), "build_max_us": max(samples)}


def say(**line):
    print(json.dumps(line), flush=True)


def main():
    requests, groups = ([int(n) for n in text.split(",")] for text in sys.argv[1:3])
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            block_size=BLOCK,
            enforce_eager=True,
        ).create_engine_config()
        current_platform.import_kernels()
        with set_current_vllm_config(config):
            run(config, requests, groups)


def run(config, all_requests, all_groups):
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
    from vllm.v1.worker.utils import AttentionGroup

    shape = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    spec = lambda g: SlidingWindowSpec(sliding_window=WINDOW, **shape) if g else FullAttentionSpec(**shape)
    cpu = torch.device("cpu")
    builder = CPUAttentionBackend.get_builder_cls()(spec(0), ["l0"], config, cpu)
    for n in all_requests:
        starts, lengths = torch.arange(n + 1, dtype=torch.int32), torch.full((n,), LENGTH, dtype=torch.int32)
        table = torch.randint(1, 10000, (n, 64), dtype=torch.int32)
        slots = torch.randint(0, 10000, (n,), dtype=torch.int64)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            max_seq_len=LENGTH,
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
        )
        say(what="build", requests=n, groups=1, **measure(lambda: builder.build(0, common)))
        for count in all_groups:
            names = [[f"l{i}" for i in range(g, LAYERS, count)] for g in range(count)]
            kv = KVCacheConfig(
                num_blocks=10000,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec(layer_names=own, kv_cache_spec=spec(g)) for g, own in enumerate(names)
                ],
            )
            made = []
            for g, own in enumerate(names):
                made.append(AttentionGroup(CPUAttentionBackend, own, spec(g), g))
                made[-1].create_metadata_builders(config, cpu)
            step = lambda: build_attn_metadata(
                [[group] for group in made],
                n,
                n,
                starts,
                starts,
                1,
                lengths,
                LENGTH,
                [table] * count,
                slots.expand(count, -1).contiguous(),
                kv,
                seq_lens_cpu_upper_bound=lengths,
            )
            say(what="step", requests=n, groups=count, **measure(step))


if __name__ == "__main__":
    main()
