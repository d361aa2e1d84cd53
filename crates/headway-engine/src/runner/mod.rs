//! The model runner and its three moments: `startup` (once), [`model_runner`] (every step), and the
//! layer, which is the contract's. [`devices`] is the one file that names device crates.

pub mod block_size;
pub mod capacity;
pub mod decide;
pub mod devices;
pub mod error;
mod extent;
pub(crate) mod facts;
pub mod fast_prefill;
pub(crate) mod graphs;
mod inputs;
pub mod limits;
mod logits;
pub mod memory;
pub mod micro_batches;
pub mod model_runner;
pub(crate) mod needs;
pub mod place;
pub(crate) mod present;
pub mod report;
pub(crate) mod speculation;
pub(crate) mod startup;
pub mod step_times;

pub use error::StartupError;
pub use logits::StepLogits;
pub use model_runner::ModelRunner;
pub use report::StartupReport;
pub use step_times::StepTimes;
