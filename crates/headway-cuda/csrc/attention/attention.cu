// Softmax attention over a paged cache: decode, prefill and mixed batches in one launch of a fixed size.
//
// A block of four warps takes tiles from the builder's list until none is left. Tiles of few rows (decodes) are
// bound by memory: each warp reads every fourth run of 16 keys through a pipeline of its own and keeps its own
// softmax, and the four are merged at the end. Tiles of many rows (prefills) are bound by the tensor cores: the
// block reads 64 keys at a time and each warp keeps rows of its own. A tile may be one of several parts of the
// same rows' keys: the last part to arrive merges all of them, in their order.
//
// FlashAttention-2 (Dao, 2023), Flash-Decoding (Dao et al., 2023), PagedAttention (Kwon et al., 2023).
//
// Set from outside: HEAD (elements of a head, a multiple of 8, at most 256), ACT (type of q and out: BF16 or F16), CACHE (ACT, E4M3 or E5M2),
// PLAIN (1 without soft cap and ALiBi), FEW_STAGES (runs of 16 keys that a warp of a tile of few rows has in shared memory or under way, at
// least 2).
#include "attention/rows.cuh"

#define WARPS 4
#define THREADS (WARPS * 32)
#define ROW_TILES (HEAD <= 128 ? 2 : 1)  // runs of 16 rows that a warp keeps
#define MANY (WARPS * ROW_TILES * 16)
#define KEYS 64
#define OUT_TILES (K_STEPS * 2)
#define PAIRS ((HEAD + 63) / 64)  // of a row's elements, a lane

#define TILE_BYTES(rows) ((rows) * ROW_BYTES)
#define STAGE_BYTES(rows) (EIGHT_BITS ? (rows) * RAW_ROW : TILE_BYTES(rows))
#define WIDE_BYTES(rows) (EIGHT_BITS ? TILE_BYTES(rows) : 0)

extern __shared__ __align__(128) u8 memory[];

// The split's sums go to memory; the last one of its tile merges them all.
__device__ void merge_parts(const Params& p, const Tile& t, int head) {
    int heads = p.kv_heads * p.group;
    i64 token0 = p.query_start_loc[t.request];
    const float2* sums = p.part_sum + (i64)head * p.part_rows + t.part_row0;
    const float* outs = p.part_out + ((i64)head * p.part_rows + t.part_row0) * HEAD;
    // A warp a row, so that the scores' part is done once.
    int lane = threadIdx.x & 31;
    for (int row = threadIdx.x >> 5; row < t.rows; row += WARPS) {
        int packed = t.row0 + row, token = packed / p.group, g = packed - token * p.group;
        float top = NEG_INF, sum = 0.f;
        float2 acc[PAIRS] = {};
        for (int s = 0; s < t.splits; s++) {
            float2 part = __ldcg(&sums[s * t.rows + row]);
            float before, after;
            join(top, sum, part.x, part.y, before, after);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int d = i * 64 + lane * 2;
                if (d < HEAD)
                    acc[i] = joined(acc[i], __ldcg((const float2*)(outs + (i64)(s * t.rows + row) * HEAD + d)), before, after);
            }
        }
        float factor = finish_row(p, top, sum, head * p.group + g, token0 + token, heads, lane == 0);
        u16* to = (u16*)p.out + (token0 + token) * p.out_token + (i64)(head * p.group + g) * p.out_head;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = i * 64 + lane * 2;
            if (d < HEAD) *(u32*)(to + d) = Act::pack(acc[i].x * factor, acc[i].y * factor);
        }
    }
}

