//! The compiled forms of a layer's kernels.

use super::shape::StatePage;
use crate::{CudaExec, Kernel, KernelSpec, device::Result, kernels::elements::number};
use headway_attention::group::arith::mamba2_dims::Mamba2Dims;
use headway_tensor::DType::{self, BF16, F16, F32};
use std::sync::Arc;

/// Threads of a block of the convolution, and of a step's.
pub(super) const CONV_BLOCK: usize = 256;
pub(super) const STEP_BLOCK: usize = 256;
/// Elements of a head that a step's block takes.
pub(super) const STEP_ROWS: usize = 32;

/// A kernel: the file's, in its forms for 16-byte accesses and for single elements where it has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Token,
    Chunks,
    Keep,
    Step,
    States,
    Rows,
}

const CONV: &str = "state_space/conv.cu";
const STEP: &str = "state_space/step.cu";
const SCAN: &str = "state_space/scan.cu";

impl Form {
    const ALL: [Self; 6] = [Self::Token, Self::Chunks, Self::Keep, Self::Step, Self::States, Self::Rows];

    fn entries(self) -> (&'static str, [&'static str; 2]) {
        match self {
            Self::Token => (CONV, ["conv_token_wide", "conv_token_single"]),
            Self::Chunks => (CONV, ["conv_chunks_wide", "conv_chunks_single"]),
            Self::Keep => (CONV, ["conv_keep_wide", "conv_keep_single"]),
            Self::Step => (STEP, ["step_wide", "step_single"]),
            Self::States => (SCAN, ["scan_states"; 2]),
            Self::Rows => (SCAN, ["scan_rows"; 2]),
        }
    }

    /// What it is compiled of for states of these sizes and types, and activations of `dtype`, where a block has so much
    /// shared memory.
    fn specs(self, page: &StatePage, dtype: DType, shared_per_block: usize) -> Result<[KernelSpec; 2]> {
        let (file, entries) = self.entries();
        let mut defines = vec![
            ("ACT", number(dtype)?),
            ("HEAD", page.dims.head_dim.to_string()),
            ("STATE", page.dims.state.to_string()),
        ];
        match file {
            CONV => {
                defines.push(("CONV", number(page.conv)?));
                defines.push(("TAPS", page.dims.conv_kernel.to_string()));
            }
            _ => defines.push(("SSM", number(page.ssm)?)),
        }
        if file == SCAN {
            defines.push(("STAGES", page.stages(shared_per_block).to_string()));
        }
        Ok(entries.map(|entry| KernelSpec { file, entry, defines: defines.clone() }))
    }
}

/// The kernels of layers of one shape, loaded.
#[derive(Clone, Debug)]
pub struct LayerKernels {
    page: StatePage,
    dtype: DType,
    /// By form: wide, single.
    loaded: [[Arc<Kernel>; 2]; 6],
}

impl LayerKernels {
    /// Loads them, compiled where no folder has them.
    ///
    /// # Errors
    /// The compiler's; types that no kernel reads.
    pub fn new(cx: &CudaExec, page: &StatePage, dtype: DType) -> Result<Self> {
        let load = |form: Form| -> Result<[Arc<Kernel>; 2]> {
            let [wide, single] = form.specs(page, dtype, cx.info().shared_per_block as usize)?;
            Ok([cx.kernel(&wide)?, cx.kernel(&single)?])
        };
        let [a, b, c, d, e, f] = Form::ALL;
        let loaded = [load(a)?, load(b)?, load(c)?, load(d)?, load(e)?, load(f)?];
        Ok(Self { page: *page, dtype, loaded })
    }

    pub(super) fn get(&self, form: Form, wide: bool) -> &Kernel {
        &self.loaded[form as usize][usize::from(!wide)]
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn page(&self) -> &StatePage {
        &self.page
    }
}

/// What [`LayerKernels::new`] loads, one of each file, where a block has so much shared memory.
///
/// # Errors
/// Types that no kernel reads.
pub fn layer_specs(page: &StatePage, dtype: DType, shared_per_block: usize) -> Result<Vec<KernelSpec>> {
    let mut all = vec![];
    for form in [Form::Chunks, Form::Step, Form::Rows] {
        let [wide, _] = form.specs(page, dtype, shared_per_block)?;
        all.push(wide);
    }
    Ok(all)
}

/// Forms that stand for all: sizes of published models, odd ones, each type of a state.
///
/// # Errors
/// A type that no kernel reads.
pub fn specs() -> Result<Vec<KernelSpec>> {
    let mut all = vec![];
    // With the shared memory of the generations that have most and of those that have least.
    let (most, least) = (227 << 10, 99 << 10);
    for (head_dim, state, conv_kernel, dtype, conv, ssm, shared) in [
        (64, 128, 4, BF16, BF16, F32, most),
        (64, 128, 4, BF16, BF16, F32, least),
        (128, 256, 4, F16, F16, BF16, most),
        (32, 16, 4, BF16, F32, F16, most),
        (7, 6, 2, F16, F32, F32, most),
    ] {
        let dims = Mamba2Dims { heads: 8, head_dim, groups: 2, state, conv_kernel };
        all.extend(layer_specs(&StatePage { dims, conv, ssm }, dtype, shared)?);
    }
    Ok(all)
}
