//! New keys and values into the cache, by slot.

use super::{CacheLayout, Form, GROUP, Result, check_rows, inputs, job::Rows, read_rows, shape::Shape};
use crate::pool::Pool;
use half::{bf16, f16};
use headway_attention::AttentionError;
use headway_tensor::{
    DType, TensorRef,
    fp8::{f32_to_e4m3, f32_to_e5m2},
    quant::half_bits::f16_to_f32,
};

/// Fewer elements than this are written by the calling thread.
const WORTH_A_REGION: usize = 1 << 14;

/// Scatters keys `[tokens, kv_heads, head_size]` and values `[tokens, kv_heads, head_size_v]`: token t
/// goes to slot `slots[t]`; −1 is skipped; tokens past the slots are padding. Values of another type
/// than the cache's are rounded to nearest even; 8-bit types are divided by their scale first, and
/// saturate. Where a slot is named twice, the last token stays.
///
/// # Errors
/// Shapes and dtypes; a slot outside the cache (then nothing is written).
pub fn write_kv(
    pool: &Pool,
    shape: &Shape,
    (k, k_scale): (TensorRef<'_>, f32),
    (v, v_scale): (TensorRef<'_>, f32),
    slots: &[i64],
    cache: &CacheLayout,
    bytes: &mut [u8],
) -> Result<()> {
    cache.check(shape, bytes.len())?;
    check_rows("key", k.shape(), shape.num_kv_heads, shape.head_size, slots.len())?;
    check_rows("value", v.shape(), shape.num_kv_heads, shape.head_size_v, slots.len())?;
    check_slots(slots, cache)?;
    let (k_put, v_put) = (converter(k.dtype(), cache.dtype)?, converter(v.dtype(), cache.dtype)?);
    let size = cache.dtype.size();
    let keys =
        Part { rows: read_rows(k)?, put: k_put, scale: k_scale, width: shape.head_size, step: GROUP * size };
    let values =
        Part { rows: read_rows(v)?, put: v_put, scale: v_scale, width: shape.head_size_v, step: size };
    let head_bytes = cache.head_bytes(shape);
    let base = Base(bytes[cache.offset..].as_mut_ptr());
    let write_head = |head: usize| {
        let base = &base;
        for (token, &slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
            let (block, at) = (slot as usize / cache.block_size, slot as usize % cache.block_size);
            let key = (at / GROUP * GROUP * shape.head_size + at % GROUP) * size;
            let value = (cache.block_size * shape.head_size + at * shape.head_size_v) * size;
            // SAFETY: the slot is in the cache, whose blocks lie in `bytes`, both checked above; the
            // token is one of k's and v's rows; different heads lie in different bytes.
            unsafe {
                let tile = base.0.add(block * cache.block_stride + head * head_bytes);
                keys.write(token, head, tile.add(key));
                values.write(token, head, tile.add(value));
            }
        }
    };
    if slots.len() * shape.num_kv_heads * shape.head_size < WORTH_A_REGION {
        (0..shape.num_kv_heads).for_each(write_head);
    } else {
        pool.run(shape.num_kv_heads, &|head, _| write_head(head));
    }
    Ok(())
}

/// Scatters latent rows `[tokens, size]` of `shape`, a latent one: as [`write_kv`] for a single row a token.
///
/// # Errors
/// As [`write_kv`]; a shape of keys and values.
pub fn write_latent(
    shape: &Shape,
    (latent, scale): (TensorRef<'_>, f32),
    slots: &[i64],
    cache: &CacheLayout,
    bytes: &mut [u8],
) -> Result<()> {
    if shape.form != Form::Latent {
        return Err(inputs("latent rows for a cache of keys and values"));
    }
    cache.check(shape, bytes.len())?;
    let latent = latent.heads(1)?;
    check_rows("latent", latent.shape(), 1, shape.head_size, slots.len())?;
    check_slots(slots, cache)?;
    let size = cache.dtype.size();
    let put = converter(latent.dtype(), cache.dtype)?;
    let rows = Part { rows: read_rows(latent)?, put, scale, width: shape.head_size, step: size };
    let base = Base(bytes[cache.offset..].as_mut_ptr());
    // One thread: a row has few bytes.
    for (token, &slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
        let (block, at) = (slot as usize / cache.block_size, slot as usize % cache.block_size);
        // SAFETY: the slot is in the cache, whose blocks lie in `bytes`, both checked above; the token is one of the
        // rows.
        unsafe { rows.write(token, 0, base.0.add(block * cache.block_stride + at * shape.head_size * size)) };
    }
    Ok(())
}

/// That every slot but −1 lies in the cache.
fn check_slots(slots: &[i64], cache: &CacheLayout) -> Result<()> {
    let total = cache.num_blocks * cache.block_size;
    match slots.iter().enumerate().find(|&(_, &s)| s != -1 && (s < 0 || s as u64 >= total as u64)) {
        None => Ok(()),
        Some((t, s)) => Err(inputs(format!("slot {s} of token {t} is not in a cache of {total} slots"))),
    }
}

/// The first byte of the layer's cache.
struct Base(*mut u8);
// SAFETY: tasks write disjoint heads.
unsafe impl Sync for Base {}

/// Writes `width` elements from contiguous memory to places `step` bytes apart, times a factor.
/// Safety: both sides have that many elements.
type Put = unsafe fn(from: *const u8, to: *mut u8, width: usize, step: usize, factor: f32);

/// Keys or values: where they come from and how they are written.
struct Part {
    rows: Rows<*const u8>,
    put: Put,
    scale: f32,
    width: usize,
    step: usize,
}
// SAFETY: the rows are only read.
unsafe impl Sync for Part {}

impl Part {
    /// # Safety
    /// The row is there; `to` has room for `width` elements `step` bytes apart.
    unsafe fn write(&self, token: usize, head: usize, to: *mut u8) {
        // SAFETY: as the caller has promised.
        unsafe {
            let from = self.rows.base.add(token * self.rows.token_stride + head * self.rows.head_stride);
            (self.put)(from, to, self.width, self.step, self.scale);
        }
    }
}

/// Elements of the same type: their bits.
///
/// # Safety
/// As [`Put`].
unsafe fn copy<T: Copy>(from: *const u8, to: *mut u8, width: usize, step: usize, _: f32) {
    for i in 0..width {
        // SAFETY: as the caller has promised.
        unsafe { to.add(i * step).cast::<T>().write_unaligned(from.cast::<T>().add(i).read_unaligned()) };
    }
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

/// Elements of another type, through float32.
///
/// # Safety
/// As [`Put`].
unsafe fn convert<S: Source, T: Target>(from: *const u8, to: *mut u8, width: usize, step: usize, scale: f32) {
    for i in 0..width {
        // SAFETY: as the caller has promised.
        unsafe {
            let x = from.cast::<S>().add(i).read_unaligned().f32();
            let x = if T::SCALED && scale != 1.0 { x / scale } else { x };
            to.add(i * step).cast::<T>().write_unaligned(T::of(x));
        }
    }
}

fn converter(from: DType, to: DType) -> Result<Put> {
    fn to_target<S: Source>(to: DType) -> Option<Put> {
        Some(match to {
            DType::F32 => convert::<S, f32>,
            DType::F16 => convert::<S, f16>,
            DType::BF16 => convert::<S, bf16>,
            DType::F8E4M3 => convert::<S, E4m3>,
            DType::F8E5M2 => convert::<S, E5m2>,
            _ => return None,
        })
    }
    let put: Option<Put> = match (from, to) {
        (DType::F32, DType::F32) => Some(copy::<u32>),
        (DType::F16, DType::F16) | (DType::BF16, DType::BF16) => Some(copy::<u16>),
        (DType::F32, _) => to_target::<f32>(to),
        (DType::F16, _) => to_target::<f16>(to),
        (DType::BF16, _) => to_target::<bf16>(to),
        _ => None,
    };
    put.ok_or_else(|| AttentionError::Unsupported {
        backend: "CPU_ATTN".into(),
        what: format!("writing {from} into a KV cache of {to}"),
        remedy: "use float32, float16 or bfloat16 activations and a cache of these or of an 8-bit float"
            .into(),
    })
}
