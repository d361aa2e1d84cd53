// A token from each row of logits, one block a row: repetition penalty, the largest logit (greedy ends here), top-k,
// temperature, min-p, top-p, one draw. The arithmetic, its order and its ties are those of the host's sampler
// (`headway_engine::sampling`), so both choose the same token. A row without an answer (NaN, infinity, nothing possible)
// is left as it is, and its token is -1: the host says what is wrong with it.
//
// A row's logits are overwritten with its weights: unnormalised probabilities, 0 for what is cut.
#include "common/types.cuh"

#define THREADS 1024
// Elements summed in float32, in 16 lanes, before the sum goes on in float64.
#define CHUNK 1024
#define LANES 16
#define CANDIDATES 2048
// Leading bits of a weight of [0, 1]: sign, exponent and four bits of the fraction.
#define BIN_SHIFT 19
#define BINS ((0x3f800000 >> BIN_SHIFT) + 1)
#define SEGMENT 64  // bins

struct Choice {
    double uniform;
    int row, top_k;
    float temperature, top_p, min_p, penalty;
    int seen, unused;  // row of bits of tokens that are penalised; -1: none
};

struct Sample {
    float* logits;
    const Choice* choices;
    const u32* seen;
    int* tokens;
    i64 stride;  // elements from row to row
    int vocab, words, index_bits, unused;
};

// What the block's threads share.
struct Shared {
    union {
        u64 candidates[CANDIDATES];
        double bins[BINS];
        float chunk[CHUNK];
    };
    double partial[THREADS / 32];
    float best[THREADS / 32];
    int place[THREADS / 32];
    int count;
    u32 bin;
    double before;
};

extern __shared__ double sums[];  // of each chunk

// A row's logits, penalised.
struct Logits {
    float* x;
    const u32* seen;
    float penalty;
    __device__ __forceinline__ float operator()(int i) const {
        float v = x[i];
        if (seen && seen[i / 32] >> (i % 32) & 1) v = v > 0.f ? __fdiv_rn(v, penalty) : __fmul_rn(v, penalty);
        return v;
    }
};

// Bits that order floats; both zeros are one.
__device__ __forceinline__ u32 ordered(float x) {
    u32 b = __float_as_uint(x + 0.f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// A key and an index as one number: more is more likely, and of equal keys the lower index.
struct Places {
    int bits;
    __device__ __forceinline__ u64 of(u32 key, int i) const { return (u64)key << bits | (((1u << bits) - 1) - (u32)i); }
    __device__ __forceinline__ u32 key(u64 place) const { return (u32)(place >> bits); }
};

// e^x for x <= 0, 0 below -87: the polynomial of `softmax::exp_nonpositive`, step by step.
__device__ __forceinline__ float exp_nonpositive(float x) {
    const float round = 12582912.f;
    float clamped = fmaxf(x, -87.f);
    float shifted = __fadd_rn(__fmul_rn(clamped, LOG2E), round);
    float n = __fsub_rn(shifted, round);
    float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 355.f / 512.f)), __fmul_rn(n, -2.1219444e-4f));
    float p = 1.f / 5040.f;
    p = __fadd_rn(__fmul_rn(p, r), 1.f / 720.f);
    p = __fadd_rn(__fmul_rn(p, r), 1.f / 120.f);
    p = __fadd_rn(__fmul_rn(p, r), 1.f / 24.f);
    p = __fadd_rn(__fmul_rn(p, r), 1.f / 6.f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    float e = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.f);
    float scale = __uint_as_float((__float_as_uint(shifted) << 23) + (127u << 23));
    return x > -87.f ? __fmul_rn(e, scale) : 0.f;
}

__device__ double block_sum(Shared& s, double x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = s.partial[threadIdx.x % 32];
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// The largest logit and its first index, in every thread; index -1 where no logit is a number above minus infinity.
struct Best { float value; int at; };

__device__ Best block_best(Shared& s, float best, int at) {
    auto take = [&](float x, int i) {
        if (x > best || (x == best && i < at)) {
            best = x;
            at = i;
        }
    };
    for (int d = 16; d; d /= 2) {
        float x = __shfl_xor_sync(~0u, best, d);
        int i = __shfl_xor_sync(~0u, at, d);
        take(x, i);
    }
    if (threadIdx.x % 32 == 0) {
        s.best[threadIdx.x / 32] = best;
        s.place[threadIdx.x / 32] = at;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < THREADS / 32; i++) take(s.best[i], s.place[i]);
    return {best, at == 0x7fffffff ? -1 : at};
}

// Entries that a cut is looked for in: a list, or all of a row below some place.
template <class Weigh> struct List {
    const u64* places;
    int n;
    Weigh weigh;
    __device__ __forceinline__ double from(u64 at) const {
        double sum = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += THREADS) sum += places[i] >= at ? weigh(places[i]) : 0.;
        return sum;
    }
};
template <class Place, class Weigh> struct All {
    Place place;
    int n;
    u64 end;
    Weigh weigh;
    __device__ __forceinline__ double from(u64 at) const {
        double sum = 0;
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += THREADS) {
            u64 here = place(i);
            sum += here >= at && here < end ? weigh(here) : 0.;
        }
        return sum;
    }
};

