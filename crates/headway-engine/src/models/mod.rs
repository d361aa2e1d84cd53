//! Models by plan. An architecture file ([`arch`]) translates a `config.json` or a GGUF header into a
//! [`plan::ModelPlan`] with weight names; the [`decoder`] that runs a plan exists once.

pub mod arch;
pub mod decoder;
pub mod dummy;
pub mod error;
pub(crate) mod headers;
mod load;
pub mod needs;
pub mod plan;
pub mod rope;
pub(crate) mod unused;

pub use decoder::Decoder;
pub use error::ModelError;
pub use needs::ModelNeeds;
pub use plan::ModelPlan;
