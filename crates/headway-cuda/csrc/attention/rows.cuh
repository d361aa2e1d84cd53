// A thread's share of 16 rows (two of them: lane / 4 and 8 more): what they see, the running softmax, their end.
#pragma once
#include "attention/tile_io.cuh"
#include "common/softmax.cuh"

struct Row {
    int low, high;   // visible keys: low <= key < high
    int position;
    float slope;     // base 2
};

// What packed row `row` of a tile sees.
__device__ __forceinline__ Row row_of(const Params& p, const Tile& t, int head, int row, int query_len, int seq_len) {
    Row r = {0, 0, 0, 0.f};
    if (row >= t.rows) return r;
    int packed = t.row0 + row, token = packed / p.group, g = packed - token * p.group;
    r.position = seq_len - query_len + token;
    r.high = t.causal ? min(r.position + 1, t.kv_end) : t.kv_end;
    r.low = p.window > 0 ? max(t.kv_begin, r.position - p.window + 1) : t.kv_begin;
    if (!PLAIN && p.alibi_slopes) r.slope = p.alibi_slopes[head * p.group + g] * LOG2E;
    return r;
}

// Without soft cap and ALiBi scores stay as they are until they are exponents; with one of them they are in base 2
// from here on, and this is the factor that is left.
__device__ __forceinline__ float score_factor(const Params& p) { return PLAIN ? p.scale * LOG2E : 1.f; }

// Scores of 16 rows and 8 N keys from `key0`, from q·k: capped, biased, masked.
template <int N, bool MASKED>
__device__ __forceinline__ void finish_scores(const Params& p, float (&s)[N][4], const Row (&rows)[2], int key0, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Row& r = rows[i >> 1];
            int key = key0 + n * 8 + (lane & 3) * 2 + (i & 1);
            if constexpr (!PLAIN) {
                float x = s[n][i] * (p.scale * LOG2E);
                if (p.soft_cap > 0.f) {
                    // tanh(y) = 1 - 2 / (e^2y + 1)
                    float y = exp2_fast(2.f * x / p.soft_cap);
                    x = p.soft_cap * LOG2E * (1.f - 2.f / (y + 1.f));
                }
                s[n][i] = x + r.slope * (float)(key - r.position);
            }
            if (MASKED && (key < r.low || key >= r.high)) s[n][i] = NEG_INF;
        }
}

// The end of a row: the factor on its sum of values, with the sink in the denominator; and its LSE.
__device__ __forceinline__ float finish_row(const Params& p, float top, float sum, int query_head, i64 token, int heads,
                                            bool writes) {
    if (p.sinks) {
        float sink = p.sinks[query_head] * LOG2E, most = fmaxf(top, sink);
        float base = most == NEG_INF ? 0.f : most;
        float shift = exp2_fast(top - base);
        sum = sum * shift + exp2_fast(sink - base);
        if (p.lse && writes) p.lse[token * heads + query_head] = (most + log2f(sum)) * LN2;
        return sum > 0.f || sum != sum ? shift * p.v_scale / sum : 0.f;
    }
    if (p.lse && writes) p.lse[token * heads + query_head] = sum > 0.f ? (top + log2f(sum)) * LN2 : NEG_INF;
    return sum > 0.f || sum != sum ? p.v_scale / sum : 0.f;
}
