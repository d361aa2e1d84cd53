//! Lifetime: the model. CUDA graphs: what builders allow, the modes, how a configured mode is
//! lowered to what the chosen backends allow, and which captured shape serves a batch.

pub mod dispatch;
pub mod resolve;

pub use dispatch::{Batch, CaptureOptions, GraphPlan, GraphShape, MicroBatching};
pub use resolve::{GraphRequest, GraphResolution, Lowering, resolve};

use crate::AttentionError;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

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

    /// The weakest of all groups with the backend that has it, the first of several; `ALWAYS` and no
    /// backend where all are that.
    pub fn weakest<'a>(groups: impl IntoIterator<Item = (&'a str, Self)>) -> (Self, Option<&'a str>) {
        groups.into_iter().fold((Self::Always, None), |weakest, (name, support)| {
            if support < weakest.0 { (support, Some(name)) } else { weakest }
        })
    }
}

impl fmt::Display for GraphSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The first backend whose full graphs can't take decodes of mixed lengths up to `query_len`, with the most
/// that it takes (`None`: none). Groups are name, support, and
/// [`RuleBook::varlen_graph_max_query_len`](crate::RuleBook::varlen_graph_max_query_len).
pub fn varlen_blocker<'a>(
    groups: impl IntoIterator<Item = (&'a str, GraphSupport, Option<usize>)>,
    query_len: usize,
) -> Option<(&'a str, Option<usize>)> {
    groups
        .into_iter()
        .filter(|(_, support, _)| *support != GraphSupport::Always)
        .map(|(name, support, most)| (name, most.filter(|_| support != GraphSupport::Never)))
        .find(|(_, most)| most.is_none_or(|m| m < query_len))
}

/// How a step's kernels are launched.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum GraphMode {
    /// Every kernel by itself.
    #[default]
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

impl GraphMode {
    /// All modes.
    pub const ALL: [Self; 5] =
        [Self::None, Self::Piecewise, Self::Full, Self::FullDecodeOnly, Self::FullAndPiecewise];

    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "NONE",
            Self::Piecewise => "PIECEWISE",
            Self::Full => "FULL",
            Self::FullDecodeOnly => "FULL_DECODE_ONLY",
            Self::FullAndPiecewise => "FULL_AND_PIECEWISE",
        }
    }

    /// The mode of batches in which every request decodes.
    pub const fn decode_mode(self) -> Self {
        match self {
            Self::FullDecodeOnly | Self::FullAndPiecewise => Self::Full,
            other => other,
        }
    }

    /// The mode of other batches.
    pub const fn mixed_mode(self) -> Self {
        match self {
            Self::FullDecodeOnly => Self::None,
            Self::FullAndPiecewise => Self::Piecewise,
            other => other,
        }
    }

    /// The larger of the two.
    pub fn max_mode(self) -> Self {
        self.decode_mode().max(self.mixed_mode())
    }

    /// Whether some batches run as this run-time mode.
    pub fn has(self, mode: Self) -> bool {
        self.decode_mode() == mode || self.mixed_mode() == mode
    }

    /// Some batches run as one graph.
    pub fn has_full(self) -> bool {
        self.has(Self::Full)
    }

    /// Some batches run as graphs between the attention calls.
    pub fn has_piecewise(self) -> bool {
        self.has(Self::Piecewise)
    }

    /// Decode and mixed batches are captured apart.
    pub fn separates_decode(self) -> bool {
        self.decode_mode() != self.mixed_mode()
    }

    /// One of the three modes that a batch can run in.
    pub const fn is_runtime_mode(self) -> bool {
        matches!(self, Self::None | Self::Piecewise | Self::Full)
    }

    /// The mode where nothing can be captured piecewise.
    pub const fn without_piecewise(self) -> Self {
        match self {
            Self::Piecewise => Self::None,
            Self::FullAndPiecewise => Self::FullDecodeOnly,
            other => other,
        }
    }
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for GraphMode {
    type Err = AttentionError;

    fn from_str(s: &str) -> Result<Self, AttentionError> {
        Self::ALL.into_iter().find(|m| m.name().eq_ignore_ascii_case(&s.replace('-', "_"))).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|m| m.name()).collect();
            let near = crate::process::registry::nearest(s, names.iter().copied());
            AttentionError::Graph(format!(
                "--graph-mode takes {}, not {s}{}",
                names.join(", "),
                near.map(|n| format!(" (did you mean {n}?)")).unwrap_or_default()
            ))
        })
    }
}
