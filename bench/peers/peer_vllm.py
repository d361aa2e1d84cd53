"""vLLM's CPU attention, called as its operators: paged, each instruction set and block size that it has here."""

import math
import sysconfig

import torch

import environment
from reference import DTYPES, SEQS, batch

NAME = "vllm"
MOST_TABLES = 4096


class Peer:
    NAME = NAME

    def __init__(self, pool, threads):
        level = environment.level()
        path, why = environment.vllm_library(sysconfig.get_paths()["purelib"])
        if path is None:
            raise RuntimeError(why)
        if level == "amx":
            # Asks the system for tile registers; without it the first tile instruction ends the process.
            torch.cpu._init_amx()
        torch.ops.load_library(str(path))
        self.ops, self.pool = torch.ops._C, pool
        self.version = f"{environment.VLLM.split('==')[1]} {path.name.split('.')[0]}"
        self.amx = level == "amx"

    def release(self):
        pass

    def kinds(self, dtype):
        """Instruction sets as vLLM names them, with the block sizes they are run with."""
        tiles = [("amx", 128), ("amx", 32)] if self.amx and dtype == "bf16" else [("vec", 128)]
        return [*tiles, ("vec", 32), ("vec16", 16)]

    def cache(self, heads, dtype, block):
        """Keys and values of a page lie one behind the other: two views of the pool."""
        hk, d, dt = heads["num_kv_heads"], heads["head_size"], DTYPES[dtype]
        flat = self.pool.view(dt)
        n = flat.numel() // (hk * block * 2 * d)
        return n, flat[: n * hk * block * 2 * d].view(n, hk, block * 2, d).chunk(2, dim=2)

    def call(self, seqs, heads, dtype, isa, block, tables, q, out):
        h, hk, d = heads["num_heads"], heads["num_kv_heads"], heads["head_size"]
        starts = torch.tensor([0, *torch.tensor([s[0] for s in seqs]).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor([s[1] for s in seqs], dtype=torch.int32)
        _, (k, v) = self.cache(heads, dtype, block)
        plan = self.ops.get_scheduler_metadata(
            len(seqs), h, hk, d, lens, DTYPES[dtype], starts, True, -1, isa, True, None, "auto"
        )
        run, n, scale = self.ops.cpu_attention_with_kv_cache.default, len(tables), 1 / math.sqrt(d)

        def call(i):
            run(
                q,
                k,
                v,
                out,
                starts,
                lens,
                scale,
                True,
                None,
                -1,
                tables[i % n],
                0.0,
                plan,
                None,
                None,
                1.0,
                1.0,
                "auto",
            )

        return call

    def calls(self, case, heads, dtype):
        calls, left_out = {}, {}
        seqs = case["seqs"]
        for isa, block in self.kinds(dtype):
            name = f"vllm-{isa}-{block}"
            n, _ = self.cache(heads, dtype, block)
            blocks = [-(-kv // block) for _, kv in seqs]
            if sum(blocks) > n:
                left_out[name] = "the case is larger than the pool"
                continue
            order = torch.randperm(n, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
            count = min(MOST_TABLES, n // sum(blocks)) if case["cache"] == "cold" else 1
            tables = [table(order[r * sum(blocks) :], blocks) for r in range(count)]
            shape = (sum(q for q, _ in seqs), heads["num_heads"], heads["head_size"])
            q = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
            calls[name] = self.call(seqs, heads, dtype, isa, block, tables, q, torch.empty_like(q))
        return calls, left_out

    def writes(self, case, heads, dtype):
        calls, tokens, run = {}, case["tokens"], self.ops.cpu_attn_reshape_and_cache.default
        g = torch.Generator().manual_seed(3)
        both = torch.randn(tokens, heads["num_kv_heads"], 2 * heads["head_size"], generator=g).to(DTYPES[dtype])
        key, value = (t.contiguous() for t in both.chunk(2, dim=2))
        for isa, block in self.kinds(dtype):
            n, (k, v) = self.cache(heads, dtype, block)
            order = torch.randperm(n, generator=g)
            if tokens < 512:
                count = min(MOST_TABLES, n // tokens)
                offsets = torch.randint(0, block, (count, tokens), generator=g)
                slots = list(order[: count * tokens].view(count, tokens) * block + offsets)
            else:
                each = -(-tokens // block)
                whole = order[: n // each * each].view(-1, each, 1) * block + torch.arange(block)
                slots = [s[:tokens] for s in whole.view(whole.shape[0], -1)[:MOST_TABLES]]

            def call(i, k=k, v=v, slots=slots, isa=isa):
                run(key, value, k, v, slots[i % len(slots)], isa, 1.0, 1.0, "auto")

            calls[f"vllm-{isa}-{block}"] = call
        return calls, {}

    def check(self, heads, dtype, reference):
        """The cache is filled through the peer's own write."""
        errors = {}
        data = batch(heads, dtype)
        for isa, block in self.kinds(dtype):
            _, (kc, vc) = self.cache(heads, dtype, block)
            blocks = [-(-kv // block) for _, kv in SEQS]
            tables = table(
                torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(0), dtype=torch.int32), blocks
            )
            # As an engine starts: vLLM's kernels multiply what lies behind a sequence's end by zero, so it must be a number.
            kc[: sum(blocks) + 3] = vc[: sum(blocks) + 3] = 0
            for row, (_, k, v) in zip(tables, data):
                slots = (row.long()[:, None] * block + torch.arange(block)).flatten()[: k.shape[0]].contiguous()
                self.ops.cpu_attn_reshape_and_cache(k, v, kc, vc, slots, isa, 1.0, 1.0, "auto")
            q = torch.cat([q for q, _, _ in data])
            out = torch.zeros_like(q)
            self.call(SEQS, heads, dtype, isa, block, [tables], q, out)(0)
            parts = out.split([s[0] for s in SEQS])
            errors[f"vllm-{isa}-{block}"] = max(reference.error(o, *x) for o, x in zip(parts, data))
        return errors


def table(order, blocks):
    """A row a sequence, padded with block 0."""
    rows = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    at = 0
    for row, n in zip(rows, blocks):
        row[:n] = order[at : at + n]
        at += n
    return rows
