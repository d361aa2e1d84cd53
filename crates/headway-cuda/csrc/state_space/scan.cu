// The scan of prefills in chunks (state-space duality: Dao and Gu, 2024, arXiv 2405.21060). With a_t the sum of dt A up
// to token t of a chunk, S the state before it:
//     Y = (C B^T o exp(a_i - a_t) dt_t, t <= i) X + exp(a_i) C S^T + D X
//     S = exp(a_last) S + (X o dt_t exp(a_last - a_t))^T B
// A block takes TILE elements of a head and goes over the chunks of a segment; the state stays in its threads' registers.
// Requests long enough to leave the device idle so are cut into segments: `scan_states` finds what each segment adds to
// the state, and `scan_rows` begins each segment with the sum of those before it. Products take 16-bit elements on tensor
// cores with sums in float32; the state is float32 from the request's first chunk to its last.
//
// Set from outside: as in `params.cuh`, SSM, the state's type in the cache, and STAGES, the chunks in shared memory: with 2 one is
// loaded while another is multiplied, with 1 the two take turns.
#include "state_space/params.cuh"

// Warps that multiply, and their threads; one more loads what they multiply next.
#define WARPS 4
#define BLOCK (32 * WARPS)
#define THREADS_ALL (BLOCK + 32)
// Elements of a head: as many as make a state of 64 registers a thread.
#define TILE (HEAD_WIDE <= 16 || STATE_WIDE > 256 ? 16 : HEAD_WIDE <= 32 || STATE_WIDE > 128 ? 32 : 64)
#define TILES ((HEAD_WIDE + TILE - 1) / TILE)
// Warps that share a row of the state, and 16-element parts of it that each takes.
#define SHARES (WARPS / (TILE / 16))
#define PARTS ((STATE_WIDE / 16 + SHARES - 1) / SHARES)
// Elements from one row to the next in shared memory: eight rows begin in different banks.
#define STATE_ROW (STATE_WIDE + 8)
#define TILE_ROW (TILE + 8)

typedef Wide<ACT>::store act;

struct Stage {
    act c[CHUNK][STATE_ROW], b[CHUNK][STATE_ROW], x[CHUNK][TILE_ROW];
    float a[CHUNK];       // a_t, in powers of two
    float dt[CHUNK];
    float weight[CHUNK];  // dt_t exp(a_last - a_t)
};
struct Shared {
    Stage stage[STAGES];
    act s[TILE][STATE_ROW];
};

// What a thread holds of the state: of each 16-element part two accumulators of an m16n8k16 product.
struct State {
    float v[PARTS][2][4];
};

// Element e of an accumulator of warp w: its row in the tile, and its column.
__device__ __forceinline__ int state_row(int e) {
    return threadIdx.x / 32 % (TILE / 16) * 16 + threadIdx.x % 32 / 4 + (e / 2) * 8;
}
__device__ __forceinline__ int part_of(int i) { return threadIdx.x / 32 / (TILE / 16) * PARTS + i; }
__device__ __forceinline__ int state_col(int i, int half) { return part_of(i) * 16 + half * 8 + threadIdx.x % 4 * 2; }

template <class F> __device__ __forceinline__ void each_pair(State& s, F f) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        if (part_of(i) < STATE_WIDE / 16)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 4; e += 2) f(s.v[i][half][e], s.v[i][half][e + 1], state_row(e), state_col(i, half));
}

struct Work {
    Request request;
    Segment segment;
    int head, tile;
    u8* state;  // the head's, in the cache

    __device__ __forceinline__ Work(const Params& p)
        : segment(p.segments[blockIdx.y]), head(blockIdx.x / TILES), tile(blockIdx.x % TILES) {
        request = p.requests[segment.request];
        state = p.cache + request.block * p.block_stride + p.ssm_offset +
                (i64)head * HEAD * STATE * (int)sizeof(typename Wide<SSM>::store);
    }
    __device__ __forceinline__ float4* part(const Params& p, int of_segment) const {
        i64 n = ((i64)(segment.slot + of_segment) * p.heads + head) * TILES + tile;
        return p.parts + n * (PARTS * 2 * BLOCK) + threadIdx.x;
    }
    __device__ __forceinline__ float& decay(const Params& p, int of_segment) const {
        return p.decays[(segment.slot + of_segment) * p.heads + head];
    }
};

__device__ __forceinline__ void zero(State& s) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) s.v[i][half][e] = 0.f;
}

