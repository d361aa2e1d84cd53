//! The bodies of the element-wise kernels: plain loops that the compiler vectorises for the
//! instruction set they are inlined into. Not called directly: see the parent module.

use super::math;

/// Lanes of a sum, whatever the vector length of the machine.
const LANES: usize = 16;

/// Adds lanes pairwise, halves onto halves.
#[inline(always)]
fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for c in chunks {
        for (l, v) in lanes.iter_mut().zip(c) {
            *l += v * v;
        }
    }
    for (l, v) in lanes.iter_mut().zip(rest) {
        *l += v * v;
    }
    reduce(lanes)
}

#[inline(always)]
pub(super) fn scaled(out: &mut [f32], x: &[f32], scale: f32, weight: &[f32]) {
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

#[inline(always)]
pub(super) fn scaled_in_place(x: &mut [f32], scale: f32, weight: &[f32]) {
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

#[inline(always)]
pub(super) fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mut lanes = [0f32; LANES];
    for c in x.chunks(LANES) {
        lanes.iter_mut().zip(c).for_each(|(l, v)| *l += v);
    }
    let mean = reduce(lanes) / n;
    x.iter_mut().for_each(|v| *v -= mean);
    let scale = 1.0 / (sum_of_squares(x) / n + eps).sqrt();
    for ((x, w), b) in x.iter_mut().zip(weight).zip(bias) {
        *x = *x * scale * w + b;
    }
}

#[inline(always)]
pub(super) fn add(acc: &mut [f32], x: &[f32]) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a += x;
    }
}

#[inline(always)]
fn gate(out: &mut [f32], gate: &[f32], up: &[f32], f: impl Fn(f32) -> f32) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = f(*g) * u;
    }
}

#[inline(always)]
pub(super) fn silu(out: &mut [f32], g: &[f32], up: &[f32]) {
    gate(out, g, up, |x| x * math::sigmoid(x));
}

#[inline(always)]
pub(super) fn gelu_tanh(out: &mut [f32], g: &[f32], up: &[f32]) {
    gate(out, g, up, gelu_by_tanh);
}

#[inline(always)]
fn gelu_by_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + math::tanh(SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}

#[inline(always)]
pub(super) fn gelu(out: &mut [f32], g: &[f32], up: &[f32]) {
    gate(out, g, up, gelu_by_erf);
}

#[inline(always)]
fn gelu_by_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + math::erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[inline(always)]
pub(super) fn relu2(out: &mut [f32], g: &[f32], up: &[f32]) {
    gate(out, g, up, |x| x.max(0.0) * x.max(0.0));
}

#[inline(always)]
fn each(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

#[inline(always)]
pub(super) fn silu_of(x: &mut [f32]) {
    each(x, |x| x * math::sigmoid(x));
}

#[inline(always)]
pub(super) fn gelu_tanh_of(x: &mut [f32]) {
    each(x, gelu_by_tanh);
}

#[inline(always)]
pub(super) fn gelu_of(x: &mut [f32]) {
    each(x, gelu_by_erf);
}

#[inline(always)]
pub(super) fn relu2_of(x: &mut [f32]) {
    each(x, |x| x.max(0.0) * x.max(0.0));
}

#[inline(always)]
pub(super) fn times_silu(x: &mut [f32], gate: &[f32]) {
    for (x, g) in x.iter_mut().zip(gate) {
        *x *= g * math::sigmoid(*g);
    }
}

#[inline(always)]
pub(super) fn clamped_swiglu(out: &mut [f32], g: &[f32], up: &[f32], alpha: f32, limit: f32) {
    for ((o, g), u) in out.iter_mut().zip(g).zip(up) {
        let g = g.min(limit);
        *o = g * math::sigmoid(alpha * g) * (u.clamp(-limit, limit) + 1.0);
    }
}

#[inline(always)]
pub(super) fn add_scaled(acc: &mut [f32], x: &[f32], factor: f32) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a += x * factor;
    }
}

#[inline(always)]
pub(super) fn softmax(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for c in chunks {
        for (l, v) in lanes.iter_mut().zip(c) {
            *v = math::exp(*v - max);
            *l += *v;
        }
    }
    for (l, v) in lanes.iter_mut().zip(rest) {
        *v = math::exp(*v - max);
        *l += *v;
    }
    let sum = reduce(lanes);
    for v in x {
        *v /= sum;
    }
}

#[inline(always)]
pub(super) fn sigmoid(x: &mut [f32]) {
    for x in x {
        *x = math::sigmoid(*x);
    }
}

#[inline(always)]
pub(super) fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

#[inline(always)]
pub(super) fn soft_cap(x: &mut [f32], factor: f32, cap: f32) {
    for x in x {
        *x = cap * math::tanh(*x * factor / cap);
    }
}

#[inline(always)]
pub(super) fn rope_halves(x: &mut [f32], table: &[[f32; 2]]) {
    let Some((low, rest)) = x.split_at_mut_checked(table.len()) else { return };
    for ((a, b), [cos, sin]) in low.iter_mut().zip(rest).zip(table) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[inline(always)]
pub(super) fn rope_interleaved(x: &mut [f32], table: &[[f32; 2]]) {
    for ([a, b], [cos, sin]) in x.as_chunks_mut::<2>().0.iter_mut().zip(table) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
