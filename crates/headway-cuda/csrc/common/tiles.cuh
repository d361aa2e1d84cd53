// Tiles of rows in shared memory, as operands of tensor-core products. A row of WIDTH 16-bit elements takes ROW bytes;
// its 16-byte chunks are permuted by the row's number, so that eight rows of a column lie in all banks.
#pragma once
#include "common/mma.cuh"

template <int WIDTH> struct Tiles {
    enum : int {
        STEPS = (WIDTH + 15) / 16,  // of a product over a row's elements
        CHUNKS = WIDTH / 8,
        ROW = (STEPS * 2 + 7) / 8 * 128,
    };

    static __device__ __forceinline__ u32 at(u32 tile, int row, int chunk) {
        return tile + row * ROW + ((chunk ^ (row & 7)) << 4);
    }

    // Widths that are no multiple of 16 leave half a step of the product, which must be zero on both sides.
    template <int THREADS> static __device__ __forceinline__ void zero_pad(u32 tile, int rows, int thread) {
        if constexpr (WIDTH % 16 != 0)
            for (int r = thread; r < rows; r += THREADS) store_shared(at(tile, r, CHUNKS), make_uint4(0, 0, 0, 0));
    }

    // Rows of WIDTH 8-bit elements side by side to a tile.
    template <int FROM, int TO, int COUNT, int THREADS>
    static __device__ __forceinline__ void widen(u32 raw, u32 tile, int thread) {
#pragma unroll 4
        for (int i = thread; i < COUNT * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, chunk = i % CHUNKS;
            uint2 x = load_shared2(raw + row * WIDTH + chunk * 8);
            store_shared(at(tile, row, chunk),
                         make_uint4(widen2<FROM, TO>(x.x), widen2<FROM, TO>(x.x >> 16), widen2<FROM, TO>(x.y),
                                    widen2<FROM, TO>(x.y >> 16)));
        }
    }

    // Where a lane's row of a product's operand begins: row `row`, half `half` of the 16 elements of step `k`. Four
    // steps are a period of the permutation, so that what depends on the lane is computed four times, not for each step.
    static __device__ __forceinline__ u32 operand(u32 tile, int row, int k, int half) {
        return tile + row * ROW + ((((k & 3) * 2 + half) ^ (row & 7)) << 4) + (k >> 2) * 128;
    }

    // The left side of a product: 16 rows from `row`, 16 columns from step `k`.
    static __device__ __forceinline__ void left(u32 (&a)[4], u32 tile, int row, int k, int lane) {
        load_matrices(a, operand(tile + row * ROW, (lane & 7) + ((lane >> 3) & 1) * 8, k, lane >> 4));
    }
    // 16 rows from `row` as columns, 16 of their elements from step `k`: two right sides.
    static __device__ __forceinline__ void keys_right(u32 (&b)[4], u32 tile, int row, int k, int lane) {
        load_matrices(b, operand(tile + row * ROW, (lane & 7) + (lane >> 4) * 8, k, (lane >> 3) & 1));
    }
    // 16 rows from `row` as rows, 16 of their elements from step `n` as columns: two right sides.
    static __device__ __forceinline__ void values_right(u32 (&b)[4], u32 tile, int row, int n, int lane) {
        load_matrices_transposed(b, operand(tile + row * ROW, (lane & 7) + ((lane >> 3) & 1) * 8, n, lane >> 4));
    }
};
