// Rows of HEAD elements between global memory, shared memory and registers.
#pragma once
#include "attention/params.cuh"
#include "attention/pages.cuh"
#include "common/tiles.cuh"

typedef Tiles<HEAD> Head;
#define K_STEPS (Head::STEPS)
#define CHUNKS (Head::CHUNKS)
#define ROW_BYTES (Head::ROW)
#define EIGHT_BITS (CACHE == E4M3 || CACHE == E5M2)
#define RAW_ROW HEAD
#define RAW_CHUNK (HEAD % 16 == 0 ? 16 : 8)

typedef Wide<ACT> Act;

__device__ __forceinline__ u32 at(u32 tile, int row, int chunk) { return Head::at(tile, row, chunk); }
template <int THREADS> __device__ __forceinline__ void zero_pad(u32 tile, int rows, int thread) {
    Head::zero_pad<THREADS>(tile, rows, thread);
}

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
    Head::widen<CACHE, ACT, ROWS, THREADS>(raw, tile, thread);
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
