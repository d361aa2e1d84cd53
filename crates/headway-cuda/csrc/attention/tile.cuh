// A tile of a step's attention, as the planner cuts it. Mirrored in `src/kernels/attention/plan.rs`.
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
