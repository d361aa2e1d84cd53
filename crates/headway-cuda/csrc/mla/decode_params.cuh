// What the decode kernels of latent attention get. Mirrored in `src/kernels/mla/decode.rs`.
#pragma once
#include "attention/tile.cuh"

struct Params {
    const void* q_latent;  // [tokens, heads, RANK]: queries in the latent space
    const void* q_rope;    // the rotated parts, where token 0's head 0 has it
    void* out;             // [tokens, heads, RANK]: weighted latents
    const u8* cache;       // block 0 of the layer: rows of RANK + ROPE elements
    const int* block_table;
    const int* query_start_loc;
    const int* seq_lens;
    const Tile* tiles;     // the first holds their number, itself not counted, in `request`
    const Tile* merges;    // likewise: the first parts of tiles of several
    float* part_out;       // [part rows + blocks x ROWS, RANK]; those of the blocks after the parts'
    float2* part_sum;      // [part rows]: largest score (base 2), sum of 2^(score - largest)
    int* next;             // [2]: next tile, blocks that are done; 0 between launches
    i64 q_token, q_head;   // strides of q_rope, elements
    i64 block_stride;      // bytes in the cache
    i64 token_stride;
    int block_size;        // tokens
    int table_stride;
    int heads;
    int part_rows;
    float scale;           // of q·k, the latents' own factor in it
    float v_scale;         // of what was stored
};
