"""Attention in float64, and a small batch to hold peers against it."""

import math

import torch

# Two decodes and two prefills (one behind a cached beginning), in lengths that fill no block.
SEQS = [[1, 70], [1, 33], [40, 90], [19, 19]]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def batch(heads, dtype, seed=5):
    """Per sequence q [n, H, D], k and v [kv, Hk, D] in the dtype."""
    g = torch.Generator().manual_seed(seed)
    h, hk, d = heads["num_heads"], heads["num_kv_heads"], heads["head_size"]
    draw = lambda n, m: torch.randn(n, m, d, generator=g).to(DTYPES[dtype])
    return [(draw(q, h), draw(kv, hk), draw(kv, hk)) for q, kv in SEQS]


def attention(q, k, v):
    """Causal, the queries at the end; float64 throughout."""
    q, k, v = (t.double() for t in (q, k, v))
    n, kv, share = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.arange(kv)[None] > torch.arange(n)[:, None] + kv - n
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def error(out, q, k, v):
    """Largest absolute difference from float64."""
    return (out.double() - attention(q, k, v)).abs().max().item()


# What rounding explains: outputs are below 4 in size, weights of bf16 kernels are rounded to bf16 too.
ALLOWED = {"bf16": 0.03, "f16": 0.006, "f32": 2e-5}
