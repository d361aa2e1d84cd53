//! FlashAttention-3's paged attention out of vLLM's extension module: a schedule made once for all layers of a group, and
//! runs of it. The functions and the order of their arguments are those of [`VLLM`](crate::modules::extension::VLLM).
//!
//! What the kernels are given is checked here, so that nothing is left for them to refuse; what they throw all the same is
//! an error (`modules/extension/catch.rs`).
//!
//! | file | what |
//! |---|---|
//! | `shape.rs` | heads, pages and types that there are kernels for; what decides the form of a launch |
//! | `schedule.rs` | a batch, and its schedule |
//! | `run.rs` | a layer's launch |
//! | `arguments.rs` | tensors as the library gets them |

mod arguments;
mod run;
mod schedule;
mod shape;

pub use run::{FlashNumbers, Queries, run};
pub use schedule::{FlashBatch, Schedule, schedule};
pub use shape::{FlashShape, Form, MOST_HEADS_WITH_SINKS, element, head_step, most_splits, operand};
