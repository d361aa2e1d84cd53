//! The limits of steps and requests: as asked, or defaults with their reasons; and the options that
//! this build refuses by name.

use super::{StartupError, micro_batches};
use crate::{
    models::{ModelPlan, plan::MixerPlan},
    options::EngineOptions,
};
use headway_attention::{GraphMode, KvCacheSpec, group::graph::MicroBatching, process::rules::AttnType};

/// Limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in a step.
    pub max_num_reqs: usize,
    /// New tokens in a step.
    pub max_num_tokens: usize,
    /// Tokens of a request.
    pub max_model_len: usize,
    /// How steps are cut.
    pub micro_batching: MicroBatching,
    /// Tokens drafted for a request in a step.
    pub num_speculative_tokens: usize,
}

/// Limits of a step where none are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsualLimits {
    /// Requests.
    pub max_num_seqs: usize,
    /// New tokens.
    pub max_num_batched_tokens: usize,
}

impl UsualLimits {
    /// Activations of so many rows stay in a core's second-level cache, and more rows don't make the matrix products
    /// of a CPU faster.
    pub const CPU: Self = Self { max_num_seqs: 64, max_num_batched_tokens: 512 };
    /// As many rows as keep the tensor cores of a large GPU busy.
    pub const CUDA: Self = Self { max_num_seqs: 256, max_num_batched_tokens: 8192 };

    /// Of a platform.
    pub fn of(platform: &str) -> Self {
        if platform == "cpu" { Self::CPU } else { Self::CUDA }
    }
}

/// Tokens in a block, at least, as far as block tables are reckoned.
const SMALLEST_BLOCK: usize = 16;

impl Limits {
    /// Asked limits held against the `most` tokens that the model was made for.
    ///
    /// # Errors
    /// 0; a length beyond the model's; more drafted tokens than a step holds.
    pub fn resolve(options: &EngineOptions, most: usize, usual: UsualLimits) -> Result<Self, StartupError> {
        let positive = |option: &'static str, v: Option<usize>| match v {
            Some(0) => {
                Err(StartupError::Option { option, value: "0".into(), why: "it must be at least 1".into() })
            }
            v => Ok(v),
        };
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
        let max_num_tokens = tokens.unwrap_or_else(|| usual.max_num_batched_tokens.max(seqs.unwrap_or(0)));
        let max_num_reqs = seqs.unwrap_or(usual.max_num_seqs.min(max_num_tokens));
        let micro_batching = micro_batches::resolve(options, max_num_tokens)?;
        let num_speculative_tokens = options.speculative_tokens.unwrap_or(0);
        let limits =
            Self { max_num_reqs, max_num_tokens, max_model_len, micro_batching, num_speculative_tokens };
        limits.check_drafts()?;
        Ok(limits)
    }

    /// Holds the buffers of the largest step against the memory that is free, before any is allocated:
    /// an absurd limit, asked for or in a config file, ends in an error that names it.
    ///
    /// # Errors
    /// The first option whose buffers don't fit.
    pub fn fit(&self, plan: &ModelPlan, available: Option<u64>) -> Result<(), StartupError> {
        let Some(mut available) = available else { return Ok(()) };
        let [tokens, reqs, len] = [self.max_num_tokens, self.max_num_reqs, self.max_model_len];
        let (rows, drafts) = (self.max_num_logits(), self.num_speculative_tokens);
        let width = plan.hidden_size.saturating_add(plan.vocab_size);
        let floats = |n: usize, width: usize| (n as u64).saturating_mul(width as u64).saturating_mul(4);
        let rotary: usize = plan.ropes.iter().map(|r| r.rotary_dim).sum();
        let experts = plan.expert_limits().map_or(0, |l| l.buffer_bytes(tokens)) as u64;
        let parts = [
            // Once as it is computed, once in the device's memory.
            ("--max-model-len", len, "rotary tables", floats(len, rotary.saturating_mul(2))),
            ("--max-num-seqs", reqs, "logits", floats(reqs, width)),
            ("--speculative-tokens", drafts, "logits", floats(rows - reqs, width)),
            ("--max-num-seqs", reqs, "block tables", floats(reqs, len / SMALLEST_BLOCK)),
            ("--max-num-batched-tokens", tokens, "activations", floats(tokens, plan.activation_width())),
            ("--max-num-batched-tokens", tokens, "rows of experts", experts),
        ];
        for (option, value, what, needed) in parts {
            if needed > available {
                return Err(StartupError::NoMemory { option, value, what, needed, available });
            }
            available -= needed;
        }
        Ok(())
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
    one("--tp", o.tensor_parallel, 1, "supported: 1")?;
    one("--dcp", o.decode_context_parallel, 1, "supported: 1")?;
    let cuda = o.device.as_deref().is_some_and(|d| d.starts_with("cuda"));
    if cuda && o.micro_batches.is_some_and(|n| n > 1) {
        let value = o.micro_batches.unwrap_or(1).to_string();
        let supported = "with device cuda steps are not cut yet: supported: 1".into();
        return Err(StartupError::NotYet { option: "--micro-batches", value, supported });
    }
    if cuda && o.kv_sharing_fast_prefill {
        let (option, value) = ("--kv-sharing-fast-prefill", "true".into());
        return Err(StartupError::NotYet { option, value, supported: "it is with device cpu".into() });
    }
    if let Some(mode) = o.graph_mode.as_deref().filter(|m| !m.eq_ignore_ascii_case("none")) {
        let why = match mode.parse::<GraphMode>() {
            Ok(_) if cuda => return Ok(()),
            Ok(_) => {
                "is not supported with device cpu, which has no graphs to capture; leave it out or give NONE"
                    .into()
            }
            Err(_) => format!("unknown; there are: {}", GraphMode::ALL.map(GraphMode::name).join(", ")),
        };
        return Err(StartupError::Option { option: "--graph-mode", value: mode.into(), why });
    }
    Ok(())
}

