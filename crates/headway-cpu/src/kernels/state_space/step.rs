//! One token of one head: `S = exp(dt · A) · S + dt · x ⊗ B`, `y = S · C + D · x`.

use super::{
    elem::{Bf16, Elem, F16, F32, Stored},
    product::Madd,
};

/// Lanes of a sum, whatever the vector length of the machine.
const LANES: usize = 16;

/// A token as a head sees it.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    /// `[head_dim]`.
    pub x: &'a [f32],
    /// `[state]`.
    pub b: &'a [f32],
    /// `[state]`.
    pub c: &'a [f32],
    /// Length of the step, after its bias and softplus.
    pub dt: f32,
    /// exp(dt · A).
    pub decay: f32,
    /// Skip weight.
    pub d: f32,
}

/// Advances a head's state `[head_dim, state]`, in place, and writes the output `[head_dim]`. The output is
/// made of the new state before it is rounded to its element type.
#[inline(always)]
pub(super) fn step<M: Madd>(elem: Elem, state: &mut [u8], token: &Token<'_>, y: &mut [f32]) {
    match elem {
        Elem::F32 => of_elem::<M, F32>(state, token, y),
        Elem::Bf16 => of_elem::<M, Bf16>(state, token, y),
        Elem::F16 => of_elem::<M, F16>(state, token, y),
    }
}

#[inline(always)]
fn of_elem<M: Madd, E: Stored>(state: &mut [u8], token: &Token<'_>, y: &mut [f32]) {
    let state: &mut [E::Bytes] = bytemuck::cast_slice_mut(state);
    let (b_lanes, b_rest) = token.b.as_chunks::<LANES>();
    let (c_lanes, c_rest) = token.c.as_chunks::<LANES>();
    let rows = state.chunks_exact_mut(token.b.len());
    for ((row, y), x) in rows.zip(y).zip(token.x) {
        let dx = token.dt * x;
        let mut sums = [0f32; LANES];
        let (lanes, rest) = row.as_chunks_mut::<LANES>();
        for ((s, b), c) in lanes.iter_mut().zip(b_lanes).zip(c_lanes) {
            for l in 0..LANES {
                let new = M::madd(E::get(s[l]), token.decay, dx * b[l]);
                sums[l] = M::madd(new, c[l], sums[l]);
                s[l] = E::of(new);
            }
        }
        for (l, ((s, b), c)) in rest.iter_mut().zip(b_rest).zip(c_rest).enumerate() {
            let new = M::madd(E::get(*s), token.decay, dx * b);
            sums[l] = M::madd(new, *c, sums[l]);
            *s = E::of(new);
        }
        let mut n = LANES / 2;
        while n > 0 {
            for l in 0..n {
                sums[l] += sums[l + n];
            }
            n /= 2;
        }
        *y = M::madd(token.d, *x, sums[0]);
    }
}
