// What the attention kernel gets: one struct by value, and a list of tiles in memory. Mirrored in
// `src/kernels/attention.rs`.
#pragma once
#include "common/types.cuh"

enum Kind { FEW_ROWS = 0, MANY_ROWS = 1, NO_ROWS = 2 };

// A tile of packed query rows (row r of a request is query head r % group of token r / group, of each key/value
// head) and a range of its keys.
struct Tile {
    int request;
    int row0;       // first packed row; of NO_ROWS: the first token of the step
    int rows;       // live rows; of NO_ROWS: tokens
    int kv_begin;   // first key, a multiple of 16
    int kv_end;     // one past the last
    int kind;
    int split;      // which part of the tile's keys this is
    int splits;     // parts; 1 writes the output itself
    int part_row0;  // row of split 0 in the partial results; split s begins `rows` times s later
    int counter;    // of the tile, among the counters of a key/value head
    int causal;     // 0, 1, or 2: as the request's flag says
    int chunk;      // FEW_ROWS: keys whose sums are merged in their order, counted from key 0; 0: all at once
};

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