__device__ __forceinline__ void from_cache(State& s, const Params& p, const Work& w) {
    if (w.request.fresh) return;
    each_pair(s, [&](float& lo, float& hi, int row, int col) {
        row += w.tile * TILE;
        if (row >= HEAD || col >= STATE) return;
        int at = row * STATE + col;
        if (p.pairs) {
            float both[2];
            load<SSM, 2>(both, w.state, at);
            lo = both[0], hi = both[1];
            return;
        }
        float one[1];
        load<SSM, 1>(one, w.state, at);
        lo = one[0];
        if (col + 1 < STATE) load<SSM, 1>(one, w.state, at + 1), hi = one[0];
    });
}

__device__ __forceinline__ void to_cache(State& s, const Params& p, const Work& w) {
    each_pair(s, [&](float& lo, float& hi, int row, int col) {
        row += w.tile * TILE;
        if (row >= HEAD || col >= STATE) return;
        int at = row * STATE + col;
        float both[2] = {lo, hi};
        if (p.pairs) return store<SSM, 2>(w.state, at, both);
        float one[1] = {lo};
        store<SSM, 1>(w.state, at, one);
        one[0] = hi;
        if (col + 1 < STATE) store<SSM, 1>(w.state, at + 1, one);
    });
}

__device__ __forceinline__ void to_part(const State& s, float4* to) {
#pragma unroll
    for (int i = 0; i < PARTS * 2; i++) {
        const float* v = s.v[i / 2][i % 2];
        to[i * BLOCK] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

// s = s by + a part.
__device__ __forceinline__ void add_part(State& s, float by, const float4* from) {
#pragma unroll
    for (int i = 0; i < PARTS * 2; i++) {
        float4 x = from[i * BLOCK];
        float* v = s.v[i / 2][i % 2];
        v[0] = fmaf(v[0], by, x.x), v[1] = fmaf(v[1], by, x.y);
        v[2] = fmaf(v[2], by, x.z), v[3] = fmaf(v[3], by, x.w);
    }
}

// Rows of a chunk from the workspace, by one warp; past its end zeros.
template <int COLS, int ROW>
__device__ __forceinline__ void rows_in(act (&to)[CHUNK][ROW], const Params& p, const Chunk& c, int at, int cols) {
    // The last round may be past the end, where accesses of a row don't divide the lanes.
    constexpr int EACH = COLS / 8, ROWS = 32 / EACH, ROUNDS = (CHUNK + ROWS - 1) / ROWS;
    int lane = threadIdx.x % 32, first = lane / EACH, col = lane % EACH * 8;
    if (first >= ROWS) return;
    int len = col < cols ? c.len : 0;
    const u8* from = p.rows + (i64)(c.row + first) * p.rows_row + (at + (col < cols ? col : 0)) * (int)sizeof(act);
    i64 step = ROWS * p.rows_row;
    u32 into = shared_address(&to[first][col]);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int t = first + i * ROWS;
        if (CHUNK % ROWS && t >= CHUNK) break;
        copy_async_or_zero<16>(into + i * ROWS * ROW * (int)sizeof(act), t < len ? from : p.rows, t < len);
        from += step;
    }
}

// The chunk's steps, by one warp; two tokens a lane.
__device__ __forceinline__ void steps_in(Stage& m, const Params& p, const Chunk& c, int head) {
    int lane = threadIdx.x % 32, t = lane * 2;
    float dt[2], a = p.a[head] * LOG2E;
    dt[0] = t < c.len ? step_length(p, c.row + t, head) : 0.f;
    dt[1] = t + 1 < c.len ? step_length(p, c.row + t + 1, head) : 0.f;
    float before = 0.f, both = (dt[0] + dt[1]) * a, sum = both;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        before = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += before;
    }
    float all = __shfl_sync(~0u, sum, 31);
    before = sum - both;
    float first = before + dt[0] * a;
    m.dt[t] = dt[0], m.dt[t + 1] = dt[1];
    m.a[t] = first, m.a[t + 1] = sum;
    m.weight[t] = dt[0] * exp2_fast(all - first);
    m.weight[t + 1] = dt[1] * exp2_fast(all - sum);
}

// Places of a lane's row in four 8x8 matrices: [rows, k] as an operand by rows; [k, columns] and [columns, k] as one by
// columns.
template <int ROW> __device__ __forceinline__ u32 by_rows(const act (*m)[ROW], int row, int k) {
    int l = threadIdx.x % 32;
    return shared_address(&m[row + l % 16][k + l / 16 * 8]);
}
template <int ROW> __device__ __forceinline__ u32 by_cols(const act (*m)[ROW], int col, int k) {
    int l = threadIdx.x % 32;
    return shared_address(&m[col + l % 8 + l / 16 * 8][k + l / 8 % 2 * 8]);
}
template <int ROW> __device__ __forceinline__ u32 turned(const act (*m)[ROW], int k, int col) {
    int l = threadIdx.x % 32;
    return shared_address(&m[k + l % 16][col + l / 16 * 8]);
}
template <int ROW> __device__ __forceinline__ u32 turned_rows(const act (*m)[ROW], int k, int row) {
    int l = threadIdx.x % 32;
    return shared_address(&m[k + l % 8 + l / 16 * 8][row + l / 8 % 2 * 8]);
}

