//! A chunk of the scan as matrix products (the state-space duality of arXiv 2405.21060): inside the chunk
//! `Y = (C Bᵀ ∘ L) X`, with L the decay from one token to a later one; from before it `Y += exp(a) C S`; and
//! the state after it `S = exp(a_end) S + Bᵀ (exp(a_end − a) X)`. X is dt · x, a the running sum of dt · A.
//!
//! The heads of a task share a group, so that C Bᵀ is computed once for them.

use super::product::{Madd, PANEL, Part, product};
use crate::kernels::elementwise::math::exp;
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;

/// What a task computes of a chunk.
pub(super) struct Chunk<'a> {
    /// Rows of the convolution's output, `[tokens, conv_dim]`, the chunk's first at the beginning.
    pub rows: &'a [f32],
    /// Tokens.
    pub len: usize,
    /// Of the task's heads, `[heads, tokens]`.
    pub dt: &'a [f32],
    /// Decay of all heads.
    pub a: &'a [f32],
    /// The first head, and how many.
    pub heads: (usize, usize),
    /// The states before the chunk are zero.
    pub fresh: bool,
}

/// Sizes of a task's buffers, for chunks of at most `chunk` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub chunk: usize,
    /// Elements of a row of tokens, and of a row of head elements, both in whole panels.
    pub tokens: usize,
    pub elements: usize,
}

impl Room {
    pub(super) fn new(dims: &Mamba2Dims, chunk: usize) -> Self {
        Self { chunk, tokens: chunk.next_multiple_of(PANEL), elements: dims.head_dim.next_multiple_of(PANEL) }
    }
}

/// A worker's buffers.
#[derive(Debug)]
pub(super) struct Buffers {
    /// `[state, tokens]`: B with the tokens in a row.
    bt: Vec<f32>,
    /// `[tokens, tokens]`: C Bᵀ.
    cb: Vec<f32>,
    /// `[tokens, tokens]`: C Bᵀ ∘ L of a head.
    decayed: Vec<f32>,
    /// `[tokens, elements]`: X.
    x: Vec<f32>,
    /// `[heads, tokens, elements]`: Y.
    pub y: Vec<f32>,
    /// `[heads, state, elements]`: the states, turned so that a product reads them in rows.
    pub states: Vec<f32>,
    /// `[heads, tokens]`.
    pub dt: Vec<f32>,
    /// `[tokens]`: a. In float64, since differences of long sums are taken.
    sums: Vec<f64>,
}

impl Buffers {
    pub(super) fn new(dims: &Mamba2Dims, room: Room, heads: usize) -> Self {
        let zeros = |n| vec![0f32; n];
        Self {
            bt: zeros(dims.state * room.tokens),
            cb: zeros(room.chunk * room.tokens),
            decayed: zeros(room.chunk * room.tokens),
            x: zeros(room.chunk * room.elements),
            y: zeros(heads * room.chunk * room.elements),
            states: zeros(heads * dims.state * room.elements),
            dt: zeros(heads * room.chunk),
            sums: vec![0.0; room.chunk],
        }
    }

    pub(super) fn bytes(dims: &Mamba2Dims, room: Room, heads: usize) -> usize {
        let floats = dims.state * room.tokens
            + 2 * room.chunk * room.tokens
            + (heads + 1) * room.chunk * room.elements
            + heads * (dims.state * room.elements + room.chunk);
        floats * size_of::<f32>() + room.chunk * size_of::<f64>()
    }
}

/// Computes a chunk: reads and writes `buffers.states`, writes `buffers.y`.
#[inline(always)]
pub(super) fn chunk<M: Madd>(dims: &Mamba2Dims, room: &Room, c: &Chunk<'_>, buffers: &mut Buffers) {
    let Buffers { bt, cb, decayed, x, y, states, sums, .. } = buffers;
    let (len, conv_dim, n) = (c.len, dims.conv_dim(), dims.state);
    let group = c.heads.0 / dims.heads_per_group();
    let b_at = dims.inner() + group * n;
    let c_at = b_at + dims.groups * n;
    for (t, row) in c.rows.chunks(conv_dim).take(len).enumerate() {
        for (s, b) in row[b_at..b_at + n].iter().enumerate() {
            bt[s * room.tokens + t] = *b;
        }
    }
    // Columns past the chunk take part in whole panels: zeros, not what an earlier chunk left.
    let padded = len.next_multiple_of(PANEL).min(room.tokens);
    for row in bt.chunks_mut(room.tokens) {
        row[len..padded].fill(0.0);
    }
    let c_rows = &c.rows[c_at..];
    product::<M>(
        (c_rows, conv_dim),
        (bt, room.tokens),
        (cb, room.tokens),
        (len, padded, n),
        Part::LowerC,
        0.0,
        |_| 1.0,
    );
    let head_rows = room.chunk * room.elements;
    let states = states.chunks_mut(n * room.elements);
    let heads = states.zip(y.chunks_mut(head_rows)).zip(c.dt.chunks(room.chunk)).take(c.heads.1);
    for (h, ((state, y), dt)) in heads.enumerate() {
        let head = c.heads.0 + h;
        let a = f64::from(c.a[head]);
        let mut sum = 0.0;
        for (s, dt) in sums.iter_mut().zip(&dt[..len]) {
            sum += f64::from(*dt) * a;
            *s = sum;
        }
        let sums = &sums[..len];
        for (i, (out, cb)) in
            decayed.chunks_mut(room.tokens).zip(cb.chunks(room.tokens)).take(len).enumerate()
        {
            for ((o, cb), s) in out.iter_mut().zip(cb).zip(&sums[..=i]) {
                *o = cb * exp((sums[i] - s) as f32);
            }
            // Rows are computed four at a time, so three more columns are read.
            out[i + 1..(i + 4).min(room.tokens)].fill(0.0);
        }
        let x_at = head * dims.head_dim;
        for ((t, x), dt) in x.chunks_mut(room.elements).take(len).enumerate().zip(dt) {
            let from = &c.rows[t * conv_dim + x_at..][..dims.head_dim];
            x.iter_mut().zip(from).for_each(|(x, f)| *x = dt * f);
        }
        let sizes = (len, room.elements, len);
        let one = |_: usize| 1.0;
        product::<M>(
            (decayed, room.tokens),
            (x, room.elements),
            (y, room.elements),
            sizes,
            Part::LowerA,
            0.0,
            one,
        );
        if !c.fresh {
            product::<M>(
                (c_rows, conv_dim),
                (state, room.elements),
                (y, room.elements),
                (len, room.elements, n),
                Part::All,
                1.0,
                |i| exp(sums[i] as f32),
            );
        }
        for (x, s) in x.chunks_mut(room.elements).zip(sums) {
            let left = exp((sum - s) as f32);
            x.iter_mut().for_each(|x| *x *= left);
        }
        let keep = if c.fresh { 0.0 } else { exp(sum as f32) };
        product::<M>(
            (bt, room.tokens),
            (x, room.elements),
            (state, room.elements),
            (n, room.elements, len),
            Part::All,
            keep,
            one,
        );
    }
}
