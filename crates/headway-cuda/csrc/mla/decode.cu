// Decode of latent attention over a paged cache of latents: all heads of a request's tokens over one read of its rows,
// which are keys as they are and values in their first RANK elements.
//
// A block takes tiles from the builder's list until none is left; a tile is up to ROWS packed rows (head r % heads of
// token r / heads) and a range of keys. Warps form a grid: a row of it shares query rows, a column of it keys and
// columns. KEYS keys lie in shared memory; each warp scores 16 of them for its rows, the probabilities meet in shared
// memory, and each warp sums its columns of all of them, so that accumulators fit into registers. A tile that is one of
// several parts of its keys leaves sums in memory; `merge.cu` joins them.
//
// Set from outside: RANK and ROPE (multiples of 8), ACT (BF16 or F16), CACHE (ACT, E4M3 or E5M2), ROWS (16, 32 or 64),
// COLS (2 or 4), CHUNKED (1: tiles have a `chunk`, keys whose sums are joined in their order whatever the parts).
#include "attention/pages.cuh"
#include "common/softmax.cuh"
#include "common/tiles.cuh"
#include "mla/decode_params.cuh"

#define WIDTH (RANK + ROPE)
#define EIGHT_BITS (CACHE == E4M3 || CACHE == E5M2)
#define ROW_TILES (ROWS == 64 && COLS == 4 ? 2 : 1)  // runs of 16 rows that a warp has
#define ROW_WARPS (ROWS / 16 / ROW_TILES)
#define WARPS (ROW_WARPS * COLS)
#define THREADS (WARPS * 32)
#define KEYS (COLS * 16)
#define STAGES 2
#define COLUMN_TILES ((RANK + 16 * COLS - 1) / (16 * COLS))  // runs of 16 columns that a warp has
#define CHAINS (ROW_TILES == 1 ? 2 : 1)                      // sums that a score is made of, for their latency

typedef Tiles<WIDTH> Latents;
typedef Tiles<KEYS> Keys;
typedef Wide<ACT> Act;

#define STAGE_BYTES (KEYS * (EIGHT_BITS ? WIDTH : Latents::ROW))
#define CACHE_ROW (WIDTH * (EIGHT_BITS ? 1 : 2))

extern __shared__ __align__(128) u8 memory[];

struct Shared {
    u32 queries, stages, wide, probabilities;
    float* stats;  // [COLS, ROWS]
};

__device__ __forceinline__ Shared layout() {
    Shared s;
    s.queries = shared_address(memory);
    s.stages = s.queries + ROWS * Latents::ROW;
    s.wide = s.stages + STAGES * STAGE_BYTES;
    s.probabilities = s.wide + (EIGHT_BITS ? KEYS * Latents::ROW : 0);
    s.stats = (float*)(memory + (s.probabilities - s.queries) + ROWS * Keys::ROW);
    return s;
}

// A row's token in the step and its head.
struct Place {
    i64 token;
    int head;
};
__device__ __forceinline__ Place place(const Params& p, const Tile& t, int row) {
    int packed = t.row0 + row, token = packed / p.heads;
    return {p.query_start_loc[t.request] + token, packed - token * p.heads};
}

__device__ __forceinline__ void load_queries(const Params& p, const Tile& t, u32 to) {
    constexpr int OWN = RANK / 8;
    for (int i = threadIdx.x; i < ROWS * Latents::CHUNKS; i += THREADS) {
        int row = i / Latents::CHUNKS, chunk = i % Latents::CHUNKS;
        const u16* from = (const u16*)p.q_latent;
        bool live = row < t.rows;
        if (live) {
            Place at = place(p, t, row);
            from = chunk < OWN ? from + (at.token * p.heads + at.head) * RANK + chunk * 8
                               : (const u16*)p.q_rope + at.token * p.q_token + at.head * p.q_head + (chunk - OWN) * 8;
        }
        copy_async_or_zero<16>(Latents::at(to, row, chunk), from, live);
    }
    Latents::zero_pad<THREADS>(to, ROWS, threadIdx.x);
}

// A warp's share of a run of 16 keys that begins at `from` with key `key0`; rows past `end` become zeros.
__device__ __forceinline__ void load_keys(const u8* base, const u8* from, int key0, int end, u32 to, int row0, int lane) {
    constexpr int CHUNK = !EIGHT_BITS || WIDTH % 16 == 0 ? 16 : 8, PER_ROW = CACHE_ROW / CHUNK;
    constexpr int MINE = 16 / ROW_WARPS * PER_ROW;
    bool whole = key0 + 16 <= end;
#pragma unroll
    for (int j = 0; j < (MINE + 31) / 32; j++) {
        int i = lane + j * 32, row = row0 + i / PER_ROW, chunk = i % PER_ROW;
        if (MINE % 32 != 0 && i >= MINE) break;
        u32 at = to + (EIGHT_BITS ? (u32)(row * CACHE_ROW + chunk * CHUNK) : Latents::at(0, row, chunk));
        const u8* src = from + row * CACHE_ROW + chunk * CHUNK;
        if (whole) copy_async<CHUNK>(at, src);
        else copy_async_or_zero<CHUNK>(at, key0 + row < end ? src : base, key0 + row < end);
    }
}

