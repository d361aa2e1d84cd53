// What the attention kernel gets: one struct by value, and a list of tiles in memory. Mirrored in
// `src/kernels/attention.rs`.
#pragma once
#include "attention/tile.cuh"

struct Params {
    const void* q;
    void* out;
    const u8* cache;  // block 0 of the layer
    const int* block_table;
    const int* query_start_loc;
    const int* seq_lens;
    const u8* causal;  // a flag for each request, where tiles say so
    const Tile* tiles;  // the first holds their number, itself not counted, in `request`
    float* part_out;   // [kv heads, part rows, HEAD]
    float2* part_sum;  // [kv heads, part rows]: largest score (base 2), sum of 2^(score - largest)
    int* counters;     // [kv heads, counters]: arrivals, 0 between launches
    int* next;         // [2]: next tile, blocks that are done; 0 between launches
    const float* sinks;
    const float* alibi_slopes;
    float* lse;  // [tokens, heads], natural logarithm
    i64 q_token, q_head;      // strides, elements
    i64 out_token, out_head;
    i64 block_stride, token_stride, head_stride;  // bytes in the cache
    int v_offset;      // bytes from a head's key to its value
    int block_size;    // tokens
    int table_stride;
    int kv_heads;
    int group;         // query heads of a key/value head
    int part_rows;
    int num_counters;
    int window;        // 0: none
    float scale;       // of q·k, the keys' own factor in it
    float soft_cap;    // 0: none
    float v_scale;
    int pad;
};
