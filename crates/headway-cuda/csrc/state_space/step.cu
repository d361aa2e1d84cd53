// Single steps of the state: S = exp(dt A) S + dt x (x) B, y = S C + D x. A block takes ROWS elements of a head of one
// request, and holds their states in registers over the request's tokens. Sums are float32, in an order that no other
// request changes; the state is rounded to its type after each token, so that it is the same in how many steps ever.
//
// Set from outside: as in `params.cuh`, and SSM, the state's type.
#include "state_space/params.cuh"

#define BLOCK 256
// Elements of a head that a block takes.
#define ROWS 32

constexpr int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p < 32 ? p : 32;
}

template <int V> __device__ __forceinline__ void step(const Params& p) {
    constexpr int LANES = power_of_two((STATE + V - 1) / V);  // that share a row of the state
    constexpr int PARTS = (STATE + LANES * V - 1) / (LANES * V);
    constexpr int AT_ONCE = BLOCK / LANES;                    // rows
    constexpr int EACH = (ROWS + AT_ONCE - 1) / AT_ONCE;      // rows of a thread
    int head = blockIdx.x, row0 = blockIdx.z * ROWS, lane = threadIdx.x % LANES;
    Request r = p.requests[p.first_request + blockIdx.y];
    typedef Wide<ACT>::store act;
    act* out = (act*)(p.out + r.row * p.out_row) + head * HEAD;
    if (r.block == 0) {
        for (int t = 0; t < r.len; t++, out = (act*)((u8*)out + p.out_row))
            if (threadIdx.x < ROWS && row0 + threadIdx.x < HEAD) out[row0 + threadIdx.x] = 0;
        return;
    }
    u8* state = p.cache + r.block * p.block_stride + p.ssm_offset +
                (i64)head * HEAD * STATE * (int)sizeof(typename Wide<SSM>::store);
    float s[EACH][PARTS][V];
    int mine[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int in_block = threadIdx.x / LANES + e * AT_ONCE;
        mine[e] = in_block < ROWS ? row0 + in_block : HEAD;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int n = (i * LANES + lane) * V;
            bool live = !r.fresh && mine[e] < HEAD && n < STATE;
            if (live) load<SSM, V>(s[e][i], state, mine[e] * STATE + n);
            else
#pragma unroll
                for (int j = 0; j < V; j++) s[e][i][j] = 0.f;
        }
    }
    float a = p.a[head], d = p.d[head];
    int b_at = p.heads * HEAD_WIDE + head / p.heads_per_group * STATE_WIDE;
    int c_at = b_at + p.heads / p.heads_per_group * STATE_WIDE;
    for (int t = 0; t < r.len; t++, out = (act*)((u8*)out + p.out_row)) {
        const u8* row = p.rows + (r.row + t) * p.rows_row;
        float dt = step_length(p, r.row + t, head), decay = expf(dt * a);
        float b[PARTS][V], c[PARTS][V], x[EACH], y[EACH];
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int n = (i * LANES + lane) * V;
            if (n < STATE) {
                load<ACT, V>(b[i], row, b_at + n);
                load<ACT, V>(c[i], row, c_at + n);
            } else
#pragma unroll
                for (int j = 0; j < V; j++) b[i][j] = c[i][j] = 0.f;
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            x[e] = mine[e] < HEAD ? Wide<ACT>::up(((const act*)row)[head * HEAD_WIDE + mine[e]]) : 0.f;
            float dx = dt * x[e];
            y[e] = 0.f;
#pragma unroll
            for (int i = 0; i < PARTS; i++)
#pragma unroll
                for (int j = 0; j < V; j++) {
                    float now = fmaf(s[e][i][j], decay, dx * b[i][j]);
                    y[e] = fmaf(now, c[i][j], y[e]);
                    s[e][i][j] = Wide<SSM>::up(Wide<SSM>::down(now));
                }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
            for (int m = LANES / 2; m; m /= 2) y[e] += __shfl_xor_sync(~0u, y[e], m);
            if (lane == 0 && mine[e] < HEAD) out[mine[e]] = Wide<ACT>::down(fmaf(d, x[e], y[e]));
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int n = (i * LANES + lane) * V;
            if (mine[e] < HEAD && n < STATE) store<SSM, V>(state, mine[e] * STATE + n, s[e][i]);
        }
}

#define WIDE_STATE (16 / (int)sizeof(typename Wide<SSM>::store))

extern "C" __global__ void __launch_bounds__(BLOCK) step_wide(const __grid_constant__ Params p) { step<WIDE_STATE>(p); }
extern "C" __global__ void __launch_bounds__(BLOCK) step_single(const __grid_constant__ Params p) { step<1>(p); }
