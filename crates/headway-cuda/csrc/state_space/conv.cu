// The causal convolution over each channel, and what is kept of it: the last TAPS - 1 inputs of every channel, as they
// came. A thread takes V neighbouring channels.
//
// Set from outside: as in `params.cuh`, and CONV, the state's type; TAPS, the width of the convolution.
#include "state_space/params.cuh"

#define BLOCK 256
// Tokens that a warp goes over.
#define RUN (CHUNK / (BLOCK / 32))

template <int V> struct Channels {
    float weight[TAPS][V], bias[V];

    __device__ __forceinline__ Channels(const Params& p, int first) {
#pragma unroll
        for (int k = 0; k < TAPS; k++) load<F32, V>(weight[k], (const u8*)p.conv_weight, k * p.conv_dim + first);
#pragma unroll
        for (int j = 0; j < V; j++) bias[j] = p.conv_bias ? p.conv_bias[first + j] : 0.f;
    }

    // Inputs of a token, the oldest first, to a row of the workspace.
    __device__ __forceinline__ void write(const Params& p, int row, int at, const float (&seen)[TAPS][V]) const {
        float y[V];
#pragma unroll
        for (int j = 0; j < V; j++) {
            y[j] = bias[j];
#pragma unroll
            for (int k = 0; k < TAPS; k++) y[j] = fmaf(weight[k][j], seen[k][j], y[j]);
            // The quotient of the fast kind: 0 where the denominator is past its range, as it should be.
            y[j] = __fdividef(y[j], 1.f + __expf(-y[j]));
        }
        store<ACT, V>(p.rows + row * p.rows_row, at, y);
    }
};

__device__ __forceinline__ u8* conv_state(const Params& p, const Request& r) { return p.cache + r.block * p.block_stride; }

// An input of a request: token `at` of its new ones, or what is kept of those before.
template <int V> __device__ __forceinline__ void input(float (&to)[V], const Params& p, const Request& r, int at, int channel) {
    if (at >= 0) return load<ACT, V>(to, p.x + (r.row + at) * p.x_row, channel);
    if (!r.fresh) return load<CONV, V>(to, conv_state(p, r), (TAPS - 1 + at) * p.conv_dim + channel);
#pragma unroll
    for (int j = 0; j < V; j++) to[j] = 0.f;
}

// Chunks of prefills: a block takes 32 V channels of a chunk. States are left as they are: other blocks read them.
template <int V> __device__ __forceinline__ void chunks(const Params& p) {
    int channel = (blockIdx.x * 32 + threadIdx.x % 32) * V;
    if (channel >= p.conv_dim) return;
    Chunk c = p.chunks[blockIdx.y];
    int begin = threadIdx.x / 32 * RUN, end = min(begin + RUN, c.len);
    if (begin >= end) return;
    Request r = p.requests[c.request];
    Channels<V> channels(p, channel);
    int at = place(p, channel);
    float seen[TAPS][V];
#pragma unroll
    for (int k = 1; k < TAPS; k++) input<V>(seen[k], p, r, c.first + begin + k - TAPS, channel);
#pragma unroll 4
    for (int t = begin; t < end; t++) {
#pragma unroll
        for (int k = 1; k < TAPS; k++)
#pragma unroll
            for (int j = 0; j < V; j++) seen[k - 1][j] = seen[k][j];
        load<ACT, V>(seen[TAPS - 1], p.x + (c.row + t) * p.x_row, channel);
        channels.write(p, c.row + t, at, seen);
    }
}

// The states of prefills, after their chunks. A state is shorter than what follows it, so it is written in order.
template <int V> __device__ __forceinline__ void keep(const Params& p) {
    int channel = (blockIdx.x * BLOCK + threadIdx.x) * V;
    if (channel >= p.conv_dim) return;
    Request r = p.requests[p.first_request + blockIdx.y];
    if (r.block == 0 || r.len == 0) return;
    float x[V];
    for (int k = 0; k < TAPS - 1; k++) {
        input<V>(x, p, r, r.len - (TAPS - 1) + k, channel);
        store<CONV, V>(conv_state(p, r), k * p.conv_dim + channel, x);
    }
}

// One token each of requests: output and state.
template <int V> __device__ __forceinline__ void token(const Params& p) {
    int wide = p.conv_dim / V, i = blockIdx.x * BLOCK + threadIdx.x, index = i / wide;
    if (index >= p.count) return;
    Request r = p.requests[p.first_request + index];
    if (r.block == 0 || r.len == 0) return;
    int channel = (i - index * wide) * V;
    Channels<V> channels(p, channel);
    float seen[TAPS][V];
#pragma unroll
    for (int k = 0; k < TAPS; k++) input<V>(seen[k], p, r, k - (TAPS - 1), channel);
    channels.write(p, r.row, place(p, channel), seen);
#pragma unroll
    for (int k = 1; k < TAPS; k++) store<CONV, V>(conv_state(p, r), (k - 1) * p.conv_dim + channel, seen[k]);
}

#define FORMS(name)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) conv_##name##_wide(const __grid_constant__ Params p) {       \
        name<4>(p);                                                                                                  \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) conv_##name##_single(const __grid_constant__ Params p) {     \
        name<1>(p);                                                                                                  \
    }
FORMS(chunks)
FORMS(keep)
FORMS(token)
