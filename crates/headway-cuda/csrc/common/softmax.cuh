// The running softmax of 16 rows over scores in base 2: a thread has two of the rows, lane / 4 and 8 more.
#pragma once
#include "common/mma.cuh"

struct Softmax {
    float top[2], sum[2];
    __device__ __forceinline__ void clear() { top[0] = top[1] = NEG_INF, sum[0] = sum[1] = 0.f; }
};

// Sums of 16 rows, times a factor for each of a thread's two.
template <int D> __device__ __forceinline__ void rescale(float (&out)[D][4], const float (&factor)[2]) {
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f))
#pragma unroll
        for (int d = 0; d < D; d++) {
            out[d][0] *= factor[0], out[d][1] *= factor[0];
            out[d][2] *= factor[1], out[d][3] *= factor[1];
        }
}

// Takes 8 N more scores in; they become probabilities. `out` holds 16 rows' sums of values, and is rescaled.
template <int N, int D>
__device__ __forceinline__ void take_in(Softmax& m, float (&s)[N][4], float (&out)[D][4], float score_factor) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = s[0][2 * h];
#pragma unroll
        for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        float top = fmaxf(m.top[h], row_max(most) * score_factor);
        float base = top == NEG_INF ? 0.f : top;
        factor[h] = exp2_fast(m.top[h] - base);
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; i++) {
                s[n][i] = exp2_fast(__fmaf_rn(s[n][i], score_factor, -base));
                sum += s[n][i];
            }
        m.sum[h] = m.sum[h] * factor[h] + sum;  // of this lane's keys
        m.top[h] = top;
    }
    rescale(out, factor);
}

// Probabilities of 16 keys, two columns of scores, as the left side of a product.
template <int T> __device__ __forceinline__ void as_left(u32 (&a)[4], const float (&s0)[4], const float (&s1)[4]) {
    a[0] = Wide<T>::pack(s0[0], s0[1]), a[1] = Wide<T>::pack(s0[2], s0[3]);
    a[2] = Wide<T>::pack(s1[0], s1[1]), a[3] = Wide<T>::pack(s1[2], s1[3]);
}

// Sums over a part of the keys join those over earlier parts. Rounded alike wherever it is called.
__device__ __forceinline__ void join(float& top, float& sum, float part_top, float part_sum, float& before, float& after) {
    float most = fmaxf(top, part_top), base = most == NEG_INF ? 0.f : most;
    before = exp2_fast(top - base), after = exp2_fast(part_top - base);
    sum = __fmaf_rn(sum, before, __fmul_rn(part_sum, after));
    top = most;
}
__device__ __forceinline__ float2 joined(float2 acc, float2 part, float before, float after) {
    return make_float2(__fmaf_rn(acc.x, before, __fmul_rn(part.x, after)),
                       __fmaf_rn(acc.y, before, __fmul_rn(part.y, after)));
}
