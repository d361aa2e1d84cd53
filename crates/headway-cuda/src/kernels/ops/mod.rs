//! Wrappers of the kernels under `csrc/ops`: the operations of models but attention.

mod activation;
pub(crate) mod argmax;
pub(crate) mod codes;
pub(crate) mod dequantise;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod gated;
pub(crate) mod gather;
mod gemm;
pub(crate) mod latent;
mod launch;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod sample;

pub(crate) use gemm::Gemm;
pub(crate) use launch::OpKernels;

use super::elements::number;
use crate::{KernelSpec, device::Result};
use headway_tensor::DType;

/// Forms in which the files under `csrc/ops` are compiled; one kernel of each stands for the others. Float16 differs
/// from bfloat16 in two instructions, so it is not in all of them.
///
/// # Errors
/// A type that no kernel reads.
pub fn specs() -> Result<Vec<KernelSpec>> {
    let files = [
        (argmax::FILE, "argmax_wide"),
        (codes::FILE, "quantise_wide"),
        (elementwise::FILE, "add_wide"),
        (gated::FILE, "gate_wide"),
        (norm::FILE, "rms_norm_wide"),
        (rope::FILE, "halves_wide"),
    ];
    let of = |file, entry, dtype| -> Result<KernelSpec> {
        Ok(KernelSpec { file, entry, defines: vec![("DTYPE", number(dtype)?)] })
    };
    let mut all = vec![of(norm::FILE, "rms_norm_wide", DType::F16)?];
    for (file, entry) in files {
        all.push(of(file, entry, DType::BF16)?);
        all.push(of(file, entry, DType::F32)?);
    }
    for (table, dtype) in [(DType::BF16, DType::BF16), (DType::F32, DType::F16), (DType::F16, DType::F32)] {
        let mut gather = of(gather::FILE, "gather_wide", dtype)?;
        gather.defines.push(("TABLE", number(table)?));
        all.push(gather);
    }
    all.push(sample::spec());
    all.extend(dequantise::specs()?);
    all.extend(experts::specs()?);
    Ok(all)
}
