"""Softmax attention over a paged cache: decodes, prefills and batches of both in one launch.

A row is a query head of a new token. The heads of one key/value head lie together in a tile of `M` rows: packed row
`token * group + head`, counted within a request. The grid is (tiles, key/value heads, parts of the keys). Tiles are numbered
so that the number of a request's first tile follows from its place alone: `start * group // M + request`. So a block
finds its rows by bisection, and the grid depends on how many tokens and requests there are, not on lengths. What lies past the
last request is a request without keys: its rows become zeros.

Scores are exponents of 2 from the product on: `scale` holds log2(e). Online softmax: Milakov and Gimelshein, 2018;
tiles: FlashAttention-2 (Dao, 2023); parts of the keys: Flash-Decoding (Dao et al., 2023); paging: PagedAttention (Kwon et
al., 2023).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_request(query_start_loc, tile, num_reqs, group, M: tl.constexpr):
    """The request that a tile is of; `num_reqs`: what lies behind the last."""
    request = 0
    after = num_reqs + 1
    while after - request > 1:
        middle = (request + after) // 2
        if tl.load(query_start_loc + middle) * group // M + middle <= tile:
            request = middle
        else:
            after = middle
    return request


@triton.jit
def some_keys(
    acc, top, total, q, cache, table, low, high, begin, end, first_key, last_key,
    block_stride, token_stride, v_offset, block_size, reciprocal, scale, cap,
    HEAD: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):
    """The rows over the keys `begin..end`, in steps of `N`. Not `MASKED`: every row sees them all."""
    d = tl.arange(0, PAD)
    n = tl.arange(0, N)
    for first in tl.range(begin, end, N):
        key = first + n
        # key // block_size; exact for the lengths that the caller lets through.
        page = tl.umulhi(key.to(tl.uint32), reciprocal).to(tl.int32)
        if MASKED:
            # Keys that no row sees may lie in blocks that are someone else's, or hold no numbers.
            there = (key >= first_key) & (key < last_key)
            block = tl.load(table + page, mask=there, other=0)
        else:
            block = tl.load(table + page)
        at = block.to(tl.int64) * block_stride + (key - page * block_size) * token_stride
        k_at = cache + at[None, :] + d[:, None]
        v_at = cache + v_offset + at[:, None] + d[None, :]
        if MASKED:
            k = tl.load(k_at, mask=there[None, :] & (d < HEAD)[:, None], other=0.0)
        elif HEAD != PAD:
            k = tl.load(k_at, mask=(d < HEAD)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        s = tl.dot(q, k) * scale
        if CAPPED:
            # cap * tanh(x) = cap * (1 - 2 / (e^2x + 1)); `scale` makes e^2x of it.
            s = cap * (1.0 - 2.0 / (tl.exp2(s) + 1.0))
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            s = tl.where(seen, s, float("-inf"))
        most = tl.maximum(top, tl.max(s, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s - base[:, None])
        shift = tl.exp2(top - base)
        total = total * shift + tl.sum(p, 1)
        acc = acc * shift[:, None]
        if MASKED:
            v = tl.load(v_at, mask=there[:, None] & (d < HEAD)[None, :], other=0.0)
        elif HEAD != PAD:
            v = tl.load(v_at, mask=(d < HEAD)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = most
    return acc, top, total


@triton.jit
def paged_attention(
    out, q, cache, block_table, query_start_loc, seq_lens, causal_flags, sinks, part_out, part_sums,
    out_token, out_head, q_token, q_head, block_stride, token_stride, head_stride, v_offset,
    block_size, reciprocal, table_stride, num_reqs, num_tokens, group, window, causal, scale, cap,
    HEAD: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, PARTS: tl.constexpr,
):
    """`causal`: 0 no row is, 1 all are, 2 `causal_flags` says so of each request. `window` 0: none. Without sinks that
    pointer is null. `PARTS`: the third axis of the grid divides the keys, and `merge_parts` adds up."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(query_start_loc, tile, num_reqs, group, M)
    start = tl.load(query_start_loc + request)
    row0 = (tile - start * group // M - request) * M
    stop = num_tokens
    seq_len = 0
    is_causal = causal == 1
    if request < num_reqs:
        stop = tl.load(query_start_loc + request + 1)
        seq_len = tl.load(seq_lens + request)
        if causal == 2:
            is_causal = tl.load(causal_flags + request) != 0
    q_len = stop - start
    rows = q_len * group - row0
    if rows <= 0:
        return

    row = row0 + tl.arange(0, M)
    live = tl.arange(0, M) < rows
    token = row // group
    head = kv_head * group + row - token * group
    d = tl.arange(0, PAD)
    here = live[:, None] & (d < HEAD)[None, :]
    at = (start + token).to(tl.int64) * q_token + head.to(tl.int64) * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=here, other=0.0)

    # Keys that each row sees, low <= key < high; both rise with the token.
    past = seq_len - q_len
    first = past + row0 // group
    last = past + (row0 + tl.minimum(rows, M) - 1) // group
    end = seq_len
    all_end = seq_len
    high = tl.where(live, seq_len, 0)
    if is_causal:
        end = tl.maximum(tl.minimum(last + 1, seq_len), 0)
        all_end = tl.maximum(tl.minimum(first + 1, seq_len), 0)
        high = tl.where(live, past + token + 1, 0)
    begin = 0
    all_begin = 0
    low = tl.zeros([M], tl.int32)
    if window > 0:
        begin = tl.maximum(first - window + 1, 0)
        all_begin = tl.maximum(last - window + 1, 0)
        low = past + token - window + 1
    # Steps of N keys; from `full` to `full_end` every row sees every key.
    my_begin = begin // N * N
    my_end = tl.cdiv(end, N) * N
    full = tl.minimum(tl.cdiv(all_begin, N) * N, my_end)
    full_end = tl.maximum(full, all_end // N * N)
    part = tl.program_id(2)
    if PARTS:
        each = tl.cdiv((my_end - my_begin) // N, tl.num_programs(2)) * N
        my_begin += part * each
        my_end = tl.minimum(my_end, my_begin + each)

    acc = tl.zeros([M, PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    cache += kv_head.to(tl.int64) * head_stride
    acc, top, total = some_keys(
        acc, top, total, queries, cache, table, low, high, my_begin, tl.minimum(full, my_end), begin, end,
        block_stride, token_stride, v_offset, block_size, reciprocal, scale, cap, HEAD, PAD, N, CAPPED, True,
    )
    acc, top, total = some_keys(
        acc, top, total, queries, cache, table, low, high, tl.maximum(full, my_begin), tl.minimum(full_end, my_end),
        begin, end, block_stride, token_stride, v_offset, block_size, reciprocal, scale, cap,
        HEAD, PAD, N, CAPPED, False,
    )
    acc, top, total = some_keys(
        acc, top, total, queries, cache, table, low, high, tl.maximum(full_end, my_begin), tl.minimum(end, my_end),
        begin, end, block_stride, token_stride, v_offset, block_size, reciprocal, scale, cap,
        HEAD, PAD, N, CAPPED, True,
    )

    if PARTS:
        heads = tl.num_programs(1) * group
        at = (part * num_tokens + start + token).to(tl.int64) * heads + head
        tl.store(part_sums + at * 2, top, mask=live)
        tl.store(part_sums + at * 2 + 1, total, mask=live)
        # A part without keys leaves sums alone.
        if my_begin < my_end:
            tl.store(part_out + at[:, None] * HEAD + d[None, :], acc, mask=here)
    else:
        if sinks.to(tl.int64) != 0:
            sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
            most = tl.maximum(top, sink)
            base = tl.where(most == float("-inf"), 0.0, most)
            shift = tl.exp2(top - base)
            total = total * shift + tl.exp2(sink - base)
            acc = acc * shift[:, None]
        # A row that sees nothing is zeros; what is not a number stays that.
        factor = tl.where(total == 0.0, 0.0, 1.0 / total)
        at = (start + token).to(tl.int64) * out_token + head.to(tl.int64) * out_head
        tl.store(out + at[:, None] + d[None, :], (acc * factor[:, None]).to(out.dtype.element_ty), mask=here)


@triton.jit
def merge_parts(
    out, sinks, part_out, part_sums, out_token, out_head, parts, num_tokens,
    HEAD: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr,
):
    """A row out of its parts, at most `MOST`; the grid is (tokens, heads)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, PAD)
    part = tl.arange(0, MOST)
    at = (part * num_tokens + token).to(tl.int64) * heads + head
    top = tl.load(part_sums + at * 2, mask=part < parts, other=float("-inf"))
    total = tl.load(part_sums + at * 2 + 1, mask=part < parts, other=0.0)
    some = top != float("-inf")
    acc = tl.load(part_out + at[:, None] * HEAD + d[None, :], mask=some[:, None] & (d < HEAD)[None, :], other=0.0)
    most = tl.max(top, 0)
    sink = float("-inf")
    if sinks.to(tl.int64) != 0:
        sink = tl.load(sinks + head) * LOG2E
        most = tl.maximum(most, sink)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2(top - base)
    sums = tl.sum(total * weight, 0) + tl.exp2(sink - base)
    row = tl.sum(acc * weight[:, None], 0)
    factor = tl.where(sums == 0.0, 0.0, 1.0 / sums)
    to = out + token.to(tl.int64) * out_token + head.to(tl.int64) * out_head + d
    tl.store(to, (row * factor).to(out.dtype.element_ty), mask=d < HEAD)
