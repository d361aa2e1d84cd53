//! MXFP4 (OCP Microscaling Formats, version 1.0): 32 elements of e2m1, two a byte with the first in the low half,
//! and a power of two for all of them.

use super::in_parallel;
use crate::loading::safetensors::RawTensor;
use half::bf16;

/// The values of the 4-bit codes: a sign, two bits of exponent, one of mantissa.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Bytes of a block of 32 elements.
const BLOCK_BYTES: usize = 16;

/// The value of a scale: 2^(code − 127); 255 is no number.
fn e8m0(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        code => 2f64.powi(i32::from(code) - 127) as f32,
    }
}

/// Blocks `[experts, out, in / 32, 16]` with scales `[experts, out, in / 32]` as bfloat16 `[experts, out, in]`: exact,
/// but for scales at the very end of the range.
///
/// # Errors
/// Shapes that don't fit each other, in words.
pub(super) fn dequantise(
    blocks: &RawTensor<'_>,
    scales: &RawTensor<'_>,
) -> Result<(Vec<usize>, Vec<u8>), String> {
    let &[experts, out, groups, BLOCK_BYTES] = blocks.shape else {
        return Err("blocks of [experts, out, in / 32, 16] bytes are needed".into());
    };
    if scales.shape != [experts, out, groups] || scales.bytes.len() * BLOCK_BYTES != blocks.bytes.len() {
        return Err("a byte of scale for every block is needed".into());
    }
    let (codes, scales) = (blocks.bytes.as_slice(), scales.bytes.as_slice());
    let (codes, row) = (codes.as_chunks::<BLOCK_BYTES>().0, groups * 64);
    let mut made = vec![0u8; experts * out * row];
    in_parallel(&mut made, row, &|r, to| {
        let blocks = codes[r * groups..].iter().zip(&scales[r * groups..]);
        for (to, (codes, scale)) in to.as_chunks_mut::<64>().0.iter_mut().zip(blocks) {
            let scale = e8m0(*scale);
            let value = E2M1.map(|v| bf16::from_f32(v * scale).to_le_bytes());
            for (to, code) in to.as_chunks_mut::<4>().0.iter_mut().zip(codes) {
                let ([a, b], [c, d]) = (value[usize::from(code & 15)], value[usize::from(code >> 4)]);
                *to = [a, b, c, d];
            }
        }
    });
    Ok((vec![experts, out, groups * 32], made))
}