// The place of the last of the fewest most likely entries whose weights reach `need`; `cut` has the bits above the
// lowest `bits` right. Where all together do not reach it: `cut`.
template <class Entries> __device__ u64 reach(Shared& s, const Entries& all, u64 cut, int bits, double need) {
#pragma unroll 1
    for (int b = bits - 1; b >= 0; b--) {
        u64 at = cut | 1ull << b;
        if (block_sum(s, all.from(at)) >= need) cut = at;
    }
    return cut;
}

// Collects the places that `wanted` takes, as many as there is room for; returns how many there are.
template <class Place, class Wanted> __device__ int collect(Shared& s, int n, Place place, Wanted wanted) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
#pragma unroll 2
    for (int i = threadIdx.x; i < n; i += THREADS) {
        u64 here = place(i);
        if (wanted(here)) {
            int k = atomicAdd(&s.count, 1);
            if (k < CANDIDATES) s.candidates[k] = here;
        }
    }
    __syncthreads();
    return s.count;
}

// The place of the k-th most likely logit. `own` is the key of this thread's largest one: the k-th of those is a bound
// below which none of the k can be, and few others are above it.
__device__ u64 top_k(Shared& s, const Logits& x, int n, Places places, u32 own, u32 largest, int k) {
    auto place = [&](int i) { return places.of(ordered(x(i)), i); };
    auto one = [](u64) { return 1.; };
    u32 bound = 0;
    if (k <= THREADS) {
#pragma unroll 1
        for (int b = 31; b >= 0; b--) {
            u32 at = bound | 1u << b;
            if (__syncthreads_count(own >= at) >= k) bound = at;
        }
        u64 first = (u64)bound << places.bits;
        int found = collect(s, n, place, [&](u64 here) { return here >= first; });
        if (found <= CANDIDATES) {
            u64 last = (u64)largest << places.bits | ((1ull << places.bits) - 1);
            int bits = 64 - __clzll((long long)(first ^ last));
            List<decltype(one)> list = {s.candidates, found, one};
            return reach(s, list, first >> bits << bits, bits, (double)k);
        }
    }
    All<decltype(place), decltype(one)> all = {place, n, ~0ull, one};
    return reach(s, all, 0, 32 + places.bits, (double)k);
}

// Sums `weight(i)` of all i, in the host's order: 16 lanes of float32 in a chunk, chunks in float64.
template <class Weight> __device__ double sum_chunks(int n, Weight weight) {
    int chunks = (n + CHUNK - 1) / CHUNK, lane = threadIdx.x % LANES;
    u32 lanes = 0xffffu << (threadIdx.x & 16);
    for (int c = threadIdx.x / LANES; c < chunks; c += THREADS / LANES) {
        int first = c * CHUNK, end = min(first + CHUNK, n), whole = first + (end - first) / LANES * LANES;
        float acc = 0.f;
#pragma unroll 8
        for (int i = first + lane; i < whole; i += LANES) acc = __fadd_rn(acc, weight(i));
        float last = whole + lane < end ? weight(whole + lane) : 0.f;
        double total = 0.;
        for (int l = 0; l < LANES; l++) total += (double)__shfl_sync(lanes, acc, l, LANES);
#pragma unroll 1
        for (int l = 0; l < end - whole; l++) total += (double)__shfl_sync(lanes, last, l, LANES);
        if (lane == 0) sums[c] = total;
    }
    __syncthreads();
    double all = 0.;
#pragma unroll 4
    for (int c = 0; c < chunks; c++) all += sums[c];
    return all;
}

// The place of the last weight that top-p keeps; 0: it keeps all. Weights fall into bins by their leading bits; sums
// within a bin are exact in any order, since all are multiples of one number that is not much smaller.
__device__ u64 top_p(Shared& s, const float* w, int n, Places places, double need) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0.;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float x = w[i];
        if (x > 0.f) atomicAdd(&s.bins[min(__float_as_uint(x) >> BIN_SHIFT, (u32)BINS - 1)], (double)x);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        // Lane l has the l-th segment from the top; bin 0 has the weights of 0.
        int high = BINS - 1 - (int)threadIdx.x * SEGMENT, low = max(high - SEGMENT, 0);
        double own = 0., before = 0.;
#pragma unroll 4
        for (int b = high; b > low; b--) own += s.bins[b];