__device__ __forceinline__ bool last_to_arrive(const Params& p, const Tile& t, int head) {
    __shared__ int last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = p.counters + (i64)head * p.num_counters + t.counter;
        last = atomicAdd(counter, 1) == t.splits - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// At most 16 rows: every warp has all of them and a quarter of the keys.
__device__ __forceinline__ void few_rows(const Params& p, const Tile& t, int head) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 shared = shared_address(memory), q = shared;
    u32 own = shared + TILE_BYTES(16) + warp * 2 * (FEW_STAGES * STAGE_BYTES(16) + WIDE_BYTES(16));
    u32 wide = own + 2 * FEW_STAGES * STAGE_BYTES(16);
    const int* table = p.block_table + (i64)t.request * p.table_stride;
    const u8* mine = p.cache + (i64)head * p.head_stride;

    load_queries<16, THREADS>(p, t, head, q, threadIdx.x);
    copy_commit();
    if (EIGHT_BITS) zero_pad<32>(wide, 16, lane), zero_pad<32>(wide + TILE_BYTES(16), 16, lane);
    copy_wait<0>();
    __syncthreads();
    u32 left_q[K_STEPS][4];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) Head::left(left_q[k], q, 0, k, lane);
    int query_len = p.query_start_loc[t.request + 1] - p.query_start_loc[t.request], seq_len = p.seq_lens[t.request];
    Row rows[2];
#pragma unroll
    for (int h = 0; h < 2; h++) rows[h] = row_of(p, t, head, (lane >> 2) + 8 * h, query_len, seq_len);

    // Rows `warp`, `warp` + 4 and so on, merged over the warps.
    float2 acc[16 / WARPS][PAIRS] = {};
    float acc_top[16 / WARPS], acc_sum[16 / WARPS] = {};
#pragma unroll
    for (int j = 0; j < 16 / WARPS; j++) acc_top[j] = NEG_INF;
    float* sums = (float*)memory;                      // [4, 16, 2]
    float* parts = (float*)(memory + TILE_BYTES(16));  // [4, 16, HEAD]

    for (int from = t.kv_begin; from < t.kv_end;) {
        int to = t.chunk ? min(t.kv_end, (from / t.chunk + 1) * t.chunk) : t.kv_end;
        if (!EIGHT_BITS)
            for (int i = 0; i < 2 * FEW_STAGES; i++) zero_pad<32>(own + i * TILE_BYTES(16), 16, lane);
        Softmax m;
        m.clear();
        float out[OUT_TILES][4] = {};
        // Runs of 16 keys are dealt out by their place in the request, so that a part's beginning does not matter.
        int first = from / 16, stop = (to + 15) / 16, run = first + ((warp - first) & 3);
        Runs<WARPS> runs = {table, run, stop, p.cache};
        int fetched = 0;
        auto fetch = [&](int stage) {
            int r = runs.first + fetched * WARPS;
            const u8* at = runs.at(p, mine, fetched++, lane);
            u32 k = own + stage * 2 * STAGE_BYTES(16);
            if (r < stop) load_run<32>(p, at, r * 16, from, to, k, k + STAGE_BYTES(16), lane);
            copy_commit();
        };
#pragma unroll
        for (int i = 0; i < FEW_STAGES - 1; i++) fetch(i);
        for (int stage = 0; run < stop; run += WARPS, stage = (stage + 1) % FEW_STAGES) {
            fetch((stage + FEW_STAGES - 1) % FEW_STAGES);
            copy_wait<FEW_STAGES - 1>();
            __syncwarp();
            u32 k = own + stage * 2 * STAGE_BYTES(16), v = k + STAGE_BYTES(16);
            if (EIGHT_BITS) {
                widen_tile<16, 32>(k, wide, lane);
                widen_tile<16, 32>(v, wide + TILE_BYTES(16), lane);
                __syncwarp();
                k = wide, v = wide + TILE_BYTES(16);
            }
            float s[2][4] = {};
#pragma unroll
            for (int i = 0; i < K_STEPS; i++) {
                u32 b[4];
                Head::keys_right(b, k, 0, i, lane);
                mma<ACT>(s[0], left_q[i], b[0], b[1]);
                mma<ACT>(s[1], left_q[i], b[2], b[3]);
            }
            finish_scores<2, true>(p, s, rows, run * 16, lane);
            take_in(m, s, out, score_factor(p));
            u32 a[4];
            as_left<ACT>(a, s[0], s[1]);
#pragma unroll
            for (int n = 0; n < K_STEPS; n++) {
                u32 b[4];
                Head::values_right(b, v, 0, n, lane);
                mma<ACT>(out[2 * n], a, b[0], b[1]);
                mma<ACT>(out[2 * n + 1], a, b[2], b[3]);
            }
            __syncwarp();
        }
        copy_wait<0>();
        __syncthreads();

        // The four warps' sums meet in shared memory.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (lane >> 2) + 8 * h;
            float sum = row_sum(m.sum[h]);
            if ((lane & 3) == 0) sums[(warp * 16 + row) * 2] = m.top[h], sums[(warp * 16 + row) * 2 + 1] = sum;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                int d = n * 8 + (lane & 3) * 2;
                if (d < HEAD)
                    *(float2*)(parts + (warp * 16 + row) * HEAD + d) = make_float2(out[n][2 * h], out[n][2 * h + 1]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 16 / WARPS; j++) {
            int row = warp + j * WARPS;
            if (row >= t.rows) continue;
            float top = NEG_INF, sum = 0.f, factor[WARPS], before, after;
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, sums[(w * 16 + row) * 2]);
            float base = top == NEG_INF ? 0.f : top;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factor[w] = exp2_fast(sums[(w * 16 + row) * 2] - base);
                sum += factor[w] * sums[(w * 16 + row) * 2 + 1];
            }
            join(acc_top[j], acc_sum[j], top, sum, before, after);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int d = i * 64 + lane * 2;
                float2 x = make_float2(0.f, 0.f);
                if (d < HEAD)
