//! 8-bit floats of KV caches to and from float32: e4m3 ("fn", no infinities) and e5m2 (IEEE-like).
//!
//! Encoding rounds to nearest, ties to even, and *saturates*: what is larger than the largest finite
//! value, infinity too, becomes ±448 (e4m3) or ±57344 (e5m2), so that one outlier does not poison a
//! cache with infinities. NaN stays NaN. Decoding is exact. (Micikevicius et al., "FP8 Formats for Deep
//! Learning", 2022.)
//!
//! Portable and branch-light; vector kernels have their own decoders that give the same values.

use crate::quant::half_bits::f16_to_f32;

/// Largest finite e4m3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Largest finite e5m2 value.
pub const E5M2_MAX: f32 = 57344.0;

/// The value of an e4m3 code: exact, codes 0x7f and 0xff are NaN.
#[inline(always)]
pub const fn e4m3_to_f32(code: u8) -> f32 {
    // As binary16 the exponent field is 8 too low (bias 15 against 7), for subnormals as well.
    let half = ((code as u16 & 0x80) << 8) | ((code as u16 & 0x7f) << 7);
    if code & 0x7f == 0x7f { f32::NAN } else { f16_to_f32(half) * 256.0 }
}

/// The value of an e5m2 code: exact. It is the upper byte of a binary16 number.
#[inline(always)]
pub const fn e5m2_to_f32(code: u8) -> f32 {
    f16_to_f32((code as u16) << 8)
}

/// The nearest e4m3 code, saturating at ±448; NaN gives NaN.
#[inline(always)]
pub const fn f32_to_e4m3(x: f32) -> u8 {
    encode(x, 3, 7, 0x7e, 0x7f)
}

/// The nearest e5m2 code, saturating at ±57344; NaN gives NaN.
#[inline(always)]
pub const fn f32_to_e5m2(x: f32) -> u8 {
    encode(x, 2, 15, 0x7b, 0x7e)
}

/// Rounds to `mantissa` bits under this exponent bias; `max` is the largest finite code.
#[inline(always)]
const fn encode(x: f32, mantissa: u32, bias: u32, max: u8, nan: u8) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | nan;
    }
    let code = if magnitude < (128 - bias) << 23 {
        // Subnormal: a count of the smallest steps. Adding 2^23 leaves it, rounded to even, in the low
        // bits; a count of 2^mantissa is the code of the smallest normal number.
        let step = f32::from_bits((126 + bias + mantissa) << 23);
        (f32::from_bits(magnitude) * step + 8_388_608.0).to_bits() & 0xff
    } else {
        let drop = 23 - mantissa;
        let rounded = magnitude + (1 << (drop - 1)) - 1 + ((magnitude >> drop) & 1);
        (rounded >> drop) - ((127 - bias) << mantissa)
    };
    sign | if code > max as u32 { max } else { code as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Decode = fn(u8) -> f32;
    type Encode = fn(f32) -> u8;
    const FORMATS: [(Decode, Encode, u8, f32); 2] =
        [(e4m3_to_f32, f32_to_e4m3, 0x7e, E4M3_MAX), (e5m2_to_f32, f32_to_e5m2, 0x7b, E5M2_MAX)];

    #[test]
    fn known_values() {
        assert_eq!(
            [0x00, 0x01, 0x08, 0x38, 0x7e, 0xb8].map(e4m3_to_f32),
            [0.0, 2f32.powi(-9), 2f32.powi(-6), 1.0, 448.0, -1.0]
        );
        assert_eq!(
            [0x01, 0x04, 0x3c, 0x7b, 0x7c].map(e5m2_to_f32),
            [2f32.powi(-16), 2f32.powi(-14), 1.0, 57344.0, f32::INFINITY]
        );
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan() && e5m2_to_f32(0x7e).is_nan());
    }

    #[test]
    fn every_finite_code_survives() {
        for (decode, encode, max, _) in FORMATS {
            for code in (0..=max).flat_map(|c| [c, c | 0x80]) {
                assert_eq!(encode(decode(code)), code, "{code:#04x}");
            }
        }
    }

    #[test]
    fn midpoints_go_to_even_and_their_neighbours_to_the_nearer_code() {
        for (decode, encode, max, _) in FORMATS {
            for low in 0..max {
                let middle = (decode(low) + decode(low + 1)) / 2.0;
                assert_eq!(encode(middle), low + low % 2, "between {low:#04x} and the next");
                assert_eq!(encode(middle.next_down()), low);
                assert_eq!(encode(middle.next_up()), low + 1);
            }
        }
    }

    #[test]
    fn overflow_saturates_and_nan_stays() {
        for (decode, encode, _, max) in FORMATS {
            for x in [max.next_up(), max * 1.1, 1e30, f32::INFINITY] {
                assert_eq!((decode(encode(x)), decode(encode(-x))), (max, -max));
            }
            assert!(decode(encode(f32::NAN)).is_nan() && decode(encode(-f32::NAN)).is_nan());
            assert_eq!((encode(-0.0), encode(1e-30), encode(-f32::MIN_POSITIVE)), (0x80, 0, 0x80));
        }
    }
}
