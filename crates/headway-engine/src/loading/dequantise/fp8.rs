//! DeepSeek-V3's float8 (arXiv 2412.19437, section 3.3): e4m3 with one float32 scale for every block of rows and
//! columns, 128 x 128 as published. A weight is its code's value times its block's scale.

use super::in_parallel;
use crate::loading::safetensors::RawTensor;
use half::bf16;
use headway_tensor::fp8::e4m3_to_f32;

/// A matrix `[out, in]` with scales `[ceil(out / block), ceil(in / block)]` as bfloat16, rounded to nearest.
///
/// # Errors
/// Shapes that don't fit each other, in words.
pub(super) fn dequantise(
    codes: &RawTensor<'_>,
    scale_shape: &[usize],
    scales: &[f32],
    [block_rows, block_cols]: [usize; 2],
) -> Result<(Vec<usize>, Vec<u8>), String> {
    let &[rows, cols] = codes.shape else { return Err("a matrix is needed".into()) };
    let across = cols.div_ceil(block_cols);
    if scale_shape != [rows.div_ceil(block_rows), across] {
        return Err(format!("a scale for every block of {block_rows} x {block_cols} is needed"));
    }
    let values: Vec<f32> = (0..=u8::MAX).map(e4m3_to_f32).collect();
    let from = codes.bytes.as_slice();
    let mut made = vec![0u8; 2 * from.len()];
    in_parallel(&mut made, 2 * cols, &|r, to| {
        let scales = &scales[r / block_rows * across..][..across];
        let blocks = from[r * cols..(r + 1) * cols].chunks(block_cols);
        for ((to, codes), scale) in to.chunks_mut(2 * block_cols).zip(blocks).zip(scales) {
            for (to, code) in to.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *to = bf16::from_f32(values[usize::from(*code)] * scale).to_le_bytes();
            }
        }
    });
    Ok((vec![rows, cols], made))
}

/// A matrix of codes as the bfloat16 of each code's value, exactly.
///
/// # Errors
/// No matrix, in words.
pub(super) fn codes(codes: &RawTensor<'_>) -> Result<(Vec<usize>, Vec<u8>), String> {
    let &[rows, cols] = codes.shape else { return Err("a matrix is needed".into()) };
    let values: Vec<[u8; 2]> = (0..=u8::MAX).map(|c| bf16::from_f32(e4m3_to_f32(c)).to_le_bytes()).collect();
    let from = codes.bytes.as_slice();
    let mut made = vec![0u8; 2 * from.len()];
    in_parallel(&mut made, 2 * cols, &|r, to| {
        for (to, code) in to.as_chunks_mut::<2>().0.iter_mut().zip(&from[r * cols..(r + 1) * cols]) {
            *to = values[usize::from(*code)];
        }
    });
    Ok((vec![rows, cols], made))
}
