// What memory gives at most, and data to measure with.
#include "common/types.cuh"

struct Params {
    const uint4* from;
    uint4* to;
    u64 words;  // of 16 bytes
};

// Reads everything; writes only what no data gives.
extern "C" __global__ void __launch_bounds__(512) read_all(const __grid_constant__ Params p) {
    u64 step = (u64)gridDim.x * 512, i = (u64)blockIdx.x * 512 + threadIdx.x;
    u32 sum = 0;
    for (; i + 3 * step < p.words; i += 4 * step) {
        uint4 a = __ldcs(p.from + i), b = __ldcs(p.from + i + step), c = __ldcs(p.from + i + 2 * step),
              d = __ldcs(p.from + i + 3 * step);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < p.words; i += step) sum ^= __ldcs(p.from + i).x;
    if (sum == 0x9e3779b9u) p.to[0].x = sum;
}

extern "C" __global__ void __launch_bounds__(512) copy_all(const __grid_constant__ Params p) {
    u64 step = (u64)gridDim.x * 512, i = (u64)blockIdx.x * 512 + threadIdx.x;
    for (; i + 3 * step < p.words; i += 4 * step) {
        uint4 a = __ldcs(p.from + i), b = __ldcs(p.from + i + step), c = __ldcs(p.from + i + 2 * step),
              d = __ldcs(p.from + i + 3 * step);
        __stcs(p.to + i, a), __stcs(p.to + i + step, b), __stcs(p.to + i + 2 * step, c), __stcs(p.to + i + 3 * step, d);
    }
    for (; i < p.words; i += step) __stcs(p.to + i, __ldcs(p.from + i));
}

// Eight 16-bit floats a word, about uniform in (-2, 2): sign and fraction from a hash, exponent 0 or below.
extern "C" __global__ void __launch_bounds__(512) fill_floats(const __grid_constant__ Params p) {
    u64 step = (u64)gridDim.x * 512;
    for (u64 i = (u64)blockIdx.x * 512 + threadIdx.x; i < p.words; i += step) {
        u32 out[4];
        for (int j = 0; j < 4; j++) {
            u64 x = (i * 4 + j + 1) * 0x9e3779b97f4a7c15ull;
            x ^= x >> 31, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 29;
            float lo = (float)(int)(u32)x * (1.f / 1073741824.f), hi = (float)(int)(u32)(x >> 32) * (1.f / 1073741824.f);
            out[j] = Wide<ACT>::pack(lo, hi);
        }
        p.to[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// Sixteen e4m3 numbers a word, about uniform in (-2, 2).
extern "C" __global__ void __launch_bounds__(512) fill_codes(const __grid_constant__ Params p) {
    u64 step = (u64)gridDim.x * 512;
    for (u64 i = (u64)blockIdx.x * 512 + threadIdx.x; i < p.words; i += step) {
        u32 out[4];
        for (int j = 0; j < 4; j++) {
            u64 x = (i * 4 + j + 1) * 0x9e3779b97f4a7c15ull;
            x ^= x >> 31, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 29;
            out[j] = 0;
            for (int b = 0; b < 4; b++) {
                float f = (float)((int)((x >> (8 * b)) & 255) - 128) * (1.f / 64.f);
                out[j] |= (u32)Wide<E4M3>::down(f) << (8 * b);
            }
        }
        p.to[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
