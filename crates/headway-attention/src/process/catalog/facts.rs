//! What the catalogue knows of a backend beside its rule book: its builder, its impl, what it makes of a cache spec.

use crate::{
    GraphSupport, KvCacheSpec,
    group::kv::spec::{AttentionSpec, StrideAlignment},
};
use headway_tensor::DType;
use serde::{Deserialize, Serialize};

/// A number of new tokens of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum QueryLen {
    /// This many.
    Tokens(usize),
    /// One that grows with speculation.
    Named(NamedQueryLen),
}

/// Numbers of tokens that depend on the configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedQueryLen {
    /// What a decode step has of one request: one token and the drafted ones.
    DecodeQueryLen,
}

impl QueryLen {
    /// The number, where so many tokens are drafted a step.
    pub const fn tokens(self, num_speculative_tokens: usize) -> usize {
        match self {
            Self::Tokens(n) => n,
            Self::Named(NamedQueryLen::DecodeQueryLen) => 1 + num_speculative_tokens,
        }
    }
}

/// A backend's metadata builder, under one configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuilderFacts {
    /// The class.
    pub class: String,
    /// What it allows of full CUDA graphs.
    pub graph_support: GraphSupport,
    /// Most new tokens of a request in a full graph of decodes of mixed lengths; `None`: no such graph.
    pub varlen_graph_max_query_len: Option<QueryLen>,
    /// Requests with at most this many new tokens come first in the batch, as decodes; `None`: it asks for no
    /// order, or is not known ([`Self::class_reorder_batch_threshold`] is what its class says).
    pub reorder_batch_threshold: Option<QueryLen>,
    /// The threshold that its class states, before a configuration is known.
    pub class_reorder_batch_threshold: Option<usize>,
    /// It can swap the block table of metadata that another group built.
    pub supports_update_block_table: bool,
    /// It must be told the width of the block table.
    pub requires_block_table_width: bool,
    /// It can update metadata between the steps of drafting; `None`: not known.
    pub supports_draft_decode_update: Option<bool>,
    /// The same, as its class states it.
    pub class_supports_draft_decode_update: bool,
    /// Non-causal steps of several tokens with decode context parallelism (MLA builders).
    pub supports_non_causal_multi_token_dcp: Option<bool>,
    /// Which query lengths its decode kernel takes (MLA builders).
    pub query_len_support: Option<QueryLenSupport>,
}

/// Query lengths that an MLA decode kernel takes in one batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum QueryLenSupport {
    /// One token a request.
    SingleOnly,
    /// The same number a request.
    Uniform,
    /// Any.
    Varlen,
}

/// A backend's layer class.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImplFacts {
    /// The class.
    pub class: String,
    /// Decode can return the log-sum-exp (decode context parallelism needs it).
    pub can_return_lse_for_decode: bool,
    /// The log-sum-exp is in base e; else in base 2.
    pub lse_base_on_e: bool,
    /// Prefill context parallelism.
    pub supports_pcp: bool,
    /// Decode context parallelism.
    pub supports_dcp: bool,
    /// Drafting with context parallelism that deals several tokens in a row to a rank.
    pub supports_mtp_with_cp_non_trivial_interleave_size: bool,
    /// Decode must return the log-sum-exp.
    pub need_to_return_lse_for_decode: bool,
    /// Quantised queries.
    pub supports_quant_query_input: bool,
    /// Sparse attention.
    pub is_sparse: bool,
    /// Prefill by full heads (MLA).
    pub supports_dense_mha_prefill: bool,
}

/// What a backend makes of a layer's cache spec.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecChange {
    /// What the distance between blocks must be a multiple of; `None`: it changes something that the contract's
    /// spec doesn't show.
    pub block_stride_alignment: Option<Stride>,
}

/// A distance between blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stride {
    /// So many states of all head slots.
    States(usize),
    /// So many tokens of a block.
    Tokens(usize),
}

impl SpecChange {
    /// The spec that the backend wants.
    pub fn apply(self, mut spec: KvCacheSpec) -> KvCacheSpec {
        let of = |stride, a: &AttentionSpec| match stride {
            Stride::States(n) => StrideAlignment::Bytes(n * a.num_heads() * a.state_content_size_bytes()),
            Stride::Tokens(n) => StrideAlignment::Tokens(n),
        };
        if let (Some(stride), Some(a)) = (self.block_stride_alignment, spec.attention_mut()) {
            a.block_stride_alignment = Some(of(stride, a));
        }
        spec
    }
}

/// What a class declares, where its checks accept something else.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Declared {
    /// Head sizes; empty: no list.
    pub head_sizes: Vec<usize>,
    /// Dtypes, in its order.
    pub dtypes: Vec<DType>,
}
