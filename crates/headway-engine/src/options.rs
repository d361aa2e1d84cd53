//! What a user can ask of an engine: the one option set that every command shares. `None` means
//! "not asked"; what is in force then stands in the `StartupReport`.

use headway_attention::Registry;
use headway_tensor::DType;
use std::{path::PathBuf, str::FromStr};

/// `--dtype`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DTypeOption {
    /// The file's type.
    #[default]
    Auto,
    /// This type.
    As(DType),
}

impl FromStr for DTypeOption {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s {
            "auto" => Self::Auto,
            "float32" | "f32" => Self::As(DType::F32),
            "bfloat16" | "bf16" => Self::As(DType::BF16),
            "float16" | "f16" | "half" => Self::As(DType::F16),
            _ => {
                let known = ["auto", "float32", "bfloat16", "float16"];
                let near = headway_attention::process::registry::nearest(s, known.into_iter());
                let near = near.map(|n| format!(" (did you mean {n}?)")).unwrap_or_default();
                return Err(format!("unknown dtype {s}; there are: {}{near}", known.join(", ")));
            }
        })
    }
}

impl std::fmt::Display for DTypeOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::As(d) => d.fmt(f),
        }
    }
}

/// `--load-format`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LoadFormat {
    /// The model's weight files.
    #[default]
    Auto,
    /// Seeded random weights of the config's shapes: timing without weights.
    Dummy,
}

/// The option set.
#[derive(Clone, Default)]
pub struct EngineOptions {
    /// `--device`: `cpu`, `cuda`, `cuda:N`.
    pub device: Option<String>,
    /// `--dtype`.
    pub dtype: DTypeOption,
    /// `--kv-cache-dtype`: `auto`, `float32`, `bfloat16`, `float16`, `fp8`, `fp8_e4m3`, `fp8_e5m2`.
    pub kv_cache_dtype: Option<String>,
    /// `--block-size`, in tokens.
    pub block_size: Option<usize>,
    /// `--kv-layout`.
    pub kv_layout: Option<String>,
    /// `--attention-backend`, for every layer; `tuned`: what `headway tune` measured.
    pub attention_backend: Option<String>,
    /// `--profile`: the file that `tuned` reads.
    pub profile: Option<PathBuf>,
    /// `--backend-per-kind kind=NAME`.
    pub backend_per_kind: Vec<(String, String)>,
    /// `--graph-mode`.
    pub graph_mode: Option<String>,
    /// `--batch-invariant`.
    pub batch_invariant: bool,
    /// `--micro-batches`.
    pub micro_batches: Option<usize>,
    /// `--micro-batch-decode-tokens`: decodes are cut from this many tokens on.
    pub micro_batch_decode_tokens: Option<usize>,
    /// `--micro-batch-prefill-tokens`: other steps are cut from this many tokens on.
    pub micro_batch_prefill_tokens: Option<usize>,
    /// `--kv-sharing-fast-prefill`: last layers that read earlier layers' caches compute only the rows with logits.
    pub kv_sharing_fast_prefill: bool,
    /// `--speculative-tokens`: the most tokens drafted for a request in a step.
    pub speculative_tokens: Option<usize>,
    /// `--prompt-lookup-min`: the fewest last tokens whose earlier occurrence makes a draft.
    pub prompt_lookup_min: Option<usize>,
    /// `--prompt-lookup-max`: the most that are compared.
    pub prompt_lookup_max: Option<usize>,
    /// `--max-model-len`, in tokens.
    pub max_model_len: Option<usize>,
    /// `--max-num-seqs`.
    pub max_num_seqs: Option<usize>,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: Option<usize>,
    /// `--kv-cache-memory`, in bytes.
    pub kv_cache_memory: Option<u64>,
    /// `--threads`.
    pub threads: Option<usize>,
    /// `--tp`.
    pub tensor_parallel: Option<usize>,
    /// `--dcp`.
    pub decode_context_parallel: Option<usize>,
    /// Off: `--no-prefix-caching`.
    pub no_prefix_caching: bool,
    /// `--load-format`.
    pub load_format: LoadFormat,
    /// A backend's own configuration table, by backend name.
    pub backend_config: serde_json::Map<String, serde_json::Value>,
    /// The backends to choose from; `None`: this build's own.
    pub registry: Option<Registry>,
}
