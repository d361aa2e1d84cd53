// Joins the parts of decode tiles whose keys were divided, in their order. A warp takes 128 columns of a row.
//
// Set from outside: RANK, ACT, ROWS, as for `decode.cu`.
#include "common/softmax.cuh"
#include "mla/decode_params.cuh"

#define WARPS 8
#define SLICES ((RANK + 127) / 128)

typedef Wide<ACT> Act;

extern "C" __global__ void __launch_bounds__(WARPS * 32) mla_merge(const __grid_constant__ Params p) {
    int lane = threadIdx.x & 31, units = p.merges[0].request * ROWS * SLICES;
    for (int unit = blockIdx.x * WARPS + (threadIdx.x >> 5); unit < units; unit += gridDim.x * WARPS) {
        int slice = unit % SLICES, row = unit / SLICES % ROWS, d = slice * 128 + lane * 4;
        const Tile& t = p.merges[1 + unit / (SLICES * ROWS)];
        int rows = t.rows, splits = t.splits, packed = t.row0 + row;
        if (row >= rows || d >= RANK) continue;
        const float2* sums = p.part_sum + t.part_row0 + row;
        const float* outs = p.part_out + (i64)(t.part_row0 + row) * RANK + d;
        float top = NEG_INF, sum = 0.f, before, after;
        float2 lo = make_float2(0.f, 0.f), hi = lo;
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            float2 part = sums[s * rows];
            float4 x = *(const float4*)(outs + (i64)s * rows * RANK);
            join(top, sum, part.x, part.y, before, after);
            lo = joined(lo, make_float2(x.x, x.y), before, after);
            hi = joined(hi, make_float2(x.z, x.w), before, after);
        }
        float end = sum > 0.f || sum != sum ? p.v_scale / sum : 0.f;
        int token = packed / p.heads, head = packed - token * p.heads;
        u16* to = (u16*)p.out + ((p.query_start_loc[t.request] + (i64)token) * p.heads + head) * RANK + d;
        *(uint2*)to = make_uint2(Act::pack(lo.x * end, lo.y * end), Act::pack(hi.x * end, hi.y * end));
    }
}
