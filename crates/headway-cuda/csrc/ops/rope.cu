// Rotary positions, in place. A thread takes the pairs of one access (two, where a pair's halves lie apart).
#include "ops/rows.cuh"

struct Rope {
    Rows x;
    const int* positions;
    const float* table;  // [positions, half, 2]: cosine, sine
    Fault* fault;
    i64 count;  // threads in all
    int heads, half, end, what;
};

// Element i with element i + half.
template <int V> __device__ __forceinline__ void halves(const Rope& p) {
    int per_head = p.half / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_head), i = (int)(n - (i64)row * per_head) * V;
        int position = p.positions[row / p.heads];
        if ((u32)position >= (u32)p.end) {
            report(p.fault, p.what, position);
            continue;
        }
        u8* x = row_at(p.x, row, p.heads);
        float a[V], b[V], t[2 * V];
        load<DTYPE, V>(a, x, i);
        load<DTYPE, V>(b, x, p.half + i);
        load<F32, 2 * V>(t, (const u8*)(p.table + ((i64)position * p.half + i) * 2), 0);
#pragma unroll
        for (int j = 0; j < V; j++) {
            float c = t[2 * j], s = t[2 * j + 1], u = a[j], v = b[j];
            a[j] = u * c - v * s;
            b[j] = v * c + u * s;
        }
        store<DTYPE, V>(x, i, a);
        store<DTYPE, V>(x, p.half + i, b);
    }
}
KERNELS(halves, Rope)

// Element 2i with element 2i + 1.
template <int V> __device__ __forceinline__ void pairs(const Rope& p) {
    constexpr int W = V < 2 ? 1 : V / 2;  // pairs of a thread
    int per_head = p.half / W;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_head), i = (int)(n - (i64)row * per_head) * W;
        int position = p.positions[row / p.heads];
        if ((u32)position >= (u32)p.end) {
            report(p.fault, p.what, position);
            continue;
        }
        u8* x = row_at(p.x, row, p.heads);
        float v[2 * W], t[2 * W];
        if (V < 2) {
            float one[1];
            load<DTYPE, 1>(one, x, 2 * i);
            v[0] = one[0];
            load<DTYPE, 1>(one, x, 2 * i + 1);
            v[1] = one[0];
        } else load<DTYPE, 2 * W>(v, x, 2 * i);
        load<F32, 2 * W>(t, (const u8*)(p.table + ((i64)position * p.half + i) * 2), 0);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float c = t[2 * j], s = t[2 * j + 1], a = v[2 * j], b = v[2 * j + 1];
            v[2 * j] = a * c - b * s;
            v[2 * j + 1] = b * c + a * s;
        }
        if (V < 2) {
            float one[1] = {v[0]}, two[1] = {v[1]};
            store<DTYPE, 1>(x, 2 * i, one);
            store<DTYPE, 1>(x, 2 * i + 1, two);
        } else store<DTYPE, 2 * W>(x, 2 * i, v);
    }
}
KERNELS(pairs, Rope)
