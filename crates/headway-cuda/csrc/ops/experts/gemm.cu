// Rows sorted by expert times each expert's matrix, on tensor cores: gate and up with the activation between them, or
// down. A block has a tile of ROWS rows of one expert and 64 rows of its matrix. A sum runs over the inner dimension in
// one order whatever the tile's size, so a row's result is the same among any others. Blocks beyond the last tile, whose
// number only the device knows, do nothing.
//
// Set from outside: DTYPE, the type of rows and matrices (BF16 or F16).
#include "common/mma.cuh"
#include "ops/activation.cuh"

#define BLOCK 128
#define COLS 64    // rows of the matrix
#define INNER 64   // elements of the inner dimension a stage
#define STAGES 4
#define ROW_BYTES (INNER * 2)

struct Experts {
    const u8* x;           // rows
    i64 row;               // their stride, bytes
    const int* rows;       // the row of each slot; null: slot itself
    const int* offsets;    // [experts + 1]: an expert's slots
    const u16* matrices;   // [experts, all_cols, inner]
    const float* bias;     // [experts, all_cols], or null
    u8* out;               // [slots, cols]: of DTYPE after the activation, else float32
    int experts, inner;
    int cols;        // of the output
    int col_blocks;  // blocks side by side
    Activation activation;
    int gap;
};

__device__ __forceinline__ u32 place(u32 tile, int row, int chunk) {
    return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

struct Tile { int expert, first, end; };  // slots

// Tile number n: experts have as many tiles as their rows need. Every warp looks for itself.
template <int ROWS> __device__ __forceinline__ Tile find(const Experts& p, int n) {
    int lane = threadIdx.x % 32, before = 0;
    for (int e0 = 0; e0 < p.experts; e0 += 32) {
        int e = e0 + lane, begin = 0, end = 0;
        if (e < p.experts) begin = p.offsets[e], end = p.offsets[e + 1];
        int own = (end - begin + ROWS - 1) / ROWS, all = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, all, d);
            if (lane >= d) all += other;
        }
        int mine = n - before - (all - own);
        u32 found = __ballot_sync(~0u, mine >= 0 && mine < own);
        if (found) {
            int from = __ffs(found) - 1;
            mine = __shfl_sync(~0u, mine, from);
            begin = __shfl_sync(~0u, begin, from);
            end = __shfl_sync(~0u, end, from);
            return {e0 + from, begin + mine * ROWS, end};
        }
        before += __shfl_sync(~0u, all, 31);
    }
    return {-1, 0, 0};
}

// A thread's share of a tile of rows: one 16-byte chunk each of N rows, 16 apart.
template <int N, bool ALIGNED> struct Source {
    const u8* at[N];  // null: zeros

    __device__ __forceinline__ void load(u32 tile, int k, int inner, const void* any) const {
        int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        k += chunk * 8;
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 to = place(tile, row + j * (BLOCK / 8), chunk);
            if (ALIGNED) {
                bool live = at[j] && k < inner;
                copy_async_or_zero<16>(to, live ? at[j] + k * 2 : (const u8*)any, live);
            } else {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u16* e = (const u16*)at[j] + k + 2 * i;
                    u32 lo = at[j] && k + 2 * i < inner ? e[0] : 0, hi = at[j] && k + 2 * i + 1 < inner ? e[1] : 0;
                    v[i] = hi << 16 | lo;
                }
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]),
                             "r"(v[3]) : "memory");
            }
        }
    }
};

// Once in the code: inlined for every sum of a thread, it takes most of the compiler's time.
static __device__ __noinline__ float between(Activation a, float gate, float up) { return gated(a, gate, up); }

