//! Latents of a pass's tokens side by side, in float32: out of the cache's pages, or of the step's new rows.

use crate::{
    kernels::attention::{CacheLayout, GROUP},
    pool::Pool,
};
use half::bf16;
use headway_attention::{
    AttentionError, Result,
    group::arith::prefill_passes::{Run, Source},
};
use headway_tensor::{
    DType, TensorError, TensorRef,
    fp8::{e4m3_to_f32, e5m2_to_f32},
    quant::half_bits::f16_to_f32,
};

/// The slot after a run's last, rounded up to a multiple of 16.
fn end(run: &Run) -> usize {
    (run.slot + run.len).next_multiple_of(GROUP)
}

/// Copies each run's latents to its slots: `out` is `[slots, width]`; slots between runs become 0. `cache` is pages of
/// `width` elements a token, times `scale` where they are of 8 bits; `table` is `[requests, stride]`; `new` is `[rows, width]`.
///
/// # Errors
/// A block outside the cache or past a row of the table; rows that aren't there; dtypes.
pub fn gather(
    pool: &Pool,
    runs: &[Run],
    width: usize,
    (cache, bytes, scale): (&CacheLayout, &[u8], f32),
    (table, stride): (&[i32], usize),
    new: TensorRef<'_>,
    out: &mut [f32],
) -> Result<()> {
    let size = cache.dtype.size();
    let read = reader(cache.dtype)?;
    if cache.block_size == 0 {
        return Err(AttentionError::KvCache("blocks of no tokens".into()));
    }
    let new = New::of(new, width)?;
    let mut rest = out;
    let mut at = 0;
    for run in runs {
        let (skipped, tail) = std::mem::take(&mut rest)
            .split_at_mut_checked((run.slot - at) * width)
            .ok_or_else(|| short(end(run)))?;
        let taken = end(run) - run.slot;
        let (rows, tail) = tail.split_at_mut_checked(taken * width).ok_or_else(|| short(end(run)))?;
        (rest, at) = (tail, end(run));
        skipped.fill(0.0);
        rows[run.len * width..].fill(0.0);
        let rows = &mut rows[..run.len * width];
        match run.source {
            Source::New { row } => {
                let from = new.rows(row, run.len)?;
                pool.run_chunks(rows, PIECE * width, &|i, to, _| from.widen(i * PIECE, to, width));
            }
            Source::Cached { request, start } => {
                let blocks = table.get(request * stride..(request + 1) * stride).unwrap_or(&[]);
                let page = |token: usize| -> Option<&[u8]> {
                    let block = usize::try_from(*blocks.get(token / cache.block_size)?).ok()?;
                    let at =
                        cache.offset + block * cache.block_stride + token % cache.block_size * width * size;
                    (block < cache.num_blocks).then(|| bytes.get(at..at + width * size))?
                };
                if let Some(token) = (start..start + run.len).find(|&t| page(t).is_none()) {
                    return Err(AttentionError::Inputs(format!(
                        "token {token} of request {request} has no block in a cache of {} blocks",
                        cache.num_blocks
                    )));
                }
                pool.run_chunks(rows, PIECE * width, &|i, to, _| {
                    for (t, to) in to.chunks_exact_mut(width).enumerate() {
                        read(page(start + i * PIECE + t).unwrap_or(&[]), to, scale);
                    }
                });
            }
        }
    }
    Ok(())
}

/// Rows that a task takes.
const PIECE: usize = 64;

fn short(slots: usize) -> AttentionError {
    AttentionError::Inputs(format!("a workspace of fewer than {slots} slots for a pass"))
}

/// Elements of a page, times a factor for 8-bit ones, as float32.
type Read = fn(&[u8], &mut [f32], f32);

fn reader(dtype: DType) -> Result<Read> {
    fn two(from: &[u8], to: &mut [f32], f: impl Fn(u16) -> f32) {
        for (x, o) in from.as_chunks::<2>().0.iter().zip(to) {
            *o = f(u16::from_ne_bytes(*x));
        }
    }
    fn one(from: &[u8], to: &mut [f32], f: impl Fn(u8) -> f32) {
        for (x, o) in from.iter().zip(to) {
            *o = f(*x);
        }
    }
    Ok(match dtype {
        DType::F32 => |from, to, _| {
            for (x, o) in from.as_chunks::<4>().0.iter().zip(to) {
                *o = f32::from_ne_bytes(*x);
            }
        },
        DType::BF16 => |from, to, _| two(from, to, |x| bf16::from_bits(x).to_f32()),
        DType::F16 => |from, to, _| two(from, to, f16_to_f32),
        DType::F8E4M3 => |from, to, scale| one(from, to, |x| e4m3_to_f32(x) * scale),
        DType::F8E5M2 => |from, to, scale| one(from, to, |x| e5m2_to_f32(x) * scale),
        found => {
            let supported = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2";
            return Err(TensorError::WrongDType { what: "latent cache", found, supported }.into());
        }
    })
}

/// The step's new rows.
#[derive(Clone, Copy)]
struct New<'a> {
    bytes: &'a [u8],
    read: Read,
    size: usize,
    stride: usize,
    count: usize,
}

impl<'a> New<'a> {
    fn of(x: TensorRef<'a>, width: usize) -> Result<Self> {
        let (count, stride) = match (x.shape(), x.strides()) {
            (&[n, w], &[s, 1]) if w == width => (n, s),
            (shape, _) => {
                return Err(TensorError::WrongShape {
                    what: "new latents".into(),
                    found: shape.to_vec(),
                    expected: format!("[tokens, {width}]"),
                }
                .into());
            }
        };
        let bytes = match x.dtype() {
            DType::F32 => bytemuck::cast_slice(x.into_host::<f32>()?),
            DType::F16 => bytemuck::cast_slice(x.into_host::<half::f16>()?),
            DType::BF16 => bytemuck::cast_slice(x.into_host::<bf16>()?),
            found => {
                let supported = "float32, float16, bfloat16";
                return Err(TensorError::WrongDType { what: "new latents", found, supported }.into());
            }
        };
        Ok(Self { bytes, read: reader(x.dtype())?, size: x.dtype().size(), stride, count })
    }

    fn rows(self, row: usize, len: usize) -> Result<Self> {
        if row + len > self.count {
            return Err(AttentionError::Inputs(format!(
                "new latents {row}..{} of {}",
                row + len,
                self.count
            )));
        }
        let bytes = self.bytes.get(row * self.stride * self.size..).unwrap_or(&[]);
        Ok(Self { bytes, count: len, ..self })
    }

    fn widen(&self, first: usize, to: &mut [f32], width: usize) {
        for (t, to) in to.chunks_exact_mut(width).enumerate() {
            let at = (first + t) * self.stride * self.size;
            (self.read)(self.bytes.get(at..at + width * self.size).unwrap_or(&[]), to, 1.0);
        }
    }
}