__device__ __forceinline__ u32 scaled(u32 pair, float lo, float hi) {
    return Wide<ACT>::pack(Wide<ACT>::up((act)pair) * lo, Wide<ACT>::up((act)(pair >> 16)) * hi);
}

// The state after a chunk.
__device__ __forceinline__ void advance(State& s, const Stage& m) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % (TILE / 16) * 16;
    float left = exp2_fast(m.a[CHUNK - 1]);
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) s.v[i][half][e] *= left;
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        u32 x[4], b[4];
        load_matrices_transposed(x, turned_rows(m.x, k, row));
        float2 w0 = *(const float2*)&m.weight[k + lane % 4 * 2], w1 = *(const float2*)&m.weight[k + lane % 4 * 2 + 8];
        x[0] = scaled(x[0], w0.x, w0.y), x[1] = scaled(x[1], w0.x, w0.y);
        x[2] = scaled(x[2], w1.x, w1.y), x[3] = scaled(x[3], w1.x, w1.y);
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            if (part_of(i) < STATE_WIDE / 16) {
                load_matrices_transposed(b, turned(m.b, k, part_of(i) * 16));
                mma<ACT>(s.v[i][0], x, b[0], b[1]);
                mma<ACT>(s.v[i][1], x, b[2], b[3]);
            }
    }
}

// A chunk's outputs; a warp takes 16 tokens.
__device__ __forceinline__ void rows_out(const Stage& m, const act (&state)[TILE][STATE_ROW], const Params& p, const Chunk& c, const Work& w, bool empty) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp * 16;
    if (row >= c.len) return;
    int mine[2] = {row + lane / 4, row + lane / 4 + 8};
    float a[2] = {m.a[mine[0]], m.a[mine[1]]};
    float y[TILE / 8][4] = {};
    u32 cs[STATE_WIDE / 16][4], o[4];
#pragma unroll
    for (int k = 0; k < STATE_WIDE / 16; k++) load_matrices(cs[k], by_rows(m.c, row, k * 16));
    if (!empty) {
#pragma unroll
        for (int k = 0; k < STATE_WIDE / 16; k++)
#pragma unroll
            for (int j = 0; j < TILE / 16; j++) {
                load_matrices(o, by_cols(state, j * 16, k * 16));
                mma<ACT>(y[2 * j], cs[k], o[0], o[1]);
                mma<ACT>(y[2 * j + 1], cs[k], o[2], o[3]);
            }
        float e0 = exp2_fast(a[0]), e1 = exp2_fast(a[1]);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) y[j][0] *= e0, y[j][1] *= e0, y[j][2] *= e1, y[j][3] *= e1;
    }
    for (int t0 = 0; t0 <= row; t0 += 16) {
        // Two sums each: products wait for the sum that they go on with.
        float cb[2][4] = {}, odd[2][4] = {};
#pragma unroll
        for (int k = 0; k < STATE_WIDE / 16; k++) {
            load_matrices(o, by_cols(m.b, t0, k * 16));
            mma<ACT>(k % 2 ? odd[0] : cb[0], cs[k], o[0], o[1]);
            mma<ACT>(k % 2 ? odd[1] : cb[1], cs[k], o[2], o[3]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) cb[e / 4][e % 4] += odd[e / 4][e % 4];
        u32 g[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = t0 + half * 8 + lane % 4 * 2;
            float2 at = *(const float2*)&m.a[t], dt = *(const float2*)&m.dt[t];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // The later of the two exponents would be positive, and infinite at worst: it is not taken.
                float lo = t <= mine[r] ? cb[half][2 * r] * exp2_fast(a[r] - at.x) * dt.x : 0.f;
                float hi = t + 1 <= mine[r] ? cb[half][2 * r + 1] * exp2_fast(a[r] - at.y) * dt.y : 0.f;
                g[half * 2 + r] = Wide<ACT>::pack(lo, hi);
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            load_matrices_transposed(o, turned(m.x, t0, j * 16));
            mma<ACT>(y[2 * j], g, o[0], o[1]);
            mma<ACT>(y[2 * j + 1], g, o[2], o[3]);
        }
    }
    float d = p.d[w.head];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (mine[r] >= c.len) continue;
        act* out = (act*)(p.out + (c.row + mine[r]) * p.out_row) + w.head * HEAD;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            int col = j * 8 + lane % 4 * 2, at = w.tile * TILE + col;
            u32 x = *(const u32*)&m.x[mine[r]][col];
            float lo = fmaf(d, Wide<ACT>::up((act)x), y[j][2 * r]);
            float hi = fmaf(d, Wide<ACT>::up((act)(x >> 16)), y[j][2 * r + 1]);
            if (HEAD % 2 == 0 && p.pairs) {
                if (at < HEAD) *(u32*)&out[at] = Wide<ACT>::pack(lo, hi);
            } else {
                if (at < HEAD) out[at] = Wide<ACT>::down(lo);
                if (at + 1 < HEAD) out[at + 1] = Wide<ACT>::down(hi);
            }
        }
    }
}

