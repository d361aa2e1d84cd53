//! Float32 products of activation rows with weight rows that are floating-point, or are made so a
//! panel at a time. Weights are read in their own type, activations and sums are float32.
//!
//! The order in which an output element is summed is fixed by the row length and the instruction set
//! alone: K is cut into blocks, in a block lane i takes elements i, i + LANES, …, the lanes are added
//! in one order, and the blocks one after another. So neither the number of rows, nor the tile that a
//! row falls in, nor the number of threads changes a bit.
//!
//! Lives for one call. Not for integer arithmetic: see `int`.

use super::{AHEAD, Job, prefetch, simd::Simd};
use headway_tensor::quant::{BlockFormat, MAX_BLOCK_ELEMS, MAX_SUB_BLOCKS};
use std::{marker::PhantomData, ops::Range};

/// A row element as it lies in memory, little-endian, at any alignment.
pub(super) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// `S::LANES` elements.
    ///
    /// # Safety
    /// As [`Simd`]'s: that many bytes are readable, the processor has the instruction set.
    unsafe fn load<S: Simd>(p: *const u8) -> S;
}

/// IEEE binary32.
pub(super) struct F32;
/// IEEE binary16.
pub(super) struct F16;
/// bfloat16.
pub(super) struct BF16;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S {
        // SAFETY: the caller's.
        unsafe { S::load_f32(p) }
    }
}
impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S {
        // SAFETY: the caller's.
        unsafe { S::load_f16(p) }
    }
}
impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S {
        // SAFETY: the caller's.
        unsafe { S::load_bf16(p) }
    }
}

/// Elements of K that are summed in lanes before the lanes are added: depends on the row length only.
pub(super) fn k_block(k: usize, align: usize) -> usize {
    let blocks = k.div_ceil(640).max(1);
    k.div_ceil(blocks).next_multiple_of(align)
}

/// The first `n` elements, zeros for the rest.
///
/// # Safety
/// `n` elements are readable at `p`; `n` is at most `S::LANES`, and that at most 16.
#[inline(always)]
unsafe fn load_part<S: Simd, W: Element>(p: *const u8, n: usize) -> S {
    let mut padded = [0u8; 64];
    // SAFETY: the caller's: n elements of at most 4 bytes, at most 16 of them.
    unsafe {
        std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n * W::BYTES);
        W::load(padded.as_ptr())
    }
}

/// The products of R weight rows with C activation rows over `k` elements: one block of K. `ahead`, where
/// it is given, is where memory will be read next, as many bytes as are read here.
///
/// # Safety
/// `k` elements are readable at each pointer (`ahead` may be any); the processor has the instruction set
/// of `S`.
#[inline(always)]
unsafe fn tile<S: Simd, W: Element, const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const f32; C],
    k: usize,
    ahead: Option<*const u8>,
) -> [[f32; R]; C] {
    // SAFETY: every access is inside the k elements of its row: whole vectors up to `full`, a part after.
    unsafe {
        let mut acc = [[S::zero(); R]; C];
        let full = k - k % S::LANES;
        let mut i = 0;
        while i < full {
            if let Some(ahead) = ahead {
                for line in (0..R * S::LANES * W::BYTES).step_by(64) {
                    prefetch(ahead.wrapping_add(i * R * W::BYTES + line));
                }
            }
            // All activations and one weight at a time: with 12 accumulators that is 16 registers.
            let xv: [S; C] = std::array::from_fn(|c| S::load_f32(x[c].add(i).cast()));
            for r in 0..R {
                let wv: S = W::load(w[r].add(i * W::BYTES));
                for c in 0..C {
                    acc[c][r] = wv.mul_add(xv[c], acc[c][r]);
                }
            }
            i += S::LANES;
        }
        if full < k {
            for c in 0..C {
                let xv: S = load_part::<S, F32>(x[c].add(full).cast(), k - full);
                for r in 0..R {
                    let wv: S = load_part::<S, W>(w[r].add(full * W::BYTES), k - full);
                    acc[c][r] = wv.mul_add(xv, acc[c][r]);
                }
            }
        }
        let mut out = [[0f32; R]; C];
        for c in 0..C {
            if R == 4 {
                let s = S::sum4([acc[c][0], acc[c][1 % R], acc[c][2 % R], acc[c][3 % R]]);
                out[c].copy_from_slice(&s[..R]);
            } else {
                out[c] = acc[c].map(|a| a.sum());
            }
        }
        out
    }
}

