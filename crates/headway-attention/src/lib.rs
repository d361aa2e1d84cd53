//! The attention-backend contract of headway: no kernels, no device, no file I/O.
//!
//! The folders are the lifetimes, so the tree is the diagram:
//!
//! | folder | lives | class |
//! |---|---|---|
//! | [`process`] | the program | 1: [`AttentionBackend`], the rule book, selection, the registry |
//! | [`group`] | the model, per attention group and micro-batch | 2: [`MetadataBuilder`], KV cache specs and groups, graph modes |
//! | [`step`] | one step | [`CommonAttentionMetadata`], the build loop, [`StepMetadata`] |
//! | [`layer`] | the model, per layer | 3: [`AttentionImpl`], [`MlaImpl`], [`StateSpaceImpl`] |
//!
//! Metadata depends on the batch, never on the layer: it is built once per attention group and step,
//! and every layer of the group reads the same one. The triple is one type, so a backend's layer can't
//! be handed another backend's metadata; type erasure happens once, in `process::erased`.
//!
//! Arrow: depends on `headway-tensor` alone. No path branches on the name of a backend, device or model.
#![forbid(unsafe_code)]

pub mod error;
pub mod group;
pub mod layer;
pub mod process;
pub mod step;

pub use error::{AttentionError, Result};
pub use group::{
    builder::{BuilderPlan, ContextParallel, DecodeSplit, GroupInfo, MetadataBuilder},
    graph::{GraphMode, GraphSupport},
    groups::AttentionGroup,
    kv::{
        layout::KvCacheLayout,
        pool::{KvBuf, KvHandle, KvMut, KvPool},
        spec::{AttentionSpec, KvCacheSpec, MambaSpec},
    },
    plan::{AttentionGroupPlan, CacheLimits, KvCacheGroup, KvCachePlan, LayerCache, plan_kv_cache},
};
pub use layer::{
    AttnLayer, ImplKind, LayerArgs, LayerImpl, LayerKernel, PickArgs,
    attention::{AttentionArgs, AttentionImpl, DynAttention, Qkv, QuantisedOut, Standard},
    mla::{DynMla, Mla, MlaArgs, MlaImpl},
    state_space::{DynStateSpace, StateSpace, StateSpaceArgs, StateSpaceImpl},
};
pub use process::catalog;
pub use process::{
    backend::AttentionBackend,
    composed::Composed,
    erased::{DynBackend, DynBuilder, EraseAs, ErasedConfig},
    registry::Registry,
    rules::{KindTag, LayerNeed, Refusal, RuleBook},
    select::{BackendRequest, Selection, select},
};
pub use step::{
    build::{StepEntry, StepMetadata, build_step},
    common::{BuildHints, Causal, CommonAttentionMetadata, StepInputs},
};

/// What the examples of this crate run on: a backend with its three classes, and one step's inputs. To run an
/// example elsewhere, put this text into a `mod example` beside it.
///
/// ```
#[doc = include_str!("../docs/example.rs")]
/// ```
#[cfg(doc)]
pub mod example {}

/// The version of this contract. A plugin writes the number that it was built for in
/// [`AttentionBackend::CONTRACT`]; the registry refuses another.
pub const CONTRACT_VERSION: u32 = 1;
