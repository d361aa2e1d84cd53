// Rows of activations: [tokens, heads, width] with contiguous rows, numbered heads first. Mirrored in
// `src/kernels/rows.rs`.
//
// Set from outside: DTYPE, the elements' type (BF16, F16 or F32).
#pragma once
#include "common/types.cuh"

#define THREADS 256

// Elements that one 16-byte access takes.
template <int T> struct Lanes { static constexpr int value = 16 / (int)sizeof(typename Wide<T>::store); };
#define WIDE (Lanes<DTYPE>::value)

struct Rows {
    u8* at;
    i64 row, head;  // strides, bytes
};

__device__ __forceinline__ u8* row_at(const Rows& r, int i, int heads) {
    int token = i / heads;
    return r.at + token * r.row + (i - token * heads) * r.head;
}

// N bytes at once, or in 16-byte pieces.
template <int N> struct Bytes { uint4 v[N / 16]; };
template <> struct Bytes<8> { uint2 v; };
template <> struct Bytes<4> { u32 v; };
template <> struct Bytes<2> { u16 v; };
template <> struct Bytes<1> { u8 v; };

// V elements of type T from index i of a row, as float32.
template <int T, int V> __device__ __forceinline__ void load(float (&to)[V], const u8* row, int i) {
    typedef typename Wide<T>::store store;
    constexpr int N = V * (int)sizeof(store);
    Bytes<N> raw = *(const Bytes<N>*)(row + i * (i64)sizeof(store));
    const store* e = (const store*)&raw;
#pragma unroll
    for (int j = 0; j < V; j++) to[j] = Wide<T>::up(e[j]);
}

template <int T, int V> __device__ __forceinline__ void store(u8* row, int i, const float (&from)[V]) {
    typedef typename Wide<T>::store elem;
    constexpr int N = V * (int)sizeof(elem);
    Bytes<N> raw;
    elem* e = (elem*)&raw;
#pragma unroll
    for (int j = 0; j < V; j++) e[j] = Wide<T>::down(from[j]);
    *(Bytes<N>*)(row + i * (i64)sizeof(elem)) = raw;
}

// The first thing that was wrong on the device, in memory of the host: what, and the value that was out of range.
struct Fault { int what, value; };

__device__ __forceinline__ void report(Fault* fault, int what, int value) {
    fault->value = value;
    __threadfence_system();
    fault->what = what;
}

// One kernel for rows whose places and width allow 16-byte accesses, one for all others.
#define KERNELS(name, Params)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_wide(const __grid_constant__ Params p) {           \
        name<WIDE>(p);                                                                                              \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_single(const __grid_constant__ Params p) {         \
        name<1>(p);                                                                                                 \
    }
