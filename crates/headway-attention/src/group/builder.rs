//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: turns a step's
//! [`CommonAttentionMetadata`] into the backend's own metadata, and keeps persistent buffers.

use crate::{
    AttentionError, AttnLayer, CommonAttentionMetadata, GraphSupport, KvCacheSpec, Result, RuleBook,
    group::kv::layout::KvCacheLayout, process::rules::LatentDims,
};
use headway_tensor::Exec;

/// What a builder will need and support, decided from configuration and spec with no device at hand:
/// start-up and `explain` both ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuilderPlan {
    /// Full-graph support under this configuration.
    pub graph_support: GraphSupport,
    /// Requests with at most this many new tokens come first in the batch, as decodes.
    pub reorder_batch_threshold: Option<usize>,
    /// Bytes of buffers that live as long as the builder.
    pub persistent_bytes: u64,
    /// Bytes of scratch that the group's layers share.
    pub workspace_bytes: u64,
}

/// Decode context parallelism: the ranks that share a request's tokens, dealt out in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextParallel {
    /// Ranks; 1 is none.
    pub size: usize,
    /// This rank.
    pub rank: usize,
    /// Tokens in a row that go to one rank.
    pub interleave: usize,
}

impl Default for ContextParallel {
    fn default() -> Self {
        Self { size: 1, rank: 0, interleave: 1 }
    }
}

/// What start-up knows of an attention group: the layers, their cache spec, the limits of a step.
/// [`GroupInfo::new`] and struct update keep tests free of fields that they don't use.
#[derive(Clone, Debug)]
pub struct GroupInfo {
    /// The spec of the layers' cache, with the manager's block size.
    pub spec: KvCacheSpec,
    /// The order of the cache's axes.
    pub layout: KvCacheLayout,
    /// Tokens in a block that the kernel sees; divides the manager's block size.
    pub kernel_block_size: usize,
    /// Query heads of each layer on this rank.
    pub num_heads: usize,
    /// The layers' latent dimensions, where they are latent attention.
    pub latent: Option<LatentDims>,
    /// The layers.
    pub layers: Vec<AttnLayer>,
    /// The layers compute only the tokens whose logits are wanted: [`crate::step::fast_prefill`].
    pub fast_prefill: bool,
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// Most new tokens in a step.
    pub max_num_tokens: usize,
    /// Most tokens of a request.
    pub max_model_len: usize,
    /// Tokens drafted beyond the one that a decode step yields.
    pub num_speculative_tokens: usize,
    /// `--batch-invariant`.
    pub batch_invariant: bool,
    /// Ranks that share a request's tokens.
    pub context_parallel: ContextParallel,
    /// An earlier group's metadata serve this one with another block table, and the memory that layers run in with
    /// them; set where groups are formed.
    pub shares_metadata: bool,
}

impl GroupInfo {
    /// A group without layers, with the limits of one request of one block a step.
    pub fn new(spec: KvCacheSpec, num_heads: usize) -> Self {
        let block = spec.block_size();
        Self {
            spec,
            layout: KvCacheLayout::default(),
            kernel_block_size: block,
            num_heads,
            latent: None,
            layers: vec![],
            fast_prefill: false,
            max_num_reqs: 1,
            max_num_tokens: block,
            max_model_len: block,
            num_speculative_tokens: 0,
            batch_invariant: false,
            context_parallel: ContextParallel::default(),
            shares_metadata: false,
        }
    }
}

/// How a step's batch divides: the first `decode_tokens` rows belong to the first `decodes` requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeSplit {
    /// Decode requests, first in the batch.
    pub decodes: usize,
    /// Their new tokens.
    pub decode_tokens: usize,
}

