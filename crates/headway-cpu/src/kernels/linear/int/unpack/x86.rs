//! The formats of 32 weights with AVX2 and F16C: the general decoder spends more on the half-precision
//! header than on the integers. Gives the same values; held against it in the tests of the layers.
//!
//! Not for the 256-weight formats, whose headers weigh less.

use super::{Chunk, ROWS};
use headway_tensor::quant::{BlockFormat, QuantFormat};
use std::arch::x86_64::*;

/// As [`super::Unpack`], for a format with blocks of 32.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn small<F: BlockFormat>(
    chunk: &mut Chunk,
    bytes: &[u8],
    row_bytes: usize,
    from: usize,
    len: usize,
) {
    let start = from / 32 * F::BLOCK_BYTES;
    let len = len / 32 * F::BLOCK_BYTES;
    for (r, row) in bytes.chunks_exact(row_bytes).take(ROWS).enumerate() {
        let blocks = row[start..start + len].chunks_exact(F::BLOCK_BYTES);
        for ((b, block), q) in blocks.enumerate().zip(chunk.q[r].as_chunks_mut::<32>().0) {
            let (d, m) = header::<F>(block);
            chunk.d[b][r] = d;
            chunk.m[b][r] = m;
            let v = integers::<F>(block);
            // SAFETY: 32 bytes are written to an array of 32.
            unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), v) };
        }
    }
}

/// Scale and minimum.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn header<F: BlockFormat>(block: &[u8]) -> (f32, f32) {
    let stored_minimum = matches!(F::FORMAT, QuantFormat::Q4_1 | QuantFormat::Q5_1);
    let high = if stored_minimum { [block[2], block[3]] } else { [0; 2] };
    let halves = i32::from_le_bytes([block[0], block[1], high[0], high[1]]);
    let floats = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
    let d = _mm_cvtss_f32(floats);
    match F::FORMAT.zero_point() {
        None => (d, _mm_cvtss_f32(_mm_movehdup_ps(floats))),
        Some(zero) => (d, -f32::from(zero) * d),
    }
}

/// The 32 integers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn integers<F: BlockFormat>(block: &[u8]) -> __m256i {
    let at = F::BLOCK_BYTES - if F::SIGNED { 32 } else { 16 };
    if F::SIGNED {
        let bytes: &[u8; 32] = block[at..].first_chunk().unwrap_or(&[0; 32]);
        // SAFETY: 32 bytes are read from an array of 32.
        return unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    }
    let bytes: &[u8; 16] = block[at..].first_chunk().unwrap_or(&[0; 16]);
    // SAFETY: 16 bytes are read from an array of 16.
    let packed = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(packed), packed);
    let nibbles = _mm256_and_si256(both, _mm256_set1_epi8(0x0f));
    if !matches!(F::FORMAT, QuantFormat::Q5_0 | QuantFormat::Q5_1) {
        return nibbles;
    }
    // Bit j of the word before the nibbles is the fifth bit of weight j.
    let word = i32::from_le_bytes([block[at - 4], block[at - 3], block[at - 2], block[at - 1]]);
    let byte_of = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of), bit_of);
    let fifth = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(0x10));
    _mm256_or_si256(nibbles, fifth)
}
