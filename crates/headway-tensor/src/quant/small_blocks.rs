//! The formats with blocks of 32 weights: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1.
//!
//! Layouts (ggml): a half-precision scale, then where present a half-precision minimum, then for the
//! five-bit formats 4 bytes with bit 4 of each integer, then the packed integers. Packed byte `j` holds
//! weight `j` in its low nibble and weight `j + 16` in its high one.
//!
//! Not for the 256-weight formats, which are in `k_blocks`.

use super::QuantFormat;
use super::half_bits::f16_le;
use super::unpack::{BlockFormat, head, head_mut};

/// [`QuantFormat::Q8_0`] as a type: `d` (2 bytes), 32 signed bytes.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
pub struct Q8_0;
/// [`QuantFormat::Q4_0`] as a type: `d` (2 bytes), 16 bytes of nibbles.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
pub struct Q4_0;
/// [`QuantFormat::Q4_1`] as a type: `d`, `m` (2 bytes each), 16 bytes of nibbles.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
pub struct Q4_1;
/// [`QuantFormat::Q5_0`] as a type: `d` (2 bytes), 4 bytes of fifth bits, 16 bytes of nibbles.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
pub struct Q5_0;
/// [`QuantFormat::Q5_1`] as a type: `d`, `m` (2 bytes each), 4 bytes of fifth bits, 16 bytes of nibbles.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
pub struct Q5_1;

/// Low nibbles to the first half of `q`, high nibbles to the second.
#[inline(always)]
fn nibbles(packed: &[u8; 16], q: &mut [u8; 32]) {
    let (low, high) = q.split_at_mut(16);
    for (j, &byte) in packed.iter().enumerate() {
        low[j] = byte & 0x0f;
        high[j] = byte >> 4;
    }
}

/// Adds bit `j` of the little-endian word `bits` to weight `j` as its bit 4.
#[inline(always)]
fn fifth_bits(bits: &[u8; 4], q: &mut [u8; 32]) {
    let word = u32::from_le_bytes(*bits);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (((word >> j) & 1) << 4) as u8;
    }
}

impl BlockFormat for Q8_0 {
    const FORMAT: QuantFormat = QuantFormat::Q8_0;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let block: &[u8; 34] = head(block);
        *head_mut::<_, 32>(q) = *head(&block[2..]);
        *head_mut(d) = [f16_le(block[0], block[1])];
        *head_mut(m) = [0.0];
    }
}

impl BlockFormat for Q4_0 {
    const FORMAT: QuantFormat = QuantFormat::Q4_0;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let block: &[u8; 18] = head(block);
        nibbles(head(&block[2..]), head_mut(q));
        let scale = f16_le(block[0], block[1]);
        *head_mut(d) = [scale];
        *head_mut(m) = [-8.0 * scale];
    }
}

impl BlockFormat for Q4_1 {
    const FORMAT: QuantFormat = QuantFormat::Q4_1;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let block: &[u8; 20] = head(block);
        nibbles(head(&block[4..]), head_mut(q));
        *head_mut(d) = [f16_le(block[0], block[1])];
        *head_mut(m) = [f16_le(block[2], block[3])];
    }
}

impl BlockFormat for Q5_0 {
    const FORMAT: QuantFormat = QuantFormat::Q5_0;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let (block, q): (&[u8; 22], &mut [u8; 32]) = (head(block), head_mut(q));
        nibbles(head(&block[6..]), q);
        fifth_bits(head(&block[2..]), q);
        let scale = f16_le(block[0], block[1]);
        *head_mut(d) = [scale];
        *head_mut(m) = [-16.0 * scale];
    }
}

impl BlockFormat for Q5_1 {
    const FORMAT: QuantFormat = QuantFormat::Q5_1;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let (block, q): (&[u8; 24], &mut [u8; 32]) = (head(block), head_mut(q));
        nibbles(head(&block[8..]), q);
        fifth_bits(head(&block[4..]), q);
        *head_mut(d) = [f16_le(block[0], block[1])];
        *head_mut(m) = [f16_le(block[2], block[3])];
    }
}
