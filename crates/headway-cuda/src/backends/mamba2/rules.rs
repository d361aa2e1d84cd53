//! Lifetime: process. Class 1 of 3: the rule book of `MAMBA2_ATTN`.

use super::{Mamba2Builder, Mamba2Layer};
use crate::{CudaExec, backends::common};
use headway_attention::{
    AttentionBackend, AttentionError, GraphSupport, KindTag, LayerNeed, Refusal, RuleBook, StateSpace,
    process::rules::{CapabilityRange, ComputeCapability, StateSpaceMixer},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "MAMBA2_ATTN";

/// Mamba-2 on NVIDIA devices. See the [folder](super).
pub enum Mamba2Attn {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba2Config {}

pub(super) fn refuse(what: impl Into<String>, remedy: &str) -> AttentionError {
    common::refuse(NAME, what, remedy)
}

impl AttentionBackend for Mamba2Attn {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = StateSpace;
    type Config = Mamba2Config;
    type Builder = Mamba2Builder;
    type Impl = Mamba2Layer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            kind: KindTag::StateSpace,
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kernel_block_sizes: vec![],
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            supports_sliding_window: false,
            supports_logit_soft_cap: false,
            supports_alibi: false,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            forward_includes_kv_cache_update: true,
            reorder_batch_threshold: Some(1),
            graph_support: GraphSupport::UniformSingleTokenDecode,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        match need.state_space {
            Some(StateSpaceMixer::Mamba2) | None => {}
            Some(other) => return Some(format!("{} mixers not supported", other.name()).into()),
        }
        (need.num_speculative_tokens > 0).then(|| {
            "speculative tokens not supported (a state can't be taken back; set --speculative-tokens 0)"
                .into()
        })
    }
}
