//! A tile of 64 keys in AMX tiles, for caches of bfloat16: the page's pairs are loaded as they lie, keys as
//! the second factor of q·k and values as that of weights·v. Between the two products the scores are
//! softened by the same code as at every level.
//!
//! Queries and weights are bfloat16 here. Where the activations are, a query is taken as it is and a weight is
//! rounded once; otherwise both are sums of three bfloat16, which is all of a float32, and multiplied three
//! times. The layer's scale is applied to the scores.
//!
//! # Sameness
//! A score is one chain over the channels, 32 after 32, and a value's column one over the tokens, 32 after 32
//! from absolute positions on; a row without a token there has the weight 0 in it, which changes nothing. So a
//! row's bits don't depend on the other rows, if values are finite: what the other rows of a pass see is
//! multiplied by those zeros, while what no row sees is not touched. Numbers below 2^-126 are zero.

use super::{
    lanes::prefetch,
    level::Level,
    micro::{GROUP, TILE, Values},
    pass::Pass,
    shape::{Form, Shape, TERMS},
    tile::{Block, Keys, seen, sees_any, soften_row},
};
use crate::kernels::amx::{self, Config, ROW, SIDE, Tiles};
use headway_tensor::DType;
use std::arch::x86_64::*;

/// Channels, and tokens, of a step of the products.
const DEPTH: usize = 32;
/// Tiles 0 to 3 are sums, two by two; these are the first of two factors and of two others.
const A: usize = 4;
const B: usize = 6;

/// Whether a layer's head sizes are whole tiles.
pub(super) fn fit(shape: &Shape) -> bool {
    shape.form == Form::KeysAndValues
        && shape.head_size.is_multiple_of(DEPTH)
        && shape.head_size_v.is_multiple_of(SIDE)
}

fn terms(dtype: DType) -> usize {
    if dtype == DType::BF16 { 1 } else { TERMS }
}

/// Tiles for passes of up to `rows` rows: all have as many, up to 16.
///
/// # Safety
/// The process may use tiles, and the thread has none.
pub(super) unsafe fn begin(rows: usize) -> Tiles {
    let (of_rows, other) = ((rows.clamp(1, SIDE), ROW), (SIDE, ROW));
    // SAFETY: the caller's.
    unsafe { Tiles::new(&Config::new([of_rows, of_rows, of_rows, of_rows, of_rows, of_rows, other, other])) }
}

/// The pass's queries as terms of bfloat16, unscaled.
///
/// # Safety
/// As `Pass`'s methods, after [`Pass::prepare`].
pub(super) unsafe fn prepare<L: Level>(p: &Pass<'_>) {
    let (job, size) = (p.job, p.job.shape.head_size);
    let apart = p.tile_rows() * size;
    // SAFETY: rows fit the scratch; queries lie in `q`.
    unsafe {
        for row in 0..p.rows {
            L::read_row(job.dtype, p.query(row), p.q(row), size, 1.0);
            split(p.q(row), p.q_terms(row), size, (0, size), (terms(job.dtype), apart));
        }
    }
}

/// One tile of keys for all rows: scores, the online softmax step, weighted values.
///
/// # Safety
/// As `Pass`'s methods, after [`prepare`]; keys and values are those of the tile; the thread has the tiles
/// of [`begin`].
pub(super) unsafe fn tile<L: Level>(p: &Pass<'_>, b: &Block, keys: &Keys, values: &Values) {
    let (job, width) = (p.job, p.job.shape.head_size_v);
    let terms = terms(job.dtype);
    // SAFETY: as the caller has promised; the scratch has rows up to a multiple of 16.
    unsafe {
        let groups = b.groups();
        for g in groups.clone().step_by(2) {
            for m in (0..p.rows).step_by(2 * SIDE) {
                let (last, pair) = (p.rows.min(m + 2 * SIDE), g + 1 < groups.end);
                if !(g..groups.end.min(g + 2)).any(|g| sees_any(p, b, m, last - m, g)) {
                    continue;
                }
                match (last - m > SIDE, pair) {
                    (true, true) => scores::<2, 2>(p, terms, keys, g, m),
                    (true, false) => scores::<2, 1>(p, terms, keys, g, m),
                    (false, true) => scores::<1, 2>(p, terms, keys, g, m),
                    (false, false) => scores::<1, 1>(p, terms, keys, g, m),
                }
            }
        }
        for row in 0..p.rows {
            let (s, seen) = (p.scores(row), seen(p, b, row));
            if seen.0 < seen.1 {
                scale(s, seen, job.scale);
                soften_row::<L>(p, b, row);
            }
            split(s, p.weight_terms(row), TILE, seen, (terms, p.tile_rows() * TILE));
        }
        let halves = [0, 1].map(|half| half_of_values(p, b, values, half));
        for m in (0..p.rows).step_by(2 * SIDE) {
            for c in (0..width).step_by(2 * SIDE) {
                match (p.rows - m > SIDE, width - c > SIDE) {
                    (true, true) => weigh::<2, 2>(p, terms, &halves, m, c),
                    (true, false) => weigh::<2, 1>(p, terms, &halves, m, c),
                    (false, true) => weigh::<1, 2>(p, terms, &halves, m, c),
                    (false, false) => weigh::<1, 1>(p, terms, &halves, m, c),
                }
            }
        }
    }
}

