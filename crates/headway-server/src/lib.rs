//! An OpenAI-compatible server over any [`headway_engine::Engine`].
//!
//! One thread steps the engine ([`driver`]); handlers ([`api`]) send it requests and shape what comes back; [`metrics`]
//! and the status page (`page/`) show what happens. [`server::Server`] ties them together.
//!
//! Arrow: depends on `headway-engine`. Knows no device and no model.

#![forbid(unsafe_code)]

pub mod api;
mod connections;
pub mod driver;
mod error;
pub mod metrics;
pub mod options;
pub mod server;

pub use error::ApiError;
pub use options::ServeOptions;
pub use server::{ServeError, Server};