__device__ __forceinline__ float end_of_row(const Params& p, float sum) {
    return sum > 0.f || sum != sum ? p.v_scale / sum : 0.f;
}

__device__ __forceinline__ void rows_of(const Params& p, const Tile& t) {
    Shared s = layout();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_warp = warp / COLS, col = warp % COLS;
    const int* table = p.block_table + (i64)t.request * p.table_stride;
    int past = p.seq_lens[t.request] - (p.query_start_loc[t.request + 1] - p.query_start_loc[t.request]);

    load_queries(p, t, s.queries);
    if (EIGHT_BITS) Latents::zero_pad<THREADS>(s.wide, KEYS, threadIdx.x);
    else Latents::zero_pad<THREADS>(s.stages, STAGES * KEYS, threadIdx.x);

    // What this thread's rows see, and which keys all rows of the tile see.
    int high[ROW_TILES][2], all_see = min(t.kv_end, past + t.row0 / p.heads + 1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            high[r][h] = min(t.kv_end, past + (t.row0 + row) / p.heads + 1);
        }

    float end_top[ROW_TILES][2], end_sum[ROW_TILES][2];  // of all chunks so far
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) end_top[r][0] = end_top[r][1] = NEG_INF, end_sum[r][0] = end_sum[r][1] = 0.f;
    float out[ROW_TILES][2 * COLUMN_TILES][4];
    float* own = p.part_out + (i64)(p.part_rows + blockIdx.x * ROWS) * RANK;

    int from = t.kv_begin;
    do {
        int to = CHUNKED ? min(t.kv_end, (from / t.chunk + 1) * t.chunk) : t.kv_end;
        Softmax m[ROW_TILES];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            m[r].clear();
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_TILES; n++) out[r][n][0] = out[r][n][1] = out[r][n][2] = out[r][n][3] = 0.f;
        }
        // The runs of the keys are dealt out to the warps; where there are more warps, they share a run's rows.
        int run = warp / ROW_WARPS, row0 = warp % ROW_WARPS * (16 / ROW_WARPS), fetched = 0;
        Runs<COLS> runs = {table, from / 16 + run, (to + 15) / 16, p.cache};
        auto fetch = [&](int key0, int stage) {
            const u8* at = runs.at(p, p.cache, fetched++, lane);
            if (key0 < to)
                load_keys(p.cache, at, key0 + run * 16, to,
                          s.stages + stage * STAGE_BYTES + run * 16 * (EIGHT_BITS ? WIDTH : Latents::ROW), row0, lane);
            copy_commit();
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch(from + i * KEYS, i);
        for (int key0 = from, stage = 0; key0 < to; key0 += KEYS, stage = (stage + 1) % STAGES) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            fetch(key0 + (STAGES - 1) * KEYS, (stage + STAGES - 1) % STAGES);
            u32 keys = s.stages + stage * STAGE_BYTES;
            if (EIGHT_BITS) {
                Latents::widen<CACHE, ACT, KEYS, THREADS>(keys, s.wide, threadIdx.x);
                __syncthreads();
                keys = s.wide;
            }

            float x[CHAINS][ROW_TILES][2][4] = {};
#pragma unroll
            for (int i = 0; i < Latents::STEPS; i++) {
                u32 a[ROW_TILES][4], b[4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
                    Latents::left(a[r], s.queries, (row_warp * ROW_TILES + r) * 16, i, lane);
                Latents::keys_right(b, keys, col * 16, i, lane);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    mma<ACT>(x[i % CHAINS][r][0], a[r], b[0], b[1]);
                    mma<ACT>(x[i % CHAINS][r][1], a[r], b[2], b[3]);
                }
            }
            float(&score)[ROW_TILES][2][4] = x[0];
            bool masked = key0 + KEYS > all_see;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float& y = score[r][i >> 2][i & 3];
                    if (CHAINS == 2) y += x[CHAINS - 1][r][i >> 2][i & 3];
                    int key = key0 + col * 16 + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
                    if (masked && key >= high[r][(i >> 1) & 1]) y = NEG_INF;
                }

            // The largest score of each row over all warps' keys.
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float most = row_max(fmaxf(fmaxf(score[r][0][2 * h], score[r][0][2 * h + 1]),
                                               fmaxf(score[r][1][2 * h], score[r][1][2 * h + 1])));
                    int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
                    if ((lane & 3) == 0) s.stats[col * ROWS + row] = most;
                }
            group_sync(1 + row_warp, COLS * 32);
            float score_factor = p.scale * LOG2E;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
                    float most = s.stats[row];
#pragma unroll
                    for (int c = 1; c < COLS; c++) most = fmaxf(most, s.stats[c * ROWS + row]);
                    float top = fmaxf(m[r].top[h], most * score_factor), base = top == NEG_INF ? 0.f : top, sum = 0.f;
                    factor[h] = exp2_fast(m[r].top[h] - base);