/// Scores of M times 16 rows from `m` over N groups of keys from `g`, unscaled.
///
/// # Safety
/// As [`tile`]'s.
#[inline(always)]
unsafe fn scores<const M: usize, const N: usize>(
    p: &Pass<'_>,
    terms: usize,
    keys: &Keys,
    g: usize,
    m: usize,
) {
    let size = p.job.shape.head_size;
    let (stride, apart) = (2 * size, 2 * p.tile_rows() * size);
    // SAFETY: rows, terms and groups are in the scratch and the page; see `tile`.
    unsafe {
        let mut tiles = Tiles::held();
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        let q = p.q_terms(m).cast::<u8>().cast_const();
        for d in 0..size / DEPTH {
            if m == 0 {
                for n in 0..N {
                    (0..SIDE).for_each(|line| {
                        prefetch(keys.ahead[g + n].wrapping_add(d * amx::FULL + line * ROW));
                    });
                }
            }
            tiles.load::<B>(keys.groups[g].add(d * amx::FULL), ROW);
            if N == 2 {
                tiles.load::<{ B + 1 }>(keys.groups[g + 1].add(d * amx::FULL), ROW);
            }
            for t in 0..terms {
                dots::<M, N>(&mut tiles, q.add(t * apart + d * ROW), stride);
            }
        }
        put::<M, N>(&tiles, p.scores(m).add(g * GROUP).cast(), 4 * TILE);
    }
}

/// Adds the weighted values of M times 16 rows from `m` to N times 16 columns from `c`.
///
/// # Safety
/// As [`tile`]'s; `halves` from [`half_of_values`].
#[inline(always)]
unsafe fn weigh<const M: usize, const N: usize>(
    p: &Pass<'_>,
    terms: usize,
    halves: &[Option<Half>; 2],
    m: usize,
    c: usize,
) {
    let width = p.job.shape.head_size_v;
    let (stride, apart) = (2 * TILE, 2 * p.tile_rows() * TILE);
    // SAFETY: rows, terms and values are in the scratch and the page; see `tile`.
    unsafe {
        let acc = p.acc(m).add(c).cast::<u8>();
        let mut tiles = Tiles::held();
        tiles.load::<0>(acc, 4 * width);
        if N == 2 {
            tiles.load::<1>(acc.add(4 * SIDE), 4 * width);
        }
        if M == 2 {
            tiles.load::<2>(acc.add(SIDE * 4 * width), 4 * width);
        }
        if M == 2 && N == 2 {
            tiles.load::<3>(acc.add(SIDE * 4 * width + 4 * SIDE), 4 * width);
        }
        let weights = p.weight_terms(m).cast::<u8>().cast_const();
        for (h, half) in halves.iter().enumerate() {
            let Some(half) = half else { continue };
            tiles.load::<B>(half.first.add(4 * c), half.stride);
            if N == 2 {
                tiles.load::<{ B + 1 }>(half.first.add(4 * (c + SIDE)), half.stride);
            }
            for t in 0..terms {
                dots::<M, N>(&mut tiles, weights.add(t * apart + h * ROW), stride);
            }
        }
        put::<M, N>(&tiles, acc, 4 * width);
    }
}

/// The sums += rows at `a`, and 16 rows on, times the tiles B and B + 1.
///
/// # Safety
/// As many rows as the tiles have are readable; the thread has tiles.
#[inline(always)]
unsafe fn dots<const M: usize, const N: usize>(tiles: &mut Tiles, a: *const u8, stride: usize) {
    // SAFETY: the caller's.
    unsafe {
        tiles.load::<A>(a, stride);
        tiles.dot::<0, A, B>();
        if N == 2 {
            tiles.dot::<1, A, { B + 1 }>();
        }
        if M == 2 {
            tiles.load::<{ A + 1 }>(a.add(SIDE * stride), stride);
            tiles.dot::<2, { A + 1 }, B>();
        }
        if M == 2 && N == 2 {
            tiles.dot::<3, { A + 1 }, { B + 1 }>();
        }
    }
}