/// Builds a group's metadata, once a step.
///
/// Metadata owns what it refers to (views into the builder's persistent buffers), depends on the
/// batch, and never on the layer. `Host` is the one of [`example`](crate::example).
///
/// ```
/// use headway_attention::*;
/// use headway_tensor::{DType, Dual, View};
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::Host;
/// struct Lengths;
/// struct LengthsMetadata {
///     seq_lens: View<i32>,
///     split: DecodeSplit,
/// }
/// impl MetadataBuilder for Lengths {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = LengthsMetadata;
///     fn new(_: &Host, _: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
///         Ok(Self)
///     }
///     fn build(&mut self, _: &Host, common: &CommonAttentionMetadata) -> Result<LengthsMetadata> {
///         let split = common.split(&step::batch::SplitOptions::default())?;
///         Ok(LengthsMetadata { seq_lens: common.inputs.seq_lens.clone(), split: split.into() })
///     }
///     fn split(metadata: &LengthsMetadata) -> DecodeSplit {
///         metadata.split
///     }
/// }
///
/// // A decode at position 8, and a prefill of three tokens.
/// let inputs = StepInputs::new(Dual::from_vec(vec![0, 1, 4]), View::from_vec(vec![9, 3]), vec![9, 3])?;
/// let slots = View::from_vec(vec![88, 112, 113, 114]);
/// let common = CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(vec![5, 7]), 1, slots)?;
/// let group = GroupInfo::new(KvCacheSpec::Full(AttentionSpec::new(16, 2, 64, DType::BF16)), 8);
/// let plan = Lengths::plan(&group, &RuleBook::default(), &())?;
/// let metadata = Lengths::new(&Host, &group, &plan, &())?.build(&Host, &common)?;
/// assert_eq!(Lengths::split(&metadata), DecodeSplit { decodes: 1, decode_tokens: 1 });
/// assert_eq!(metadata.seq_lens.host(), Some(&[9, 3][..]));
/// # Ok::<(), AttentionError>(())
/// ```
pub trait MetadataBuilder: Sized + Send + 'static {
    /// What calls run on.
    type Exec: Exec;
    /// The part of the backend's configuration that the builder reads.
    type Config;
    /// The backend's metadata of one step.
    type Metadata: Send + Sync + 'static;
    /// Whether [`MetadataBuilder::update_block_table`] works.
    const UPDATES_BLOCK_TABLE: bool = false;

    /// Decides support and sizes; by default the rule book's.
    ///
    /// # Errors
    /// A group that the backend can't serve, as [`MetadataBuilder::new`] would say.
    fn plan(group: &GroupInfo, rules: &RuleBook, config: &Self::Config) -> Result<BuilderPlan> {
        let _ = (group, config);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: 0,
            workspace_bytes: 0,
        })
    }

    /// Allocates the persistent buffers that the plan promised.
    ///
    /// # Errors
    /// No memory; a group that the backend can't serve.
    fn new(cx: &Self::Exec, group: &GroupInfo, plan: &BuilderPlan, config: &Self::Config) -> Result<Self>;

    /// This step's metadata.
    ///
    /// # Errors
    /// Inputs that contradict each other or the group's limits.
    fn build(&mut self, cx: &Self::Exec, common: &CommonAttentionMetadata) -> Result<Self::Metadata>;

    /// Metadata to capture a graph with; a builder that captures decode only refuses other batches.
    ///
    /// # Errors
    /// As [`MetadataBuilder::build`].
    fn build_for_capture(
        &mut self,
        cx: &Self::Exec,
        common: &CommonAttentionMetadata,
    ) -> Result<Self::Metadata> {
        self.build(cx, common)
    }

    /// The metadata of an earlier group with this group's block table: field by field what a fresh
    /// build would give. Writes into this builder's own buffers; safe inside capture.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] unless [`MetadataBuilder::UPDATES_BLOCK_TABLE`].
    fn update_block_table(
        &mut self,
        cx: &Self::Exec,
        first: &Self::Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Self::Metadata> {
        let _ = (cx, first, common);
        Err(AttentionError::Unsupported {
            backend: std::any::type_name::<Self>().into(),
            what: "a block-table-only update".into(),
            remedy: "build the metadata instead".into(),
        })
    }

    /// How the metadata divides the batch.
    fn split(metadata: &Self::Metadata) -> DecodeSplit {
        let _ = metadata;
        DecodeSplit::default()
    }

    /// Fingerprint of everything that a captured graph freezes: addresses and launch scalars. Equal at
    /// capture and at every replay. Required of a backend that claims graph support.
    fn frozen(metadata: &Self::Metadata) -> u64 {
        let _ = metadata;
        0
    }
}
