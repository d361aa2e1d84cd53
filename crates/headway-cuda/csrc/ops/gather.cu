// Rows by number: of a table of embeddings, or of activations.
//
// Set from outside: TABLE, the type of what is gathered; DTYPE, that of the output.
#include "ops/rows.cuh"

struct Gather {
    Rows from, out;
    const int* rows;
    Fault* fault;
    i64 count;  // accesses in all
    int width, end;
    float scale;
    int what;  // the fault's number
};

template <int V> __device__ __forceinline__ void gather(const Gather& p) {
    int per_row = p.width / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_row), i = (int)(n - (i64)row * per_row) * V;
        int id = p.rows[row];
        float v[V];
        if ((u32)id < (u32)p.end) {
            load<TABLE, V>(v, row_at(p.from, id, 1), i);
        } else {
            report(p.fault, p.what, id);
#pragma unroll
            for (int j = 0; j < V; j++) v[j] = 0.f;
        }
#pragma unroll
        for (int j = 0; j < V; j++) v[j] *= p.scale;
        store<DTYPE, V>(row_at(p.out, row, 1), i, v);
    }
}
KERNELS(gather, Gather)
