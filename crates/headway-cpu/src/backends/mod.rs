//! The CPU attention backends, one folder each; a new one is its folder and a line in [`register`].

pub mod cpu_attn;

pub use cpu_attn::CpuAttn;

use headway_attention::{Registry, Result};

/// Registers the CPU backends, most preferred first.
///
/// # Errors
/// A name that is taken.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<CpuAttn>()
}
