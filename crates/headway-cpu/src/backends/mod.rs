//! The CPU attention backends, one folder each; a new one is its folder and a line in [`register`].

mod common;
pub mod cpu_attn;
pub mod cpu_mla;
pub mod mamba2;

pub use cpu_attn::CpuAttn;
pub use cpu_mla::CpuMla;
pub use mamba2::Mamba2Attn;

use headway_attention::{Registry, Result};

/// Registers the CPU backends, most preferred first.
///
/// # Errors
/// A name that is taken.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<CpuAttn>()?;
    registry.register::<CpuMla>()?;
    registry.register::<Mamba2Attn>()
}
