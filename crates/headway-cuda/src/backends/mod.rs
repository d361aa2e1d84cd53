//! The CUDA attention backends, one folder each; a new one is its folder and a line in [`register`].

mod common;
pub mod cuda_attn;
pub mod cuda_mla;
pub mod flashinfer;
pub mod mamba2;

pub use cuda_attn::CudaAttn;
pub use cuda_mla::CudaMla;
pub use flashinfer::FlashInfer;
pub use mamba2::Mamba2Attn;

use headway_attention::{Registry, Result};

/// Registers the CUDA backends, most preferred first. `FLASHINFER` stands before `CUDA_ATTN`: decodes are level, and its
/// prefills on Hopper take half the time (`docs/gpu.md`). It is refused where its modules are not built.
///
/// # Errors
/// A name that is taken.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<FlashInfer>()?;
    registry.register::<CudaAttn>()?;
    registry.register::<CudaMla>()?;
    registry.register::<Mamba2Attn>()
}
