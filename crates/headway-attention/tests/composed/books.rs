//! Random rule books and needs: a composition takes a layer exactly where both parts take it, less what it says no to by
//! itself, and says so in the same places whichever way it is asked.

use headway_attention::{
    group::kv::layout::KvCacheLayout,
    process::{
        composed::Composed,
        rules::{AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, SizeRange},
        select::reasons,
    },
    *,
};
use headway_tensor::{DType, Exec};
use proptest::{prelude::*, sample::subsequence};
use std::{any::TypeId, sync::Arc};

/// A rule book with nothing behind it.
struct Listed(RuleBook);

fn nothing<T>() -> Result<T> {
    Err(AttentionError::Inputs("there is only a rule book".into()))
}

impl DynBackend for Listed {
    fn rules(&self) -> &RuleBook {
        &self.0
    }
    fn combination(&self, _: &LayerNeed) -> Option<Refusal> {
        None
    }
    fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec {
        spec
    }
    fn parse_config(&self, _: Option<&serde_json::Value>) -> Result<ErasedConfig> {
        Ok(ErasedConfig::none())
    }
    fn builder_type(&self) -> TypeId {
        TypeId::of::<Self>()
    }
    fn updates_block_table(&self) -> bool {
        false
    }
    fn plan(&self, _: &GroupInfo, _: &ErasedConfig) -> Result<BuilderPlan> {
        nothing()
    }
    fn builder(
        &self,
        _: &dyn Exec,
        _: &GroupInfo,
        _: &BuilderPlan,
        _: &ErasedConfig,
    ) -> Result<Box<dyn DynBuilder>> {
        nothing()
    }
    fn layer(&self, _: &LayerArgs<'_>, _: &ErasedConfig) -> Result<LayerKernel> {
        nothing()
    }
}

fn some<T: Clone + std::fmt::Debug + 'static>(of: Vec<T>) -> impl Strategy<Value = Vec<T>> {
    let n = of.len();
    subsequence(of, 1..=n)
}

prop_compose! {
    fn lists()(
        dtypes in some(vec![DType::F32, DType::F16, DType::BF16]),
        kv in some(vec!["auto", "bfloat16", "fp8", "fp8_ds_mla"]),
        head_sizes in subsequence(vec![
            SizeRange::exactly(64),
            SizeRange { first: 8, last: 256, step: 8 },
            SizeRange { first: 96, last: usize::MAX, step: 48 },
        ], 0..3),
        kernel_block_sizes in subsequence(vec![
            KernelBlockSize::Exact(16),
            KernelBlockSize::Exact(64),
            KernelBlockSize::MultipleOf(16),
            KernelBlockSize::MultipleOf(24),
        ], 0..4),
        kv_cache_layouts in subsequence(vec![KvCacheLayout::LBHNC, KvCacheLayout::LBNHC, KvCacheLayout::BLHNC], 0..3),
        attn_types in some(vec![AttnType::Decoder, AttnType::Encoder, AttnType::EncoderDecoder]),
        from in proptest::option::of(8u32..10),
        whole_blocks_only in any::<bool>(),
        preferred in proptest::option::of(prop_oneof![Just(16usize), Just(48), Just(64)]),
    ) -> RuleBook {
        RuleBook {
            dtypes,
            kv_cache_dtypes: kv.into_iter().map(Into::into).collect(),
            head_sizes,
            kernel_block_sizes,
            kv_cache_layouts,
            attn_types,
            compute_capabilities: from.map(|x| vec![CapabilityRange { from: Some(ComputeCapability(x, 0)), to: None }]),
            whole_blocks_only,
            preferred_block_size: preferred,
            ..RuleBook::default()
        }
    }
}

fn book(name: &'static str) -> impl Strategy<Value = RuleBook> {
    (lists(), any::<[bool; 12]>()).prop_map(move |(lists, yes)| RuleBook {
        name: name.into(),
        supports_different_v_head_size: yes[0],
        supports_sliding_window: yes[1],
        supports_sinks: yes[2],
        supports_logit_soft_cap: yes[3],
        supports_alibi: yes[4],
        supports_non_causal: yes[5],
        supports_mm_prefix: yes[6],
        supports_rswa: yes[7],
        supports_chunked_local: yes[8],
        supports_kv_connector: yes[9],
        supports_batch_invariance: yes[10],
        supports_dcp: yes[11],
        supports_pcp: yes[11],
        ..lists
    })
}