#pragma unroll
                    for (int n = 0; n < 2; n++) {
#pragma unroll
                        for (int i = 2 * h; i < 2 * h + 2; i++) {
                            score[r][n][i] = exp2_fast(__fmaf_rn(score[r][n][i], score_factor, -base));
                            sum += score[r][n][i];
                        }
                        store_shared(Keys::at(s.probabilities, row, col * 2 + n) + (lane & 3) * 4,
                                     Act::pack(score[r][n][2 * h], score[r][n][2 * h + 1]));
                    }
                    m[r].sum[h] = m[r].sum[h] * factor[h] + sum;  // of this lane's keys
                    m[r].top[h] = top;
                }
                rescale(out[r], factor);
            }
            group_sync(1 + row_warp, COLS * 32);
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                u32 a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
                    Keys::left(a[r], s.probabilities, (row_warp * ROW_TILES + r) * 16, k, lane);
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++) {
                    u32 b[4];
                    Latents::values_right(b, keys, k * 16, col * COLUMN_TILES + n, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        mma<ACT>(out[r][2 * n], a[r], b[0], b[1]);
                        mma<ACT>(out[r][2 * n + 1], a[r], b[2], b[3]);
                    }
                }
            }
        }
        copy_wait<0>();

        // Each warp has summed its own keys' probabilities.
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = row_sum(m[r].sum[h]);
                int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
                if ((lane & 3) == 0) s.stats[col * ROWS + row] = sum;
            }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
                float sum = s.stats[row], before, after;
#pragma unroll
                for (int c = 1; c < COLS; c++) sum += s.stats[c * ROWS + row];
                if (!CHUNKED) {
                    end_top[r][h] = m[r].top[h], end_sum[r][h] = sum;
                    continue;
                }
                join(end_top[r][h], end_sum[r][h], m[r].top[h], sum, before, after);
#pragma unroll
                for (int n = 0; n < 2 * COLUMN_TILES; n++) {
                    int d = (col * COLUMN_TILES * 2 + n) * 8 + (lane & 3) * 2;
                    if (d >= RANK) continue;
                    float2* kept = (float2*)(own + (i64)row * RANK + d);
                    float2 acc = from == t.kv_begin ? make_float2(0.f, 0.f) : *kept;
                    acc = joined(acc, make_float2(out[r][n][2 * h], out[r][n][2 * h + 1]), before, after);
                    out[r][n][2 * h] = acc.x, out[r][n][2 * h + 1] = acc.y;
                    if (to < t.kv_end) *kept = acc;
                }
            }
        from = to;
    } while (CHUNKED && from < t.kv_end);

#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (row_warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            if (row >= t.rows) continue;
            i64 part = t.part_row0 + t.split * t.rows + row;
            if (t.splits > 1 && col == 0 && (lane & 3) == 0)
                p.part_sum[part] = make_float2(end_top[r][h], end_sum[r][h]);
            float end = end_of_row(p, end_sum[r][h]);
            Place at = place(p, t, row);
            u16* to = (u16*)p.out + (at.token * p.heads + at.head) * RANK;
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_TILES; n++) {
                int d = (col * COLUMN_TILES * 2 + n) * 8 + (lane & 3) * 2;
                if (d >= RANK) continue;
                float lo = out[r][n][2 * h], hi = out[r][n][2 * h + 1];
                if (t.splits == 1) *(u32*)(to + d) = Act::pack(lo * end, hi * end);
                else *(float2*)(p.part_out + part * RANK + d) = make_float2(lo, hi);
            }
        }
}

// Rows of padding tokens.
__device__ void no_rows(const Params& p, const Tile& t) {
    i64 all = (i64)t.rows * p.heads * (RANK / 8);
    uint4* to = (uint4*)((u16*)p.out + (i64)t.row0 * p.heads * RANK);
    for (i64 i = threadIdx.x; i < all; i += THREADS) to[i] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_decode(const __grid_constant__ Params p) {
    __shared__ int fetched;
    int total = p.tiles[0].request;
    bool more = total > (int)gridDim.x;
    for (int work = blockIdx.x; work < total;) {
        // Asked for early: the answer is needed at the tile's end.
        int next = threadIdx.x == 0 && more ? (int)gridDim.x + atomicAdd(p.next, 1) : total;
        Tile t = p.tiles[1 + work];
        if (t.kind == NO_ROWS) no_rows(p, t);
        else {
            // What the host knows of a length may be more than what became of it.
            t.kv_end = min(t.kv_end, p.seq_lens[t.request]);
            rows_of(p, t);
        }
        if (!more) return;
        __syncthreads();
        if (threadIdx.x == 0) fetched = next;
        __syncthreads();
        work = fetched;
    }
    if (more && threadIdx.x == 0 && atomicAdd(p.next + 1, 1) == (int)gridDim.x - 1) p.next[0] = p.next[1] = 0;
}
