//! The limits of steps and requests: as asked, or defaults with their reasons; and the options that
//! this build refuses by name.

use super::StartupError;
use crate::{
    models::ModelPlan,
    options::{EngineOptions, LoadFormat},
};
use headway_attention::KvCacheSpec;

/// Limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in a step.
    pub max_num_reqs: usize,
    /// New tokens in a step.
    pub max_num_tokens: usize,
    /// Tokens of a request.
    pub max_model_len: usize,
}

/// Requests in a step, where not asked.
pub const DEFAULT_MAX_NUM_SEQS: usize = 64;
/// New tokens in a step, where not asked: activations of so many rows stay in a core's second-level
/// cache, and more rows don't make the matrix products of a CPU faster.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS: usize = 512;

impl Limits {
    /// Asked limits held against the model's.
    ///
    /// # Errors
    /// 0; a length beyond the model's.
    pub fn resolve(options: &EngineOptions, plan: &ModelPlan) -> Result<Self, StartupError> {
        let positive = |option: &'static str, v: Option<usize>| match v {
            Some(0) => {
                Err(StartupError::Option { option, value: "0".into(), why: "it must be at least 1".into() })
            }
            v => Ok(v),
        };
        let most = plan.max_position_embeddings;
        let max_model_len = match positive("--max-model-len", options.max_model_len)? {
            Some(n) if n > most => {
                return Err(StartupError::Option {
                    option: "--max-model-len",
                    value: n.to_string(),
                    why: format!("the model was made for at most {most} tokens; give that or less"),
                });
            }
            n => n.unwrap_or(most),
        };
        let seqs = positive("--max-num-seqs", options.max_num_seqs)?;
        let tokens = positive("--max-num-batched-tokens", options.max_num_batched_tokens)?;
        let max_num_tokens = tokens.unwrap_or_else(|| DEFAULT_MAX_NUM_BATCHED_TOKENS.max(seqs.unwrap_or(0)));
        let max_num_reqs = seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS.min(max_num_tokens));
        Ok(Self { max_num_reqs, max_num_tokens, max_model_len })
    }

    /// Blocks that the limits can ever fill, with the null block: what a pool need not exceed.
    pub fn blocks_ever_used<'a>(&self, specs: impl Iterator<Item = &'a KvCacheSpec>) -> usize {
        let a_request: usize = specs.map(|s| self.max_model_len.div_ceil(s.block_size().max(1)) + 1).sum();
        1 + a_request * self.max_num_reqs
    }
}

/// The KV cache's memory where none was asked for: two fifths of what is available after the weights.
/// The system commits a page only when it is first written. Where the system doesn't say what is
/// available: 4 GiB.
pub fn default_kv_memory(available: Option<u64>, weights: u64) -> u64 {
    match available {
        Some(a) => a.saturating_sub(weights) / 5 * 2,
        None => 4 << 30,
    }
}

/// Refuses by name what this build can't do.
///
/// # Errors
/// The first such option.
pub fn refuse_what_is_not_there(o: &EngineOptions) -> Result<(), StartupError> {
    let one = |option: &'static str, v: Option<usize>, least: usize, supported: &str| match v {
        Some(n) if n != least => {
            Err(StartupError::NotYet { option, value: n.to_string(), supported: supported.into() })
        }
        _ => Ok(()),
    };
    one("--micro-batches", o.micro_batches, 1, "supported: 1")?;
    one("--speculative-tokens", o.speculative_tokens, 0, "supported: 0")?;
    one("--tp", o.tensor_parallel, 1, "supported: 1")?;
    one("--dcp", o.decode_context_parallel, 1, "supported: 1")?;
    if let Some(mode) = o.graph_mode.as_deref().filter(|m| !m.eq_ignore_ascii_case("none")) {
        return Err(StartupError::Option {
            option: "--graph-mode",
            value: mode.into(),
            why:
                "is not supported with device cpu, which has no graphs to capture; leave it out or give NONE"
                    .into(),
        });
    }
    if o.load_format == LoadFormat::Dummy {
        return Err(StartupError::NotYet {
            option: "--load-format",
            value: "dummy".into(),
            supported: "supported: auto".into(),
        });
    }
    Ok(())
}
