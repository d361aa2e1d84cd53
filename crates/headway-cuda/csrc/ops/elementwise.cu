// Element by element over rows: sums, products, activations, caps. A thread takes one access's worth.
#include "ops/rows.cuh"
#include "ops/activation.cuh"

struct Elementwise {
    Rows x, y;
    i64 count;  // accesses in all
    int heads, width;
    Activation activation;
    float factor, cap;  // cap 0: none
    int gap;
};

// x[i] = f(x[i], y[i]).
template <int V, bool TWO, class F> __device__ __forceinline__ void each(const Elementwise& p, F f) {
    int per_row = p.width / V;
    for (i64 n = (i64)blockIdx.x * THREADS + threadIdx.x; n < p.count; n += (i64)gridDim.x * THREADS) {
        int row = (int)(n / per_row), i = (int)(n - (i64)row * per_row) * V;
        u8* x = row_at(p.x, row, p.heads);
        float v[V], w[V];
        load<DTYPE, V>(v, x, i);
        if (TWO) load<DTYPE, V>(w, row_at(p.y, row, p.heads), i);
#pragma unroll
        for (int j = 0; j < V; j++) v[j] = f(v[j], TWO ? w[j] : 0.f);
        store<DTYPE, V>(x, i, v);
    }
}

template <int V> __device__ __forceinline__ void add(const Elementwise& p) {
    each<V, true>(p, [](float x, float y) { return x + y; });
}
KERNELS(add, Elementwise)

template <int V> __device__ __forceinline__ void multiply(const Elementwise& p) {
    each<V, true>(p, [](float x, float y) { return x * y; });
}
KERNELS(multiply, Elementwise)

template <int V> __device__ __forceinline__ void assign(const Elementwise& p) {
    each<V, true>(p, [](float, float y) { return y; });
}
KERNELS(assign, Elementwise)

template <int V> __device__ __forceinline__ void times_silu(const Elementwise& p) {
    each<V, true>(p, [](float x, float y) { return x * silu(y); });
}
KERNELS(times_silu, Elementwise)

template <int V> __device__ __forceinline__ void apply(const Elementwise& p) {
    int kind = p.activation.kind;
    each<V, false>(p, [=](float x, float) { return activate(kind, x); });
}
KERNELS(apply, Elementwise)

template <int V> __device__ __forceinline__ void scale_and_cap(const Elementwise& p) {
    float factor = p.factor, cap = p.cap;
    each<V, false>(p, [=](float x, float) { return cap > 0.f ? cap * tanhf(x * factor / cap) : x * factor; });
}
KERNELS(scale_and_cap, Elementwise)