/// Refuses by name what could change nothing in this model: drafts of what generates nothing, and what is asked of a
/// cache that no layer keeps. A state is no cache of keys and values, but takes its memory.
///
/// # Errors
/// The first such option.
pub fn refuse_what_has_no_effect(o: &EngineOptions, plan: &ModelPlan) -> Result<(), StartupError> {
    let refuse = |option, value: String, why: &str| {
        let why = format!("{}{why}; leave it out", plan.architecture);
        Err(StartupError::Option { option, value, why })
    };
    if let Some(k) = o.speculative_tokens.filter(|k| *k > 0 && plan.pooling.is_some()) {
        return refuse(
            "--speculative-tokens",
            k.to_string(),
            " is an encoder, which generates nothing that could be drafted",
        );
    }
    let keeps = |m: &MixerPlan| match m {
        MixerPlan::Attention(a) => !matches!(a.attn_type, AttnType::Encoder | AttnType::EncoderOnly),
        MixerPlan::Mla(_) | MixerPlan::Cross(_) => true,
        MixerPlan::StateSpace(_) => false,
    };
    if plan.mixers().any(|(_, m)| keeps(m)) {
        return Ok(());
    }
    let states = plan.mixers().any(|(_, m)| matches!(m, MixerPlan::StateSpace(_)));
    let number = |n: Option<u64>| n.map(|n| n.to_string());
    for (option, value) in [
        ("--block-size", number(o.block_size.map(|n| n as u64))),
        ("--kv-cache-dtype", o.kv_cache_dtype.clone().filter(|d| d != "auto")),
        ("--kv-layout", o.kv_layout.clone()),
        ("--kv-cache-memory", number(o.kv_cache_memory).filter(|_| !states)),
    ] {
        if let Some(value) = value {
            return refuse(option, value, " has no layer that keeps keys and values");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{
        plan::{MaskPlan, NormPlan},
        rope::RopePlan,
    };
    use headway_tensor::RopeStyle;

    fn plan() -> ModelPlan {
        let rope = RopePlan { theta: 1e4, rotary_dim: 64, style: RopeStyle::Halves, scaling: None };
        ModelPlan {
            architecture: "Test".into(),
            hidden_size: 128,
            vocab_size: 1000,
            max_position_embeddings: 4096,
            norm_eps: 1e-5,
            embedding_scale: 1.0,
            embedding: "embedding".into(),
            lm_head: None,
            positions: None,
            embedding_norm: None,
            final_norm: Some(NormPlan::plain("norm")),
            pooling: None,
            logit_scale: 1.0,
            final_logit_soft_cap: None,
            per_layer_inputs: None,
            masks: MaskPlan::default(),
            ropes: vec![rope],
            layers: vec![],
            encoder: None,
            drafting_layers: 0,
        }
    }

    #[test]
    fn buffers_that_never_fit_are_refused_by_the_option_that_decides() {
        let fine = Limits::resolve(&EngineOptions::default(), 4096, UsualLimits::CPU).unwrap();
        let available = Some(1 << 30);
        assert!(fine.fit(&plan(), available).is_ok());
        for (limits, option) in [
            (
                Limits { max_model_len: 1 << 30, ..fine },
                "--max-model-len 1073741824 needs 549755813888 bytes",
            ),
            (Limits { max_num_tokens: usize::MAX, ..fine }, "--max-num-batched-tokens 18446744073709551615"),
            (Limits { max_num_reqs: 1 << 40, ..fine }, "--max-num-seqs 1099511627776 needs"),
        ] {
            let e = limits.fit(&plan(), available).unwrap_err().to_string();
            assert!(e.contains(option) && e.ends_with("lower it"), "{e}");
            assert!(limits.fit(&plan(), None).is_ok());
        }
    }

    #[test]
    fn graph_modes_are_known_or_not() {
        let refused = |mode: &str| {
            let o = EngineOptions { graph_mode: Some(mode.into()), ..EngineOptions::default() };
            refuse_what_is_not_there(&o).map_err(|e| e.to_string())
        };
        assert_eq!(refused("none"), Ok(()));
        assert!(refused("FULL").is_err_and(|e| e.contains("is not supported with device cpu")));
        assert!(refused("FILL").is_err_and(|e| e.contains("unknown; there are: NONE, PIECEWISE")));
    }
}