/// Weight rows as they lie in memory, and the activation rows of `job`, few enough that the weights
/// are converted in registers and read from memory once.
///
/// # Safety
/// `bytes` holds the rows up to `rows.end` of `job.k` elements; at most three activation rows; the
/// processor has the instruction set of `S`; no other task writes the same rows of the output.
#[inline(always)]
pub(super) unsafe fn direct<S: Simd, W: Element>(job: &Job<'_>, bytes: &[u8], rows: Range<usize>) {
    let row_bytes = job.k * W::BYTES;
    assert!(bytes.len() >= rows.end * row_bytes && job.m.len() <= 3);
    let kb = k_block(job.k, 32);
    let mut n = rows.start;
    while n < rows.end {
        let p: *const u8 = &raw const bytes[n * row_bytes];
        let four = rows.end - n >= 4;
        // SAFETY: the rows n.. (four or one of them) are inside `bytes` by the assertion; the rest is
        // the caller's.
        unsafe {
            match (four, job.m.len()) {
                (true, 1) => few::<S, W, 4, 1>(job, p, n, kb),
                (true, 2) => few::<S, W, 4, 2>(job, p, n, kb),
                (true, _) => few::<S, W, 4, 3>(job, p, n, kb),
                (false, 1) => few::<S, W, 1, 1>(job, p, n, kb),
                (false, 2) => few::<S, W, 1, 2>(job, p, n, kb),
                (false, _) => few::<S, W, 1, 3>(job, p, n, kb),
            }
        }
        n += if four { 4 } else { 1 };
    }
}

/// R weight rows from row `n` of the part, at `p`, with the C activation rows of the job.
///
/// # Safety
/// As [`direct`]'s, for these rows.
#[inline(always)]
unsafe fn few<S: Simd, W: Element, const R: usize, const C: usize>(
    job: &Job<'_>,
    p: *const u8,
    n: usize,
    kb: usize,
) {
    let x: [*const f32; C] = std::array::from_fn(|c| job.x_row(job.m.start + c).as_ptr());
    let mut total = [[0f32; R]; C];
    let mut k0 = 0;
    while k0 < job.k {
        let len = kb.min(job.k - k0);
        // SAFETY: row r is k elements at p + r · k · BYTES, and k0 + len ≤ k; the activation rows are
        // k long (checked by `Job::x_row`).
        let part = unsafe {
            let w = std::array::from_fn(|r| p.add((r * job.k + k0) * W::BYTES));
            let ahead = p.wrapping_add(k0 * R * W::BYTES + (R * job.k * W::BYTES).max(AHEAD));
            tile::<S, W, R, C>(w, x.map(|x| x.add(k0)), len, Some(ahead))
        };
        for c in 0..C {
            for r in 0..R {
                total[c][r] = if k0 == 0 { part[c][r] } else { total[c][r] + part[c][r] };
            }
        }
        k0 += len;
    }
    for (c, total) in total.iter().enumerate() {
        // SAFETY: the caller's: these output rows are this task's.
        unsafe { job.put(job.m.start + c, n, total, true, true) };
    }
}

/// Where a panel's float32 rows come from.
pub(super) trait RowSource {
    /// K blocks begin at multiples of this.
    const ALIGN: usize;
    /// Elements `from..from + out.len()` of a row of bytes, as float32.
    ///
    /// # Safety
    /// The row has as many elements; the processor has the instruction set of `S`.
    unsafe fn fill<S: Simd>(row: &[u8], from: usize, out: &mut [f32]);
}

/// Rows of floating-point elements.
pub(super) struct Floats<W>(PhantomData<W>);

impl<W: Element> RowSource for Floats<W> {
    const ALIGN: usize = 32;

