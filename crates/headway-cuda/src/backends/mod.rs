//! The CUDA attention backends, one folder each; a new one is its folder and a line in [`register`].

mod common;
pub mod cuda_attn;
pub mod cuda_mla;
pub mod mamba2;

pub use cuda_attn::CudaAttn;
pub use cuda_mla::CudaMla;
pub use mamba2::Mamba2Attn;

use headway_attention::{Registry, Result};

/// Registers the CUDA backends, most preferred first.
///
/// # Errors
/// A name that is taken.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<CudaAttn>()?;
    registry.register::<CudaMla>()?;
    registry.register::<Mamba2Attn>()
}
