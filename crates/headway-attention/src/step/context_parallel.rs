//! Lifetime: one step. Decode context parallelism: which of a request's tokens a rank holds, and how
//! the ranks' partial answers become one. A rank that holds no key of a row contributes nothing: output
//! 0 and log-sum-exp minus infinity.

use crate::ContextParallel;

/// Tokens of a sequence that this rank holds: tokens go to the ranks in turns of `interleave`.
pub fn local_seq_len(seq_len: i32, cp: ContextParallel) -> i32 {
    let (size, turn) = (cp.size.max(1), cp.interleave.max(1));
    let len = usize::try_from(seq_len).unwrap_or(0);
    let round = size * turn;
    let rest = (len % round).saturating_sub(cp.rank * turn).min(turn);
    ((len / round) * turn + rest) as i32
}

/// [`local_seq_len`] of each request.
pub fn local_seq_lens(seq_lens: &[i32], cp: ContextParallel) -> Vec<i32> {
    seq_lens.iter().map(|&s| local_seq_len(s, cp)).collect()
}

/// At least what any rank holds of a sequence of at most this length. Divisible by `interleave`.
pub fn max_local_seq_len(max_seq_len: usize, cp: ContextParallel) -> usize {
    let turn = cp.interleave.max(1);
    max_seq_len.div_ceil(cp.size.max(1) * turn) * turn
}

/// Base of a log-sum-exp. It is part of the interface: kernels differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogBase {
    /// Natural logarithm.
    E,
    /// Logarithm to base 2.
    Two,
}

impl LogBase {
    fn exp(self, x: f32) -> f32 {
        match self {
            Self::E => x.exp(),
            Self::Two => x.exp2(),
        }
    }

    fn log(self, x: f32) -> f32 {
        match self {
            Self::E => x.ln(),
            Self::Two => x.log2(),
        }
    }
}

/// A log-sum-exp that stands for "no keys": kernels also write NaN or plus infinity for an empty set.
fn finite_or_empty(lse: f32) -> f32 {
    if lse.is_nan() || lse == f32::INFINITY { f32::NEG_INFINITY } else { lse }
}

/// The log-sum-exp over ranks of one row and head.
pub fn combined_lse(partial: impl Iterator<Item = f32> + Clone, base: LogBase) -> f32 {
    let partial = partial.map(finite_or_empty);
    let max = partial.clone().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    max + base.log(partial.map(|l| base.exp(l - max)).sum())
}

/// The factor on a rank's output of one row and head: its share of the whole softmax.
pub fn rank_weight(partial: f32, combined: f32, base: LogBase) -> f32 {
    let partial = finite_or_empty(partial);
    if partial == f32::NEG_INFINITY || combined == f32::NEG_INFINITY {
        0.0
    } else {
        base.exp(partial - combined)
    }
}

/// Weighs one rank's output `[rows, width]` (a row is a token and head) by its share, in place.
pub fn correct_rank_output(out: &mut [f32], width: usize, partial: &[f32], combined: &[f32], base: LogBase) {
    for ((row, &p), &c) in out.chunks_exact_mut(width.max(1)).zip(partial).zip(combined) {
        let w = rank_weight(p, c, base);
        // An empty share is 0 whatever the kernel left in the row, NaN included.
        row.iter_mut().for_each(|x| *x = if w == 0.0 { 0.0 } else { *x * w });
    }
}

/// Merges two partial outputs of one row and head over disjoint keys (cached context and new tokens), in
/// base e. Returns the log-sum-exp.
pub fn merge_rows(prefix: &[f32], prefix_lse: f32, suffix: &[f32], suffix_lse: f32, out: &mut [f32]) -> f32 {
    let lse = combined_lse([prefix_lse, suffix_lse].into_iter(), LogBase::E);
    let weights = [prefix_lse, suffix_lse].map(|l| rank_weight(l, lse, LogBase::E));
    let share = |x: f32, w: f32| if w == 0.0 { 0.0 } else { x * w };
    for ((o, &p), &s) in out.iter_mut().zip(prefix).zip(suffix) {
        *o = share(p, weights[0]) + share(s, weights[1]);
    }
    lse
}

/// Sets the log-sum-exp of rows without local keys, and of rows past the last request, to minus
/// infinity. `lse` is `[tokens, heads]`.
pub fn mask_empty_shards(lse: &mut [f32], heads: usize, local_seq_lens: &[i32], query_start_loc: &[i32]) {
    for (token, row) in lse.chunks_exact_mut(heads.max(1)).enumerate() {
        let request = query_start_loc.partition_point(|&q| q <= token as i32).saturating_sub(1);
        if local_seq_lens.get(request).is_none_or(|&l| l <= 0) {
            row.fill(f32::NEG_INFINITY);
        }
    }
}
