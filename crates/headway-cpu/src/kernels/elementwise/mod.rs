//! Element-wise kernels on float32 rows: norms, activations, rotation, sums. Each is one generic body,
//! compiled for every instruction set and chosen by [`Isa`].
//!
//! Sums use 16 fixed lanes and no fused multiply-add, so a row's result is the same bits at every
//! level, on any thread, and in any batch. Not for whole tensors: rows and threads are `ops`' business.

mod body;
pub(in crate::kernels) mod math;
pub(crate) mod rows;

use crate::Isa;

/// Declares safe functions that run `body::NAME` compiled for the instruction set given.
macro_rules! per_isa {
    ($( $(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?; )*) => { $(
        $(#[$doc])*
        #[inline]
        pub(crate) fn $name(isa: Isa, $($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $type),*) $(-> $ret)? { body::$name($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $type),*) $(-> $ret)? { body::$name($($arg),*) }
                match isa {
                    // SAFETY: `CpuExec::new`, where every level comes from, refuses what the machine lacks.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return unsafe { avx512($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            body::$name($($arg),*)
        }
    )* };
}

/// e^x of one number: the same bits at every level.
pub(crate) fn exp(x: f32) -> f32 {
    math::exp(x)
}

per_isa! {
    /// Sum of squares.
    fn sum_of_squares(x: &[f32]) -> f32;
    /// `out = x · scale · weight`, as long as the shortest.
    fn scaled(out: &mut [f32], x: &[f32], scale: f32, weight: &[f32]);
    /// `x = x · scale · weight`.
    fn scaled_in_place(x: &mut [f32], scale: f32, weight: &[f32]);
    /// x with mean 0 and variance 1, times `weight` plus `bias`.
    fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32);
    /// `acc += x`.
    fn add(acc: &mut [f32], x: &[f32]);
    /// `out = silu(gate) · up`.
    fn silu(out: &mut [f32], gate: &[f32], up: &[f32]);
    /// `out = gelu(gate) · up`, tanh form.
    fn gelu_tanh(out: &mut [f32], gate: &[f32], up: &[f32]);
    /// `out = gelu(gate) · up`, error-function form.
    fn gelu(out: &mut [f32], gate: &[f32], up: &[f32]);
    /// `out = g · sigmoid(alpha · g) · (u + 1)`, g and u being gate and up within the limit (gate from above
    /// alone).
    fn clamped_swiglu(out: &mut [f32], gate: &[f32], up: &[f32], alpha: f32, limit: f32);
    /// `acc += x · factor`.
    fn add_scaled(acc: &mut [f32], x: &[f32], factor: f32);
    /// `x = softmax(x)`.
    fn softmax(x: &mut [f32]);
    /// `x = sigmoid(x)`.
    fn sigmoid(x: &mut [f32]);
    /// `out = max(gate, 0)² · up`.
    fn relu2(out: &mut [f32], gate: &[f32], up: &[f32]);
    /// `x = silu(x)`.
    fn silu_of(x: &mut [f32]);
    /// `x = gelu(x)`, tanh form.
    fn gelu_tanh_of(x: &mut [f32]);
    /// `x = gelu(x)`, error-function form.
    fn gelu_of(x: &mut [f32]);
    /// `x = max(x, 0)²`.
    fn relu2_of(x: &mut [f32]);
    /// `x = x · silu(gate)`.
    fn times_silu(x: &mut [f32], gate: &[f32]);
    /// `x = x · factor`.
    fn scale(x: &mut [f32], factor: f32);
    /// `x = cap · tanh(x · factor / cap)`.
    fn soft_cap(x: &mut [f32], factor: f32, cap: f32);
    /// Rotates `(x[i], x[i + n])`, n the length of `table` in pairs.
    fn rope_halves(x: &mut [f32], table: &[[f32; 2]]);
    /// Rotates `(x[2i], x[2i + 1])`.
    fn rope_interleaved(x: &mut [f32], table: &[[f32; 2]]);
}

#[cfg(test)]
mod tests;
