// Scatters new rows of latents into the cache by slot. A thread takes eight elements of a row.
//
// Set from outside: WIDTH (elements of a row), ACT (type of the rows: BF16 or F16), CACHE (ACT, E4M3 or E5M2).
#include "cache/put.cuh"

// Mirrored in `src/kernels/mla/write.rs`.
struct Params {
    const void* rows;
    const i64* slots;  // [tokens]; -1: nowhere
    u8* cache;         // block 0 of the layer
    i64 row_stride;    // elements
    i64 block_stride;  // bytes in the cache
    i64 num_slots;
    int block_size;    // tokens
    int tokens;
    float scale;       // what is stored is x / scale, in 8-bit caches
    int pad;
};

extern "C" __global__ void __launch_bounds__(256) write_latent(const __grid_constant__ Params p) {
    constexpr int CHUNKS = WIDTH / 8, BYTES = EIGHT_BITS ? 8 : 16;
    i64 all = (i64)p.tokens * CHUNKS;
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < all; i += (i64)gridDim.x * 256) {
        int token = (int)(i / CHUNKS), chunk = (int)(i - (i64)token * CHUNKS);
        i64 slot = p.slots[token];
        if (slot < 0 || slot >= p.num_slots) continue;
        i64 block = slot / p.block_size;
        u8* to = p.cache + block * p.block_stride + ((slot - block * p.block_size) * CHUNKS + chunk) * BYTES;
        put(to, __ldg((const uint4*)((const u16*)p.rows + token * p.row_stride) + chunk), p.scale);
    }
}
