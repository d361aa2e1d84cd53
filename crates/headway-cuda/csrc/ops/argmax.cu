// The column of a row's largest element, the first of several; one block a row. NaN counts for nothing; a row without
// a number gives 0.
#include "ops/rows.cuh"

struct Argmax {
    Rows x;
    int* out;
    int count, width;
};

__device__ __forceinline__ void take(float& best, int& at, float x, int i) {
    if (x > best || (x == best && i < at)) {
        best = x;
        at = i;
    }
}

template <int V> __device__ __forceinline__ void argmax(const Argmax& p) {
    const u8* x = row_at(p.x, (int)blockIdx.x, 1);
    float best = NEG_INF, v[V];
    int at = 0x7fffffff;
    for (int i = threadIdx.x * V; i < p.width; i += THREADS * V) {
        load<DTYPE, V>(v, x, i);
#pragma unroll
        for (int j = 0; j < V; j++) take(best, at, v[j], i + j);
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
        float other = __shfl_xor_sync(~0u, best, d);
        int place = __shfl_xor_sync(~0u, at, d);
        take(best, at, other, place);
    }
    __shared__ float bests[THREADS / 32];
    __shared__ int places[THREADS / 32];
    if (threadIdx.x % 32 == 0) {
        bests[threadIdx.x / 32] = best;
        places[threadIdx.x / 32] = at;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / 32; i++) take(best, at, bests[i], places[i]);
        p.out[blockIdx.x] = at == 0x7fffffff ? 0 : at;
    }
}
KERNELS(argmax, Argmax)
