//! FlashInfer's kernels: a plan made once for all layers of a group, and runs of it. The functions and the order of
//! their arguments are those of [`crate::modules::FLASHINFER`].

mod latent;
mod paged;

pub use latent::{LatentBatch, LatentInputs, LatentShape, divides_tiles, plan_latent, run_latent};
pub use paged::{PagedBatch, PagedNumbers, PagedShape, PlanInputs, plan, run};

use crate::{
    CudaExec,
    device::{CudaError, Pinned, Result},
    modules::{Returned, TensorArg},
};
use headway_tensor::{DType, Exec, Tensor};
use std::{ffi::c_void, sync::Arc};

/// Tables of a plan begin at multiples of so many bytes; there are fewer than so many.
const TABLES: usize = 16 * 16;

/// The memory of a plan: its tables on the device, and where they are written on the host.
#[derive(Debug)]
pub struct PlanMemory {
    tables: Arc<Tensor>,
    staging: Pinned,
}

impl PlanMemory {
    /// For tables of so many bytes.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &CudaExec, bytes: usize) -> Result<Self> {
        let tables = Arc::new(Tensor::zeros(cx, DType::U8, &[bytes])?);
        Ok(Self { tables, staging: Pinned::new(cx, bytes)? })
    }
}

/// A plan: what runs are called with.
#[derive(Debug)]
pub struct Plan {
    returned: Returned,
    numbers: Vec<i64>,
    tables: TensorArg,
    floats: TensorArg,
    // What the two name.
    _memory: [Arc<Tensor>; 2],
}

impl Plan {
    /// Launch scalars and places in the memory, for telling two plans apart.
    pub fn numbers(&self) -> (&[i64], u64, u64) {
        (&self.numbers, self.tables.addr(), self.floats.addr())
    }
}

fn ordinal(cx: &CudaExec) -> u32 {
    cx.device().index
}

fn stream(cx: &CudaExec) -> *mut c_void {
    cx.stream().cu_stream().cast()
}

fn bytes_of(cx: &CudaExec, x: &Tensor) -> Result<TensorArg> {
    let addr = x.view().device_addr().ok_or_else(|| CudaError::Argument("a workspace on the host".into()))?;
    Ok(TensorArg::row(ordinal(cx), addr, DType::U8, x.bytes()))
}

/// That a plan's requests are what a page list can be of.
fn check_requests(
    (query_start_loc, page_indptr, seq_lens): (&[i32], &[i32], &[i32]),
    page_size: usize,
) -> Result<()> {
    let reqs = seq_lens.len();
    let rises = |v: &[i32]| v.len() == reqs + 1 && v[0] >= 0 && v.windows(2).all(|w| w[0] <= w[1]);
    if reqs == 0 || !rises(query_start_loc) || !rises(page_indptr) || query_start_loc[0] != 0 {
        return Err(CudaError::Argument(format!(
            "a plan for {reqs} requests with {} bounds of tokens and {} of pages",
            query_start_loc.len(),
            page_indptr.len()
        )));
    }
    let fits = |(w, &len): (&[i32], &i32)| {
        len >= 0 && (w[1] - w[0]) as usize == (len as usize).div_ceil(page_size.max(1))
    };
    match page_indptr.windows(2).zip(seq_lens).position(|e| !fits(e)) {
        None => Ok(()),
        Some(i) => Err(CudaError::Argument(format!(
            "request {i} of {} tokens has {} pages of {page_size}",
            seq_lens[i],
            page_indptr[i + 1] - page_indptr[i],
        ))),
    }
}
