//! Why an engine doesn't start: the option at fault, what was asked, what to do.

use crate::{loading::LoadError, models::ModelError, scheduler::SchedulerError, text::TextError};
use headway_attention::AttentionError;
use headway_tensor::TensorError;
use std::path::PathBuf;

/// What can go wrong at start-up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartupError {
    /// An option has a value that can't be.
    #[error("{option} {value}: {why}")]
    Option {
        /// The option by its command-line name.
        option: &'static str,
        /// What was asked.
        value: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// An option asks for what this build can't do yet.
    #[error("{option} {value} is not supported by this build; {supported}")]
    NotYet {
        /// The option.
        option: &'static str,
        /// What was asked.
        value: String,
        /// What is.
        supported: String,
    },
    /// Buffers that don't fit into memory.
    #[error("{option} {value} needs {needed} bytes for {what}, and {available} bytes are free; lower it")]
    NoMemory {
        /// The option that decides.
        option: &'static str,
        /// What is in force.
        value: usize,
        /// What it is for.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes that could be had after the weights.
        available: u64,
    },
    /// A graph that couldn't be captured.
    #[error(
        "capturing a graph of {tokens} tokens: {source}; give --graph-mode NONE, or lower --kv-cache-memory where memory is short"
    )]
    Capture {
        /// Tokens of the graph.
        tokens: usize,
        /// What went wrong.
        source: ModelError,
    },
    /// Weights that are made in memory and don't fit.
    #[error("{what} makes {needed} bytes of weights in memory, and {available} bytes are free; {remedy}")]
    NoMemoryForWeights {
        /// What makes them.
        what: String,
        /// What to do.
        remedy: &'static str,
        /// Bytes of all weights.
        needed: u64,
        /// Bytes that could be had.
        available: u64,
    },
    /// A builder's buffers don't fit.
    #[error(
        "{backend} needs {needed} bytes for its metadata and workspace, and {available} bytes are free; lower \
         --max-num-batched-tokens, --max-num-seqs or --max-model-len, or what [backend.{backend}] sets"
    )]
    NoMemoryForBuilder {
        /// Whose builder.
        backend: String,
        /// Bytes of its buffers.
        needed: u64,
        /// Bytes that could be had.
        available: u64,
    },
    /// The KV cache doesn't fit.
    #[error(
        "the KV cache has {budget} bytes, but one block needs {block} bytes in each of the pool's pages and two pages are the least; \
         raise --kv-cache-memory to at least {least} or lower --block-size"
    )]
    NoRoomForKv {
        /// Bytes allowed.
        budget: u64,
        /// Bytes of one block over all layers.
        block: u64,
        /// Bytes that would do.
        least: u64,
    },
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Weight files.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The tokenizer.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The model's file, or its folder.
        path: PathBuf,
        /// What is wrong with it.
        source: TextError,
    },
    /// Selection, builders, layers.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Limits of the scheduler.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The device.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