// The chunks of a segment. `empty`: the state before it is zero. Returns what is left of that state, as a power of two.
template <bool ROWS> __device__ __forceinline__ float scan(State& s, Shared& all, const Params& p, const Work& w, bool empty) {
    int group = w.head / p.heads_per_group, groups = p.heads / p.heads_per_group;
    int b_at = p.heads * HEAD_WIDE + group * STATE_WIDE, c_at = b_at + groups * STATE_WIDE;
    int x_at = w.head * HEAD_WIDE + w.tile * TILE;
    auto load_in = [&](Stage& m, const Chunk& c) {
        rows_in<STATE_WIDE>(m.b, p, c, b_at, STATE_WIDE);
        rows_in<TILE>(m.x, p, c, x_at, HEAD_WIDE - w.tile * TILE);
        if (ROWS) rows_in<STATE_WIDE>(m.c, p, c, c_at, STATE_WIDE);
        copy_commit();
    };
    bool loads = threadIdx.x >= BLOCK;
    auto stage_in = [&](Stage& m, const Chunk& c) {
        load_in(m, c);
        steps_in(m, p, c, w.head);
        copy_wait<0>();
    };
    auto state_in = [&] {
        each_pair(s, [&](float& lo, float& hi, int row, int col) {
            *(u32*)&all.s[row][col] = Wide<ACT>::pack(lo, hi);
        });
    };
    float left = 0.f;
    int chunks = w.segment.chunks;
    const Chunk* list = p.chunks + w.segment.chunk;
    Chunk c = list[0], next = c;
    if (loads) stage_in(all.stage[0], c);
    else if (ROWS && !empty) state_in();
    __syncthreads();
    for (int i = 0; i < chunks; i++) {
        Stage& m = all.stage[i % STAGES];
        Stage& m_next = all.stage[(i + 1) % STAGES];
        bool more = i + 1 < chunks;
        if (more) next = list[i + 1];
        if (!loads) {
            if (ROWS) rows_out(m, all.s, p, c, w, empty);
            advance(s, m);
            left += m.a[CHUNK - 1];
            if (ROWS && more) {
                // The others may still read the state before this chunk.
                asm volatile("bar.sync 1, %0;" ::"n"(BLOCK) : "memory");
                state_in();
            }
        } else if (STAGES == 2 && more) stage_in(m_next, next);
        empty = false;
        __syncthreads();
        if (STAGES == 1 && more) {
            if (loads) stage_in(m_next, next);
            __syncthreads();
        }
        c = next;
    }
    return left;
}

// What the segments but the last of each request add to the state; the first one's is the state after it.
extern "C" __global__ void __launch_bounds__(THREADS_ALL, 2) scan_states(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Work w(p);
    int count = w.segment.count, index = w.segment.index;
    if (index + 1 >= count) return;
    bool holds = threadIdx.x < BLOCK;
    State s;
    zero(s);
    if (holds && index == 0) {
        from_cache(s, p, w);
        // The last segment writes the state while the first reads it.
        to_part(s, w.part(p, count - 1));
    }
    float left = scan<false>(s, *(Shared*)memory, p, w, false);
    if (holds) to_part(s, w.part(p, index));
    if (threadIdx.x == 0 && w.tile == 0) w.decay(p, index) = exp2_fast(left);
}

// Outputs of all segments, and the state after the last of each request.
extern "C" __global__ void __launch_bounds__(THREADS_ALL, 2) scan_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Work w(p);
    int count = w.segment.count, index = w.segment.index;
    bool holds = threadIdx.x < BLOCK;
    State s;
    zero(s);
    if (holds && count == 1) from_cache(s, p, w);
    if (holds && count > 1) {
        add_part(s, 0.f, w.part(p, index == 0 ? count - 1 : 0));
        for (int i = 1; i < index; i++) add_part(s, w.decay(p, i), w.part(p, i));
    }
    scan<true>(s, *(Shared*)memory, p, w, index == 0 && w.request.fresh);
    if (holds && index + 1 == count) to_cache(s, p, w);
}
