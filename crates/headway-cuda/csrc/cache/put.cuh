// Eight elements of ACT (BF16 or F16) into a cache of CACHE (ACT, E4M3 or E5M2).
#pragma once
#include "common/types.cuh"

#define EIGHT_BITS (CACHE == E4M3 || CACHE == E5M2)

__device__ __forceinline__ void put(u8* to, uint4 x, float scale) {
    if constexpr (EIGHT_BITS) {
        u32 in[4] = {x.x, x.y, x.z, x.w}, out[2] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float f = Wide<ACT>::up((u16)(in[i / 2] >> (16 * (i & 1))));
            out[i / 4] |= (u32)Wide<CACHE>::down(f / scale) << (8 * (i & 3));
        }
        *(uint2*)to = make_uint2(out[0], out[1]);
    } else {
        *(uint4*)to = x;
    }
}
