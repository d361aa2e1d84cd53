//! Blocks of GGUF files as plain weights (`csrc/ops/dequantise.cu`).

use super::{
    super::{elements::number, kernel_params},
    launch::{Entries, THREADS, blocks, entries},
};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, DeviceMem, Exec, TensorError, quant::QuantFormat};
use std::sync::Arc;

pub(super) const FILE: &str = "ops/dequantise.cu";
const ENTRIES: Entries = entries!("dequantise");
/// Weights of a thread.
const GROUP: usize = 8;

kernel_params! {
    struct Params { blocks: u64, out: u64, groups: i64 }
}

/// One of the forms in which the file is compiled.
fn spec(format: QuantFormat, dtype: DType, wide: bool) -> Result<KernelSpec> {
    let defines = vec![("BLOCK", format.ggml_type_id().to_string()), ("DTYPE", number(dtype)?)];
    Ok(KernelSpec { file: FILE, entry: ENTRIES[usize::from(!wide)], defines })
}

/// Every format, as bfloat16; one of them as the other types too.
pub(super) fn specs() -> Result<Vec<KernelSpec>> {
    let others = [DType::F16, DType::F32].map(|dtype| spec(QuantFormat::Q6_K, dtype, true));
    QuantFormat::ALL.into_iter().map(|f| spec(f, DType::BF16, true)).chain(others).collect()
}

/// Writes the `weights` that the blocks at the beginning of `from` stand for to `to`, from byte `at` on: each rounded
/// to float32 as [`headway_tensor::quant::dequantize`] does, then to `dtype`.
///
/// # Errors
/// Weights that are not whole blocks; memory that is too small, or on another device; types; the driver's.
pub(crate) fn dequantise(
    cx: &CudaExec,
    format: QuantFormat,
    from: &Arc<dyn DeviceMem>,
    weights: usize,
    (to, at): (&Arc<dyn DeviceMem>, usize),
    dtype: DType,
) -> Result<()> {
    for mem in [from, to] {
        if mem.device() != cx.device() {
            let (found, expected) = (mem.device(), cx.device());
            return Err(TensorError::WrongDevice { what: "dequantise", found, expected }.into());
        }
    }
    if !dtype.is_compute_float() {
        let supported = "bfloat16, float16, float32";
        return Err(TensorError::WrongDType { what: "dequantise", found: dtype, supported }.into());
    }
    let fits = |mem: &Arc<dyn DeviceMem>, at: usize, bytes: Option<usize>| {
        bytes.and_then(|n| n.checked_add(at)).is_some_and(|end| end <= mem.bytes())
    };
    let out_bytes = weights.checked_mul(dtype.size());
    if !fits(from, 0, format.bytes_for(weights))
        || !fits(to, at, out_bytes)
        || !at.is_multiple_of(dtype.size())
    {
        return Err(CudaError::Argument(format!(
            "dequantise: {weights} weights of {format} from {} bytes to byte {at} of {}",
            from.bytes(),
            to.bytes()
        )));
    }
    let groups = weights / GROUP;
    let out = to.addr() + at as u64;
    let wide = out.is_multiple_of(16);
    let kernel = cx.kernel(&spec(format, dtype, wide)?)?;
    let params = Params { blocks: from.addr(), out, groups: groups as i64 };
    // SAFETY: whole blocks of `from` and as many elements of `to`, as checked; groups lie within blocks, whose weights
    // are a multiple of theirs; alignment as `wide` says.
    unsafe { kernel.launch(cx, blocks(groups), THREADS as u32, 0, &params) }
}
