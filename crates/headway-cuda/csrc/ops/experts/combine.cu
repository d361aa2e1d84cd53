// Every token's results added up by their weights, in the order of its choices, on top of what the output holds or not.
#include "ops/rows.cuh"

struct Combine {
    const float* results;  // [slots, width]
    const int* slots;      // [tokens, top_k]
    const float* weights;  // the same
    Rows out;
    i64 count;  // accesses in all
    int width, top_k, accumulate, gap;
};

template <int V> __device__ __forceinline__ void combine(const Combine& p) {
    int per_row = p.width / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_row), i = (int)(n - (i64)row * per_row) * V;
        u8* out = row_at(p.out, row, 1);
        float sum[V];
#pragma unroll
        for (int j = 0; j < V; j++) sum[j] = 0.f;
        if (p.accumulate) load<DTYPE, V>(sum, out, i);
        for (int k = 0; k < p.top_k; k++) {
            i64 choice = (i64)row * p.top_k + k;
            float v[V], w = p.weights[choice];
            load<F32, V>(v, (const u8*)(p.results + (i64)p.slots[choice] * p.width), i);
#pragma unroll
            for (int j = 0; j < V; j++) sum[j] = __fmaf_rn(w, v[j], sum[j]);
        }
        store<DTYPE, V>(out, i, sum);
    }
}
KERNELS(combine, Combine)
