//! The formats with blocks of 256 weights: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! A block has one or two half-precision scales for the whole, small integer scales (and minima) per
//! sub-block, and the packed integers. Their order differs per format; each type states its layout.
//!
//! Not for the 32-weight formats, which are in `small_blocks`.

use super::QuantFormat;
use super::half_bits::f16_le;
use super::unpack::{BlockFormat, head, head_mut};

/// [`QuantFormat::Q2_K`] as a type: 16 bytes of scale (low) and minimum (high) nibbles, 64 bytes of
/// two-bit integers, `d`, `dmin`.
#[derive(Debug, Clone, Copy)]
pub struct Q2K;
/// [`QuantFormat::Q3_K`] as a type: 32 bytes of third bits, 64 bytes of two-bit integers, 12 bytes of
/// packed six-bit scales, `d`.
#[derive(Debug, Clone, Copy)]
pub struct Q3K;
/// [`QuantFormat::Q4_K`] as a type: `d`, `dmin`, 12 bytes of packed six-bit scales and minima, 128 bytes
/// of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q4K;
/// [`QuantFormat::Q5_K`] as a type: `d`, `dmin`, 12 bytes of packed six-bit scales and minima, 32 bytes
/// of fifth bits, 128 bytes of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q5K;
/// [`QuantFormat::Q6_K`] as a type: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed
/// scales, `d`.
#[derive(Debug, Clone, Copy)]
pub struct Q6K;

/// Two-bit integers: each half of the block (128 weights) takes 32 bytes, and bit pair `j` of byte `l`
/// is weight `32 j + l` of its half.
#[inline(always)]
fn bit_pairs(packed: &[u8; 64], q: &mut [u8; 256]) {
    for half in 0..2 {
        for pair in 0..4 {
            for l in 0..32 {
                q[half * 128 + pair * 32 + l] = (packed[half * 32 + l] >> (2 * pair)) & 3;
            }
        }
    }
}

/// Nibbles of Q4_K and Q5_K: each quarter of the block (64 weights) takes 32 bytes, low nibbles first.
#[inline(always)]
fn quarter_nibbles(packed: &[u8; 128], q: &mut [u8; 256]) {
    for quarter in 0..4 {
        for l in 0..32 {
            let byte = packed[quarter * 32 + l];
            q[quarter * 64 + l] = byte & 0x0f;
            q[quarter * 64 + 32 + l] = byte >> 4;
        }
    }
}

/// The eight six-bit scales and eight six-bit minima that Q4_K and Q5_K pack into 12 bytes, times the
/// block's `scale` and `-min`.
///
/// The first four of each are the low six bits of bytes 0..4 and 4..8. The last four have their low
/// nibbles in bytes 8..12 (scale low, minimum high) and their upper two bits on top of bytes 0..8.
#[inline(always)]
fn six_bit_pairs(packed: &[u8; 12], scale: f32, min: f32, d: &mut [f32; 8], m: &mut [f32; 8]) {
    for j in 0..4 {
        let (scale_byte, min_byte, low) = (packed[j], packed[j + 4], packed[j + 8]);
        d[j] = scale * f32::from(scale_byte & 63);
        m[j] = -(min * f32::from(min_byte & 63));
        d[j + 4] = scale * f32::from((low & 0x0f) | ((scale_byte >> 6) << 4));
        m[j + 4] = -(min * f32::from((low >> 4) | ((min_byte >> 6) << 4)));
    }
}

impl BlockFormat for Q2K {
    const FORMAT: QuantFormat = QuantFormat::Q2_K;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let block: &[u8; 84] = head(block);
        let (d, m): (&mut [f32; 16], &mut [f32; 16]) = (head_mut(d), head_mut(m));
        bit_pairs(head(&block[16..]), head_mut(q));
        let (scale, min) = (f16_le(block[80], block[81]), f16_le(block[82], block[83]));
        for s in 0..16 {
            d[s] = scale * f32::from(block[s] & 0x0f);
            m[s] = -(min * f32::from(block[s] >> 4));
        }
    }
}

impl BlockFormat for Q3K {
    const FORMAT: QuantFormat = QuantFormat::Q3_K;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let (block, q): (&[u8; 110], &mut [u8; 256]) = (head(block), head_mut(q));
        let (d, m): (&mut [f32; 16], &mut [f32; 16]) = (head_mut(d), head_mut(m));
        bit_pairs(head(&block[32..]), q);
        for group in 0..8 {
            for l in 0..32 {
                q[group * 32 + l] |= ((block[l] >> group) & 1) << 2;
            }
        }
        // Six-bit scales: low nibbles of bytes 0..8 then high nibbles of the same, upper bit pairs in bytes 8..12.
        let packed: &[u8; 12] = head(&block[96..]);
        let scale = f16_le(block[108], block[109]);
        for s in 0..16 {
            let low = (packed[s % 8] >> (4 * (s / 8))) & 0x0f;
            let high = (packed[8 + s % 4] >> (2 * (s / 4))) & 3;
            d[s] = scale * (f32::from(low | (high << 4)) - 32.0);
            m[s] = -4.0 * d[s];
        }
    }
}

impl BlockFormat for Q4K {
    const FORMAT: QuantFormat = QuantFormat::Q4_K;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let block: &[u8; 144] = head(block);
        quarter_nibbles(head(&block[16..]), head_mut(q));
        let (scale, min) = (f16_le(block[0], block[1]), f16_le(block[2], block[3]));
        six_bit_pairs(head(&block[4..]), scale, min, head_mut(d), head_mut(m));
    }
}

impl BlockFormat for Q5K {
    const FORMAT: QuantFormat = QuantFormat::Q5_K;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let (block, q): (&[u8; 176], &mut [u8; 256]) = (head(block), head_mut(q));
        quarter_nibbles(head(&block[48..]), q);
        // Fifth bits: bit `group` of byte `l` belongs to weight `32 group + l`.
        for group in 0..8 {
            for l in 0..32 {
                q[group * 32 + l] |= ((block[16 + l] >> group) & 1) << 4;
            }
        }
        let (scale, min) = (f16_le(block[0], block[1]), f16_le(block[2], block[3]));
        six_bit_pairs(head(&block[4..]), scale, min, head_mut(d), head_mut(m));
    }
}

impl BlockFormat for Q6K {
    const FORMAT: QuantFormat = QuantFormat::Q6_K;

    #[inline(always)]
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
        let (block, q): (&[u8; 210], &mut [u8; 256]) = (head(block), head_mut(q));
        let (d, m): (&mut [f32; 16], &mut [f32; 16]) = (head_mut(d), head_mut(m));
        for half in 0..2 {
            let low: &[u8; 64] = head(&block[half * 64..]);
            let high: &[u8; 32] = head(&block[128 + half * 32..]);
            let q: &mut [u8; 128] = head_mut(&mut q[half * 128..]);
            for l in 0..32 {
                q[l] = (low[l] & 0x0f) | ((high[l] & 3) << 4);
                q[l + 32] = (low[l + 32] & 0x0f) | (((high[l] >> 2) & 3) << 4);
                q[l + 64] = (low[l] >> 4) | (((high[l] >> 4) & 3) << 4);
                q[l + 96] = (low[l + 32] >> 4) | ((high[l] >> 6) << 4);
            }
        }
        let scale = f16_le(block[208], block[209]);
        for s in 0..16 {
            d[s] = scale * f32::from(block[192 + s].cast_signed());
            m[s] = -32.0 * d[s];
        }
    }
}
