"""The cases of `headway bench attention`: what is run, and what counts as a byte and an operation."""

import json

SIZE = {"bf16": 2, "f16": 2, "f32": 4}
KINDS = ("decode", "prefill", "mixed", "write")

# What --quick runs, with a smaller pool: enough to see that everything works.
QUICK = {"decode_b1_c512", "decode_b8_c2048", "prefill_1x512", "mixed_2p512_16d1024", "write_1", "write_512"}
QUICK_POOL_MIB = 768


def load(path):
    return json.loads(path.read_text())


def tokens(case):
    """Keys that a call reads (for a write: writes), each once."""
    return case["tokens"] if case["kind"] == "write" else sum(kv for _, kv in case["seqs"])


def cache_bytes(case, heads, dtype):
    return tokens(case) * heads["num_kv_heads"] * heads["head_size"] * 2 * SIZE[dtype]


def operations(case, heads):
    """Two for each multiply-add of the visible pairs of query and key, in both products."""
    pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in case.get("seqs", []))
    return 4 * heads["head_size"] * heads["num_heads"] * pairs


def work(case, heads, dtype):
    """What a rate is made of: bytes for decode and write, operations for the others; with its unit."""
    if case["kind"] in ("decode", "write"):
        return cache_bytes(case, heads, dtype), "GB/s"
    return operations(case, heads), "GFLOP/s"


def groups(case):
    """Neighbouring sequences of equal lengths: [new tokens, all tokens, how many]."""
    out = []
    for q, kv in case["seqs"]:
        if out and out[-1][:2] == [q, kv]:
            out[-1][2] += 1
        else:
            out.append([q, kv, 1])
    return out
