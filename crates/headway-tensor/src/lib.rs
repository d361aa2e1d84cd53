//! Device-neutral memory for headway: dtypes, strided views over host or device memory, the few
//! operations that models call ([`Ops`]), and weights as they lie in a file.
//!
//! Arrow: this crate depends on no other headway crate; `headway-attention` depends on it.
//! It holds no kernels: an [`Ops`] implementation lives in a device crate.

pub mod choose;
#[expect(unsafe_code, reason = "DLPack hands raw pointers over")]
pub mod dlpack;
pub mod dtype;
pub mod error;
/// What the examples of [`Linear`] and [`Ops`] run on: a device in a few lines. To run an example elsewhere, put
/// this text into a `mod example` beside it. The host's real operations are `CpuExec` of `headway-cpu`.
///
/// ```
#[doc = include_str!("../docs/example.rs")]
/// ```
#[cfg(doc)]
pub mod example {}
pub mod experts;
pub mod fp8;
pub mod graph;
pub mod memory;
pub mod ops;
pub mod packed;
pub mod persistent;
pub mod quant;
pub mod row_quant;
pub mod tensor;
#[cfg(test)]
mod testing;
pub mod view;
pub mod weight;

pub use choose::{RowChoice, RowSampler};
pub use dtype::{DType, Element};
pub use error::{Result, TensorError};
pub use experts::{
    ExpertBuffers, ExpertGroups, ExpertLimits, ExpertParts, Experts, ExpertsSpec, GroupScore, RouterScores,
    Routing,
};
pub use graph::{Graph, Graphs};
pub use memory::{Device, DeviceMem, Exec, HostBuf, Pod};
pub use ops::{Activation, GatedNorm, Linear, LinearPart, Ops, RopeStyle};
pub use packed::{Packed, Part};
pub use persistent::{Changes, Persistent};
pub use row_quant::{RowQuant, RowQuantKind};
pub use tensor::{Dims, Tensor, TensorMut, TensorRef};
pub use view::{Dual, View};
pub use weight::{BytesOwner, SharedBytes, Weight, WeightError, WeightType};
