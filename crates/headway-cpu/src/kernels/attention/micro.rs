//! The two register-blocked products: scores of a few rows over groups of 16 keys, and weighted values
//! into a few rows of accumulators.
//!
//! Every sum is one chain of multiply-adds in ascending order (over the head's elements, over the
//! tokens), whatever the blocking: how rows are grouped never shows in a bit of the result.
//!
//! Pages lie anywhere in memory, so that the processor's own prefetchers begin anew with every block.
//! Both products therefore ask, with every line that they read from there, for one that comes later.

use super::{
    elem::Elem,
    lanes::{LINE, Lanes, prefetch},
};

/// Tokens in a packed group of keys.
pub const GROUP: usize = 16;
/// Groups in a tile.
pub(super) const GROUPS: usize = 4;
/// Tokens in a tile: the step of the online softmax, aligned to absolute positions.
pub(super) const TILE: usize = GROUP * GROUPS;

/// Whether the factors of a step stay in registers while vectors come and go, or the other way round:
/// what fits sixteen registers beside `rows · vectors` sums.
const fn factors_stay(rows: usize, vectors: usize, unit: usize) -> bool {
    rows * vectors + rows * unit + unit <= 16
}

/// Scores of `M` rows over `G` groups of keys: `s[m][g][t] = Σ_d q[m][d] · k[g][d][t]`.
///
/// # Safety
/// The instruction set of `L`; `q` has `M` rows of `head_size` float32, `k` `G` pointers, each to a packed group of
/// `head_size x 16` elements, `ahead` `G` addresses (the groups that come next, or these again), `s` `M` rows of
/// [`TILE`] float32 from the first group's place on.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, E: Elem, const M: usize, const G: usize>(
    q: *const f32,
    k: *const *const u8,
    ahead: *const *const u8,
    head_size: usize,
    s: *mut f32,
) {
    // SAFETY: indices stay in the shapes that the caller promised.
    unsafe {
        let vectors = GROUP / L::N;
        let (mut groups, mut next) = ([std::ptr::null(); G], [std::ptr::null(); G]);
        for g in 0..G {
            (groups[g], next[g]) = (*k.add(g), *ahead.add(g));
        }
        let mut acc = [[[L::splat(0.0); 2]; G]; M];
        for d in (0..head_size).step_by(E::UNIT) {
            let at = d * GROUP * E::SIZE;
            if E::AHEAD && at.is_multiple_of(LINE) {
                for g in 0..G {
                    prefetch(next[g].wrapping_add(at));
                }
            }
            if factors_stay(M, G * vectors, E::UNIT) {
                let mut x = [[L::splat(0.0); 2]; M];
                for m in 0..M {
                    for u in 0..E::UNIT {
                        x[m][u] = L::splat(*q.add(m * head_size + d + u));
                    }
                }
                for g in 0..G {
                    for j in 0..vectors {
                        let keys = E::load_units::<L>(groups[g].add(at + j * L::N * E::UNIT_SIZE));
                        for u in 0..E::UNIT {
                            for m in 0..M {
                                acc[m][g][j] = L::fma(x[m][u], keys[u], acc[m][g][j]);
                            }
                        }
                    }
                }
            } else {
                let mut keys = [[[L::splat(0.0); 2]; 2]; G];
                for g in 0..G {
                    for j in 0..vectors {
                        keys[g][j] = E::load_units::<L>(groups[g].add(at + j * L::N * E::UNIT_SIZE));
                    }
                }
                for m in 0..M {
                    for u in 0..E::UNIT {
                        let x = L::splat(*q.add(m * head_size + d + u));
                        for g in 0..G {
                            for j in 0..vectors {
                                acc[m][g][j] = L::fma(x, keys[g][j][u], acc[m][g][j]);
                            }
                        }
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

/// Values of one tile, by groups of 16 tokens: where each group's first unit of tokens (one token, or a
/// pair) begins, where that of the tile to come does, and the bytes from one unit to the next.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) groups: [*const u8; GROUPS],
    pub(super) ahead: [*const u8; GROUPS],
    pub(super) stride: usize,
}

/// Adds weighted values to `V` vectors of columns of `M` rows: `acc[m][c] += Σ_t p[m][t] · v[t][c]` for
/// the tokens `from..to` of the tile. Of a pair, a token outside is not touched.
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
            let (group, next) = (*v.groups.get_unchecked(t / GROUP), *v.ahead.get_unchecked(t / GROUP));
            if E::UNIT == 2 && t % 2 == 1 {
                weigh_one::<L, E, M, V>(&mut a, p.add(t), group.add(t % GROUP / 2 * v.stride), 1);
                t += 1;
            }
            let at = t % GROUP / E::UNIT * v.stride;
            let (mut unit, mut next) = (group.wrapping_add(at), next.wrapping_add(at));
            while t + E::UNIT <= end {
                if E::AHEAD {
                    for line in (0..V * L::N * E::UNIT_SIZE).step_by(LINE) {
                        prefetch(next.wrapping_add(line));
                    }
                    next = next.wrapping_add(v.stride);
                }
                weigh_unit::<L, E, M, V>(&mut a, p.add(t), unit);
                unit = unit.wrapping_add(v.stride);
                t += E::UNIT;
            }
            if E::UNIT == 2 && t < end {
                weigh_one::<L, E, M, V>(&mut a, p.add(t), group.add(t % GROUP / 2 * v.stride), 0);
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

/// All tokens of a unit.
///
/// # Safety
/// As [`weigh`]; the unit's values are at `unit`, the first token's weights at `p`.
#[inline(always)]
unsafe fn weigh_unit<L: Lanes, E: Elem, const M: usize, const V: usize>(
    a: &mut [[L; V]; M],
    p: *const f32,
    unit: *const u8,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        if factors_stay(M, V, E::UNIT) {
            let mut x = [[L::splat(0.0); 2]; M];
            for m in 0..M {
                for u in 0..E::UNIT {
                    x[m][u] = L::splat(*p.add(m * TILE + u));
                }
            }
            for c in 0..V {
                let values = E::load_units::<L>(unit.add(c * L::N * E::UNIT_SIZE));
                for u in 0..E::UNIT {
                    for m in 0..M {
                        a[m][c] = L::fma(x[m][u], values[u], a[m][c]);
                    }
                }
            }
        } else {
            let mut values = [[L::splat(0.0); 2]; V];
            for c in 0..V {
                values[c] = E::load_units::<L>(unit.add(c * L::N * E::UNIT_SIZE));
            }
            for m in 0..M {
                for u in 0..E::UNIT {
                    let x = L::splat(*p.add(m * TILE + u));
                    for c in 0..V {
                        a[m][c] = L::fma(x, values[c][u], a[m][c]);
                    }
                }
            }
        }
    }
}

/// One token of a pair: the first or the second.
///
/// # Safety
/// As [`weigh`]; the pair's values are at `unit`, the token's weights at `p`.
#[inline(always)]
unsafe fn weigh_one<L: Lanes, E: Elem, const M: usize, const V: usize>(
    a: &mut [[L; V]; M],
    p: *const f32,
    unit: *const u8,
    which: usize,
) {
    // SAFETY: as the caller has promised.
    unsafe {
        for c in 0..V {
            let values = E::load_units::<L>(unit.add(c * L::N * E::UNIT_SIZE))[which];
            for m in 0..M {
                a[m][c] = L::fma(L::splat(*p.add(m * TILE)), values, a[m][c]);
            }
        }
    }
}
