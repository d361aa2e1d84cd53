//! Rows of activations as 8-bit codes for a product with 8-bit weights: the rules by which a checkpoint's static
//! scales, or scales made on the way, turn float32 into codes. Kernels that write codes directly and passes over a
//! finished output call the same function, so that both give the same bits.
//!
//! Not for KV caches ([`crate::fp8`] has their codes) nor for weights.

use crate::{
    DType,
    fp8::{E4M3_MAX, f32_to_e4m3},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The least maximum of a block that its scale is made of: a block of zeros has a scale too.
const LEAST: f32 = 1e-10;

/// How a row becomes codes. A code's value times its scale is what is multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowQuant {
    /// e4m3 of `x / scale`, rounded to nearest even, saturating at ±448; NaN stays NaN.
    E4m3 {
        /// One for the tensor, from the checkpoint.
        scale: f32,
    },
    /// Whole numbers of `x / scale`, rounded to nearest even, saturating at −128 and 127; NaN becomes 0.
    I8 {
        /// One for the tensor, from the checkpoint.
        scale: f32,
    },
    /// e4m3 of `x / s` for every `block` elements that follow one another, with `s` the largest of their magnitudes
    /// (at least 1e-10) over 448. NaN stays NaN and counts for no maximum; beside an infinity every other value is 0
    /// and the infinity NaN.
    E4m3Blocks {
        /// Elements that share a scale.
        block: usize,
    },
}

/// The kinds of [`RowQuant`], as rule books list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowQuantKind {
    /// [`RowQuant::E4m3`].
    E4m3PerTensor,
    /// [`RowQuant::I8`].
    Int8PerTensor,
    /// [`RowQuant::E4m3Blocks`].
    E4m3Blocks,
}

impl RowQuantKind {
    /// As reports and errors name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3PerTensor => "fp8 with one scale",
            Self::Int8PerTensor => "int8 with one scale",
            Self::E4m3Blocks => "fp8 with a scale a block",
        }
    }
}

impl fmt::Display for RowQuantKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl RowQuant {
    /// The kind.
    pub const fn kind(&self) -> RowQuantKind {
        match self {
            Self::E4m3 { .. } => RowQuantKind::E4m3PerTensor,
            Self::I8 { .. } => RowQuantKind::Int8PerTensor,
            Self::E4m3Blocks { .. } => RowQuantKind::E4m3Blocks,
        }
    }

    /// The codes' element type.
    pub const fn dtype(&self) -> DType {
        match self {
            Self::E4m3 { .. } | Self::E4m3Blocks { .. } => DType::F8E4M3,
            Self::I8 { .. } => DType::I8,
        }
    }

    /// Scales that are made for so many elements.
    pub const fn scales_of(&self, width: usize) -> usize {
        match self {
            Self::E4m3Blocks { block } if *block > 0 => width / *block,
            _ => 0,
        }
    }

    /// Whether rows of so many elements can be quantised: a positive, finite scale; whole blocks.
    pub fn fits(&self, width: usize) -> bool {
        match self {
            Self::E4m3 { scale } | Self::I8 { scale } => scale.is_finite() && *scale > 0.0,
            Self::E4m3Blocks { block } => *block > 0 && width.is_multiple_of(*block),
        }
    }

    /// The codes of `row[i] · factor`, the product rounded to float32 first. `scales` takes those that are made,
    /// [`RowQuant::scales_of`] the row.
    ///
    /// ```
    /// use headway_tensor::RowQuant;
    /// let (mut codes, mut scales) = ([0u8; 4], [0f32; 2]);
    /// RowQuant::E4m3Blocks { block: 2 }.quantise(&[448.0, -1.0, 0.5, 0.25], 1.0, &mut codes, &mut scales);
    /// assert_eq!((codes, scales), ([0x7e, 0xb8, 0x7e, 0x76], [1.0, 0.5 / 448.0]));
    /// RowQuant::I8 { scale: 2.0 }.quantise(&[5.0, -1000.0, 3.0, f32::NAN], 1.0, &mut codes, &mut []);
    /// assert_eq!(codes.map(|c| c as i8), [2, -128, 2, 0]); // 2.5 and 1.5 go to even
    /// ```
    #[inline(always)]
    pub fn quantise(&self, row: &[f32], factor: f32, codes: &mut [u8], scales: &mut [f32]) {
        match *self {
            Self::E4m3 { scale } => e4m3(row, factor, scale, codes),
            Self::I8 { scale } => {
                for (code, x) in codes.iter_mut().zip(row) {
                    // The conversion saturates, and takes NaN to 0.
                    *code = (x * factor / scale).round_ties_even() as i8 as u8;
                }
            }
            Self::E4m3Blocks { block } => {
                let blocks = row.chunks_exact(block).zip(codes.chunks_exact_mut(block));
                for ((row, codes), s) in blocks.zip(scales) {
                    let top = row.iter().fold(LEAST, |top, x| (x * factor).abs().max(top));
                    *s = top / E4M3_MAX;
                    e4m3(row, factor, *s, codes);
                }
            }
        }
    }
}

#[inline(always)]
fn e4m3(row: &[f32], factor: f32, scale: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(row) {
        *code = f32_to_e4m3(x * factor / scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::e4m3_to_f32;

    #[test]
    fn static_codes_saturate_round_to_even_and_keep_nan() {
        let mut codes = [0u8; 6];
        let row = [1e9, -1e9, f32::INFINITY, f32::NAN, 17.0 * 0.5, 19.0 * 0.5];
        RowQuant::E4m3 { scale: 0.5 }.quantise(&row, 1.0, &mut codes, &mut []);
        let values = codes.map(e4m3_to_f32);
        assert_eq!(values[..3], [448.0, -448.0, 448.0]);
        assert!(values[3].is_nan());
        // 17 and 19 lie half-way between multiples of 2.
        assert_eq!(values[4..], [16.0, 20.0]);
        let mut ints = [0u8; 6];
        RowQuant::I8 { scale: 0.5 }.quantise(&row, 1.0, &mut ints, &mut []);
        assert_eq!(ints.map(|c| c as i8), [127, -128, 127, 0, 17, 19]);
    }

    #[test]
    fn a_block_is_scaled_by_its_largest_value() {
        let (mut codes, mut scales) = ([9u8; 6], [9f32; 3]);
        let row = [3.0, f32::NAN, 0.0, 0.0, -2.0, 1.0];
        RowQuant::E4m3Blocks { block: 2 }.quantise(&row, 2.0, &mut codes, &mut scales);
        assert_eq!(scales, [6.0 / 448.0, 1e-10 / 448.0, 4.0 / 448.0]);
        assert_eq!((codes[0], e4m3_to_f32(codes[1]).is_nan()), (0x7e, true));
        assert_eq!((codes[2], codes[3], codes[4], codes[5]), (0, 0, 0xfe, 0x76));
    }

    #[test]
    fn what_can_not_be_is_known_before() {
        assert!(!RowQuant::E4m3 { scale: 0.0 }.fits(8) && !RowQuant::I8 { scale: f32::NAN }.fits(8));
        let blocks = |block| RowQuant::E4m3Blocks { block };
        assert!(blocks(128).fits(256) && !blocks(128).fits(192) && !blocks(0).fits(8));
        assert_eq!((blocks(128).scales_of(256), RowQuant::I8 { scale: 1.0 }.scales_of(256)), (2, 0));
    }
}
