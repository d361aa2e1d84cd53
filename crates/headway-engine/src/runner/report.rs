//! The `StartupReport`: everything that was decided at start-up, with reasons. `explain`, the log and
//! the server show this one value.

use headway_attention::KvCacheSpec;
use serde::Serialize;
use std::collections::BTreeMap;

/// What was decided at start-up.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StartupReport {
    /// The model, as its files name it.
    pub model: String,
    /// The files in use.
    pub files: String,
    /// Whose backends: `headway`, or `vllm` with its version.
    pub engine: String,
    /// The device, with its instruction set or name.
    pub device: String,
    /// One entry an attention group.
    pub groups: Vec<GroupReport>,
    /// The layout that every backend reads.
    pub kv_cache_layout: String,
    /// Layers whose output projection takes 8-bit codes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub coded_outputs: Vec<CodedOutputReport>,
    /// CUDA-graph mode.
    pub graph_mode: GraphModeReport,
    /// Every option: asked, in force, why they differ.
    pub options: BTreeMap<&'static str, OptionReport>,
    /// Bytes.
    pub memory: MemoryReport,
    /// How long the device took to take the weights into its form, reading them from the files included.
    pub packing_seconds: f64,
    /// What a change of options would gain.
    pub suggestions: Vec<SuggestionReport>,
    /// What can't be known from here.
    pub unknowns: Vec<String>,
    /// Warnings of start-up, as printed.
    pub warnings: Vec<String>,
    /// Why start-up would fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One attention group.
#[derive(Clone, Debug, Serialize)]
pub struct GroupReport {
    /// The model's layers, by index.
    pub layers: Vec<u32>,
    /// `full attention`, `sliding window 512`, …
    pub kind: String,
    /// Those of the layers that read the cache of an earlier one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared_caches: Vec<SharedCacheReport>,
    /// The layers compute only the rows with logits (`--kv-sharing-fast-prefill`).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub fast_prefill: bool,
    /// Index of the KV cache group.
    pub kv_cache_group: usize,
    /// The backend chosen; `None`: none is valid.
    pub backend: Option<String>,
    /// Of a backend made of two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<PartsReport>,
    /// The figures that chose it (`--attention-backend tuned`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<String>,
    /// The ones refused, in order of priority.
    pub refused: Vec<RefusedReport>,
    /// What a layer's cache holds.
    pub kv_cache_spec: KvCacheSpec,
    /// Tokens in a block of the manager.
    pub block_size: usize,
    /// Tokens in a block of the kernel; 0 where no backend is valid.
    pub kernel_block_size: usize,
    /// Bytes of a layer's page.
    pub page_size_bytes: usize,
    /// Full-graph support of the builder.
    pub graph_support: String,
    /// The builder's threshold for decodes first.
    pub reorder_batch_threshold: Option<usize>,
    /// Bytes of scratch that the group's layers share, over all micro-batches.
    pub workspace_bytes: u64,
}

/// The two backends that serve as one.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct PartsReport {
    /// The one whose kernels compute decodes.
    pub decodes: String,
    /// The one whose kernels compute other rows.
    pub prefills: String,
}

/// A layer that reads another's cache: it computes no keys and values, and no pages are its own.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct SharedCacheReport {
    /// The model's layer.
    pub layer: u32,
    /// The layer whose cache it reads.
    pub of: u32,
}

/// Layers whose attention's output is quantised for its projection.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct CodedOutputReport {
    /// The model's layers, by index.
    pub layers: Vec<usize>,
    /// As what.
    pub output: String,
    /// The kernel writes the codes where it finishes a row; otherwise a pass over its output does.
    pub fused: bool,
}

/// One change of one option, tried with the code that decides at start-up, and what it gains.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct SuggestionReport {
    /// The option by its command-line name.
    pub option: &'static str,
    /// What is asked now; `None`: nothing.
    pub from: Option<String>,
    /// What to ask; `None`: leave the option out.
    pub to: Option<String>,
    /// What that gains, in a sentence.
    pub gain: String,
}

/// A backend that was refused.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct RefusedReport {
    /// Its name.
    pub backend: String,
    /// Every reason.
    pub reasons: Vec<String>,
}

/// The graph mode's way from asked to in force.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GraphModeReport {
    /// As asked; `None`: not asked.
    pub requested: Option<String>,
    /// What survives.
    pub in_force: String,
    /// Each step down.
    pub lowerings: Vec<LoweringReport>,
    /// What start-up captured; `None`: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub captured: Option<CaptureReport>,
}

/// The graphs that were captured at start-up.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
pub struct CaptureReport {
    /// Tokens of each graph of a whole step, ascending.
    pub sizes: Vec<usize>,
    /// Kernels, copies and fills of the largest.
    pub nodes: usize,
    /// Tokens of each step that was captured in pieces, ascending.
    pub piecewise_sizes: Vec<usize>,
    /// Kernels, copies and fills in all pieces of the largest.
    pub piecewise_nodes: usize,
    /// How long it took, the runs before each capture included.
    pub seconds: f64,
    /// Bytes of the device's memory that it took.
    pub bytes: u64,
}

/// One step down of the graph mode.
#[derive(Clone, Debug, Serialize)]
pub struct LoweringReport {
    /// The mode before.
    pub from: String,
    /// The mode after.
    pub to: String,
    /// The reason, with the backend's name.
    pub because: String,
}

/// One option.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct OptionReport {
    /// As asked; `None`: not asked.
    pub requested: Option<String>,
    /// What holds.
    pub in_force: String,
    /// Why, where it isn't simply what was asked.
    pub because: Option<String>,
}

/// Where memory goes, in bytes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MemoryReport {
    /// Weights in the files in use; those that are made another type at load count in that type.
    pub weights_bytes: u64,
    /// What the device holds of them in a form of its own (packed for its kernels; biases). The files' pages
    /// of the same weights are given back.
    pub packed_weights_bytes: u64,
    /// Activation buffers, at their full size.
    pub activations_bytes: u64,
    /// The pool of KV cache pages (committed by the system as pages are first written).
    pub kv_cache_bytes: u64,
    /// Blocks of the pool; block 0 is the null block.
    pub kv_cache_blocks: usize,
    /// KV cache of one token over all layers that keep it.
    pub kv_bytes_per_token: u64,
    /// State of one request over all state-space layers.
    pub state_bytes_per_request: u64,
    /// Tokens of one request that fit, at most.
    pub max_request_tokens: usize,
    /// Tokens that fit in requests of full length.
    pub kv_cache_tokens: u64,
    /// Requests of full length that fit, with fractions.
    pub full_length_requests: f64,
    /// Builders' persistent buffers and workspaces, over all micro-batches.
    pub metadata_bytes: u64,
}

impl StartupReport {
    /// Records an option.
    pub fn option(
        &mut self,
        name: &'static str,
        requested: Option<String>,
        in_force: impl ToString,
        because: &str,
    ) {
        let in_force = in_force.to_string();
        let because = (!requested.as_ref().is_some_and(|r| r.eq_ignore_ascii_case(&in_force))
            && !because.is_empty())
        .then(|| because.to_owned());
        self.options.insert(name, OptionReport { requested, in_force, because });
    }
}
