// Latents of a prefill's pass side by side: out of the cache's pages, or of the step's new rows. A thread takes eight
// elements of a row.
//
// Set from outside: WIDTH (elements of a row), ACT (type of new rows and of what is written: BF16 or F16), CACHE (ACT,
// E4M3 or E5M2).
#include "common/types.cuh"

#define CHUNKS (WIDTH / 8)
#define EIGHT_BITS (CACHE == E4M3 || CACHE == E5M2)
#define ROWS 32  // of a block

// Tokens of one request. Mirrored, as is Params, in `src/kernels/mla/gather.rs`.
struct Run {
    int request;  // row of the block table; -1: new rows
    int start;    // first token; of new rows the first
    int len;
    int slot;     // where the first one goes
};

struct Params {
    const Run* runs;
    const u8* cache;       // block 0 of the layer
    const int* block_table;
    const void* fresh;     // new rows
    void* out;             // [slots, WIDTH]
    i64 fresh_stride;      // elements
    i64 block_stride;      // bytes in the cache
    i64 num_blocks;
    int block_size;        // tokens
    int table_stride;
    float scale;           // of what is stored in 8 bits
    int pad;
};

__device__ __forceinline__ uint4 wide(uint2 x, float scale) {
    u32 in[2] = {x.x, x.y}, out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 pair = in[i >> 1] >> (16 * (i & 1));
        out[i] = Wide<ACT>::pack(Wide<CACHE>::up((u8)pair) * scale, Wide<CACHE>::up((u8)(pair >> 8)) * scale);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

extern "C" __global__ void __launch_bounds__(256) mla_gather(const __grid_constant__ Params p) {
    Run run = p.runs[blockIdx.y];
    int first = blockIdx.x * ROWS, rows = min(ROWS, run.len - first);
    for (int i = threadIdx.x; i < rows * CHUNKS; i += 256) {
        int token = run.start + first + i / CHUNKS, chunk = i % CHUNKS;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (run.request < 0) x = *((const uint4*)((const u16*)p.fresh + token * p.fresh_stride) + chunk);
        else {
            int in_table = token / p.block_size;
            i64 block = p.block_table[(i64)run.request * p.table_stride + in_table];
            const u8* from = p.cache + block * p.block_stride +
                             ((i64)(token - in_table * p.block_size) * CHUNKS + chunk) * (EIGHT_BITS ? 8 : 16);
            if (block >= 0 && block < p.num_blocks) {
                if constexpr (EIGHT_BITS) x = wide(*(const uint2*)from, p.scale);
                else x = *(const uint4*)from;
            }
        }
        *((uint4*)((u16*)p.out + (i64)(run.slot + first + i / CHUNKS) * WIDTH) + chunk) = x;
    }
}
