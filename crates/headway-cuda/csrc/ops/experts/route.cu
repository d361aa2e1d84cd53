// Router logits to experts and weights: a warp a token. Of equal scores the lower index wins. What is compared is
// float32; NaN counts as less than every number, so that the chosen experts are all different whatever the logits are.
#include "common/types.cuh"

#define WARPS 4

// How logits become scores.
#define SOFTMAX 0
#define SIGMOID 1
#define SOFTMAX_OF_CHOSEN 2

struct Route {
    const u8* logits;  // float32 rows
    i64 row;           // their stride, bytes
    const float* correction;  // added where experts are chosen; or null
    int* choices;             // [tokens, top_k], the best first
    float* weights;           // the same
    int tokens, experts, top_k, scores;
    int groups, chosen_groups, two_best;  // groups 0: none
    int renormalize;
    float factor;
    int gap;
};

// A key whose order among integers is that of the numbers: 0 is left for what can't be chosen, 1 is NaN.
__device__ __forceinline__ u32 sortable(float x) {
    if (!(x == x)) return 1;
    u32 b = __float_as_uint(x == 0.f ? 0.f : x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The candidate that wins, in all lanes: a key above, and the complement of its index below.
__device__ __forceinline__ u64 best_of(u64 mine) {
#pragma unroll
    for (int d = 16; d; d /= 2) {
        u64 other = __shfl_xor_sync(~0u, mine, d);
        mine = other > mine ? other : mine;
    }
    return mine;
}
__device__ __forceinline__ u64 candidate(u32 key, int i) { return key ? (u64)key << 32 | (u32)~i : 0; }
__device__ __forceinline__ int index_of(u64 candidate) { return ~(int)(u32)candidate; }

__device__ __forceinline__ float all_max(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
__device__ __forceinline__ float all_sum(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

__device__ __forceinline__ void to_scores(const Route& p, const float* logits, float* scores, int lane) {
    float top = NEG_INF, sum = 0.f;
    if (p.scores == SOFTMAX) {
        for (int e = lane; e < p.experts; e += 32) top = fmaxf(top, logits[e]);
        top = all_max(top);
    }
    for (int e = lane; e < p.experts; e += 32) {
        float x = logits[e];
        if (p.scores == SOFTMAX) sum += x = expf(x - top);
        else if (p.scores == SIGMOID) x = 1.f / (1.f + expf(-x));
        scores[e] = x;
    }
    if (p.scores == SOFTMAX) {
        sum = all_sum(sum);
        for (int e = lane; e < p.experts; e += 32) scores[e] /= sum;
    }
}

__device__ __forceinline__ float key_of(const Route& p, const float* scores, int e) {
    return scores[e] + (p.correction ? p.correction[e] : 0.f);
}

// The groups that a token may use, one bit each; lane l weighs groups l and l + 32.
__device__ __forceinline__ u64 allowed_groups(const Route& p, const float* scores, int lane) {
    int size = p.experts / p.groups;
    u32 worth[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int g = lane + 32 * j;
        if (g >= p.groups) continue;
        float first = NEG_INF, second = NEG_INF;
        for (int i = 0; i < size; i++) {
            float x = key_of(p, scores, g * size + i);
            if (x > first) {
                second = first;
                first = x;
            } else if (x > second) second = x;
        }
        worth[j] = sortable(p.two_best ? first + second : first);
    }
    u64 allowed = 0;
    for (int n = 0; n < p.chosen_groups; n++) {
        u64 a = candidate(worth[0], lane), b = candidate(worth[1], lane + 32);
        int g = index_of(best_of(a > b ? a : b));
        allowed |= 1ull << g;
        if (g % 32 == lane) worth[g / 32] = 0;
    }
    return allowed;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) route(const __grid_constant__ Route p) {
    extern __shared__ float shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 token = (i64)blockIdx.x * WARPS + warp;
    if (token >= p.tokens) return;
    float* scores = shared + warp * (2 * p.experts + p.top_k);
    u32* keys = (u32*)(scores + p.experts);
    float* chosen = (float*)(keys + p.experts);
    to_scores(p, (const float*)(p.logits + token * p.row), scores, lane);
    __syncwarp();
    u64 allowed = p.groups ? allowed_groups(p, scores, lane) : ~0ull;
    int size = p.groups ? p.experts / p.groups : p.experts;
    for (int e = lane; e < p.experts; e += 32)
        keys[e] = allowed >> (e / size) & 1 ? sortable(key_of(p, scores, e)) : 0;
    int* choices = p.choices + token * p.top_k;
    for (int n = 0; n < p.top_k; n++) {
        u64 mine = 0;
        for (int e = lane; e < p.experts; e += 32) {
            u64 c = candidate(keys[e], e);
            mine = c > mine ? c : mine;
        }
        int e = index_of(best_of(mine));
        // A lane's keys are its own.
        if (e % 32 == lane) {
            keys[e] = 0;
            choices[n] = e;
            chosen[n] = scores[e];
        }
    }
    __syncwarp();
    // Every lane adds up all of them, in the order of choice.
    float top = NEG_INF, sum = 0.f;
    bool softmax = p.scores == SOFTMAX_OF_CHOSEN;
    if (softmax)
        for (int n = 0; n < p.top_k; n++) top = fmaxf(top, chosen[n]);
    for (int n = 0; n < p.top_k; n++) sum += softmax ? expf(chosen[n] - top) : chosen[n];
    // The addend keeps a sum of zeros from giving NaN.
    sum += 1e-20f;
    for (int n = lane; n < p.top_k; n += 32) {
        float w = softmax ? expf(chosen[n] - top) : chosen[n];
        if (softmax || p.renormalize) w /= sum;
        p.weights[token * p.top_k + n] = w * p.factor;
    }
}
