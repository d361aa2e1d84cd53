//! What the backends of this crate refuse alike, each in its own name.

use headway_attention::{AttentionError, CommonAttentionMetadata, GroupInfo, Result};

/// Refuses in a backend's name.
pub(super) fn refuse(backend: &str, what: impl Into<String>, remedy: &str) -> AttentionError {
    AttentionError::Unsupported { backend: backend.to_owned(), what: what.into(), remedy: remedy.into() }
}

/// A finite number above 0; `what` ends in "of".
pub(super) fn positive(backend: &str, what: &str, x: f32) -> Result<()> {
    if x.is_finite() && x > 0.0 {
        return Ok(());
    }
    Err(refuse(backend, format!("{what} {x}"), "it must be a finite number above 0"))
}

/// Most requests and new tokens of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLimits {
    max_num_reqs: usize,
    max_num_tokens: usize,
}

impl StepLimits {
    pub(super) fn of(group: &GroupInfo) -> Self {
        Self { max_num_reqs: group.max_num_reqs, max_num_tokens: group.max_num_tokens }
    }

    /// Holds a step against the limits, and refuses what no backend here does.
    pub(super) fn check(&self, backend: &str, common: &CommonAttentionMetadata) -> Result<()> {
        let x = &common.inputs;
        if x.dcp_local_seq_lens.is_some() {
            return Err(refuse(backend, "decode context parallelism", "run without it"));
        }
        if x.num_reqs > self.max_num_reqs || x.num_actual_tokens > self.max_num_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} requests with {} new tokens; the group was built for {} with {}",
                x.num_reqs, x.num_actual_tokens, self.max_num_reqs, self.max_num_tokens
            )));
        }
        Ok(())
    }
}
