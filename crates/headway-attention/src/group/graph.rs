//! Lifetime: the model. CUDA-graph support and modes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a builder's metadata allows of full CUDA graphs, weakest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum GraphSupport {
    /// No full graph.
    Never,
    /// Batches of one new token a request.
    UniformSingleTokenDecode,
    /// Batches of the same number of new tokens a request.
    UniformBatch,
    /// Any batch.
    Always,
}

impl GraphSupport {
    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "NEVER",
            Self::UniformSingleTokenDecode => "UNIFORM_SINGLE_TOKEN_DECODE",
            Self::UniformBatch => "UNIFORM_BATCH",
            Self::Always => "ALWAYS",
        }
    }
}

impl fmt::Display for GraphSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a step's kernels are launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum GraphMode {
    /// Every kernel by itself.
    None,
    /// Graphs between the attention calls.
    Piecewise,
    /// One graph for every batch.
    Full,
    /// One graph for decode batches; mixed batches without.
    FullDecodeOnly,
    /// One graph for decode batches, piecewise ones for mixed batches.
    FullAndPiecewise,
}
