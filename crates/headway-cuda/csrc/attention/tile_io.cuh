// Rows between global memory, shared memory and registers. A row of HEAD elements takes ROW_BYTES in shared
// memory; its 16-byte chunks are permuted by the row's number, so that eight rows of a column lie in all banks.
#pragma once
#include "attention/params.cuh"
#include "common/mma.cuh"

#define K_STEPS ((HEAD + 15) / 16)
#define CHUNKS (HEAD / 8)
#define ROW_BYTES (((K_STEPS * 2 + 7) / 8) * 128)
#define EIGHT_BITS (CACHE == E4M3 || CACHE == E5M2)
#define RAW_ROW HEAD
#define RAW_CHUNK (HEAD % 16 == 0 ? 16 : 8)

typedef Wide<ACT> Act;

__device__ __forceinline__ u32 at(u32 tile, int row, int chunk) {
    return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Head sizes that are no multiple of 16 leave half a step of the product, which must be zero on both sides.
template <int THREADS> __device__ __forceinline__ void zero_pad(u32 tile, int rows, int thread) {
    if constexpr (HEAD % 16 != 0)
        for (int r = thread; r < rows; r += THREADS)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at(tile, r, CHUNKS)), "r"(0));
}

// Where a warp's runs of 16 keys begin in the cache, 32 of them ahead, one a lane: a run lies in one block. Run n is
// `first + n * STEP`; runs are asked for in their order.
template <int STEP> struct Runs {
    const int* table;
    int first, stop;  // stop: one past the last run that has keys
    const u8* mine;

    __device__ __forceinline__ const u8* at(const Params& p, int head, int n, int lane) {
        if ((n & 31) == 0) {
            int run = first + (n + lane) * STEP;
            mine = p.cache;
            if (run < stop) {
                int key = run * 16, block = key / p.block_size;
                mine += (i64)table[block] * p.block_stride + (i64)(key - block * p.block_size) * p.token_stride +
                        (i64)head * p.head_stride;
            }
        }
        return (const u8*)__shfl_sync(~0u, (u64)mine, n & 31);
    }
};

// The 16 keys and values of a run that begins at `from` with key `key0`, to a tile each: as they are for 16-bit
// caches, else raw. Keys outside [begin, end) become zeros and are not read.
template <int THREADS>
__device__ __forceinline__ void load_run(const Params& p, const u8* from, int key0, int begin, int end, u32 k, u32 v,
                                         int thread) {
    constexpr int CHUNK = EIGHT_BITS ? RAW_CHUNK : 16;
    constexpr int PER_ROW = EIGHT_BITS ? RAW_ROW / RAW_CHUNK : CHUNKS;
    u32 token_stride = (u32)p.token_stride;
    auto share = [&](auto copy) {
#pragma unroll
        for (int j = 0; j < (16 * PER_ROW + THREADS - 1) / THREADS; j++) {
            int i = thread + j * THREADS, row = i / PER_ROW, chunk = i % PER_ROW;
            u32 to = EIGHT_BITS ? (u32)(row * RAW_ROW + chunk * CHUNK) : at(0, row, chunk);
            if ((16 * PER_ROW) % THREADS == 0 || i < 16 * PER_ROW) copy(row, to, row * token_stride + chunk * CHUNK);
        }
    };
    if (key0 >= begin && key0 + 16 <= end)
        share([&](int, u32 to, u32 offset) {
            copy_async<CHUNK>(k + to, from + offset);
            copy_async<CHUNK>(v + to, from + offset + p.v_offset);
        });
    else
        share([&](int row, u32 to, u32 offset) {
            bool live = key0 + row >= begin && key0 + row < end;
            const u8* src = live ? from + offset : p.cache;
            copy_async_or_zero<CHUNK>(k + to, src, live);
            copy_async_or_zero<CHUNK>(v + to, live ? src + p.v_offset : src, live);
        });
}

// Eight-bit rows to a tile of 16-bit ones.
template <int ROWS, int THREADS> __device__ __forceinline__ void widen_tile(u32 raw, u32 tile, int thread) {
#pragma unroll 4
    for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        u32 lo, hi;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(lo), "=r"(hi) : "r"(raw + row * RAW_ROW + chunk * 8));
        u32 a = widen2<CACHE, ACT>(lo), b = widen2<CACHE, ACT>(lo >> 16), c = widen2<CACHE, ACT>(hi), d = widen2<CACHE, ACT>(hi >> 16);
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at(tile, row, chunk)), "r"(a), "r"(b), "r"(c),
                     "r"(d));
    }
}

// Packed query rows of a tile; rows past the live ones become zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_queries(const Params& p, const Tile& t, int head, u32 q, int thread) {
    int token0 = p.query_start_loc[t.request];
    for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, packed = t.row0 + row;
        bool live = row < t.rows;
        int token = packed / p.group, g = packed - token * p.group;
        const u8* src = (const u8*)p.q;
        if (live)
            src += 2 * ((token0 + token) * p.q_token + (i64)(head * p.group + g) * p.q_head) + chunk * 16;
        copy_async_or_zero<16>(at(q, row, chunk), src, live);
    }
    zero_pad<THREADS>(q, ROWS, thread);
}

// Where a lane's row of a product's operand begins: row `row`, half `half` of the 16 elements of step `k`. Four steps
// are a period of the permutation, so that what depends on the lane is computed four times, not for each step.
__device__ __forceinline__ u32 operand(u32 tile, int row, int k, int half) {
    return tile + row * ROW_BYTES + ((((k & 3) * 2 + half) ^ (row & 7)) << 4) + (k >> 2) * 128;
}

// The left side of a product: 16 rows from `row`, 16 columns from step `k`.
__device__ __forceinline__ void left(u32 (&a)[4], u32 tile, int row, int k, int lane) {
    load_matrices(a, operand(tile + row * ROW_BYTES, (lane & 7) + ((lane >> 3) & 1) * 8, k, lane >> 4));
}
// 16 keys from `row` as columns, 16 of their elements from step `k`: two right sides.
__device__ __forceinline__ void keys_right(u32 (&b)[4], u32 tile, int row, int k, int lane) {
    load_matrices(b, operand(tile + row * ROW_BYTES, (lane & 7) + (lane >> 4) * 8, k, (lane >> 3) & 1));
}
// 16 values from `row` as rows, 16 of their elements from step `n` as columns: two right sides.
__device__ __forceinline__ void values_right(u32 (&b)[4], u32 tile, int row, int n, int lane) {
    load_matrices_transposed(b, operand(tile + row * ROW_BYTES, (lane & 7) + ((lane >> 3) & 1) * 8, n, lane >> 4));
}
