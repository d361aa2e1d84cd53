// Activations as e4m3 codes with one given scale: rounded to nearest even, saturating; NaN stays NaN.
#include "ops/rows.cuh"

struct Codes {
    Rows x, out;
    i64 count;  // accesses in all
    int width, heads;
    float scale;
};

template <int V> __device__ __forceinline__ void quantise(const Codes& p) {
    int per_row = p.width / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_row), i = (int)(n - (i64)row * per_row) * V;
        float v[V];
        load<DTYPE, V>(v, row_at(p.x, row, p.heads), i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] = __fdiv_rn(v[j], p.scale);
        store<E4M3, V>(row_at(p.out, row, p.heads), i, v);
    }
}
KERNELS(quantise, Codes)
