//! The command line of headway: `generate`, `chat`, `backends`, `pull`.
//!
//! A program that brings its own attention backends registers them and then offers these commands:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     headway::cli::main(|registry| {
//!         // registry.register::<MyAttention>()
//!         let _ = registry;
//!         Ok(())
//!     })
//! }
//! ```
#![forbid(unsafe_code)]

pub mod cli;
