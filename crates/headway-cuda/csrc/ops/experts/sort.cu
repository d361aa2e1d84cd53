// The choices of all tokens sorted by expert, those of one expert in the order of their tokens: a block an expert, which
// counts the choices of those before it by itself. A *slot* is a place in the sorted order.
#include "common/types.cuh"

#define WARPS 16

struct Sort {
    const int* choices;  // [count]
    int* offsets;        // [experts + 1]: slots of expert e are offsets[e] to offsets[e + 1]
    int* tokens;         // [count]: token of each slot
    int* slots;          // [count]: slot of each choice
    int count, experts, top_k, gap;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) sort(const __grid_constant__ Sort p) {
    __shared__ int lower[WARPS], equal[WARPS];
    int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Each warp has a run of whole 32s.
    int share = (p.count + WARPS * 32 - 1) / (WARPS * 32) * 32;
    i64 begin = (i64)warp * share, end = begin + share < p.count ? begin + share : p.count;
    int less = 0, same = 0;
    for (i64 i = begin; i < end; i += 32) {
        int choice = i + lane < end ? p.choices[i + lane] : 0x7fffffff;
        less += __popc(__ballot_sync(~0u, choice < expert));
        same += __popc(__ballot_sync(~0u, choice == expert));
    }
    if (lane == 0) {
        lower[warp] = less;
        equal[warp] = same;
    }
    __syncthreads();
    int first = 0, next = 0;
    for (int w = 0; w < WARPS; w++) {
        first += lower[w];
        if (w < warp) next += equal[w];
    }
    next += first;
    if (threadIdx.x == 0) {
        p.offsets[expert] = first;
        if (expert == p.experts - 1) p.offsets[p.experts] = p.count;
    }
    for (i64 i = begin; i < end; i += 32) {
        int at = (int)i + lane;
        bool mine = i + lane < end && p.choices[at] == expert;
        u32 all = __ballot_sync(~0u, mine);
        if (mine) {
            int slot = next + __popc(all & ((1u << lane) - 1));
            p.tokens[slot] = at / p.top_k;
            p.slots[at] = slot;
        }
        next += __popc(all);
    }
}