#pragma unroll
                    for (int w = 0; w < WARPS; w++) {
                        float2 o = *(float2*)(parts + (w * 16 + row) * HEAD + d);
                        x.x += factor[w] * o.x, x.y += factor[w] * o.y;
                    }
                acc[j][i] = joined(acc[j][i], x, before, after);
            }
        }
        from = to;
        __syncthreads();
    }

    int heads = p.kv_heads * p.group;
    i64 token0 = p.query_start_loc[t.request];
#pragma unroll
    for (int j = 0; j < 16 / WARPS; j++) {
        int row = warp + j * WARPS;
        if (row >= t.rows) continue;
        int packed = t.row0 + row, token = packed / p.group, g = packed - token * p.group;
        i64 part = (i64)head * p.part_rows + t.part_row0 + t.split * t.rows + row;
        float end = 1.f;
        if (t.splits == 1) end = finish_row(p, acc_top[j], acc_sum[j], head * p.group + g, token0 + token, heads, lane == 0);
        else if (lane == 0) p.part_sum[part] = make_float2(acc_top[j], acc_sum[j]);
        u16* to = (u16*)p.out + (token0 + token) * p.out_token + (i64)(head * p.group + g) * p.out_head;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = i * 64 + lane * 2;
            if (d >= HEAD) continue;
            if (t.splits == 1) *(u32*)(to + d) = Act::pack(acc[j][i].x * end, acc[j][i].y * end);
            else *(float2*)(p.part_out + part * HEAD + d) = acc[j][i];
        }
    }
}