/// The sums, to `M` times 16 rows `stride` bytes apart.
///
/// # Safety
/// As many rows as the tiles have are writable; the thread has tiles.
#[inline(always)]
unsafe fn put<const M: usize, const N: usize>(tiles: &Tiles, to: *mut u8, stride: usize) {
    // SAFETY: the caller's.
    unsafe {
        tiles.store::<0>(to, stride);
        if N == 2 {
            tiles.store::<1>(to.add(ROW), stride);
        }
        if M == 2 {
            tiles.store::<2>(to.add(SIDE * stride), stride);
        }
        if M == 2 && N == 2 {
            tiles.store::<3>(to.add(SIDE * stride + ROW), stride);
        }
    }
}

/// 32 tokens of values, as pairs of tokens: where the first pair lies, and the bytes to the next.
struct Half {
    first: *const u8,
    stride: usize,
}

/// The values of one half of a tile: in the page where they lie in one piece and all are seen, otherwise copied,
/// with zeros for what no row sees. `None` where no row sees any.
///
/// # Safety
/// As [`tile`]'s.
unsafe fn half_of_values(p: &Pass<'_>, b: &Block, v: &Values, half: usize) -> Option<Half> {
    let begin = half * DEPTH;
    let (from, to) = ((b.from - b.at).max(begin), (b.to - b.at).min(begin + DEPTH));
    if from >= to {
        return None;
    }
    let [one, two] = [2 * half, 2 * half + 1].map(|g| v.groups[g]);
    for ahead in &v.ahead[2 * half..2 * half + 2] {
        (0..GROUP / 2 * v.stride).step_by(ROW).for_each(|line| prefetch(ahead.wrapping_add(line)));
    }
    if (from, to) == (begin, begin + DEPTH) && one.wrapping_add(GROUP / 2 * v.stride) == two {
        return Some(Half { first: one, stride: v.stride });
    }
    let copy = p.value_pairs().wrapping_add(half * DEPTH / 2 * v.stride);
    for pair in 0..DEPTH / 2 {
        let token = begin + 2 * pair;
        let (first, second) = ((from..to).contains(&token), (from..to).contains(&(token + 1)));
        let mask = if first { 0xffff } else { 0u32 } | if second { 0xffff_0000 } else { 0 };
        // SAFETY: a pair has `stride` bytes, in the page where one of its tokens is seen, and in the scratch.
        unsafe {
            let to = copy.add(pair * v.stride);
            if mask == 0 {
                std::ptr::write_bytes(to, 0, v.stride);
                continue;
            }
            let from = v.groups[token / GROUP].add(token % GROUP / 2 * v.stride);
            if mask == u32::MAX {
                std::ptr::copy_nonoverlapping(from, to, v.stride);
                continue;
            }
            for at in (0..v.stride).step_by(4) {
                let pair = from.add(at).cast::<u32>().read_unaligned();
                to.add(at).cast::<u32>().write(pair & mask);
            }
        }
    }
    Some(Half { first: copy, stride: v.stride })
}

/// The scores of the vectors that hold `seen`, times a factor.
///
/// # Safety
/// The machine has AVX-512; a tile of scores at `s`.
#[target_feature(enable = "avx512f")]
unsafe fn scale(s: *mut f32, (from, to): (usize, usize), factor: f32) {
    for t in (from / 16 * 16..to).step_by(16) {
        // SAFETY: vectors within the tile.
        unsafe {
            _mm512_storeu_ps(s.add(t), _mm512_mul_ps(_mm512_loadu_ps(s.add(t)), _mm512_set1_ps(factor)))
        };
    }
}

/// `n` numbers (a multiple of 16) as sums of so many bfloat16, the largest first, each term so many elements
/// after the one before; zeros for numbers outside `low..high`.
///
/// # Safety
/// The machine has AVX512-BF16; `low..high` is readable and all terms are writable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn split(
    from: *const f32,
    to: *mut u16,
    n: usize,
    (low, high): (usize, usize),
    (terms, apart): (usize, usize),
) {
    for i in (0..n).step_by(16) {
        let lanes = |end: usize| (1u32 << (end.clamp(i, i + 16) - i)) - 1;
        let mask = (lanes(high) & !lanes(low)) as u16;
        // SAFETY: the lanes of the mask are readable, and 16 elements of each term writable.
        unsafe {
            let mut x = _mm512_maskz_loadu_ps(mask, from.wrapping_add(i));
            for t in 0..terms {
                let term = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x));
                _mm256_storeu_si256(to.add(t * apart + i).cast(), term);
                let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(term));
                x = _mm512_sub_ps(x, _mm512_castsi512_ps(wide));
            }
        }
    }
}
