//! The product of tiles in plain Rust: what the instruction is held against.

/// Denormals are zero.
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// bfloat16 bits as float32.
pub(crate) fn widen(x: u16) -> f32 {
    flush(f32::from_bits(u32::from(x) << 16))
}

/// `c + Σ a · b` over one tile's worth of elements (an even number, up to 32) of a row of A and a column
/// of B.
pub(crate) fn dot(c: f32, a: &[u16], b: &[u16]) -> f32 {
    let mut sums = [0f32; 2];
    for (a, b) in a.chunks_exact(2).zip(b.chunks_exact(2)) {
        for i in 0..2 {
            sums[i] = flush(widen(a[i]).mul_add(widen(b[i]), sums[i]));
        }
    }
    flush(flush(c) + flush(sums[0] + sums[1]))
}

/// [`dot`] over rows of any length, 32 elements after 32.
pub(crate) fn long_dot(a: &[u16], b: &[u16]) -> f32 {
    a.chunks(32).zip(b.chunks(32)).fold(0.0, |c, (a, b)| {
        let pad = |x: &[u16]| std::array::from_fn::<u16, 32, _>(|i| x.get(i).copied().unwrap_or(0));
        dot(c, &pad(a), &pad(b))
    })
}
