// Blocks of GGUF files as plain weights: `d * q + m` of a block's integers `q`, with a scale and a minimum for each
// sub-block of 16 or 32. Layouts and arithmetic are those of `headway_tensor::quant`; every product is exact there, so
// one rounding to float32 and one to the output's type is all there is.
//
// Set from outside: BLOCK, the format by ggml's number; DTYPE, the output's type.
#include "ops/rows.cuh"

struct Dequantise {
    const u8* blocks;
    u8* out;
    i64 groups;  // of 8 weights
};

// A sub-block's scale and minimum.
struct Scale { float d, m; };

__device__ __forceinline__ float half_at(const u8* p) { return Wide<F16>::up((u16)(p[0] | p[1] << 8)); }

// Weight i's nibble: 16 bytes hold the first half of 32 weights in their low ones, the second in their high ones.
__device__ __forceinline__ int nibble(const u8* packed, int i) { return packed[i % 16] >> (i / 16 * 4) & 15; }
// Its bit in a little-endian word.
__device__ __forceinline__ int bit_of(const u8* word, int i) { return word[i / 8] >> (i % 8) & 1; }

// A format: weights and bytes of a block, weight i's integer, and what its sub-block is scaled by.
template <int B> struct Format;

template <> struct Format<2> {  // Q4_0
    static constexpr int ELEMS = 32, BYTES = 18;
    static __device__ int q(const u8* b, int i) { return nibble(b + 2, i); }
    static __device__ Scale scale(const u8* b, int) { float d = half_at(b); return {d, -8.f * d}; }
};
template <> struct Format<3> {  // Q4_1
    static constexpr int ELEMS = 32, BYTES = 20;
    static __device__ int q(const u8* b, int i) { return nibble(b + 4, i); }
    static __device__ Scale scale(const u8* b, int) { return {half_at(b), half_at(b + 2)}; }
};
template <> struct Format<6> {  // Q5_0
    static constexpr int ELEMS = 32, BYTES = 22;
    static __device__ int q(const u8* b, int i) { return nibble(b + 6, i) | bit_of(b + 2, i) << 4; }
    static __device__ Scale scale(const u8* b, int) { float d = half_at(b); return {d, -16.f * d}; }
};
template <> struct Format<7> {  // Q5_1
    static constexpr int ELEMS = 32, BYTES = 24;
    static __device__ int q(const u8* b, int i) { return nibble(b + 8, i) | bit_of(b + 4, i) << 4; }
    static __device__ Scale scale(const u8* b, int) { return {half_at(b), half_at(b + 2)}; }
};
template <> struct Format<8> {  // Q8_0
    static constexpr int ELEMS = 32, BYTES = 34;
    static __device__ int q(const u8* b, int i) { return (signed char)b[2 + i]; }
    static __device__ Scale scale(const u8* b, int) { return {half_at(b), 0.f}; }
};

// Two-bit integers: each half of the block takes 32 bytes, and pair j of byte l is weight 32 j + l of its half.
__device__ __forceinline__ int pair_of(const u8* packed, int i) {
    return packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}
// Nibbles of Q4_K and Q5_K: each quarter takes 32 bytes, low ones first.
__device__ __forceinline__ int quarter_nibble(const u8* packed, int i) {
    return packed[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}
// Six-bit scales and minima of Q4_K and Q5_K: `d`, `dmin`, then 12 bytes for 8 of each. The last four of both have
// their low nibbles in the last four bytes, and their upper bits on top of the others.
__device__ __forceinline__ Scale six_bits(const u8* b, int i) {
    const u8* p = b + 4;
    int s = i / 32, j = s % 4;
    int scale = s < 4 ? p[j] & 63 : (p[j + 8] & 15) | p[j] >> 6 << 4;
    int min = s < 4 ? p[j + 4] & 63 : p[j + 8] >> 4 | p[j + 4] >> 6 << 4;
    return {half_at(b) * (float)scale, -(half_at(b + 2) * (float)min)};
}

template <> struct Format<10> {  // Q2_K
    static constexpr int ELEMS = 256, BYTES = 84;
    static __device__ int q(const u8* b, int i) { return pair_of(b + 16, i); }
    static __device__ Scale scale(const u8* b, int i) {
        int s = b[i / 16];
        return {half_at(b + 80) * (float)(s & 15), -(half_at(b + 82) * (float)(s >> 4))};
    }
};
template <> struct Format<11> {  // Q3_K
    static constexpr int ELEMS = 256, BYTES = 110;
    static __device__ int q(const u8* b, int i) {
        return pair_of(b + 32, i) | (b[i % 32] >> (i / 32) & 1) << 2;
    }
    static __device__ Scale scale(const u8* b, int i) {
        const u8* p = b + 96;
        int s = i / 16;
        int bits = (p[s % 8] >> (s / 8 * 4) & 15) | (p[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
        float d = half_at(b + 108) * (float)(bits - 32);
        return {d, -4.f * d};
    }
};
template <> struct Format<12> {  // Q4_K
    static constexpr int ELEMS = 256, BYTES = 144;
    static __device__ int q(const u8* b, int i) { return quarter_nibble(b + 16, i); }
    static __device__ Scale scale(const u8* b, int i) { return six_bits(b, i); }
};
template <> struct Format<13> {  // Q5_K
    static constexpr int ELEMS = 256, BYTES = 176;
    static __device__ int q(const u8* b, int i) {
        return quarter_nibble(b + 48, i) | (b[16 + i % 32] >> (i / 32) & 1) << 4;
    }
    static __device__ Scale scale(const u8* b, int i) { return six_bits(b, i); }
};
template <> struct Format<14> {  // Q6_K
    static constexpr int ELEMS = 256, BYTES = 210;
    static __device__ int q(const u8* b, int i) {
        int half = i / 128, l = i % 32, part = i % 128 / 32;
        int low = b[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4) & 15;
        return low | (b[128 + half * 32 + l] >> (part * 2) & 3) << 4;
    }
    static __device__ Scale scale(const u8* b, int i) {
        float d = half_at(b + 208) * (float)(signed char)b[192 + i / 16];
        return {d, -32.f * d};
    }
};

// Eight weights a thread: they are of one sub-block.
template <int V> __device__ __forceinline__ void dequantise(const Dequantise& p) {
    typedef Format<BLOCK> F;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.groups; n += (i64)gridDim.x * THREADS) {
        i64 block = n / (F::ELEMS / 8);
        int first = (int)(n - block * (F::ELEMS / 8)) * 8;
        const u8* b = p.blocks + block * F::BYTES;
        Scale s = F::scale(b, first);
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fadd_rn(__fmul_rn(s.d, (float)F::q(b, first + j)), s.m);
        u8* out = p.out + n * 8 * (i64)sizeof(typename Wide<DTYPE>::store);
#pragma unroll
        for (int j = 0; j < 8; j += V) {
            float part[V];
#pragma unroll
            for (int k = 0; k < V; k++) part[k] = v[j + k];
            store<DTYPE, V>(out, j, part);
        }
    }
}
KERNELS(dequantise, Dequantise)
