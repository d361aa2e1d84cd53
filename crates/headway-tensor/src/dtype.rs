//! Element types of tensors and caches. Block-quantised weights are not dtypes: see `weight`.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;

/// An element type with a fixed size in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 single precision.
    #[serde(rename = "float32")]
    F32,
    /// IEEE 754 half precision.
    #[serde(rename = "float16")]
    F16,
    /// bfloat16.
    #[serde(rename = "bfloat16")]
    BF16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (the "fn" variant).
    #[serde(rename = "float8_e4m3fn")]
    F8E4M3,
    /// 8-bit float, 5 exponent and 2 mantissa bits, IEEE-like.
    #[serde(rename = "float8_e5m2")]
    F8E5M2,
    /// 32-bit signed integer.
    #[serde(rename = "int32")]
    I32,
    /// 64-bit signed integer.
    #[serde(rename = "int64")]
    I64,
    /// 8-bit unsigned integer, or raw bytes.
    #[serde(rename = "uint8")]
    U8,
    /// 8-bit signed integer.
    #[serde(rename = "int8")]
    I8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I64 => 8,
            Self::F8E4M3 | Self::F8E5M2 | Self::U8 | Self::I8 => 1,
        }
    }

    /// The field's name of the dtype (`bfloat16`, `float8_e4m3fn`, …).
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::I8 => "int8",
        }
    }

    /// Whether this is one of the floating-point types that attention computes in.
    pub const fn is_compute_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that is the element of a [`DType`].
///
/// ```
/// use headway_tensor::{DType, Element};
/// /// Values as a tensor of `T` would hold them.
/// fn through<T: Element>(values: &[f32]) -> (DType, Vec<f32>) {
///     (T::DTYPE, values.iter().map(|&x| T::from_f32(x).to_f32()).collect())
/// }
///
/// assert_eq!(through::<f32>(&[1.75, -2.5]), (DType::F32, vec![1.75, -2.5]));
/// assert_eq!(through::<i32>(&[1.75, -2.5]), (DType::I32, vec![1.0, -2.0]));
/// // 8 bits of precision: 257 lies half-way between 256 and 258, and the tie goes to the even one.
/// assert_eq!(through::<half::bf16>(&[257.0]), (DType::BF16, vec![256.0]));
/// ```
pub trait Element: bytemuck::Pod + Send + Sync + 'static {
    /// The dtype whose elements are values of this type.
    const DTYPE: DType;
    /// The value as float32 (integers are converted).
    fn to_f32(self) -> f32;
    /// The nearest value to a float32 (ties to even; integers truncate).
    fn from_f32(x: f32) -> Self;
}

macro_rules! element {
    ($($t:ty => $d:ident, $to:expr, $from:expr;)*) => { $(
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f32(self) -> f32 { ($to)(self) }
            #[inline(always)]
            fn from_f32(x: f32) -> Self { ($from)(x) }
        }
    )* };
}
element! {
    f32 => F32, |x| x, |x| x;
    f16 => F16, f16::to_f32, f16::from_f32;
    bf16 => BF16, bf16::to_f32, bf16::from_f32;
    i32 => I32, |x| x as f32, |x| x as i32;
    i64 => I64, |x| x as f32, |x| x as i64;
    u8 => U8, |x| x as f32, |x| x as u8;
    i8 => I8, |x| x as f32, |x| x as i8;
}
