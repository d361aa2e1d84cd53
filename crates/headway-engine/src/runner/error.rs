//! Why an engine doesn't start: the option at fault, what was asked, what to do.

use crate::{
    loading::LoadError, models::ModelError, scheduler::SchedulerError, text::TextError, tuning::TuningError,
};
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
    /// Memory that couldn't be had.
    #[error("no memory for {what}: {source}; {remedy}")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much was asked for, and how much is free.
        source: TensorError,
        /// What to lower.
        remedy: &'static str,
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
    /// The measured choice.
    #[error(transparent)]
    Tuning(#[from] TuningError),
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

impl StartupError {
    /// The same, where memory is used up with what it was for and what to lower.
    pub(super) fn in_need_of(self, what: &'static str, remedy: &'static str) -> Self {
        let short = match &self {
            Self::Tensor(e) | Self::Attention(AttentionError::Tensor(e)) => Some(e),
            Self::Model(e) => e.out_of_memory(),
            _ => None,
        };
        match short.filter(|e| e.is_out_of_memory()).cloned() {
            Some(source) => Self::OutOfMemory { what, source, remedy },
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_said_with_what_to_lower() {
        let oom = || TensorError::OutOfMemory { what: "cuda:0 (7 of 50 bytes are free)".into(), bytes: 100 };
        let text = "no memory for the KV cache: out of memory: 100 bytes for cuda:0 (7 of 50 bytes are free) could not \
                    be allocated; lower --kv-cache-memory";
        let all: [StartupError; 3] = [
            oom().into(),
            AttentionError::from(oom()).into(),
            ModelError::from(AttentionError::from(oom())).into(),
        ];
        for e in all {
            assert_eq!(e.in_need_of("the KV cache", "lower --kv-cache-memory").to_string(), text);
        }
        let other = StartupError::from(TensorError::Unsupported("no".into()));
        assert_eq!(other.in_need_of("the KV cache", "lower it").to_string(), "no");
    }
}
