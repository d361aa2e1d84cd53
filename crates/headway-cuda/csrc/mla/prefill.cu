// Prefill of latent attention: each head over its own keys and values, which lie expanded in a workspace, one pass of
// tokens at a time. A key is a head's NOPE expanded elements and the ROPE rotated ones of the latent row, which all heads
// share. What a pass finds is merged with what earlier passes left in `out` and `lse`.
//
// A block has a head and up to MANY rows, 16 * ROW_TILES a warp; KEYS keys and values lie in shared memory, the next
// ones on their way.
//
// Set from outside: NOPE, ROPE, VALUE, RANK (multiples of 8; VALUE at most 256), ACT (BF16 or F16), WARPS, ROW_TILES
// (1 or 2), KEYS (32 or 64).
#include "common/softmax.cuh"
#include "common/tiles.cuh"

#define THREADS (WARPS * 32)
#define MANY (WARPS * ROW_TILES * 16)
#define STAGES 2

typedef Tiles<NOPE + ROPE> Key;
typedef Tiles<VALUE> Value;
typedef Wide<ACT> Act;

#define STAGE_BYTES (KEYS * (Key::ROW + Value::ROW))

// Rows of a request and the keys of a pass that they see. Mirrored, as is Params, in `src/kernels/mla/prefill.rs`.
struct Tile {
    int row0;   // first row of the prefills
    int rows;
    int slot;   // first key in the workspace
    int keys;   // that the last row may see
    int sees;   // keys that the first row sees; each further row sees one more, up to `keys`
    int first;  // 1: nothing was left by an earlier pass
};

struct Params {
    const void* q;
    void* out;
    const void* expanded;  // [slots, heads, NOPE + VALUE]
    const void* latents;   // [slots, RANK + ROPE]
    float* lse;            // [rows, heads], base 2
    const Tile* tiles;
    i64 q_token, q_head;   // strides, elements
    i64 out_token, out_head;
    int heads;
    float scale;
};

extern __shared__ __align__(128) u8 memory[];

__device__ __forceinline__ void load_queries(const Params& p, const Tile& t, int head, u32 to) {
    for (int i = threadIdx.x; i < MANY * Key::CHUNKS; i += THREADS) {
        int row = i / Key::CHUNKS, chunk = i % Key::CHUNKS;
        bool live = row < t.rows;
        const u16* from = (const u16*)p.q;
        if (live) from += (i64)(t.row0 + row) * p.q_token + head * p.q_head + chunk * 8;
        copy_async_or_zero<16>(Key::at(to, row, chunk), from, live);
    }
    Key::zero_pad<THREADS>(to, MANY, threadIdx.x);
}

