//! A backend that is as plain as can be, with faults to order: what the suite must pass, and what it
//! must catch.

mod layer;

use headway_attention::{
    AttentionBackend, CommonAttentionMetadata, GroupInfo, KindTag, KvCacheSpec, LayerNeed, MetadataBuilder,
    Refusal, Result, RuleBook, Standard,
    group::{builder::BuilderPlan, kv::layout::KvCacheLayout},
    process::rules::{KernelBlockSize, KvCacheDType, SizeRange},
};
use headway_tensor::{DType, Device, DeviceMem, Exec};
pub use layer::PlainLayer;
use std::sync::Arc;

/// The host, on one thread.
pub struct Host;

impl Exec for Host {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

/// No fault.
pub const RIGHT: u8 = 0;
/// A window of W lets W + 1 positions be seen.
pub const WINDOW_ONE_TOO_LONG: u8 = 1;
/// The causal limit is counted from the first row.
pub const MASK_FROM_THE_TOP: u8 = 2;
/// Query heads read key heads in turns.
pub const HEADS_IN_TURNS: u8 = 3;
/// Slot −1 is written to slot 0.
pub const WRITES_SKIPPED_SLOTS: u8 = 4;
/// Rows of padding are left as they are.
pub const LEAVES_PADDING: u8 = 5;
/// The tail of the last block is multiplied by zero instead of being left out.
pub const READS_THE_TAIL: u8 = 6;
/// One flag of causality for all requests.
pub const ONE_CAUSAL_FLAG: u8 = 7;
/// A layer that shares a cache writes it.
pub const WRITES_SHARED: u8 = 8;
/// The manager's block size in place of the kernel's.
pub const WRONG_BLOCK_SIZE: u8 = 9;
/// The distance between blocks is taken to be a page.
pub const ASSUMES_PAGES_SIDE_BY_SIDE: u8 = 10;
/// Sums depend on what else is in the batch.
pub const DEPENDS_ON_THE_BATCH: u8 = 11;
/// The builder keeps the longest row of earlier steps.
pub const BUILDER_REMEMBERS: u8 = 12;
/// The soft cap overflows for large scores.
pub const CAP_OVERFLOWS: u8 = 13;
/// An 8-bit cache makes NaN of what is too large.
pub const CACHE_OVERFLOWS: u8 = 14;
/// A sink is scaled like a score.
pub const SCALES_SINKS: u8 = 15;
/// A panic where there is a window.
pub const PANICS: u8 = 16;

/// Ranges that see each other both ways are causal like the rest.
pub const IGNORES_RANGES: u8 = 17;
/// R-SWA's window hides the prompt too.
pub const FORGETS_THE_PROMPT: u8 = 18;

/// The backend.
pub enum Plain<const FAULT: u8> {}

/// A step's metadata.
pub struct Metadata {
    pub common: CommonAttentionMetadata,
    pub manager_block_size: usize,
    pub batch_invariant: bool,
    pub longest: usize,
    pub rswa_window: Option<usize>,
}

/// Keeps nothing but the group's numbers.
pub struct Builder<const FAULT: u8> {
    info: GroupInfo,
    longest: usize,
}

impl<const FAULT: u8> MetadataBuilder for Builder<FAULT> {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn new(_: &Host, group: &GroupInfo, _: &BuilderPlan, (): &()) -> Result<Self> {
        Ok(Self { info: group.clone(), longest: 0 })
    }

    fn build(&mut self, _: &Host, common: &CommonAttentionMetadata) -> Result<Metadata> {
        self.longest = self.longest.max(common.inputs.max_seq_len);
        let longest = if FAULT == BUILDER_REMEMBERS { self.longest } else { common.inputs.max_seq_len };
        Ok(Metadata {
            common: common.clone(),
            manager_block_size: self.info.spec.block_size(),
            batch_invariant: self.info.batch_invariant,
            longest,
            rswa_window: match self.info.spec {
                KvCacheSpec::Rswa { rswa_window, .. } => Some(rswa_window),
                _ => None,
            },
        })
    }

    fn update_block_table(
        &mut self,
        cx: &Host,
        _: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata> {
        self.build(cx, common)
    }
}

impl<const FAULT: u8> AttentionBackend for Plain<FAULT> {
    const CONTRACT: u32 = 1;
    type Exec = Host;
    type Kind = Standard;
    type Config = ();
    type Builder = Builder<FAULT>;
    type Impl = PlainLayer<FAULT>;

    fn rules() -> RuleBook {
        let kv = ["auto", "bfloat16", "fp8", "fp8_e5m2"];
        RuleBook {
            name: "PLAIN".into(),
            kind: KindTag::Standard,
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            kv_cache_dtypes: kv.into_iter().map(KvCacheDType::from).collect(),
            head_sizes: vec![SizeRange { first: 8, last: 40, step: 8 }, SizeRange::exactly(64)],
            supports_different_v_head_size: true,
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(4)],
            kv_cache_layouts: vec![KvCacheLayout::LBNHC, KvCacheLayout::LBHNC],
            supports_sinks: true,
            supports_non_causal: true,
            supports_mm_prefix: true,
            supports_rswa: true,
            supports_batch_invariance: true,
            forward_includes_kv_cache_update: false,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        (need.has_sinks && need.has_alibi).then(|| "sinks with ALiBi not supported".into())
    }
}
