//! The two register-blocked products: scores of a few rows over groups of 16 keys, and weighted values
//! into a few rows of accumulators.
//!
//! Every sum is one chain of multiply-adds in ascending order (over the head's elements, over the
//! tokens), whatever the blocking: how rows are grouped never shows in a bit of the result.

use super::{elem::Elem, lanes::Lanes};

/// Tokens in a packed group of keys.
pub const GROUP: usize = 16;
/// Groups in a tile.
pub(super) const GROUPS: usize = 4;
/// Tokens in a tile: the step of the online softmax, aligned to absolute positions.
pub(super) const TILE: usize = GROUP * GROUPS;

/// Scores of `M` rows over `G` groups of keys: `s[m][g][t] = Σ_d q[m][d] · k[g][d][t]`.
///
/// # Safety
/// The instruction set of `L`; `q` has `M` rows of `head_size` float32, `k` `G` pointers, each to a packed group of
/// `head_size x 16` elements, `s` `M` rows of [`TILE`] float32 from the first group's place on.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, E: Elem, const M: usize, const G: usize>(
    q: *const f32,
    k: *const *const u8,
    head_size: usize,
    s: *mut f32,
) {
    // SAFETY: indices stay in the shapes that the caller promised.
    unsafe {
        let vectors = GROUP / L::N;
        let mut acc = [[[L::splat(0.0); 2]; G]; M];
        for d in 0..head_size {
            let mut keys = [[L::splat(0.0); 2]; G];
            for g in 0..G {
                for j in 0..vectors {
                    keys[g][j] = E::load((*k.add(g)).add((d * GROUP + j * L::N) * E::SIZE));
                }
            }
            for m in 0..M {
                let x = L::splat(*q.add(m * head_size + d));
                for g in 0..G {
                    for j in 0..vectors {
                        acc[m][g][j] = L::fma(x, keys[g][j], acc[m][g][j]);
                    }
                }
            }
        }
        for m in 0..M {
            for g in 0..G {
                for j in 0..vectors {
                    acc[m][g][j].store(s.add(m * TILE + g * GROUP + j * L::N).cast());
                }
            }
        }
    }
}

/// Values of one tile, by groups of 16 tokens: where each group's first token begins, and the bytes
/// from one token to the next.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) groups: [*const u8; GROUPS],
    pub(super) stride: usize,
}

/// Adds weighted values to `V` vectors of columns of `M` rows: `acc[m][c] += Σ_t p[m][t] · v[t][c]` for
/// the tokens `from..to` of the tile.
///
/// # Safety
/// The instruction set of `L`; `p` has `M` rows of [`TILE`] weights, `acc` `M` rows `acc_stride` apart
/// with `V · L::N` columns, the groups that `from..to` touches as many columns of each token.
#[inline(always)]
pub(super) unsafe fn weigh<L: Lanes, E: Elem, const M: usize, const V: usize>(
    p: *const f32,
    v: &Values,
    (from, to): (usize, usize),
    acc: *mut f32,
    acc_stride: usize,
) {
    // SAFETY: indices stay in the shapes that the caller promised.
    unsafe {
        let mut a = [[L::splat(0.0); V]; M];
        for m in 0..M {
            for c in 0..V {
                a[m][c] = L::load(acc.add(m * acc_stride + c * L::N).cast());
            }
        }
        let mut t = from;
        while t < to {
            let end = to.min((t / GROUP + 1) * GROUP);
            let group = *v.groups.get_unchecked(t / GROUP);
            while t < end {
                let token = group.add(t % GROUP * v.stride);
                let mut values = [L::splat(0.0); V];
                for c in 0..V {
                    values[c] = E::load(token.add(c * L::N * E::SIZE));
                }
                for m in 0..M {
                    let x = L::splat(*p.add(m * TILE + t));
                    for c in 0..V {
                        a[m][c] = L::fma(x, values[c], a[m][c]);
                    }
                }
                t += 1;
            }
        }
        for m in 0..M {
            for c in 0..V {
                a[m][c].store(acc.add(m * acc_stride + c * L::N).cast());
            }
        }
    }
}
