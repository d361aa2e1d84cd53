//! headway's inference engine: models, loading, tokenizer, scheduler, KV cache manager and model runner.
//!
//! One request's way: [`sources`] finds the files, [`loading`] opens them, [`models`] plans and loads the
//! decoder, [`runner`] starts it (backends, cache, builders) and runs steps that [`scheduler`] plans over
//! the pages of [`kv`], [`sampling`] chooses tokens ([`speculation`] several at once), [`text`] turns them into text; [`engine`] joins them.
//!
//! [`explain`] asks the same start-up code what would come out, with no weights and no device.
//!
//! Arrow: depends on `headway-cpu`, `headway-attention` and `headway-tensor`. Device crates are named in
//! `runner/devices.rs` alone.

pub mod engine;
pub mod explain;
pub mod kv;
pub mod loading;
pub mod models;
pub mod options;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod sources;
pub mod speculation;
pub mod text;
pub mod tuning;

pub use engine::{Engine, Event, GenerateRequest, LlmEngine};
pub use options::EngineOptions;
