//! `DAMPED_ATTN`: a backend of one folder and one line of registration. It reuses `CPU_ATTN`'s metadata
//! builder and kernels, and multiplies the scores by a factor from its own `[backend.DAMPED_ATTN]` table.

pub mod damped;

pub use damped::{Damped, DampedConfig};

use headway_attention::{Registry, Result};

/// Adds the backend, after those that are registered already.
///
/// # Errors
/// The name is taken; headway speaks another version of the contract.
pub fn register(registry: &mut Registry) -> Result<()> {
    registry.register::<Damped>()
}
