// Where keys lie in a paged cache.
#pragma once
#include "common/types.cuh"

// Where a warp's runs of 16 keys begin in the cache, 32 of them ahead, one a lane: a run lies in one block. Run n is
// `first + n * STEP`; runs are asked for in their order. `P` names block and token strides in bytes, and the block's
// tokens; `base` is block 0's.
template <int STEP> struct Runs {
    const int* table;
    int first, stop;  // stop: one past the last run that has keys
    const u8* mine;

    template <typename P> __device__ __forceinline__ const u8* at(const P& p, const u8* base, int n, int lane) {
        if ((n & 31) == 0) {
            int run = first + (n + lane) * STEP;
            mine = base;
            if (run < stop) {
                int key = run * 16, block = key / p.block_size;
                mine += (i64)table[block] * p.block_stride + (i64)(key - block * p.block_size) * p.token_stride;
            }
        }
        return (const u8*)__shfl_sync(~0u, (u64)mine, n & 31);
    }
};
