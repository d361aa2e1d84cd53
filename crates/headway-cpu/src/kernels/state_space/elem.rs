//! Element types of states: float32, bfloat16, binary16. A page may begin at any byte, so elements are read
//! as bytes; the compiler makes vector loads of them.

use half::{bf16, f16};
use headway_tensor::{DType, quant::half_bits::f16_to_f32};

/// An element type by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elem {
    F32,
    Bf16,
    F16,
}

impl Elem {
    pub(super) fn of(dtype: DType) -> Result<Self, String> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::BF16 => Ok(Self::Bf16),
            DType::F16 => Ok(Self::F16),
            other => Err(format!("a state of {other}: float32, bfloat16 and float16 are supported")),
        }
    }

    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    pub(super) fn size(self) -> usize {
        self.dtype().size()
    }

    /// Elements to float32, as many as both have.
    pub(super) fn read(self, from: &[u8], to: &mut [f32]) {
        fn go<E: Stored>(from: &[u8], to: &mut [f32]) {
            let from: &[E::Bytes] = bytemuck::cast_slice(from);
            to.iter_mut().zip(from).for_each(|(t, f)| *t = E::get(*f));
        }
        match self {
            Self::F32 => go::<F32>(from, to),
            Self::Bf16 => go::<Bf16>(from, to),
            Self::F16 => go::<F16>(from, to),
        }
    }

    /// Elements from float32, rounded to nearest even, as many as both have.
    pub(super) fn write(self, from: &[f32], to: &mut [u8]) {
        fn go<E: Stored>(from: &[f32], to: &mut [u8]) {
            let to: &mut [E::Bytes] = bytemuck::cast_slice_mut(to);
            to.iter_mut().zip(from).for_each(|(t, f)| *t = E::of(*f));
        }
        match self {
            Self::F32 => go::<F32>(from, to),
            Self::Bf16 => go::<Bf16>(from, to),
            Self::F16 => go::<F16>(from, to),
        }
    }
}

/// An element type by type.
pub(super) trait Stored {
    type Bytes: bytemuck::Pod;
    fn get(bytes: Self::Bytes) -> f32;
    fn of(x: f32) -> Self::Bytes;
}

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;

impl Stored for F32 {
    type Bytes = [u8; 4];
    #[inline(always)]
    fn get(bytes: [u8; 4]) -> f32 {
        f32::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn of(x: f32) -> [u8; 4] {
        x.to_ne_bytes()
    }
}

impl Stored for Bf16 {
    type Bytes = [u8; 2];
    #[inline(always)]
    fn get(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16)
    }
    #[inline(always)]
    fn of(x: f32) -> [u8; 2] {
        bf16::from_f32(x).to_bits().to_ne_bytes()
    }
}

impl Stored for F16 {
    type Bytes = [u8; 2];
    #[inline(always)]
    fn get(bytes: [u8; 2]) -> f32 {
        f16_to_f32(u16::from_ne_bytes(bytes))
    }
    #[inline(always)]
    fn of(x: f32) -> [u8; 2] {
        f16::from_f32(x).to_bits().to_ne_bytes()
    }
}
