//! What conditions and texts of a data file can read of a layer's need, by name.

use super::super::rules::{AttnType, ComputeCapability, KindTag, StateSpaceMixer};
use crate::LayerNeed;
use headway_tensor::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! fields {
    ($($(#[$doc:meta])* $variant:ident $kind:ident |$need:ident| $value:expr;)*) => {
        /// A fact about a layer that a condition can test; in JSON the name in snake case.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Field { $($(#[$doc])* $variant,)* }

        impl Field {
            /// What values the field has.
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)* }
            }

            /// The field's value for a layer; `None` where it is not known, or the layer has no such thing.
            pub fn of(self, need: &LayerNeed) -> Option<Value<'_>> {
                match self { $(Self::$variant => { let $need = need; fields!(@ $kind $value) })* }
            }
        }
    };
    (@ Flag $v:expr) => { Some(Value::Flag($v)) };
    (@ Number $v:expr) => { $v.map(Value::Number) };
    (@ Capability $v:expr) => { $v.map(Value::Capability) };
    (@ $word:ident $v:expr) => { $v.map(Value::Word) };
}

fields! {
    /// [`LayerNeed::kind`]: `standard`, `mla`, `state_space`.
    Kind LayerKind |n| Some(n.kind.key());
    /// [`LayerNeed::platform`].
    Platform Word |n| Some(n.platform.as_ref());
    /// [`LayerNeed::compute_capability`].
    ComputeCapability Capability |n| n.compute_capability;
    /// [`LayerNeed::head_size`].
    HeadSize Number |n| Some(n.head_size);
    /// [`LayerNeed::model_head_size`].
    ModelHeadSize Number |n| n.model_head_size;
    /// Query heads on this rank, where they are known.
    NumHeads Number |n| Some(n.num_heads).filter(|&n| n > 0);
    /// [`LayerNeed::dtype`].
    Dtype Dtype |n| Some(n.dtype.name());
    /// [`LayerNeed::kv_cache_dtype`].
    KvCacheDtype Word |n| n.kv_cache_dtype.as_ref().map(|d| d.0.as_ref());
    /// [`LayerNeed::block_size`].
    BlockSize Number |n| n.block_size;
    /// [`LayerNeed::attn_type`].
    AttnType AttnType |n| Some(n.attn_type.name());
    /// [`LayerNeed::sliding_window`].
    SlidingWindow Number |n| n.sliding_window;
    /// [`LayerNeed::state_space`].
    StateSpace Mixer |n| n.state_space.map(StateSpaceMixer::name);
    /// [`LatentDims::qk_nope_head_dim`](super::super::rules::LatentDims::qk_nope_head_dim).
    QkNopeHeadDim Number |n| n.latent.map(|l| l.qk_nope_head_dim);
    /// [`LatentDims::qk_rope_head_dim`](super::super::rules::LatentDims::qk_rope_head_dim).
    QkRopeHeadDim Number |n| n.latent.map(|l| l.qk_rope_head_dim);
    /// [`LatentDims::kv_lora_rank`](super::super::rules::LatentDims::kv_lora_rank).
    KvLoraRank Number |n| n.latent.map(|l| l.kv_lora_rank);
    /// [`LatentDims::v_head_dim`](super::super::rules::LatentDims::v_head_dim).
    VHeadDim Number |n| n.latent.map(|l| l.v_head_dim);
    /// [`LatentDims::index_topk`](super::super::rules::LatentDims::index_topk).
    IndexTopk Number |n| n.latent.and_then(|l| l.index_topk);
    /// [`LayerNeed::num_speculative_tokens`].
    NumSpeculativeTokens Number |n| Some(n.num_speculative_tokens);
    /// [`LayerNeed::has_sinks`].
    HasSinks Flag |n| n.has_sinks;
    /// [`LayerNeed::use_sparse`].
    UseSparse Flag |n| n.use_sparse;
    /// [`LayerNeed::use_mm_prefix`].
    UseMmPrefix Flag |n| n.use_mm_prefix;
    /// [`LayerNeed::use_non_causal`].
    UseNonCausal Flag |n| n.use_non_causal;
    /// [`LayerNeed::use_batch_invariant`].
    UseBatchInvariant Flag |n| n.use_batch_invariant;
    /// [`LayerNeed::use_kv_connector`].
    UseKvConnector Flag |n| n.use_kv_connector;
    /// [`LayerNeed::use_dcp`].
    UseDcp Flag |n| n.use_dcp;
    /// [`LayerNeed::use_pcp`].
    UsePcp Flag |n| n.use_pcp;
    /// [`LayerNeed::cpu_has_amx`].
    CpuHasAmx Flag |n| n.cpu_has_amx;
}

/// What values a field has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// True or false.
    Flag,
    /// A number.
    Number,
    /// A compute capability.
    Capability,
    /// Any word.
    Word,
    /// A kind of layer.
    LayerKind,
    /// A dtype.
    Dtype,
    /// A kind of attention.
    AttnType,
    /// A state-space mixer.
    Mixer,
}

impl Kind {
    /// Whether the word is one that a field of this kind can have: a misspelt one would never match.
    pub fn knows(self, word: &str) -> bool {
        fn is<T: for<'de> Deserialize<'de>>(word: &str) -> bool {
            serde_json::from_value::<T>(word.into()).is_ok()
        }
        match self {
            Self::Word => !word.is_empty(),
            Self::LayerKind => is::<KindTag>(word),
            Self::Dtype => is::<DType>(word),
            Self::AttnType => is::<AttnType>(word),
            Self::Mixer => is::<StateSpaceMixer>(word),
            Self::Flag | Self::Number | Self::Capability => false,
        }
    }
}

/// A field's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value<'a> {
    /// True or false.
    Flag(bool),
    /// A number.
    Number(usize),
    /// A compute capability.
    Capability(ComputeCapability),
    /// A word.
    Word(&'a str),
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(b) => b.fmt(f),
            Self::Number(n) => n.fmt(f),
            Self::Capability(c) => c.fmt(f),
            Self::Word(w) => w.fmt(f),
        }
    }
}