prop_compose! {
    fn need()(
        dtype in prop_oneof![Just(DType::F16), Just(DType::BF16)],
        kv in proptest::option::of(prop_oneof![Just("auto"), Just("fp8"), Just("bfloat16"), Just("fp8_ds_mla")]),
        head_size in prop_oneof![Just(64usize), Just(96), Just(128), Just(144)],
        block_size in proptest::option::of(prop_oneof![Just(16usize), Just(32), Just(48), Just(64)]),
        capability in proptest::option::of(8u32..11),
        // Of many asks at once nearly none would be taken.
        asks in proptest::collection::vec(0usize..14, 0..3),
    ) -> LayerNeed {
        let asks = |n| asks.contains(&n);
        LayerNeed {
            dtype,
            kv_cache_dtype: kv.map(Into::into),
            head_size,
            head_size_v: if asks(0) { head_size + 8 } else { head_size },
            block_size,
            compute_capability: capability.map(|x| ComputeCapability(x, 0)),
            sliding_window: asks(1).then_some(8),
            has_sinks: asks(2),
            has_logit_soft_cap: asks(3),
            has_alibi: asks(4),
            use_non_causal: asks(5),
            use_mm_prefix: asks(6),
            use_rswa: asks(7),
            use_chunked_local: asks(8),
            use_kv_connector: asks(9),
            use_batch_invariant: asks(10),
            use_dcp: asks(11),
            attn_type: if asks(12) { AttnType::EncoderDecoder } else { AttnType::Decoder },
            use_adaptive_verification: asks(13),
            ..LayerNeed::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, max_global_rejects: 40_000, ..ProptestConfig::default() })]
    #[test]
    fn a_layer_is_taken_where_both_take_it(d in book("D"), p in book("P"), need in need()) {
        let of = |book: &RuleBook| -> Arc<dyn DynBackend> { Arc::new(Listed(book.clone())) };
        let both = Composed::new(of(&d), of(&p));
        prop_assume!(both.is_ok());
        let both = both.ok().unwrap();
        let parts_take = d.refusals(&need).is_empty() && p.refusals(&need).is_empty();
        let packed = need.kv_cache_dtype.as_ref().is_some_and(|kv| kv.element(DType::F16).is_none());
        let kept = !(need.use_batch_invariant
            || need.use_dcp
            || need.use_adaptive_verification
            || packed
            || need.attn_type != AttnType::Decoder);
        // A block that each cuts in its own way has no kernel block in common.
        let cut = need.block_size.is_none_or(|b| both.rules().supports_block_size(b));
        let taken = both.rules().refusals(&need).is_empty();
        prop_assert_eq!(taken, parts_take && kept && cut, "{:?}", both.refusals(&need));
        let asked: Arc<dyn DynBackend> = Arc::new(both);
        prop_assert_eq!(reasons(&asked, &need).is_empty(), taken);
        let parts = |r: &Refusal| r.0.starts_with("D (decode): ") || r.0.starts_with("P (prefill): ");
        prop_assert_eq!(asked.refusals(&need).iter().any(parts), !parts_take);
        // Sizes that it names itself are sizes that it takes.
        let r = asked.rules();
        prop_assert!(r.preferred_block_size.is_none_or(|b| r.supports_block_size(b)));
        if r.supports_block_size(r.preferred_block_size(16)) {
            let block = r.preferred_block_size(16);
            let kernel = group::plan::select_kernel_block_size(block, &[r]);
            if let Ok(kernel) = kernel {
                for part in [&d, &p] {
                    let takes = part.kernel_block_sizes.iter().any(|k| k.accepts(kernel));
                    prop_assert!(part.kernel_block_sizes.is_empty() || takes, "{} of {:?}", kernel, part);
                }
            }
        }
    }
}
