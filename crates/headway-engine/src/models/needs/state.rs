//! State-space and linear mixers: the dimensions of their states, and the tensors that a request's state
//! is made of.

use super::config::Config;
use crate::models::ModelError;
use headway_tensor::DType;

/// Tokens in a chunk of a scan where a config doesn't say.
pub(in crate::models) const DEFAULT_CHUNK: usize = 256;

/// The dimensions of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDims {
    /// Mamba-1: a state a channel.
    Mamba1 {
        /// Channels.
        inner: usize,
        /// Elements of a channel's state.
        state: usize,
        /// Width of the convolution.
        conv: usize,
        /// The state's type where it isn't the model's.
        dtype: Option<DType>,
    },
    /// Mamba-2: a state matrix a head.
    Mamba2 {
        /// Heads.
        heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Groups that share B and C.
        groups: usize,
        /// Elements of a head's state, for each of the head's.
        state: usize,
        /// Width of the convolution.
        conv: usize,
        /// Tokens in a chunk of the scan.
        chunk: usize,
        /// The state's type where it isn't the model's.
        dtype: Option<DType>,
    },
    /// Gated delta net.
    GatedDelta {
        /// Heads of keys.
        key_heads: usize,
        /// Heads of values.
        value_heads: usize,
        /// Elements of a key head.
        key_dim: usize,
        /// Elements of a value head.
        value_dim: usize,
        /// Width of the convolution.
        conv: usize,
        /// The state's type where it isn't the model's.
        dtype: Option<DType>,
    },
    /// Kimi delta attention: a gated delta net with three convolutions and a state in float32.
    KimiDelta {
        /// Heads.
        heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Width of each convolution.
        conv: usize,
    },
    /// Linear attention: keys times values a head.
    Linear {
        /// Heads.
        heads: usize,
        /// Elements of a head.
        head_dim: usize,
    },
    /// A short convolution alone.
    ShortConv {
        /// Channels.
        channels: usize,
        /// Width of the convolution.
        conv: usize,
    },
}

impl StateDims {
    /// As people call it.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Mamba1 { .. } => "Mamba-1 state",
            Self::Mamba2 { .. } => "Mamba-2 state",
            Self::GatedDelta { .. } => "gated delta net state",
            Self::KimiDelta { .. } => "Kimi delta attention state",
            Self::Linear { .. } => "linear attention state",
            Self::ShortConv { .. } => "short convolution state",
        }
    }

    /// The heads, or channels, that tensor parallelism divides.
    pub const fn divided(&self) -> usize {
        match *self {
            Self::Mamba1 { inner, .. } => inner,
            Self::Mamba2 { heads, .. } | Self::KimiDelta { heads, .. } | Self::Linear { heads, .. } => heads,
            Self::GatedDelta { key_heads, .. } => key_heads,
            Self::ShortConv { channels, .. } => channels,
        }
    }

    /// Elements of a head, for what reports a head size.
    pub const fn head_size(&self) -> usize {
        match *self {
            Self::Mamba1 { state, .. } => state,
            Self::Mamba2 { head_dim, .. }
            | Self::KimiDelta { head_dim, .. }
            | Self::Linear { head_dim, .. } => head_dim,
            Self::GatedDelta { value_dim, .. } => value_dim,
            Self::ShortConv { conv, .. } => conv,
        }
    }

    /// Tokens in a chunk of the scan, for mixers that scan.
    pub const fn chunk(&self) -> Option<usize> {
        match *self {
            Self::Mamba2 { chunk, .. } => Some(chunk),
            _ => None,
        }
    }

    /// Shapes and types of a request's state on one of `tp` ranks. Drafted tokens lengthen the convolution's
    /// memory; groups are repeated where there are fewer than ranks.
    pub fn tensors(&self, tp: usize, drafted: usize, model: DType) -> (Vec<Vec<usize>>, Vec<DType>) {
        let memory = |conv: usize| conv.saturating_sub(1) + drafted;
        match *self {
            Self::Mamba1 { inner, state, conv, dtype } => (
                vec![vec![inner / tp, memory(conv)], vec![inner / tp, state]],
                vec![model, dtype.unwrap_or(model)],
            ),
            Self::Mamba2 { heads, head_dim, groups, state, conv, dtype, .. } => {
                let groups = if groups.is_multiple_of(tp) { groups } else { groups.max(tp) };
                let channels = (heads * head_dim + 2 * groups * state) / tp;
                let shapes = vec![vec![memory(conv), channels], vec![heads / tp, head_dim, state]];
                (shapes, vec![model, dtype.unwrap_or(model)])
            }
            Self::GatedDelta { key_heads, value_heads, key_dim, value_dim, conv, dtype } => {
                let channels = (2 * key_heads * key_dim + value_heads * value_dim) / tp;
                let shapes = vec![vec![memory(conv), channels], vec![value_heads / tp, value_dim, key_dim]];
                (shapes, vec![model, dtype.unwrap_or(model)])
            }
            Self::KimiDelta { heads, head_dim, conv } => {
                let one = vec![memory(conv), heads * head_dim / tp];
                let shapes = vec![one.clone(), one.clone(), one, vec![heads / tp, head_dim, head_dim]];
                (shapes, vec![model, model, model, DType::F32])
            }
            Self::Linear { heads, head_dim } => (vec![vec![heads / tp, head_dim, head_dim]], vec![model]),
            Self::ShortConv { channels, conv } => (vec![vec![memory(conv), channels / tp]], vec![model]),
        }
    }

    /// Reads the mixer that the model's state-space layers have.
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        match c.model_type.as_str() {
            "kimi_linear" => kimi(c),
            "minimax" | "minimax_text_01" | "minimax_m1" => linear(c),
            "lfm2" | "lfm2_moe" => short_conv(c),
            "jamba" | "mamba" | "falcon_mamba" => mamba1(c),
            _ if c.get("linear_num_key_heads").is_some() || c.model_type == "qwen3_next" => gated_delta(c),
            _ => mamba2(c),
        }
    }
}