// Up to MANY rows, ROW_TILES * 16 of them a warp.
__device__ __forceinline__ void many_rows(const Params& p, const Tile& t, int head) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 q = shared_address(memory), stages = q + TILE_BYTES(MANY), wide = stages + 4 * STAGE_BYTES(KEYS);
    const int* table = p.block_table + (i64)t.request * p.table_stride;
    const u8* mine = p.cache + (i64)head * p.head_stride;
    int query_len = p.query_start_loc[t.request + 1] - p.query_start_loc[t.request], seq_len = p.seq_lens[t.request];

    // Aligned to KEYS by the place in the request: where a split or a window begins does not matter.
    int key0 = t.kv_begin / KEYS * KEYS, stop = t.kv_end, fetched = 0;
    Runs<1> runs = {table, key0 / 16, (stop + 15) / 16, p.cache};
    auto fetch = [&](int key, int stage) {
        if (key < stop) {
            u32 to = stages + stage * 2 * STAGE_BYTES(KEYS);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                load_run<THREADS>(p, runs.at(p, mine, fetched + i, lane), key + i * 16, t.kv_begin, stop,
                                  to + i * STAGE_BYTES(16), to + STAGE_BYTES(KEYS) + i * STAGE_BYTES(16), threadIdx.x);
            fetched += KEYS / 16;
        }
        copy_commit();
    };
    load_queries<MANY, THREADS>(p, t, head, q, threadIdx.x);
    fetch(key0, 0);
    if (EIGHT_BITS) zero_pad<THREADS>(wide, 2 * KEYS, threadIdx.x);
    else zero_pad<THREADS>(stages, 4 * KEYS, threadIdx.x);

    Row rows[ROW_TILES][2];
    Softmax m[ROW_TILES];
    float out[ROW_TILES][OUT_TILES][4] = {};
    int sees_all_from = 0, sees_all_to = 0x7fffffff, sees_from = 0x7fffffff, sees_to = 0;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        m[r].clear();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            rows[r][h] = row_of(p, t, head, row, query_len, seq_len);
            if (row < t.rows) {
                sees_all_from = max(sees_all_from, rows[r][h].low), sees_from = min(sees_from, rows[r][h].low);
                sees_all_to = min(sees_all_to, rows[r][h].high), sees_to = max(sees_to, rows[r][h].high);
            }
        }
    }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
        sees_all_from = max(sees_all_from, __shfl_xor_sync(~0u, sees_all_from, i));
        sees_all_to = min(sees_all_to, __shfl_xor_sync(~0u, sees_all_to, i));
        sees_from = min(sees_from, __shfl_xor_sync(~0u, sees_from, i));
        sees_to = max(sees_to, __shfl_xor_sync(~0u, sees_to, i));
    }

    for (int stage = 0; key0 < stop; key0 += KEYS, stage ^= 1) {
        fetch(key0 + KEYS, stage ^ 1);
        copy_wait<1>();
        __syncthreads();
        u32 k = stages + stage * 2 * STAGE_BYTES(KEYS), v = k + STAGE_BYTES(KEYS);
        if (EIGHT_BITS) {
            widen_tile<KEYS, THREADS>(k, wide, threadIdx.x);
            widen_tile<KEYS, THREADS>(v, wide + TILE_BYTES(KEYS), threadIdx.x);
            __syncthreads();
            k = wide, v = wide + TILE_BYTES(KEYS);
        }
        if (key0 < sees_to && key0 + KEYS > sees_from) {
            float s[ROW_TILES][KEYS / 8][4] = {};
#pragma unroll
            for (int i = 0; i < K_STEPS; i++) {
                u32 a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) Head::left(a[r], q, (warp * ROW_TILES + r) * 16, i, lane);
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 b[4];
                    Head::keys_right(b, k, n * 16, i, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        mma<ACT>(s[r][2 * n], a[r], b[0], b[1]);
                        mma<ACT>(s[r][2 * n + 1], a[r], b[2], b[3]);
                    }
                }
            }
            bool whole = key0 >= sees_all_from && key0 + KEYS <= sees_all_to;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                if (whole) finish_scores<KEYS / 8, false>(p, s[r], rows[r], key0, lane);
                else finish_scores<KEYS / 8, true>(p, s[r], rows[r], key0, lane);
                take_in(m[r], s[r], out[r], score_factor(p));
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) as_left<ACT>(a[r], s[r][2 * n], s[r][2 * n + 1]);
#pragma unroll
                for (int d = 0; d < K_STEPS; d++) {
                    u32 b[4];
                    Head::values_right(b, v, n * 16, d, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        mma<ACT>(out[r][2 * d], a[r], b[0], b[1]);
                        mma<ACT>(out[r][2 * d + 1], a[r], b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
    copy_wait<0>();

    int heads = p.kv_heads * p.group;
    i64 token0 = p.query_start_loc[t.request];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            float sum = row_sum(m[r].sum[h]);
            if (row >= t.rows) continue;
            int packed = t.row0 + row, token = packed / p.group, g = packed - token * p.group;
            i64 part = (i64)head * p.part_rows + t.part_row0 + t.split * t.rows + row;
            if (t.splits == 1) {
                float end = finish_row(p, m[r].top[h], sum, head * p.group + g, token0 + token, heads, (lane & 3) == 0);
                u16* to = (u16*)p.out + (token0 + token) * p.out_token + (i64)(head * p.group + g) * p.out_head;
#pragma unroll
                for (int n = 0; n < OUT_TILES; n++) {
                    int d = n * 8 + (lane & 3) * 2;
                    if (d < HEAD) *(u32*)(to + d) = Act::pack(out[r][n][2 * h] * end, out[r][n][2 * h + 1] * end);
                }
            } else {
                if ((lane & 3) == 0) p.part_sum[part] = make_float2(m[r].top[h], sum);
#pragma unroll
                for (int n = 0; n < OUT_TILES; n++) {
                    int d = n * 8 + (lane & 3) * 2;
                    if (d < HEAD)
                        *(float2*)(p.part_out + part * HEAD + d) = make_float2(out[r][n][2 * h], out[r][n][2 * h + 1]);
                }
            }
        }
}

// Rows of padding tokens.
__device__ void no_rows(const Params& p, const Tile& t, int head) {
    int per_token = p.group * CHUNKS;
    for (int i = threadIdx.x; i < t.rows * per_token; i += THREADS) {
        int token = i / per_token, rest = i - token * per_token, g = rest / CHUNKS;
        u16* to = (u16*)p.out + (i64)(t.row0 + token) * p.out_token + (i64)(head * p.group + g) * p.out_head;
        *(uint4*)(to + (rest - g * CHUNKS) * 8) = make_uint4(0, 0, 0, 0);
        if (p.lse && rest == g * CHUNKS)
            p.lse[(i64)(t.row0 + token) * p.kv_heads * p.group + head * p.group + g] = NEG_INF;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention(const __grid_constant__ Params p) {
    __shared__ int fetched;
    int total = p.tiles[0].request * p.kv_heads;
    bool more = total > (int)gridDim.x;
    for (int work = blockIdx.x; work < total;) {
        // Asked for early: the answer is needed at the tile's end.
        int next = threadIdx.x == 0 && more ? (int)gridDim.x + atomicAdd(p.next, 1) : total;
        Tile t = p.tiles[1 + work / p.kv_heads];
        int head = work % p.kv_heads;
        // What the host knows of a length may be more than what became of it.
        if (t.kind != NO_ROWS) t.kv_end = min(t.kv_end, p.seq_lens[t.request]);
        if (t.causal == 2) t.causal = p.causal[t.request];
        if (t.kind == FEW_ROWS) few_rows(p, t, head);
        else if (t.kind == MANY_ROWS) many_rows(p, t, head);
        else no_rows(p, t, head);
        if (t.splits > 1 && last_to_arrive(p, t, head)) merge_parts(p, t, head);
        if (!more) return;
        __syncthreads();
        if (threadIdx.x == 0) fetched = next;
        __syncthreads();
        work = fetched;
    }
    if (more && threadIdx.x == 0 && atomicAdd(p.next + 1, 1) == (int)gridDim.x - 1) p.next[0] = p.next[1] = 0;
}