template <int ROWS, bool GATED, bool ALIGNED> __device__ __forceinline__ void product(const Experts& p) {
    constexpr int DOWN = ROWS == 64 ? 2 : 1, ACROSS = 4 / DOWN;  // warps
    constexpr int M = ROWS / 16 / DOWN, N = COLS / 8 / ACROSS;   // a warp's tiles of the product
    constexpr int OUT_COLS = GATED ? COLS / 2 : COLS;
    constexpr u32 STAGE = (ROWS + COLS) * ROW_BYTES;
    extern __shared__ uint4 shared[];
    int col0 = (int)(blockIdx.x % p.col_blocks) * OUT_COLS;
    Tile t = find<ROWS>(p, (int)(blockIdx.x / p.col_blocks));
    if (t.expert < 0) return;

    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    Source<ROWS * 8 / BLOCK, ALIGNED> a;
    Source<COLS * 8 / BLOCK, ALIGNED> b;
#pragma unroll
    for (int j = 0; j < ROWS * 8 / BLOCK; j++) {
        int slot = t.first + thread / 8 + j * (BLOCK / 8);
        a.at[j] = slot < t.end ? p.x + (i64)(p.rows ? p.rows[slot] : slot) * p.row : nullptr;
    }
    int all_cols = GATED ? 2 * p.cols : p.cols;
    const u16* matrix = p.matrices + (i64)t.expert * all_cols * p.inner;
#pragma unroll
    for (int j = 0; j < COLS * 8 / BLOCK; j++) {
        int r = thread / 8 + j * (BLOCK / 8), col, row;
        // Eight rows of gate, then the eight of up that belong to them: a thread has both in its sums.
        if (GATED) col = col0 + r / 16 * 8 + r % 8, row = col + (r / 8 % 2) * p.cols;
        else row = col = col0 + r;
        b.at[j] = col < p.cols ? (const u8*)(matrix + (i64)row * p.inner) : nullptr;
    }

    u32 base = shared_address(shared);
    int steps = (p.inner + INNER - 1) / INNER;
    auto fetch = [&](int step) {
        if (step < steps) {
            u32 to = base + step % STAGES * STAGE;
            a.load(to, step * INNER, p.inner, p.matrices);
            b.load(to + ROWS * ROW_BYTES, step * INNER, p.inner, p.matrices);
        }
        copy_commit();
    };
    float c[M][N][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0.f;
    int row0 = warp / ACROSS * (M * 16), tile0 = warp % ACROSS * N;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        fetch(step + STAGES - 1);
        u32 rows = base + step % STAGES * STAGE, cols = rows + ROWS * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < INNER / 16; k++) {
            u32 x[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
                load_matrices(x[m], place(rows, row0 + m * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 w[4];
                load_matrices(w, place(cols, (tile0 + n) * 8 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<DTYPE>(c[m][n], x[m], w[0], w[1]);
                    mma<DTYPE>(c[m][n + 1], x[m], w[2], w[3]);
                }
            }
        }
    }

    const float* bias = p.bias ? p.bias + (i64)t.expert * all_cols : nullptr;
    typedef Wide<DTYPE> Type;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n += GATED ? 2 : 1)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int slot = t.first + row0 + m * 16 + lane / 4 + i / 2 * 8;
                int col = col0 + (GATED ? (tile0 + n) / 2 : tile0 + n) * 8 + lane % 4 * 2 + i % 2;
                if (slot >= t.end || col >= p.cols) continue;
                float y = c[m][n][i];
                if (bias) y += bias[col];
                i64 to = (i64)slot * p.cols + col;
                if constexpr (GATED) {
                    float up = c[m][n + 1][i];
                    if (bias) up += bias[p.cols + col];
                    ((u16*)p.out)[to] = Type::down(between(p.activation, y, up));
                } else ((float*)p.out)[to] = y;
            }
}

#define PRODUCTS(name, rows, gated)                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) name##_wide(const __grid_constant__ Experts p) {             \
        product<rows, gated, true>(p);                                                                               \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) name##_single(const __grid_constant__ Experts p) {           \
        product<rows, gated, false>(p);                                                                              \
    }
PRODUCTS(gate_up_few, 16, true)
PRODUCTS(gate_up_many, 64, true)
PRODUCTS(down_few, 16, false)
PRODUCTS(down_many, 64, false)
