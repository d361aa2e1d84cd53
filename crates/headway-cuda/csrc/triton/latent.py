"""Decodes of latent attention over a paged cache of latents: all heads of a request's tokens over one read of its rows, which
are keys as they are and values in their first `RANK` elements (DeepSeek-V2, arXiv 2405.04434).

Tiles, their numbers and the parts of the keys are those of `attention.py`, with one key/value head. Every request is causal.
The grid is (tiles, parts).
"""

import triton
import triton.language as tl

from attention import find_request


@triton.jit
def latent_decode(
    out, q, q_rope, cache, block_table, query_start_loc, seq_lens, part_out, part_sums,
    q_token, q_head, block_stride, block_size, reciprocal, table_stride, num_reqs, num_tokens, heads, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    """`q` and `out` are `[tokens, heads, RANK]`; `q_rope` is the rotated part of the first query. With several parts
    `merge_latents` adds up."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    request = find_request(query_start_loc, tile, num_reqs, heads, M)
    start = tl.load(query_start_loc + request)
    row0 = (tile - start * heads // M - request) * M
    stop = num_tokens
    seq_len = 0
    if request < num_reqs:
        stop = tl.load(query_start_loc + request + 1)
        seq_len = tl.load(seq_lens + request)
    q_len = stop - start
    rows = q_len * heads - row0
    if rows <= 0:
        return

    row = row0 + tl.arange(0, M)
    live = tl.arange(0, M) < rows
    token = row // heads
    head = row - token * heads
    c = tl.arange(0, RANK)
    r = tl.arange(0, ROPE)
    place = ((start + token).to(tl.int64) * heads + head)[:, None] * RANK + c[None, :]
    at = (start + token).to(tl.int64) * q_token + head.to(tl.int64) * q_head
    queries = tl.load(q + place, mask=live[:, None], other=0.0)
    turned = tl.load(q_rope + at[:, None] + r[None, :], mask=live[:, None], other=0.0)

    # A row sees the keys before `high`, which rises with the token.
    past = seq_len - q_len
    last = past + (row0 + tl.minimum(rows, M) - 1) // heads
    end = tl.maximum(tl.minimum(last + 1, seq_len), 0)
    high = tl.where(live, tl.minimum(past + token + 1, seq_len), 0)
    each = tl.cdiv(tl.cdiv(end, N), parts) * N
    begin = part * each
    stop = tl.minimum(end, begin + each)

    acc = tl.zeros([M, RANK], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    n = tl.arange(0, N)
    for first in tl.range(begin, stop, N):
        key = first + n
        # Others may lie in blocks that are someone else's, or hold no numbers.
        there = key < stop
        page = tl.umulhi(key.to(tl.uint32), reciprocal).to(tl.int32)
        block = tl.load(table + page, mask=there, other=0)
        row_at = block.to(tl.int64) * block_stride + (key - page * block_size) * (RANK + ROPE)
        latents = tl.load(cache + row_at[:, None] + c[None, :], mask=there[:, None], other=0.0)
        rotated = tl.load(cache + RANK + row_at[:, None] + r[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(queries, tl.trans(latents))
        s = tl.dot(turned, tl.trans(rotated), s) * scale
        s = tl.where((key[None, :] < high[:, None]) & there[None, :], s, float("-inf"))
        most = tl.maximum(top, tl.max(s, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s - base[:, None])
        shift = tl.exp2(top - base)
        total = total * shift + tl.sum(p, 1)
        acc = tl.dot(p.to(latents.dtype), latents, acc * shift[:, None])
        top = most

    if parts == 1:
        # A row that sees nothing is zeros; what is not a number stays that.
        factor = tl.where(total == 0.0, 0.0, 1.0 / total)
        tl.store(out + place, (acc * factor[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    else:
        part_at = (part * num_tokens + start + token).to(tl.int64) * heads + head
        tl.store(part_sums + part_at * 2, top, mask=live)
        tl.store(part_sums + part_at * 2 + 1, total, mask=live)
        if begin < stop:
            tl.store(part_out + part_at[:, None] * RANK + c[None, :], acc, mask=live[:, None])


@triton.jit
def merge_latents(
    out, part_out, part_sums, parts, num_tokens, heads,
    RANK: tl.constexpr, MOST: tl.constexpr, EACH: tl.constexpr,
):
    """A row out of its parts, at most `MOST`, `EACH` at a time; the grid is (tokens, heads)."""
    row = (tl.program_id(0) * heads + tl.program_id(1)).to(tl.int64)
    rows = num_tokens.to(tl.int64) * heads
    c = tl.arange(0, RANK)
    all_parts = tl.arange(0, MOST)
    sums_at = part_sums + (row + all_parts * rows) * 2
    top = tl.load(sums_at, mask=all_parts < parts, other=float("-inf"))
    total = tl.load(sums_at + 1, mask=all_parts < parts, other=0.0)
    most = tl.max(top, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    sums = tl.sum(total * tl.exp2(top - base), 0)
    acc = tl.zeros([RANK], tl.float32)
    for first in tl.range(0, parts, EACH):
        part = first + tl.arange(0, EACH)
        at = row + part * rows
        mine = tl.load(part_sums + at * 2, mask=part < parts, other=float("-inf"))
        # A part without keys has written sums alone.
        some = mine != float("-inf")
        x = tl.load(part_out + at[:, None] * RANK + c[None, :], mask=some[:, None], other=0.0)
        acc += tl.sum(x * tl.exp2(mine - base)[:, None], 0)
    factor = tl.where(sums == 0.0, 0.0, 1.0 / sums)
    tl.store(out + row * RANK + c, (acc * factor).to(out.dtype.element_ty))
