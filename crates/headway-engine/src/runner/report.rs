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
    /// The device, with its instruction set or name.
    pub device: String,
    /// One entry an attention group.
    pub groups: Vec<GroupReport>,
    /// The layout that every backend reads.
    pub kv_cache_layout: String,
    /// CUDA-graph mode.
    pub graph_mode: GraphModeReport,
    /// Every option: asked, in force, why they differ.
    pub options: BTreeMap<&'static str, OptionReport>,
    /// Bytes.
    pub memory: MemoryReport,
    /// What a change of options would gain.
    pub suggestions: Vec<String>,
    /// What can't be known from here.
    pub unknowns: Vec<String>,
    /// Warnings of start-up, as printed.
    pub warnings: Vec<String>,
}

/// One attention group.
#[derive(Clone, Debug, Serialize)]
pub struct GroupReport {
    /// Attention layers, by index.
    pub layers: Vec<u32>,
    /// `full attention`, `sliding window 512`, …
    pub kind: String,
    /// Index of the KV cache group.
    pub kv_cache_group: usize,
    /// The backend chosen.
    pub backend: String,
    /// The ones refused before it, in order of priority.
    pub refused: Vec<RefusedReport>,
    /// What a layer's cache holds.
    pub kv_cache_spec: KvCacheSpec,
    /// Tokens in a block of the manager.
    pub block_size: usize,
    /// Tokens in a block of the kernel.
    pub kernel_block_size: usize,
    /// Bytes of a layer's page.
    pub page_size_bytes: usize,
    /// Full-graph support of the builder.
    pub graph_support: String,
    /// The builder's threshold for decodes first.
    pub reorder_batch_threshold: Option<usize>,
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
    /// Weights in the files in use.
    pub weights_bytes: u64,
    /// Activation buffers, at their full size.
    pub activations_bytes: u64,
    /// The pool of KV cache pages (committed by the system as pages are first written).
    pub kv_cache_bytes: u64,
    /// Blocks of the pool; block 0 is the null block.
    pub kv_cache_blocks: usize,
    /// KV cache of one token over all layers that keep it.
    pub kv_bytes_per_token: u64,
    /// Tokens of one request that fit, at most.
    pub max_request_tokens: usize,
    /// Builders' persistent buffers and workspaces.
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
        let because =
            (requested.as_ref() != Some(&in_force) && !because.is_empty()).then(|| because.to_owned());
        self.options.insert(name, OptionReport { requested, in_force, because });
    }
}
