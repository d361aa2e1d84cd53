//! The arithmetic of softmax over a whole vocabulary: maximum with a check for NaN, exponentials, sums.
//!
//! Written in fixed lanes over chunks so that the compiler vectorises it and the result does not depend on the machine.

use super::SamplingError;

/// Elements summed in single precision before the sum goes on in double precision.
pub(super) const CHUNK: usize = 1024;
const LANES: usize = 16;

/// The largest logit.
///
/// # Errors
/// An empty row, NaN, plus infinity, nothing but minus infinity.
pub(super) fn max_logit(logits: &[f32]) -> Result<f32, SamplingError> {
    let vocab_size = logits.len();
    let mut top = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let (lanes, tail) = logits.as_chunks::<LANES>();
    for row in lanes {
        for i in 0..LANES {
            nan[i] |= row[i].is_nan();
            top[i] = if row[i] > top[i] { row[i] } else { top[i] };
        }
    }
    let max = top.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    if nan.contains(&true) || tail.iter().any(|x| x.is_nan()) {
        let token_id = logits.iter().position(|x| x.is_nan()).unwrap_or(0);
        return Err(SamplingError::Nan {
            token_id,
            count: logits.iter().filter(|x| x.is_nan()).count(),
            vocab_size,
        });
    }
    if vocab_size == 0 {
        return Err(SamplingError::Empty);
    }
    if max == f32::INFINITY {
        return Err(SamplingError::Infinite { token_id: index_of(logits, max) });
    }
    if max == f32::NEG_INFINITY {
        return Err(SamplingError::NothingPossible { vocab_size });
    }
    Ok(max)
}

/// The first index that holds `value`; 0 when none does.
pub(super) fn index_of(logits: &[f32], value: f32) -> usize {
    let chunk = logits.chunks(GLANCE).position(|chunk| any(chunk, |x| x == value)).unwrap_or(0);
    let start = chunk * GLANCE;
    start + logits[start..].iter().position(|x| *x == value).unwrap_or(0)
}

/// Elements that [`any`] looks at together.
pub(super) const GLANCE: usize = 64;

/// Whether any element is wanted; looks at all of them, which is faster for [`GLANCE`] elements than stopping early.
#[inline(always)]
pub(super) fn any(chunk: &[f32], wanted: impl Fn(f32) -> bool) -> bool {
    chunk.iter().fold(false, |any, x| any | wanted(*x))
}

/// e^x for x ≤ 0 to about one unit in the last place; 0 below -87, where the result would be subnormal.
///
/// x = n ln 2 + r, e^r by its Taylor polynomial on |r| ≤ ln 2 / 2, 2^n by writing the exponent.
#[inline(always)]
pub(super) fn exp_nonpositive(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const LN2_HIGH: f32 = 355.0 / 512.0; // ln 2 in few bits, so that n times it is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.max(-87.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let e = (p * r) * r + r + 1.0;
    // The low bits of `shifted` hold n; shifted up they are n in the place of the exponent.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    // A mask and not a branch, which would keep the loop from being vectorised.
    f32::from_bits((e * scale).to_bits() & u32::from(x > -87.0).wrapping_neg())
}

/// Sum of one chunk of at most [`CHUNK`] elements.
pub(super) fn chunk_sum(chunk: &[f32]) -> f64 {
    let mut acc = [0.0f32; LANES];
    let (lanes, tail) = chunk.as_chunks::<LANES>();
    for row in lanes {
        for i in 0..LANES {
            acc[i] += row[i];
        }
    }
    acc.iter().chain(tail).map(|x| f64::from(*x)).sum()
}

/// Sum of all elements.
pub(super) fn sum(values: &[f32]) -> f64 {
    values.chunks(CHUNK).map(chunk_sum).sum()
}
