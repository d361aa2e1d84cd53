//! What a number becomes when it is stored: the cache's and the activations' rounding, exactly.
//!
//! The 8-bit floats are looked up in the list of all their values, so there is no bit arithmetic to
//! get wrong. Overflow saturates, infinities too, and NaN stays: the rule of headway's caches.

use half::{bf16, f16};
use headway_tensor::DType;

/// The value of an 8-bit float with this many exponent bits (4: e4m3 without infinities; 5: e5m2).
pub fn f8_value(code: u8, exponent_bits: u32) -> f32 {
    let mantissa_bits = 7 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let magnitude = i32::from(code & 0x7f);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let step = 0.5f32.powi(mantissa_bits as i32);
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    if exponent_bits == 4 && magnitude == 0x7f {
        return f32::NAN;
    }
    if exponent_bits == 5 && exponent == 31 {
        return if mantissa == 0 { sign * f32::INFINITY } else { f32::NAN };
    }
    if exponent == 0 {
        sign * mantissa as f32 * step * 2f32.powi(1 - bias)
    } else {
        sign * (1.0 + mantissa as f32 * step) * 2f32.powi(exponent - bias)
    }
}

/// The nearest value of an 8-bit float, ties to the even code, saturating.
fn round_f8(x: f32, exponent_bits: u32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let finite = if exponent_bits == 4 { 0x7e } else { 0x7b };
    let a = f64::from(x.abs());
    let value = |code: u8| f64::from(f8_value(code, exponent_bits));
    if a >= value(finite) {
        return f8_value(finite, exponent_bits).copysign(x);
    }
    let (mut low, mut high) = (0, finite);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if value(middle) <= a { low = middle } else { high = middle }
    }
    let (below, above) = (a - value(low), value(high) - a);
    let code = if below < above || (below == above && low % 2 == 0) { low } else { high };
    f8_value(code, exponent_bits).copysign(x)
}

/// What is read back after `x` was stored as this dtype. Integer dtypes truncate and saturate.
pub fn round_to(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F8E4M3 => round_f8(x, 4),
        DType::F8E5M2 => round_f8(x, 5),
        DType::I8 => f32::from(x as i8),
        DType::U8 => f32::from(x as u8),
        DType::I32 => x as i32 as f32,
        DType::I64 => x as i64 as f32,
        _ => x,
    }
}

/// What a cache of this dtype with this scale gives back for `x`: `round(x / scale) · scale`. The
/// scale of a dtype that is not 8 bits wide is not used.
pub fn through_cache(dtype: DType, scale: f32, x: f32) -> f64 {
    match dtype {
        DType::F8E4M3 | DType::F8E5M2 => f64::from(round_to(dtype, x / scale)) * f64::from(scale),
        _ => f64::from(round_to(dtype, x)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_8_bit_value_is_its_own_rounding() {
        for (dtype, bits, top) in [(DType::F8E4M3, 4, 448.0), (DType::F8E5M2, 5, 57344.0)] {
            for code in 0..=255u8 {
                let x = f8_value(code, bits);
                if x.is_finite() {
                    assert_eq!(round_to(dtype, x).to_bits(), x.to_bits(), "{dtype} {code}");
                }
            }
            assert_eq!(round_to(dtype, f32::INFINITY), top);
            assert_eq!(round_to(dtype, -1e30), -top);
            assert!(round_to(dtype, f32::NAN).is_nan());
        }
    }

    #[test]
    fn edges_of_e4m3() {
        let r = |x| round_to(DType::F8E4M3, x);
        for x in [447.0, 448.0, 464.0, 465.0, 1000.0] {
            assert_eq!(r(x), 448.0);
        }
        let smallest = 2f32.powi(-9);
        assert_eq!((r(smallest), r(smallest / 2.0), r(smallest * 0.51)), (smallest, 0.0, smallest));
        assert_eq!(r(-0.0).to_bits(), (-0.0f32).to_bits());
        // 17 lies between 16 (even code) and 18; 19 between 18 and 20 (even code)
        assert_eq!((r(17.0), r(19.0), r(17.1)), (16.0, 20.0, 18.0));
    }

    #[test]
    fn scales_apply_to_8_bits_alone() {
        assert_eq!(through_cache(DType::F8E4M3, 0.5, 8.5), 8.0);
        assert_eq!(through_cache(DType::F32, 0.5, 8.4), f64::from(8.4f32));
        assert_eq!(round_to(DType::BF16, 1.0 + 0.5f32.powi(8)), 1.0);
    }
}
