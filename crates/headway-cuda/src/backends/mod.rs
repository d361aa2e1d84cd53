//! The CUDA attention backends, one folder each; a new one is its folder and a line in [`register`].

mod common;
pub mod cuda_attn;
pub mod cuda_mla;
mod extensions;
pub mod flash_attn;
pub mod flash_mla;
pub mod flashinfer;
pub mod flashinfer_mla;
pub mod latent;
pub mod mamba2;
mod modules;
mod triton;
pub mod triton_attn;
pub mod triton_mla;

pub use cuda_attn::CudaAttn;
pub use cuda_mla::CudaMla;
pub use flash_attn::FlashAttn;
pub use flash_mla::FlashMla;
pub use flashinfer::FlashInfer;
pub use flashinfer_mla::FlashInferMla;
pub use mamba2::Mamba2Attn;
pub use triton_attn::TritonAttn;
pub use triton_mla::TritonMla;

use headway_attention::{Registry, Result};

/// Registers the CUDA backends, most preferred first. `FLASH_ATTN` stands before `FLASHINFER`, and both before
/// `CUDA_ATTN`: decodes are about level, and prefills on Hopper take half the time and less (`docs/gpu.md`);
/// `TRITON_ATTN` is the last of softmax attention: `CUDA_ATTN` takes nearly every layer that it takes, and needs no build.
/// `FLASHINFER_MLA` before `CUDA_MLA`: with 128 heads its decodes on Hopper take half the time, with 16 they are level,
/// and where only `mla_fa2` is built it stands back;
/// `FLASHMLA` after them: it is slower than both but in the largest batches; `TRITON_MLA` last, as with keys and values.
/// All but headway's CUDA kernels are refused where they are not fetched or built.
///
/// # Errors
/// A name that is taken.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<FlashAttn>()?;
    registry.register::<FlashInfer>()?;
    registry.register::<CudaAttn>()?;
    registry.register::<TritonAttn>()?;
    registry.register::<FlashInferMla>()?;
    registry.register::<CudaMla>()?;
    registry.register::<FlashMla>()?;
    registry.register::<TritonMla>()?;
    registry.register::<Mamba2Attn>()
}
