//! Element types as the kernels' sources number them, and checks that every wrapper makes.

use crate::device::{CudaError, Result};
use headway_tensor::{DType, TensorRef};

/// The number of an element type (`csrc/common/types.cuh`).
///
/// # Errors
/// A type that no kernel reads.
pub(crate) fn number(dtype: DType) -> Result<String> {
    let n = match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F32 => 3,
        DType::F8E4M3 => 4,
        DType::F8E5M2 => 5,
        other => return Err(CudaError::Argument(format!("no kernel for elements of {other}"))),
    };
    Ok(n.to_string())
}

/// The address of a tensor of `[rows, heads, size]` with contiguous heads that 16-byte accesses can read, with its
/// strides in elements.
///
/// # Errors
/// Another shape, the host's memory, an address or stride that is no multiple of 16 bytes.
pub(crate) fn heads(
    what: &'static str,
    addr: Option<u64>,
    x: TensorRef<'_>,
    heads: usize,
    size: usize,
) -> Result<(u64, [i64; 2])> {
    let (&[_, h, d], &[row, head, 1]) = (x.shape(), x.strides()) else {
        return Err(CudaError::Argument(format!(
            "{what}: shape {:?} with strides {:?}, expected [tokens, {heads}, {size}] with contiguous heads",
            x.shape(),
            x.strides()
        )));
    };
    if (h, d) != (heads, size) {
        return Err(CudaError::Argument(format!(
            "{what}: {:?}, expected [tokens, {heads}, {size}]",
            x.shape()
        )));
    }
    let Some(addr) = addr else {
        return Err(CudaError::Argument(format!("{what}: on {}, not on a CUDA device", x.device())));
    };
    let bytes = x.dtype().size();
    if [addr as usize, row * bytes, head * bytes].iter().any(|n| !n.is_multiple_of(16)) {
        return Err(CudaError::Argument(format!(
            "{what}: address {addr:#x} with strides {:?} of {}: rows and heads must begin at multiples of 16 bytes",
            x.strides(),
            x.dtype()
        )));
    }
    Ok((addr, [row as i64, head as i64]))
}
