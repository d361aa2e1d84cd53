//! Half-precision bits to float32, branch-free.
//!
//! Block headers carry their scales as IEEE binary16. The `half` crate detects CPU features at run time
//! on each conversion, which a block decoder cannot afford and which stops vectorisation; this one is a
//! handful of integer operations and selects.
//!
//! Not for whole half-precision tensors (see [`Weight::to_f32`](crate::weight::Weight::to_f32)).

/// The float32 value of the binary16 number with these bits: exact for every input, NaN stays NaN.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let bits = bits as u32;
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    // Normal: move exponent and mantissa into place and add the difference of the biases (127 - 15).
    let normal = (magnitude << 13) + (112 << 23);
    // Subnormal: an integer count of 2^-24.
    let subnormal = (magnitude as f32 * f32::from_bits(0x3380_0000)).to_bits();
    // Infinity and NaN: exponent all ones.
    let special = 0x7f80_0000 | (magnitude << 13);
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    let value = if magnitude >= 0x7c00 { special } else { finite };
    f32::from_bits(sign | value)
}

/// The binary16 number in two little-endian bytes, as float32.
#[inline(always)]
pub(super) const fn f16_le(low: u8, high: u8) -> f32 {
    f16_to_f32(u16::from_le_bytes([low, high]))
}

#[cfg(test)]
mod tests {
    use super::f16_to_f32;

    #[test]
    fn equals_the_half_crate_for_every_bit_pattern() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            if theirs.is_nan() {
                assert!(ours.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#06x}");
            }
        }
    }
}