// KEYS keys and values from `key0`; those past the tile's become zeros.
__device__ __forceinline__ void load_keys(const Params& p, const Tile& t, int head, int key0, u32 keys, u32 values) {
    constexpr int PER_ROW = Key::CHUNKS + Value::CHUNKS;
    const u16* expanded = (const u16*)p.expanded + head * (NOPE + VALUE);
    i64 stride = (i64)p.heads * (NOPE + VALUE);
    const u16* latents = (const u16*)p.latents + RANK;
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * PER_ROW; i += THREADS) {
        int row = i / PER_ROW, chunk = i % PER_ROW;
        bool live = key0 + row < t.keys;
        i64 slot = live ? t.slot + key0 + row : t.slot;
        bool is_key = chunk < Key::CHUNKS;
        // Values lie right after the expanded part of the key.
        int at = is_key ? chunk : chunk - Key::CHUNKS + NOPE / 8;
        const u16* from = is_key && chunk >= NOPE / 8 ? latents + slot * (RANK + ROPE) + (chunk - NOPE / 8) * 8
                                                      : expanded + slot * stride + at * 8;
        u32 to = is_key ? Key::at(keys, row, chunk) : Value::at(values, row, chunk - Key::CHUNKS);
        copy_async_or_zero<16>(to, from, live);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_prefill(const __grid_constant__ Params p) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Tile t = p.tiles[blockIdx.x / p.heads];
    int head = blockIdx.x % p.heads;
    u32 q = shared_address(memory), stages = q + MANY * Key::ROW;

    load_queries(p, t, head, q);
    auto fetch = [&](int key0, int stage) {
        u32 keys = stages + stage * STAGE_BYTES;
        if (key0 < t.keys) load_keys(p, t, head, key0, keys, keys + KEYS * Key::ROW);
        copy_commit();
    };
    fetch(0, 0);
    for (int i = 0; i < STAGES; i++) Key::zero_pad<THREADS>(stages + i * STAGE_BYTES, KEYS, threadIdx.x);

    int high[ROW_TILES][2], sees_all = 0x7fffffff, sees_any = 0;
    Softmax m[ROW_TILES];
    float out[ROW_TILES][Value::STEPS * 2][4] = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        m[r].clear();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            high[r][h] = row < t.rows ? min(t.keys, t.sees + row) : 0;
            if (row < t.rows) sees_all = min(sees_all, high[r][h]), sees_any = max(sees_any, high[r][h]);
        }
    }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
        sees_all = min(sees_all, __shfl_xor_sync(~0u, sees_all, i));
        sees_any = max(sees_any, __shfl_xor_sync(~0u, sees_any, i));
    }
    float score_factor = p.scale * LOG2E;

    for (int key0 = 0, stage = 0; key0 < t.keys; key0 += KEYS, stage ^= 1) {
        fetch(key0 + KEYS, stage ^ 1);
        copy_wait<1>();
        __syncthreads();
        u32 keys = stages + stage * STAGE_BYTES, values = keys + KEYS * Key::ROW;
        if (key0 < sees_any) {
            float s[ROW_TILES][KEYS / 8][4] = {};
#pragma unroll
            for (int i = 0; i < Key::STEPS; i++) {
                u32 a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) Key::left(a[r], q, (warp * ROW_TILES + r) * 16, i, lane);
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 b[4];
                    Key::keys_right(b, keys, n * 16, i, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        mma<ACT>(s[r][2 * n], a[r], b[0], b[1]);
                        mma<ACT>(s[r][2 * n + 1], a[r], b[2], b[3]);
                    }
                }
            }
            bool masked = key0 + KEYS > sees_all;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                if (masked)
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (key0 + n * 8 + (lane & 3) * 2 + (i & 1) >= high[r][i >> 1]) s[r][n][i] = NEG_INF;
                take_in(m[r], s[r], out[r], score_factor);
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) as_left<ACT>(a[r], s[r][2 * n], s[r][2 * n + 1]);
#pragma unroll
                for (int d = 0; d < Value::STEPS; d++) {
                    u32 b[4];
                    Value::values_right(b, values, n * 16, d, lane);
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

    // What earlier passes left is read before any of a row's four lanes writes it.
    float earlier[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            bool reads = !t.first && row < t.rows;
            earlier[r][h] = reads ? p.lse[(i64)(t.row0 + row) * p.heads + head] : NEG_INF;
        }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp * ROW_TILES + r) * 16 + (lane >> 2) + 8 * h;
            float sum = row_sum(m[r].sum[h]), before, after, all = 0.f, top = m[r].top[h];
            if (row >= t.rows) continue;
            // Both parts as sums over a common top: the earlier one's is 1.
            join(top, all, earlier[r][h], earlier[r][h] == NEG_INF ? 0.f : 1.f, after, before);
            all += sum * after;
            bool any = all > 0.f || all != all;
            before = any ? before / all : 0.f, after = any ? after / all : 0.f;
            if ((lane & 3) == 0)
                p.lse[(i64)(t.row0 + row) * p.heads + head] = any ? top + log2f(all) : NEG_INF;
            u16* to = (u16*)p.out + (t.row0 + row) * p.out_token + head * p.out_head;
#pragma unroll
            for (int n = 0; n < Value::STEPS * 2; n++) {
                int d = n * 8 + (lane & 3) * 2;
                if (d >= VALUE) continue;
                float lo = out[r][n][2 * h] * after, hi = out[r][n][2 * h + 1] * after;
                if (!t.first) {
                    u32 x = *(u32*)(to + d);
                    lo += Act::up((u16)x) * before, hi += Act::up((u16)(x >> 16)) * before;
                }
                *(u32*)(to + d) = Act::pack(lo, hi);
            }
        }
}
