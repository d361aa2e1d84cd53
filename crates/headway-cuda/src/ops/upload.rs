//! Weights from their files to the device, in the type that a layer computes in: as they are, converted on the host, or,
//! blocks of GGUF, uploaded as they are and dequantised there.

use super::linear::alloc;
use crate::{CudaExec, device::Result, kernels::ops::dequantise};
use half::slice::HalfFloatSliceExt;
use headway_tensor::{DType, DeviceMem, Exec, Weight, WeightType, quant::QuantFormat};
use std::{ops::Range, sync::Arc, thread};

/// Bytes of float32 that are converted at once, and of blocks that are on the device at once.
const PIECE: usize = 32 << 20;
/// Threads beyond which the copy to the device is what takes time.
const MOST_THREADS: usize = 16;

/// The type that a weight has on the device where none is asked for.
pub(super) fn own(dtype: WeightType) -> DType {
    match dtype {
        WeightType::F32 => DType::F32,
        WeightType::F16 => DType::F16,
        WeightType::BF16 | WeightType::Quant(_) => DType::BF16,
    }
}

/// Uploads the weights of one layer.
pub(super) struct Upload<'a> {
    cx: &'a CudaExec,
    /// Where blocks lie until they are dequantised: as large as the layer's largest piece of them.
    blocks: Option<Arc<dyn DeviceMem>>,
}

impl<'a> Upload<'a> {
    /// For a layer of these weights.
    ///
    /// # Errors
    /// No memory for their blocks.
    pub fn of<'w>(cx: &'a CudaExec, weights: impl IntoIterator<Item = &'w Weight>) -> Result<Self> {
        let quantised = weights.into_iter().filter(|w| matches!(w.dtype(), WeightType::Quant(_)));
        let largest = quantised.map(|w| w.row_bytes() * rows_at_once(w).min(w.rows())).max();
        Ok(Self { cx, blocks: largest.map(|bytes| alloc(cx, bytes)).transpose()? })
    }

    /// Copies a weight to the device in this type, from byte `at` of `to` on.
    ///
    /// # Errors
    /// No kernel for its format; the driver's. A failure of a copy is kept by the device.
    pub fn put(&self, to: &Arc<dyn DeviceMem>, at: usize, w: &Weight, dtype: DType) -> Result<()> {
        match (w.dtype(), &self.blocks) {
            (WeightType::Quant(format), Some(blocks)) => {
                self.dequantise(format, blocks, (to, at), w, dtype)?
            }
            (own_type, _) if own(own_type) == dtype && cfg!(target_endian = "little") => {
                self.cx.upload(to, at, w.bytes().as_slice());
            }
            _ => {
                let row = w.cols() * dtype.size();
                for rows in pieces(w, (PIECE / (w.cols() * 4)).max(1)) {
                    let at = at + rows.start * row;
                    self.cx.upload(to, at, &convert(w, rows, dtype));
                }
            }
        }
        w.bytes().not_needed_now(0..w.bytes().len());
        Ok(())
    }

    fn dequantise(
        &self,
        format: QuantFormat,
        blocks: &Arc<dyn DeviceMem>,
        (to, at): (&Arc<dyn DeviceMem>, usize),
        w: &Weight,
        dtype: DType,
    ) -> Result<()> {
        let (bytes, row_bytes) = (w.bytes().as_slice(), w.row_bytes());
        for rows in pieces(w, rows_at_once(w)) {
            let weights = rows.len() * w.cols();
            let at = at + rows.start * w.cols() * dtype.size();
            // In the stream's order: the blocks before these have been read by then.
            self.cx.upload(blocks, 0, &bytes[rows.start * row_bytes..rows.end * row_bytes]);
            dequantise::dequantise(self.cx, format, blocks, weights, (to, at), dtype)?;
        }
        Ok(())
    }
}

/// Rows of blocks that are on the device at once, at least one.
fn rows_at_once(w: &Weight) -> usize {
    (PIECE / w.row_bytes().max(1)).max(1)
}

/// A weight's rows, so many at once.
fn pieces(w: &Weight, rows_at_once: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let rows = w.rows();
    (0..rows).step_by(rows_at_once).map(move |first| first..rows.min(first + rows_at_once))
}

/// Rows of a weight in this type, converted by several threads.
fn convert(w: &Weight, rows: Range<usize>, dtype: DType) -> Vec<u8> {
    let row = w.cols() * dtype.size();
    let mut bytes = vec![0; rows.len() * row];
    let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
    let share = rows.len().div_ceil(threads).max(1);
    thread::scope(|s| {
        for (i, part) in bytes.chunks_mut(share * row).enumerate() {
            let first = rows.start + i * share;
            s.spawn(move || {
                let mut values = vec![0f32; w.cols()];
                for (i, out) in part.chunks_exact_mut(row).enumerate() {
                    if let Err(e) = w.dequantize_row(first + i, &mut values) {
                        unreachable!("the rows and their width are the weight's own: {e}");
                    }
                    write(&values, dtype, out);
                }
            });
        }
    });
    bytes
}

/// A row in this type.
fn write(values: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            let mut row = vec![half::bf16::ZERO; values.len()];
            row.convert_from_f32_slice(values);
            out.copy_from_slice(bytemuck::cast_slice(&row));
        }
        DType::F16 => {
            let mut row = vec![half::f16::ZERO; values.len()];
            row.convert_from_f32_slice(values);
            out.copy_from_slice(bytemuck::cast_slice(&row));
        }
        _ => out.copy_from_slice(bytemuck::cast_slice(values)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::SharedBytes;

    #[test]
    fn rows_are_converted_in_order_whatever_the_threads() {
        let values: Vec<f32> = (0..37 * 5).map(|i| i as f32 * 0.25 - 3.0).collect();
        let w = Weight::from_f32("w", vec![37, 5], &values).unwrap();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let bytes = convert(&w, 3..36, dtype);
            let mut expected = vec![0; 33 * 5 * dtype.size()];
            write(&values[15..180], dtype, &mut expected);
            assert_eq!(bytes, expected);
        }
    }

    #[test]
    fn pieces_are_whole_rows_and_all_of_them() {
        let bytes = SharedBytes::new(vec![0; 7 * 2 * 34]);
        let w = Weight::new("w", WeightType::Quant(QuantFormat::Q8_0), vec![7, 64], bytes).unwrap();
        assert_eq!(pieces(&w, 3).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        assert_eq!(rows_at_once(&w), PIECE / 68);
    }
}
