"""PyTorch: scaled dot product attention over contiguous keys and values (no pages), index_copy_ for writes."""

import torch
import torch.nn.functional as F

import cases
from reference import DTYPES, batch

NAME = "torch"
MOST_TABLES = 4096


class Peer:
    NAME = NAME

    def __init__(self, pool, threads):
        self.pool, self.version = pool, torch.__version__

    def release(self):
        pass

    def calls(self, case, heads, dtype):
        """One call a group of equal lengths. Three ways to share keys among query heads: SDPA's own (`gqa`);
        query heads as rows (`grouped`, no mask needed in decode); keys repeated beforehand, untimed (`repeated`)."""
        h, hk, d = heads["num_heads"], heads["num_kv_heads"], heads["head_size"]
        flat, share = self.pool.view(DTYPES[dtype]), h // hk
        groups = cases.groups(case)
        each = sum(2 * b * hk * kv * d for _, kv, b in groups)
        if each > flat.numel():
            return {}, {"torch-sdpa": "the case is larger than the pool"}
        tables = min(MOST_TABLES, flat.numel() // each) if case["cache"] == "cold" else 1
        kv_of = []
        for t in range(tables):
            at, table = t * each, []
            for _, kv, b in groups:
                n = b * hk * kv * d
                table.append((flat[at : at + n].view(b, hk, kv, d), flat[at + n : at + 2 * n].view(b, hk, kv, d)))
                at += 2 * n
            kv_of.append(table)
        qs = [torch.randn(b, h, q, d).to(DTYPES[dtype]) for q, _, b in groups]
        masks = [mask(q, kv, DTYPES[dtype]) for q, kv, _ in groups]

        def gqa(i):
            for q, (k, v), (m, causal) in zip(qs, kv_of[i % tables], masks):
                F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal, enable_gqa=share > 1)

        calls = {"torch-sdpa-gqa": gqa}
        if case["kind"] == "decode":
            rows = [q.view(q.shape[0], hk, share, d) for q in qs]

            def grouped(i):
                for q, (k, v) in zip(rows, kv_of[i % tables]):
                    F.scaled_dot_product_attention(q, k, v)

            calls["torch-sdpa-grouped"] = grouped
        elif case["kind"] == "prefill" and share > 1:
            repeated = [(k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)) for k, v in kv_of[0]]

            def repeat(_):
                for q, (k, v), (m, causal) in zip(qs, repeated, masks):
                    F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal)

            calls["torch-sdpa-repeated"] = repeat
        return calls, {}

    def writes(self, case, heads, dtype):
        d, n = DTYPES[dtype], case["tokens"]
        row = heads["num_kv_heads"] * heads["head_size"] * 2
        flat = self.pool.view(d)
        rows = flat.numel() // row
        table = flat[: rows * row].view(rows, row)
        g = torch.Generator().manual_seed(1)
        count = max(1, min(MOST_TABLES, rows // n))
        if n < 512:
            index = [torch.randint(0, rows, (n,), generator=g) for _ in range(count)]
        else:
            index = [torch.arange(r * n, (r + 1) * n) for r in torch.randperm(rows // n, generator=g)[:count].tolist()]
        source = torch.randn(n, row, generator=g).to(d)
        return {"torch-index-copy": lambda i: table.index_copy_(0, index[i % len(index)], source)}, {}

    def check(self, heads, dtype, reference):
        hk, share = heads["num_kv_heads"], heads["num_heads"] // heads["num_kv_heads"]
        gqa = grouped = repeated = 0.0
        for q, k, v in batch(heads, dtype):
            m, causal = mask(q.shape[0], k.shape[0], q.dtype)
            qt, kt, vt = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
            back = lambda o: o[0].transpose(0, 1)
            out = F.scaled_dot_product_attention(qt, kt, vt, attn_mask=m, is_causal=causal, enable_gqa=share > 1)
            gqa = max(gqa, reference.error(back(out), q, k, v))
            wide = [t.repeat_interleave(share, 1) for t in (kt, vt)]
            out = F.scaled_dot_product_attention(qt, *wide, attn_mask=m, is_causal=causal)
            repeated = max(repeated, reference.error(back(out), q, k, v))
            if q.shape[0] == 1:
                out = F.scaled_dot_product_attention(qt.view(1, hk, share, -1), kt, vt)
                grouped = max(grouped, reference.error(out.reshape(q.shape), q, k, v))
        return {"torch-sdpa-gqa": gqa, "torch-sdpa-grouped": grouped, "torch-sdpa-repeated": repeated}


def mask(q, kv, dtype):
    """`attn_mask` and `is_causal`: none for one token, causal where nothing stands before, else a mask."""
    if q == 1:
        return None, False
    if q == kv:
        return None, True
    hidden = ~torch.ones(q, kv, dtype=torch.bool).tril(kv - q)
    return torch.zeros(q, kv, dtype=dtype).masked_fill_(hidden, float("-inf")), False