/// The type of states where a config sets it.
fn state_dtype(c: &Config<'_>) -> Result<Option<DType>, ModelError> {
    let names = ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"];
    let Some(name) = names.into_iter().find(|n| c.get(n).is_some()) else {
        // Nemotron-H keeps its states in float32 unless its config says otherwise.
        return Ok((c.model_type == "nemotron_h").then_some(DType::F32));
    };
    match c.text(name) {
        Some("float32") => Ok(Some(DType::F32)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("auto") => Ok(None),
        _ => Err(c.error(name, "is not one of float32, bfloat16, float16, auto")),
    }
}

fn inner(c: &Config<'_>) -> Result<usize, ModelError> {
    if let Some(n) = c.opt_count(&["mamba_d_ssm"])? {
        return Ok(n);
    }
    Ok(c.count(&["mamba_expand", "expand"])? * c.count(&["hidden_size", "d_model"])?)
}

fn mamba1(c: &Config<'_>) -> Result<StateDims, ModelError> {
    Ok(StateDims::Mamba1 {
        inner: inner(c)?,
        state: c.count(&["mamba_d_state", "state_size"])?,
        conv: c.count(&["mamba_d_conv", "conv_kernel"])?,
        dtype: state_dtype(c)?,
    })
}

fn mamba2(c: &Config<'_>) -> Result<StateDims, ModelError> {
    let alone = c.model_type.as_str() == "mamba2";
    let heads =
        c.count(if alone { &["num_heads"] } else { &["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"] })?;
    let head_dim = match c.opt_count(if alone {
        &["head_dim"]
    } else {
        &["mamba_d_head", "mamba_head_dim", "mamba_headdim"]
    })? {
        Some(n) => n,
        None => inner(c)? / heads,
    };
    Ok(StateDims::Mamba2 {
        heads,
        head_dim,
        groups: c.count(&["mamba_n_groups", "n_groups", "mamba_ngroups"])?,
        state: c.count(&["mamba_d_state", "ssm_state_size", "state_size"])?,
        conv: c.count(&["mamba_d_conv", "conv_kernel"])?,
        chunk: c.opt_count(&["mamba_chunk_size", "chunk_size"])?.unwrap_or(DEFAULT_CHUNK),
        dtype: state_dtype(c)?,
    })
}

fn gated_delta(c: &Config<'_>) -> Result<StateDims, ModelError> {
    Ok(StateDims::GatedDelta {
        key_heads: c.count(&["linear_num_key_heads"])?,
        value_heads: c.count(&["linear_num_value_heads"])?,
        key_dim: c.count(&["linear_key_head_dim"])?,
        value_dim: c.count(&["linear_value_head_dim"])?,
        conv: c.count(&["linear_conv_kernel_dim"])?,
        dtype: state_dtype(c)?,
    })
}

fn kimi(c: &Config<'_>) -> Result<StateDims, ModelError> {
    let nested =
        |name: &str| c.get("linear_attn_config").and_then(|v| v.get(name)?.as_u64()).map(|n| n as usize);
    let of = |inside: &str, outside: &str| match nested(inside) {
        Some(n) => Ok(n),
        None => c.count(&[outside]),
    };
    Ok(StateDims::KimiDelta {
        heads: of("num_heads", "linear_num_heads")?,
        head_dim: of("head_dim", "linear_head_dim")?,
        conv: of("short_conv_kernel_size", "linear_conv_kernel_dim")?,
    })
}

fn linear(c: &Config<'_>) -> Result<StateDims, ModelError> {
    let heads = c.count(&["num_attention_heads"])?;
    let head_dim = match c.opt_count(&["head_dim"])? {
        Some(n) => n,
        None => c.count(&["hidden_size"])? / heads,
    };
    Ok(StateDims::Linear { heads, head_dim })
}

fn short_conv(c: &Config<'_>) -> Result<StateDims, ModelError> {
    Ok(StateDims::ShortConv {
        channels: c.count(&["conv_dim", "hidden_size"])?,
        conv: c.count(&["conv_L_cache"])?,
    })
}
