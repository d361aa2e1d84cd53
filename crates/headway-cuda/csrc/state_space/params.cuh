// What the kernels of Mamba-2 layers get: one struct by value, and lists of a step's requests, chunks and segments in
// memory. Mirrored in `src/kernels/state_space/`.
//
// Between convolution and scan a token's channels lie in rows of the workspace: heads of HEADS_WIDE elements, then the
// groups' B, then their C, of STATE_WIDE each. What pads a head or a state to these sizes is zero and is never written.
//
// Set from outside: ACT, the activations' type (BF16 or F16); HEAD, elements of a head; STATE, elements of its state
// for each of them.
#pragma once
#include "common/mma.cuh"
#include "ops/activation.cuh"
#include "ops/rows.cuh"

#define WIDER(n) (((n) + 15) / 16 * 16)
#define HEAD_WIDE WIDER(HEAD)
#define STATE_WIDE WIDER(STATE)
// Most tokens of a chunk.
#define CHUNK 64

// A request's new tokens, and where its state is.
struct Request {
    int row;    // the first token
    int len;    // tokens
    int block;  // of the state cache; 0: it has none, so that its rows are zeros and nothing is kept
    int fresh;  // nothing of it was computed before: whatever the block holds is somebody else's
};

// Tokens of one request that are scanned together.
struct Chunk {
    int request;
    int row;    // the first token
    int len;    // at most CHUNK
    int first;  // tokens of the request in this step before it
};

// Chunks of one request that a block scans one after another.
struct Segment {
    int request;
    int chunk;   // the first
    int chunks;
    int slot;    // of the request's first segment, among the parts
    int index;   // among the request's segments
    int count;   // segments of the request
};

struct Params {
    const u8* x;    // [tokens, conv_dim + heads]: x of all heads, B and C of all groups, dt of all heads
    u8* out;        // [tokens, heads * HEAD]
    u8* cache;      // block 0 of the layer: [taps - 1, conv_dim], then [heads, HEAD, STATE]
    u8* rows;       // the workspace
    const float* conv_weight;  // [taps, conv_dim]
    const float* conv_bias;    // [conv_dim], or null
    const float* a;            // [heads]
    const float* d;            // [heads]
    const float* dt_bias;      // [heads]
    const Request* requests;
    const Chunk* chunks;
    const Segment* segments;
    float4* parts;  // by slot, head and tile of it: a state as its block's threads hold it
    float* decays;  // [slots, heads]: what is left of a state after a segment
    i64 x_row, out_row, rows_row;   // strides, bytes
    i64 block_stride, ssm_offset;   // bytes in the cache
    int first_request;  // of this launch
    int count;          // requests or chunks of this launch
    int conv_dim;
    int heads;
    int heads_per_group;
    int pairs;  // states lie so that two elements can be accessed at once
    float dt_least, dt_most;
};

// Where a channel lies in a row of the workspace.
__device__ __forceinline__ int place(const Params& p, int channel) {
    int inner = p.heads * HEAD;
    if (channel < inner) return HEAD == HEAD_WIDE ? channel : channel / HEAD * HEAD_WIDE + channel % HEAD;
    channel -= inner;
    return p.heads * HEAD_WIDE + channel / STATE * STATE_WIDE + channel % STATE;
}

// Length of a token's step for a head.
__device__ __forceinline__ float step_length(const Params& p, int row, int head) {
    typedef Wide<ACT>::store act;
    float raw = Wide<ACT>::up(((const act*)(p.x + row * p.x_row))[p.conv_dim + head]) + p.dt_bias[head];
    float soft = raw > 20.f ? raw : log1pf(expf(raw));
    return fminf(fmaxf(soft, p.dt_least), p.dt_most);
}
