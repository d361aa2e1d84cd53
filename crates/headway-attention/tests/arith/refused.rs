//! What builder arithmetic refuses, bounds or chooses; single batches.

use crate::batches::{Lens, PAGE, common, flash, infer, mla};
use headway_attention::{
    Causal, CommonAttentionMetadata, ContextParallel, Result, StepInputs,
    group::{
        arith::{
            flash_attn::{
                FlashAttnConfig, FlashAttnStep, MAX_SPLITS_IN_GRAPH, SPLITS_BY_KERNEL, kernel_window,
            },
            flashinfer::{DecodeKernel, FlashInferStep, PrefillKernel, kernels, reorder_batch_threshold},
            mamba2::{Mamba2Config, Mamba2Step},
            mla::{DecodeQueries, MlaStep, capture_decodes_only},
        },
        kv::spec::MambaCacheMode,
    },
};
use headway_tensor::{Dual, View};

#[test]
fn splits_are_bounded_in_graphs_and_forbidden_by_batch_invariance() -> Result<()> {
    let config = flash(ContextParallel::default());
    let splits = |lens: Lens, config: FlashAttnConfig, fast: bool| -> Result<_> {
        let prefilling = vec![false; lens.len()];
        let mut common = common(&lens, prefilling, PAGE);
        common.hints.fast_build = fast;
        let mut step = FlashAttnStep::default();
        step.fill(&common, &config)?;
        Ok((step.max_num_splits, step.schedule.map(|s| s.num_splits)))
    };
    let (small, large) = (vec![(1, 9), (1, 9)], vec![(65, 9)]);
    assert_eq!(splits(small.clone(), config, false)?, (MAX_SPLITS_IN_GRAPH, Some(MAX_SPLITS_IN_GRAPH)));
    assert_eq!(splits(small.clone(), config, true)?, (MAX_SPLITS_IN_GRAPH, None));
    assert_eq!(splits(large, config, false)?, (SPLITS_BY_KERNEL, Some(SPLITS_BY_KERNEL)));
    let invariant = FlashAttnConfig { batch_invariant: true, ..config };
    assert_eq!(splits(small.clone(), invariant, false)?, (1, Some(1)));
    let older = FlashAttnConfig { ahead_of_time: false, ..config };
    assert_eq!(splits(small, older, false)?, (SPLITS_BY_KERNEL, None));
    assert_eq!(
        [kernel_window(None, true), kernel_window(Some(4), true), kernel_window(Some(4), false)],
        [(-1, -1), (3, 0), (3, 3)]
    );
    Ok(())
}

#[test]
fn what_a_kernel_cannot_take_is_refused() {
    let lens = vec![(1, 5), (2, 0)];
    let plain = common(&lens, vec![false, true], PAGE);
    let by_request = CommonAttentionMetadata {
        causal_override: Some(Causal::PerRequest(View::from_vec(vec![1, 0]))),
        ..plain.clone()
    };
    let text = |r: Result<()>| r.unwrap_err().to_string();
    let xqa = infer(DecodeKernel::Xqa, PrefillKernel::Planned, 3);
    assert!(text(FlashInferStep::default().fill(&by_request, &xqa)).contains("one causality"));
    let flash = flash(ContextParallel::default());
    assert!(text(FlashAttnStep::default().fill(&by_request, &flash)).contains("one causality"));
    let mla = mla(ContextParallel::default(), 64);
    assert!(text(MlaStep::default().fill(&by_request, &mla)).contains("causal batches only"));

    // Nothing says which requests prefill, and pieces of prefills are no decodes of a state.
    let mut inputs = StepInputs::new(Dual::from_vec(vec![0, 1]), View::from_vec(vec![6]), vec![6]).unwrap();
    inputs.max_seq_len = 6;
    let unsaid =
        CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(vec![1]), 1, View::from_vec(vec![0]))
            .unwrap();
    let state = |drafts| Mamba2Config {
        chunk_size: 64,
        block_size: PAGE,
        cache_mode: MambaCacheMode::None,
        num_speculative_tokens: drafts,
    };
    assert!(text(Mamba2Step::default().fill(&unsaid, &state(0))).contains("is_prefilling"));
    let narrow = CommonAttentionMetadata { is_prefilling_override: Some(vec![false]), ..unsaid };
    let mut step = Mamba2Step::default();
    step.fill(&narrow, &state(2)).unwrap();
    assert!(text(step.states(&narrow, &[6], &state(2))).contains("2 drafted tokens need 3 blocks"));
    assert!(text(step.states(&narrow, &[], &state(0))).contains("0 lengths for 1 decodes"));

    let capture = |lens: Lens| {
        let prefilling = vec![false; lens.len()];
        capture_decodes_only(&common(&lens, prefilling, PAGE), 2)
    };
    assert!(capture(vec![(2, 5), (1, 5), (0, 0)]).is_ok());
    assert!(text(capture(vec![(3, 5)])).contains("at most 2 new tokens each, not 1 requests"));
}

#[test]
fn kernels_by_capability() {
    use {DecodeKernel as D, PrefillKernel as P};
    assert_eq!(kernels((8, 0), None), (D::Planned, P::Planned));
    assert_eq!(kernels((8, 0), Some(true)), (D::Planned, P::Planned), "there are none to take");
    assert_eq!(kernels((9, 0), None), (D::Xqa, P::Planned));
    assert_eq!(kernels((10, 0), Some(true)), (D::TrtllmGen, P::TrtllmGen));
    assert_eq!(kernels((10, 0), Some(false)), (D::Planned, P::Planned));
}

#[test]
fn how_many_new_tokens_make_a_decode() {
    let (alone, ranks) =
        (ContextParallel::default(), ContextParallel { size: 2, ..ContextParallel::default() });
    let of = |q: DecodeQueries, cp, over| q.reorder_batch_threshold(128, 200, cp, over);
    assert_eq!(of(DecodeQueries::Single, alone, true), 1);
    assert_eq!(of(DecodeQueries::Uniform, alone, false), 201);
    assert_eq!(DecodeQueries::Varlen.reorder_batch_threshold(512, 3, alone, false), 512);
    assert_eq!((of(DecodeQueries::Varlen, ranks, false), of(DecodeQueries::Varlen, ranks, true)), (1, 201));
    for (capability, with, without) in [(7, 4, 4), (8, 4, 4), (9, 4, 1), (10, 4, 1), (11, 1, 1), (12, 4, 1)] {
        let of = |without_plan, cp| {
            let (decode, _) = kernels((capability, 0), without_plan);
            reorder_batch_threshold((capability, 0), decode, 3, cp)
        };
        let ours = (of(None, alone), of(Some(false), alone), of(None, ranks));
        assert_eq!(ours, (with, without, 1), "capability {capability}");
    }
}
