//! Elements of activations in the type of a cache, where it is another.

use super::Result;
use half::{bf16, f16};
use headway_attention::AttentionError;
use headway_tensor::{
    DType,
    fp8::{f32_to_e4m3, f32_to_e5m2},
    quant::half_bits::f16_to_f32,
};

/// Rounds `width` contiguous elements; 8-bit types are divided by the scale first. Safety: both sides
/// have that many elements.
pub(super) type Narrow = unsafe fn(from: *const u8, to: *mut u8, width: usize, scale: f32);

/// The conversion of `from` into a cache of `to`; `None` where it is the same type.
///
/// # Errors
/// Types that activations or caches don't have.
pub(super) fn narrow(from: DType, to: DType) -> Result<Option<Narrow>> {
    let same = from == to && matches!(from, DType::F32 | DType::F16 | DType::BF16);
    let convert = match from {
        _ if same => return Ok(None),
        DType::F32 => to_target::<f32>(to),
        DType::F16 => to_target::<f16>(to),
        DType::BF16 => to_target::<bf16>(to),
        _ => None,
    };
    convert.map(Some).ok_or_else(|| AttentionError::Unsupported {
        backend: "CPU_ATTN".into(),
        what: format!("writing {from} into a KV cache of {to}"),
        remedy: "use float32, float16 or bfloat16 activations and a cache of these or of an 8-bit float"
            .into(),
    })
}

fn to_target<S: Source>(to: DType) -> Option<Narrow> {
    Some(match to {
        DType::F32 => convert::<S, f32>,
        DType::F16 => convert::<S, f16>,
        DType::BF16 => convert::<S, bf16>,
        DType::F8E4M3 => convert::<S, E4m3>,
        DType::F8E5M2 => convert::<S, E5m2>,
        _ => return None,
    })
}

trait Source: Copy {
    fn f32(self) -> f32;
}
trait Target: Copy {
    /// Whether the scale applies.
    const SCALED: bool = false;
    fn of(x: f32) -> Self;
}
impl Source for f32 {
    #[inline(always)]
    fn f32(self) -> f32 {
        self
    }
}
impl Source for f16 {
    #[inline(always)]
    fn f32(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
}
impl Source for bf16 {
    #[inline(always)]
    fn f32(self) -> f32 {
        self.to_f32()
    }
}
impl Target for f32 {
    fn of(x: f32) -> Self {
        x
    }
}
impl Target for f16 {
    fn of(x: f32) -> Self {
        f16::from_f32(x)
    }
}
impl Target for bf16 {
    fn of(x: f32) -> Self {
        bf16::from_f32(x)
    }
}
#[derive(Clone, Copy)]
struct E4m3(#[expect(dead_code, reason = "written as bytes")] u8);
#[derive(Clone, Copy)]
struct E5m2(#[expect(dead_code, reason = "written as bytes")] u8);
impl Target for E4m3 {
    const SCALED: bool = true;
    #[inline(always)]
    fn of(x: f32) -> Self {
        Self(f32_to_e4m3(x))
    }
}
impl Target for E5m2 {
    const SCALED: bool = true;
    #[inline(always)]
    fn of(x: f32) -> Self {
        Self(f32_to_e5m2(x))
    }
}

/// # Safety
/// As [`Narrow`].
unsafe fn convert<S: Source, T: Target>(from: *const u8, to: *mut u8, width: usize, scale: f32) {
    for i in 0..width {
        // SAFETY: as the caller has promised.
        unsafe {
            let x = from.cast::<S>().add(i).read_unaligned().f32();
            let x = if T::SCALED && scale != 1.0 { x / scale } else { x };
            to.cast::<T>().add(i).write_unaligned(T::of(x));
        }
    }
}
