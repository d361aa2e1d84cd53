// What the cache write gets. Mirrored in `src/kernels/cache.rs`.
#pragma once
#include "common/types.cuh"

struct Params {
    const void* k;
    const void* v;
    const i64* slots;  // [tokens]; -1: nowhere
    u8* cache;         // block 0 of the layer
    i64 k_token, k_head, v_token, v_head;         // strides, elements
    i64 block_stride, token_stride, head_stride;  // bytes in the cache
    int v_offset;      // bytes from a head's key to its value
    int block_size;    // tokens
    int tokens;
    int kv_heads;
    float k_scale, v_scale;  // what is stored is x / scale, in 8-bit caches
    i64 num_slots;
};
