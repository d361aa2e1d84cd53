// out = activation(gate) up, with gate and up side by side in a row.
#include "ops/rows.cuh"
#include "ops/activation.cuh"

struct Gated {
    Rows x, out;
    i64 count;  // accesses in all
    int width;  // of an output row
    Activation activation;
};

template <int V> __device__ __forceinline__ void gate(const Gated& p) {
    int per_row = p.width / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_row), i = (int)(n - (i64)row * per_row) * V;
        const u8* x = row_at(p.x, row, 1);
        float g[V], u[V];
        load<DTYPE, V>(g, x, i);
        load<DTYPE, V>(u, x, p.width + i);
#pragma unroll
        for (int j = 0; j < V; j++) g[j] = gated(p.activation, g[j], u[j]);
        store<DTYPE, V>(row_at(p.out, row, 1), i, g);
    }
}
KERNELS(gate, Gated)
