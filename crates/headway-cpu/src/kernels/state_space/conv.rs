//! One token of the causal depthwise convolution, and its activation.

use super::{product::Madd, shape::MAX_CONV_KERNEL};
use crate::kernels::elementwise::math::sigmoid;

/// Inputs of a token's convolution, oldest first; those past the convolution's width are empty.
pub(super) type Taps<'a> = [&'a [f32]; MAX_CONV_KERNEL];

/// `out[c] = silu(bias[c] + Σ_k weight[k][c] · taps[k][c])`. `weight` holds the channels' weights, tap
/// after tap, `weight_row` apart.
#[inline(always)]
pub(super) fn conv<M: Madd>(
    out: &mut [f32],
    bias: &[f32],
    weight: &[f32],
    weight_row: usize,
    taps: &Taps<'_>,
    width: usize,
) {
    out.copy_from_slice(bias);
    for (k, tap) in taps[..width].iter().enumerate() {
        let weight = &weight[k * weight_row..][..out.len()];
        for ((o, x), w) in out.iter_mut().zip(*tap).zip(weight) {
            *o = M::madd(*w, *x, *o);
        }
    }
    for o in out {
        *o *= sigmoid(*o);
    }
}