    #[inline(always)]
    unsafe fn fill<S: Simd>(row: &[u8], from: usize, out: &mut [f32]) {
        let row = &row[from * W::BYTES..(from + out.len()) * W::BYTES];
        let full = out.len() - out.len() % S::LANES;
        let mut i = 0;
        while i < full {
            // SAFETY: i + LANES ≤ out.len(), and `row` has as many elements.
            unsafe { W::load::<S>(row.as_ptr().add(i * W::BYTES)).store(out.as_mut_ptr().add(i)) };
            i += S::LANES;
        }
        let mut last = [0f32; 16];
        // SAFETY: the rest, fewer than LANES elements; `last` holds the 16 lanes there are at most.
        unsafe {
            load_part::<S, W>(row.as_ptr().add(full * W::BYTES), out.len() - full).store(last.as_mut_ptr());
        }
        let rest = &mut out[full..];
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Rows of a block-quantised format, dequantised as the format says: `d · q + m`, rounded twice.
pub(super) struct Blocks<F>(PhantomData<F>);

impl<F: BlockFormat> RowSource for Blocks<F> {
    const ALIGN: usize = if F::BLOCK_ELEMS > 32 { F::BLOCK_ELEMS } else { 32 };

    #[inline(always)]
    unsafe fn fill<S: Simd>(row: &[u8], from: usize, out: &mut [f32]) {
        let (mut q, mut d, mut m) = ([0u8; MAX_BLOCK_ELEMS], [0f32; MAX_SUB_BLOCKS], [0f32; MAX_SUB_BLOCKS]);
        let blocks = row[from / F::BLOCK_ELEMS * F::BLOCK_BYTES..].chunks_exact(F::BLOCK_BYTES);
        for (block, out) in blocks.zip(out.chunks_exact_mut(F::BLOCK_ELEMS)) {
            F::unpack(block, &mut q, &mut d, &mut m);
            for s in 0..F::SUB_BLOCKS {
                let at = s * F::SUB_BLOCK;
                let (q, out) = (&q[at..at + F::SUB_BLOCK], &mut out[at..at + F::SUB_BLOCK]);
                for (o, &q) in out.iter_mut().zip(q) {
                    let q = if F::SIGNED { f32::from(q.cast_signed()) } else { f32::from(q) };
                    *o = d[s] * q + m[s];
                }
            }
        }
    }
}

/// Most weight rows of a panel.
pub(super) const PANEL_ROWS: usize = 64;
/// Float32 elements that a panel can take.
pub(super) const PANEL_ELEMS: usize = PANEL_ROWS * (640 + MAX_BLOCK_ELEMS);
/// Activation rows that are kept in the second-level cache.
const CACHED_COLS: usize = 96;

/// One block of K of a panel: weight rows made float32, one after another.
pub(super) struct Block {
    /// First element of the block.
    pub(super) k0: usize,
    /// Its length.
    pub(super) len: usize,
    /// First weight row, of the part.
    pub(super) first: usize,
    /// Weight rows; the panel has zeros up to a multiple of four.
    pub(super) count: usize,
    /// Whether it is the last block of K.
    pub(super) last: bool,
}

/// Fills `panel` with the block's weight rows, as float32.
///
/// # Safety
/// `bytes` holds whole rows up to the block's last; the processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn fill<S: Simd, R: RowSource>(
    b: &Block,
    bytes: &[u8],
    row_bytes: usize,
    panel: &mut [f32],
) {
    for (i, out) in panel.chunks_exact_mut(b.len).take(b.count.next_multiple_of(4)).enumerate() {
        if i < b.count {
            let n = b.first + i;
            // SAFETY: the caller's: a whole row, which has k0 + len elements or more.
            unsafe { R::fill::<S>(&bytes[n * row_bytes..(n + 1) * row_bytes], b.k0, out) };
        } else {
            out.fill(0.0);
        }
    }
}

/// A panel with all activation rows: eight weight rows stay in the first-level cache while
/// activations stream by from the second.
///
/// # Safety
/// No other task writes the same elements of the output; the processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd>(job: &Job<'_>, b: &Block, panel: &[f32]) {
    assert!(panel.len() >= b.count.next_multiple_of(4) * b.len && b.k0 + b.len <= job.k);
    for m0 in job.m.clone().step_by(CACHED_COLS) {
        let m_end = job.m.end.min(m0 + CACHED_COLS);
        for eight in (0..b.count).step_by(8) {
            let mut m = m0;
            while m < m_end {
                let cols = S::COLS.min(m_end - m);
                for r in (eight..b.count.min(eight + 8)).step_by(4) {
                    let w = &raw const panel[r * b.len];
                    // SAFETY: four rows of the panel are there (padded); the rest is the caller's.
                    unsafe {
                        match cols {
                            1 => four::<S, 1>(job, b, w, r, m),
                            2 => four::<S, 2>(job, b, w, r, m),
                            3 => four::<S, 3>(job, b, w, r, m),
                            4 if S::COLS > 3 => four::<S, 4>(job, b, w, r, m),
                            5 if S::COLS > 3 => four::<S, 5>(job, b, w, r, m),
                            _ if S::COLS > 3 => four::<S, 6>(job, b, w, r, m),
                            _ => unreachable!("tiles of at most {} activation rows", S::COLS),
                        }
                    }
                }
                m += cols;
            }
        }
    }
}

/// Four panel rows from `r`, at `w`, with C activation rows from `m`.
///
/// # Safety
/// As [`multiply`]'s.
#[inline(always)]
unsafe fn four<S: Simd, const C: usize>(job: &Job<'_>, b: &Block, w: *const f32, r: usize, m: usize) {
    // SAFETY: panel rows are `len` long; activation rows are k long, and k0 + len ≤ k.
    let sums = unsafe {
        let w: [*const u8; 4] = std::array::from_fn(|i| w.add(i * b.len).cast());
        let x: [*const f32; C] = std::array::from_fn(|c| job.x_row(m + c).as_ptr().add(b.k0));
        tile::<S, F32, 4, C>(w, x, b.len, None)
    };
    let valid = 4.min(b.count - r);
    for (c, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's: these output rows are this task's.
        unsafe { job.put(m + c, b.first + r, &sums[..valid], b.k0 == 0, b.last) };
    }
}
