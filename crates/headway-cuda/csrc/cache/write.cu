// Scatters new keys and values into the cache by slot. A thread takes eight elements of a key and of its value.
//
// Set from outside: HEAD, ACT (type of k and v: BF16 or F16), CACHE (ACT, E4M3 or E5M2).
#include "cache/params.cuh"
#include "cache/put.cuh"

#define CHUNKS (HEAD / 8)
extern "C" __global__ void __launch_bounds__(256) write_kv(const __grid_constant__ Params p) {
    constexpr int BYTES = EIGHT_BITS ? 8 : 16;
    int per_token = p.kv_heads * CHUNKS;
    i64 all = (i64)p.tokens * per_token;
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < all; i += (i64)gridDim.x * 256) {
        int token = (int)(i / per_token), rest = (int)(i - (i64)token * per_token);
        int head = rest / CHUNKS, chunk = rest - head * CHUNKS;
        i64 slot = p.slots[token];
        if (slot < 0 || slot >= p.num_slots) continue;
        i64 block = slot / p.block_size;
        u8* to = p.cache + block * p.block_stride + (slot - block * p.block_size) * p.token_stride +
                 head * p.head_stride + chunk * BYTES;
        const uint4* k = (const uint4*)((const u16*)p.k + token * p.k_token + head * p.k_head) + chunk;
        const uint4* v = (const uint4*)((const u16*)p.v + token * p.v_token + head * p.v_head) + chunk;
        put(to, __ldg(k), p.k_scale);
        put(to + p.v_offset, __ldg(v), p.v_scale);
    }
}
