// Norms over rows: root mean square (plain, after an addition, beside a gate) and layer norm. A row is taken by a warp,
// or by a block where it is long; sums are in float32 and in an order that the width alone decides.
#include "ops/rows.cuh"
#include "ops/activation.cuh"

struct Norm {
    Rows x, y, out;  // y: what is added, or the gate
    const float* weight;
    const float* bias;
    int count, heads, width;
    int block;        // a block takes a row; else each of its warps does
    int weight_head;  // from a head's weights to the next one's: 0 where they share them
    float eps;
};

struct Place {
    int row, first, step;
};

__device__ __forceinline__ Place place(const Norm& p) {
    if (p.block) return {(int)blockIdx.x, (int)threadIdx.x, THREADS};
    return {(int)(blockIdx.x * (THREADS / 32) + threadIdx.x / 32), (int)(threadIdx.x % 32), 32};
}

// The sum over a row's threads, the same in all of them.
__device__ __forceinline__ float sum(float x, int block) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    if (!block) return x;
    __shared__ float parts[THREADS / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) x += parts[i];
    return x;
}

template <int V> __device__ __forceinline__ void scaled(float (&x)[V], float by, const float* weight, int i) {
    float w[V];
    load<F32, V>(w, (const u8*)weight, i);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] = x[j] * by * w[j];
}

template <int V> __device__ __forceinline__ float squares(const float (&x)[V]) {
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < V; j++) s += x[j] * x[j];
    return s;
}

template <int V> __device__ __forceinline__ void rms_norm(const Norm& p) {
    Place at = place(p);
    if (at.row >= p.count) return;
    const u8* x = row_at(p.x, at.row, p.heads);
    u8* out = row_at(p.out, at.row, p.heads);
    float s = 0.f, v[V];
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        s += squares(v);
    }
    float by = rsqrtf(sum(s, p.block) / p.width + p.eps);
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        scaled<V>(v, by, p.weight, i);
        store<DTYPE, V>(out, i, v);
    }
}
KERNELS(rms_norm, Norm)

// x += y, rounded to its type, then the norm of that.
template <int V> __device__ __forceinline__ void add_rms_norm(const Norm& p) {
    Place at = place(p);
    if (at.row >= p.count) return;
    u8* x = row_at(p.x, at.row, p.heads);
    const u8* y = row_at(p.y, at.row, p.heads);
    u8* out = row_at(p.out, at.row, p.heads);
    float s = 0.f, v[V], w[V];
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        load<DTYPE, V>(w, y, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] += w[j];
        store<DTYPE, V>(x, i, v);
        load<DTYPE, V>(v, x, i);
        s += squares(v);
    }
    float by = rsqrtf(sum(s, p.block) / p.width + p.eps);
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        scaled<V>(v, by, p.weight, i);
        store<DTYPE, V>(out, i, v);
    }
}
KERNELS(add_rms_norm, Norm)

// x to mean 0 and variance 1, times weight plus bias, in place.
template <int V> __device__ __forceinline__ void layer_norm(const Norm& p) {
    Place at = place(p);
    if (at.row >= p.count) return;
    u8* x = row_at(p.x, at.row, p.heads);
    float s = 0.f, v[V], b[V];
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
#pragma unroll
        for (int j = 0; j < V; j++) s += v[j];
    }
    float mean = sum(s, p.block) / p.width;
    s = 0.f;
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] -= mean;
        s += squares(v);
    }
    float by = rsqrtf(sum(s, p.block) / p.width + p.eps);
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        load<F32, V>(b, (const u8*)p.bias, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] -= mean;
        scaled<V>(v, by, p.weight, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] += b[j];
        store<DTYPE, V>(x, i, v);
    }
}
KERNELS(layer_norm, Norm)

// x = norm(x silu(gate)), or norm(x) silu(gate), over each part of a row, in place.
template <int V, bool NORM_FIRST> __device__ __forceinline__ void gated_norm(const Norm& p) {
    Place at = place(p);
    if (at.row >= p.count) return;
    u8* x = row_at(p.x, at.row, p.heads);
    const u8* gate = row_at(p.y, at.row, p.heads);
    const float* weight = p.weight + (at.row % p.heads) * p.weight_head;
    float s = 0.f, v[V], g[V];
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        load<DTYPE, V>(g, gate, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] *= NORM_FIRST ? 1.f : silu(g[j]);
        s += squares(v);
    }
    float by = rsqrtf(sum(s, p.block) / p.width + p.eps);
    for (int i = at.first * V; i < p.width; i += at.step * V) {
        load<DTYPE, V>(v, x, i);
        load<DTYPE, V>(g, gate, i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] *= silu(g[j]);
        scaled<V>(v, by, weight, i);
        store<DTYPE, V>(x, i, v);
    }
}
template <int V> __device__ __forceinline__ void norm_then_gate(const Norm& p) { gated_norm<V, true>(p); }
template <int V> __device__ __forceinline__ void gate_then_norm(const Norm& p) { gated_norm<V, false>(p); }
KERNELS(norm_then_gate, Norm)
KERNELS(gate_then_norm, Norm)
