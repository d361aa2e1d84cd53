//! What the operations ask of their arguments, said once: float32 on the host, and shapes that fit.
//! Not for the linear layers' own limits.

use crate::kernels::elementwise::rows::Rows;
use headway_tensor::{DType, Result, Tensor, TensorError, TensorMut, TensorRef, View};

fn need_f32(what: &'static str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 => Ok(()),
        found => Err(TensorError::WrongDType { what, found, supported: "float32 (activations on the CPU)" }),
    }
}

/// Rows and elements of a float32 host tensor.
pub(crate) fn f32_ref<'a>(what: &'static str, x: TensorRef<'a>) -> Result<(Rows, &'a [f32])> {
    need_f32(what, x.dtype())?;
    Ok((Rows::new(what, x.shape(), x.strides())?, x.into_host()?))
}

/// As [`f32_ref`], for writing.
pub(crate) fn f32_mut<'a>(what: &'static str, x: TensorMut<'a>) -> Result<(Rows, &'a mut [f32])> {
    need_f32(what, x.dtype())?;
    Ok((Rows::new(what, x.shape(), x.as_ref().strides())?, x.into_host()?))
}

/// Token ids, positions or row numbers, on the host.
pub(crate) fn host_ids<'a>(what: &str, ids: &'a View<i32>) -> Result<&'a [i32]> {
    ids.host()
        .ok_or_else(|| TensorError::Unsupported(format!("{what}: indices on another device than the CPU")))
}

/// That every index is in `0..end`.
pub(crate) fn in_range(what: &str, ids: &[i32], end: usize) -> Result<()> {
    match ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= end)) {
        None => Ok(()),
        Some(id) => Err(TensorError::Unsupported(format!("{what} {id} is outside 0..{end}"))),
    }
}

/// That a shape is the one needed.
pub(crate) fn expect(what: &str, found: &[usize], needed: &[usize]) -> Result<()> {
    if found == needed {
        return Ok(());
    }
    Err(TensorError::WrongShape {
        what: what.to_owned(),
        found: found.to_vec(),
        expected: format!("{needed:?}"),
    })
}

/// That two tensors have the same rows.
pub(crate) fn same_rows(what: &str, x: &Rows, out: &Rows) -> Result<()> {
    expect(what, &[x.count(), x.width()], &[out.count(), out.width()])
}

/// The elements of a norm's weight, `[width]` in float32.
pub(crate) fn width_of<'a>(what: &'static str, weight: &'a Tensor, width: usize) -> Result<&'a [f32]> {
    need_f32(what, weight.dtype())?;
    expect("norm weight", weight.shape(), &[width])?;
    weight.host()
}

/// A rotation table `[positions, rotary / 2, 2]`: positions, pairs of a position, and all (cosine,
/// sine) pairs.
pub(crate) fn rope_table(table: &Tensor, head_size: usize) -> Result<(usize, usize, &[[f32; 2]])> {
    need_f32("rope table", table.dtype())?;
    match table.shape() {
        &[positions, half, 2] if 2 * half <= head_size => {
            Ok((positions, half, table.host::<f32>()?.as_chunks().0))
        }
        shape => Err(TensorError::WrongShape {
            what: "rope table".into(),
            found: shape.to_vec(),
            expected: format!("[positions, rotary / 2, 2], rotary at most the head size {head_size}"),
        }),
    }
}
