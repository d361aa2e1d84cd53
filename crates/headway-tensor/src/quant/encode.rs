//! Encoders of the 32-weight formats, by ggml's published rules (round to nearest, no search).
//!
//! They make small tensors for tests and for `--load-format dummy`-like uses. Not for producing model
//! files: real quantisers search for better scales, and the K formats have no encoder here.

use super::half_bits::f16_to_f32;
use super::{QuantError, QuantFormat};
use half::f16;

/// Encodes whole blocks of 32 weights as Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1.
///
/// # Errors
/// [`QuantError::NoEncoder`] for the K formats, [`QuantError::PartialBlock`] when `weights` is not whole blocks.
pub fn quantize(format: QuantFormat, weights: &[f32]) -> Result<Vec<u8>, QuantError> {
    let encode: fn(&[f32; 32], &mut Vec<u8>) = match format {
        QuantFormat::Q8_0 => q8_0,
        QuantFormat::Q4_0 => |x, out| symmetric(x, 8, out),
        QuantFormat::Q5_0 => |x, out| symmetric(x, 16, out),
        QuantFormat::Q4_1 => |x, out| affine(x, 15, out),
        QuantFormat::Q5_1 => |x, out| affine(x, 31, out),
        other => return Err(QuantError::NoEncoder(other)),
    };
    let (blocks, rest) = weights.as_chunks::<32>();
    if !rest.is_empty() {
        return Err(QuantError::PartialBlock { format, elems: weights.len(), block: 32 });
    }
    let mut out = Vec::with_capacity(blocks.len() * format.block_bytes());
    for block in blocks {
        encode(block, &mut out);
    }
    Ok(out)
}

/// `1 / d`, and 0 for a block of equal weights.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn push_half(value: f32, out: &mut Vec<u8>) {
    out.extend_from_slice(&f16::from_f32(value).to_bits().to_le_bytes());
}

/// The largest magnitude becomes 127.
fn q8_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let d = x.iter().fold(0f32, |a, v| a.max(v.abs())) / 127.0;
    let inv = inverse(d);
    push_half(d, out);
    out.extend(x.iter().map(|v| ((v * inv).round() as i8).cast_unsigned()));
}

/// The weight of largest magnitude becomes integer 0, that is `-zero` after the zero point is taken off.
fn symmetric(x: &[f32; 32], zero: u8, out: &mut Vec<u8>) {
    let extreme = x.iter().fold(0f32, |a, &v| if v.abs() > a.abs() { v } else { a });
    let zero_f = f32::from(zero);
    let d = extreme / -zero_f;
    let inv = inverse(d);
    push_half(d, out);
    pack(x.map(|v| ((v * inv + zero_f + 0.5) as u8).min(2 * zero - 1)), zero == 16, out);
}

/// The smallest weight becomes 0 and the largest `top`.
fn affine(x: &[f32; 32], top: u8, out: &mut Vec<u8>) {
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let d = (max - min) / f32::from(top);
    let inv = inverse(d);
    push_half(d, out);
    push_half(min, out);
    pack(x.map(|v| (((v - min) * inv + 0.5) as u8).min(top)), top == 31, out);
}

/// Fifth bits (where the format has them), then nibbles `j` and `j + 16` in byte `j`.
fn pack(q: [u8; 32], five_bits: bool, out: &mut Vec<u8>) {
    if five_bits {
        let word = q.iter().enumerate().fold(0u32, |word, (j, q)| word | (u32::from(q >> 4) << j));
        out.extend_from_slice(&word.to_le_bytes());
    }
    let (low, high) = q.split_at(16);
    out.extend(low.iter().zip(high).map(|(low, high)| (low & 0x0f) | (high << 4)));
}

/// Half of the distance between neighbouring values of a block: the largest error that encoding makes,
/// apart from the rounding of the scales to half precision.
#[doc(hidden)]
pub fn half_step(block: &[u8]) -> f32 {
    block.first_chunk().map_or(0.0, |bits| f16_to_f32(u16::from_le_bytes(*bits)).abs() / 2.0)
}
