//! Measuring one layer's calls on a device, for `bench attention` and `tune`.
//!
//! | file | what |
//! |---|---|
//! | `case.rs` | a batch |
//! | `layer.rs` | a layer, and what a call of it moves and computes |
//! | `setup.rs` | a backend's layer on a device |
//! | `fixture.rs` | that set up through the contract, and its calls timed |
//! | `tables.rs` | blocks, slots and metadata of a batch |
//! | `meter.rs` | what is asked of a device: memory, a clock, ceilings; `cpu.rs` and `cuda.rs` answer |
//! | `samples.rs` | timing by the clock |

mod case;
pub mod cpu;
mod cuda;
mod fixture;
mod layer;
pub mod meter;
mod samples;
mod setup;
mod tables;

pub use case::{CacheState, Case, Kind};
pub use fixture::{Measured, Prepared};
pub use layer::Layer;
pub use samples::Sampler;
pub use setup::{Replayed, Setup};
pub use tables::blocks_of;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Hidden where standard error is not a terminal.
pub fn progress(len: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed} (about {eta} left)");
    ProgressBar::with_draw_target(Some(len as u64), ProgressDrawTarget::stderr())
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