#pragma unroll 1
        for (int l = 0; l < 31; l++) {
            double other = __shfl_sync(~0u, own, l);
            if (l < threadIdx.x) before += other;
        }
        u32 reached = __ballot_sync(~0u, before + own >= need);
        if (threadIdx.x == 0 && !reached) s.bin = 0;
        if (reached && threadIdx.x == __ffs(reached) - 1) {
            int found = 0;
            double up_to = before;
#pragma unroll 1
            for (int b = high; b > low; b--) {
                if (s.bins[b] == 0.) continue;
                found = b;
                before = up_to;
                up_to += s.bins[b];
                if (up_to >= need) break;
            }
            s.bin = (u32)found;
            s.before = before;
        }
    }
    __syncthreads();
    u32 bin = s.bin;
    double rest = need - s.before;
    if (bin == 0) return 0;
    auto place = [&](int i) { return places.of(__float_as_uint(w[i]), i); };
    auto weigh = [&](u64 here) { return (double)__uint_as_float(places.key(here)); };
    int bits = BIN_SHIFT + places.bits;
    u64 first = (u64)bin << bits, end = (u64)(bin + 1) << bits;
    int found = collect(s, n, place, [&](u64 here) { return here >= first && here < end; });
    if (found <= CANDIDATES) {
        List<decltype(weigh)> list = {s.candidates, found, weigh};
        return reach(s, list, first, bits, rest);
    }
    All<decltype(place), decltype(weigh)> all = {place, n, end, weigh};
    return reach(s, all, first, bits, rest);
}

// The index at `target` on the weights laid end to end; `sums` has those of the chunks.
__device__ int draw(Shared& s, const float* w, int n, double target) {
    double before = 0.;
#pragma unroll 1
    for (int c = 0; c * CHUNK < n; c++) {
        double after = before + sums[c];
        if (after <= target) {
            before = after;
            continue;
        }
        __syncthreads();
        int i = c * CHUNK + (int)threadIdx.x;
        s.chunk[threadIdx.x] = i < n ? w[i] : 0.f;
        __syncthreads();
        // Sixteen at a time, then those of the sixteen in which the target is passed.
#pragma unroll 1
        for (int k = 0; k < CHUNK; k += LANES) {
            double start = before;
#pragma unroll
            for (int j = 0; j < LANES; j++) before += (double)s.chunk[k + j];
            if (before > target) {
                int j = 0;
#pragma unroll 1
                for (before = start; j < LANES - 1; j++) {
                    before += (double)s.chunk[k + j];
                    if (before > target) break;
                }
                return c * CHUNK + k + j;
            }
        }
    }
    // Rounding can leave the target a hair beyond the end.
    int last = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) last = w[i] > 0.f ? i : last;
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    atomicMax(&s.count, last);
    __syncthreads();
    return s.count;
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ Sample p) {
    __shared__ Shared s;
    const Choice how = p.choices[blockIdx.x];
    const int n = p.vocab;
    float* row = p.logits + how.row * p.stride;
    Logits x = {row, how.seen < 0 ? nullptr : p.seen + (i64)how.seen * p.words, how.penalty};
    Places places = {p.index_bits};

    float best = NEG_INF;
    int at = 0x7fffffff;
    bool nan = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float v = x(i);
        nan |= v != v;
        if (v > best) {
            best = v;
            at = i;
        }
    }
    u32 own = at == 0x7fffffff ? 0u : ordered(best);
    bool broken = __syncthreads_or(nan);
    Best top = block_best(s, best, at);
    if (broken || top.at < 0 || top.value == -NEG_INF) {
        if (threadIdx.x == 0) p.tokens[blockIdx.x] = -1;
        return;
    }
    if (how.temperature == 0.f) {
        if (threadIdx.x == 0) p.tokens[blockIdx.x] = top.at;
        return;
    }
    u64 cut = 0;
    if (how.top_k > 0 && how.top_k < n) cut = top_k(s, x, n, places, own, ordered(top.value), how.top_k);
    // Divided, not multiplied by the reciprocal, which is infinite for the smallest temperatures.
    double total = sum_chunks(n, [&](int i) {
        float v = x(i);
        float w = exp_nonpositive(__fdiv_rn(__fsub_rn(v, top.value), how.temperature));
        w = w >= how.min_p && places.of(ordered(v), i) >= cut ? w : 0.f;
        row[i] = w;
        return w;
    });
    if (how.top_p < 1.f) {
        u64 last = top_p(s, row, n, places, total * (double)how.top_p);
        if (last > 0) {
            __syncthreads();
            total = sum_chunks(n, [&](int i) {
                float w = places.of(__float_as_uint(row[i]), i) >= last ? row[i] : 0.f;
                row[i] = w;
                return w;
            });
        }
    }
    int token = draw(s, row, n, how.uniform * total);
    if (threadIdx.x == 0) p.tokens[blockIdx.x] = token;
}
