//! Whole steps of each builder's arithmetic on random batches. Steps are kept and filled anew, so each is
//! also compared with one that was never used.

use crate::batches::{Lens, PAGE, batch, common, flash, infer, mla, not_causal, seq_lens};
use headway_attention::{
    AttentionSpec, ContextParallel, GroupInfo, KvCacheSpec, MambaSpec, Result,
    group::{
        arith::{
            context_chunks::ChunkWorkspace,
            flash_attn::{FlashAttnStep, local_context_lens},
            flashinfer::{DecodeKernel, FlashInferStep, PrefillKernel},
            mamba2::{Mamba2Config, Mamba2Step},
            mla::{MlaStep, workspace_rows, workspace_tokens},
            triton::{SegmentConfig, SoftmaxSegments},
        },
        kv::spec::MambaCacheMode,
    },
};
use headway_tensor::DType;
use proptest::prelude::*;

fn shown(x: &impl std::fmt::Debug) -> String {
    format!("{x:?}")
}

proptest! {
    #[test]
    fn ranks_share_the_context_without_rest((lens, prefilling) in batch(1), size in 2..5usize, interleave in 1..9usize) {
        let common = common(&lens, prefilling, PAGE);
        let mut sums = vec![0; lens.len()];
        for rank in 0..size {
            let mut step = FlashAttnStep::default();
            step.fill(&common, &flash(ContextParallel { size, rank, interleave }))?;
            let (q, mut locals) = (common.inputs.query_start_loc.host(), vec![]);
            local_context_lens(q, seq_lens(&common), ContextParallel { size, rank, interleave }, &mut locals);
            prop_assert_eq!(locals.len(), lens.len());
            for (sum, &local) in sums.iter_mut().zip(&locals) {
                *sum += local;
                prop_assert!(local as usize <= step.max_local_context_len);
            }
            let context = lens.iter().any(|l| l.1 > 0);
            prop_assert_eq!(step.schedule.is_some(), context, "no context, no kernel");
            prop_assert!(step.schedule.is_none_or(|s| !s.causal && s.window == (99, 99)));
            // Rows of the split are those with context, unless all rows are single tokens.
            let with = lens.iter().take_while(|l| l.1 > 0).count();
            let split = step.context_split;
            if common.inputs.max_query_len > 1 && lens[with..].iter().all(|l| l.1 == 0) {
                prop_assert!(split.decodes + split.extends >= with);
            }
        }
        prop_assert_eq!(sums, lens.iter().map(|l| l.1).collect::<Vec<_>>());
    }

    #[test]
    fn halves_of_flashinfer_hold_the_batch(
        (lens, prefilling) in batch(3), causal in any::<bool>(), kernel in 0..3usize, planned in any::<bool>(),
    ) {
        let mut common = common(&lens, prefilling, PAGE);
        if !causal {
            common = not_causal(&common);
        }
        let decode = [DecodeKernel::Planned, DecodeKernel::TrtllmGen, DecodeKernel::Xqa][kernel];
        let prefill = if planned { PrefillKernel::Planned } else { PrefillKernel::TrtllmGen };
        let mut step = FlashInferStep::default();
        step.fill(&common, &infer(decode, prefill, 3))?;
        let s = step.split;
        prop_assert_eq!(s.decodes + s.prefills, lens.len());
        prop_assert_eq!(s.decode_tokens + s.prefill_tokens, common.inputs.num_actual_tokens);
        prop_assert_eq!(step.decode.is_some() || step.decode_plan.is_some(), s.decodes > 0);
        prop_assert!(!(step.decode.is_some() && step.decode_plan.is_some()));
        prop_assert!(causal || decode == DecodeKernel::Xqa || s.decodes == 0);
        prop_assert!(causal || s.prefills == 0 || step.prefill_plan.as_ref().is_some_and(|p| !p.causal));
        let pages = |r: usize| ((lens[r].0 + lens[r].1) as usize).div_ceil(PAGE);
        let all: usize = (0..lens.len()).map(pages).sum();
        let any_plan = step.prefill_plan.is_some() || step.decode_plan.is_some();
        prop_assert_eq!(step.pages.indices.len(), if any_plan { all } else { 0 });
        if s.prefills > 0 && step.prefill_plan.is_none() {
            let of_prefills: usize = (s.decodes..lens.len()).map(pages).sum();
            prop_assert_eq!(step.prefill_page_indptr.last(), Some(&(of_prefills as i32)));
        } else {
            prop_assert!(step.prefill_page_indptr.is_empty());
        }
        let words = step.decode.as_ref().map_or(0, |d| d.mask_words);
        prop_assert_eq!(step.mask.len(), common.inputs.query_start_loc.host()[s.decodes] as usize * words);
    }

    #[test]
    fn latent_steps_stay_in_the_workspace((lens, prefilling) in batch(3), size in 1..4usize, pages in 1..20usize) {
        let common = common(&lens, prefilling, PAGE);
        let cp = ContextParallel { size, rank: 0, interleave: 4 };
        let config = mla(cp, pages * PAGE * size * 4);
        let mut step = MlaStep::default();
        step.fill(&common, &config)?;
        let s = step.split;
        prop_assert_eq!(s.decodes + s.prefills, lens.len());
        prop_assert_eq!(step.context.context_lens.len(), s.prefills);
        let gathered: usize = step.context.chunks.iter().map(|c| c.context_tokens).sum();
        prop_assert_eq!(gathered as i32, lens[s.decodes..].iter().map(|l| l.1).sum::<i32>());
        let room = config.workspace.local_tokens();
        prop_assert!(step.context.chunks.iter().all(|c| c.local_context_tokens <= room));
        prop_assert!(lens[..s.decodes].iter().all(|l| l.0 as usize <= step.max_decode_query_len));
        prop_assert!(step.max_decode_query_len <= config.threshold);
    }

    /// The size that start-up chooses always suits the chunks, and holds a page of each request.
    #[test]
    fn the_workspace_suits_its_chunks(
        page in 1..300usize, reqs in 1..300usize, len in 1..200_000usize, size in 1..9usize, interleave in 1..17usize,
    ) {
        let spec = KvCacheSpec::Mla(AttentionSpec { head_size_v: 0, ..AttentionSpec::new(page, 1, 576, DType::BF16) });
        let context_parallel = ContextParallel { size, rank: 0, interleave };
        let group =
            GroupInfo { max_num_reqs: reqs, max_model_len: len, context_parallel, ..GroupInfo::new(spec, 16) };
        let tokens = workspace_tokens(&group);
        prop_assert!(tokens.is_multiple_of(page) && tokens >= reqs * page);
        prop_assert!(tokens.is_multiple_of(size));
        let rows = workspace_rows(tokens, context_parallel);
        prop_assert_eq!(rows, tokens + if size > 1 { tokens / size } else { 0 });
        let workspace = ChunkWorkspace { tokens, alignment: page, context_parallel };
        let mut step = MlaStep::default();
        step.context.fill([len as i32], &[0, 1], &workspace)?;
        prop_assert!(!step.context.chunks.is_empty());
    }

    #[test]
    fn state_space_steps_name_each_state_once(
        (lens, prefilling) in batch(1), drafts in 0..3usize, mode in 0..3usize,
    ) {
        let common = common(&lens, prefilling.clone(), PAGE);
        let mode = [MambaCacheMode::None, MambaCacheMode::All, MambaCacheMode::Align][mode];
        let spec = MambaSpec { cache_mode: mode, num_speculative_blocks: drafts,
            ..MambaSpec::new(PAGE, vec![vec![4]], vec![DType::F32]) };
        let config = Mamba2Config::new(&spec, 64);
        let mut step = Mamba2Step::default();
        step.fill(&common, &config)?;
        step.states(&common, seq_lens(&common), &config)?;
        let s = step.split;
        prop_assert_eq!(step.prefill_states.len(), s.prefills);
        prop_assert_eq!(step.decode_states.len(), s.decodes * (1 + drafts));
        prop_assert_eq!(step.has_initial_state.len(), s.prefills);
        for (r, &fresh) in (s.decodes..lens.len()).zip(&step.has_initial_state) {
            prop_assert_eq!(fresh, lens[r].1 > 0);
        }
        prop_assert!(prefilling[..s.decodes].iter().all(|p| !p), "a prefill's piece passed for a decode");
        let mut states: Vec<i32> = step.prefill_states.iter().chain(&step.decode_states).copied().collect();
        prop_assert!(states.iter().all(|&b| b > 0), "block 0 is the null block");
        let n = states.len();
        states.sort_unstable();
        states.dedup();
        prop_assert_eq!(states.len(), n, "two requests share a state");
        prop_assert_eq!(step.chunks.cu_chunk_seqlen.last(), step.prefill_start_loc.last().or(Some(&0)));
    }

    /// Nothing of an earlier batch stays.
    #[test]
    fn a_used_step_is_as_good_as_new((first, a) in batch(3), (second, b) in batch(3)) {
        let make = |lens: &Lens, p: &[bool]| common(lens, p.to_vec(), PAGE);
        let cp = ContextParallel { size: 2, rank: 1, interleave: 1 };
        let state = Mamba2Config { chunk_size: 64, block_size: PAGE, cache_mode: MambaCacheMode::All,
            num_speculative_tokens: 2 };
        let (mut f, mut i, mut l, mut m) =
            (FlashAttnStep::default(), FlashInferStep::default(), MlaStep::default(), Mamba2Step::default());
        let xqa = infer(DecodeKernel::Xqa, PrefillKernel::Planned, 3);
        for batch in [make(&first, &a), not_causal(&make(&first, &a)), make(&second, &b)] {
            f.fill(&batch, &flash(cp))?;
            i.fill(&batch, &xqa)?;
            m.fill(&batch, &state)?;
            m.states(&batch, seq_lens(&batch), &state)?;
            if batch.causal().of(0) {
                l.fill(&batch, &mla(cp, 320))?;
            }
        }
        let batch = make(&second, &b);
        let (mut f2, mut i2, mut l2, mut m2) =
            (FlashAttnStep::default(), FlashInferStep::default(), MlaStep::default(), Mamba2Step::default());
        f2.fill(&batch, &flash(cp))?;
        i2.fill(&batch, &xqa)?;
        l2.fill(&batch, &mla(cp, 320))?;
        m2.fill(&batch, &state)?;
        m2.states(&batch, seq_lens(&batch), &state)?;
        prop_assert_eq!((shown(&f), shown(&i)), (shown(&f2), shown(&i2)));
        prop_assert_eq!((shown(&l), shown(&m)), (shown(&l2), shown(&m2)));
    }

    #[test]
    fn segments_fit_a_captured_size(kv in 1..65usize, units in 1..200usize, reqs in 1..600usize) {
        let sizes = [1, 2, 4, 8, 16, 32, 64];
        let config = SegmentConfig { num_heads: 64, num_kv_heads: kv, head_size: 80, compute_units: units,
            max_num_reqs: reqs, capture_sizes: Some(&sizes) };
        let s = SoftmaxSegments::new(&config);
        let fills = units / kv;
        prop_assert!(sizes.iter().all(|c| c.abs_diff(fills) >= s.threshold.abs_diff(fills)));
        prop_assert!(sizes.contains(&s.threshold) && s.rows <= reqs && s.rows <= s.threshold);
        prop_assert_eq!(s.bytes(), s.rows * 64 * 16 * (128 + 2) * 4);
        let eager = SoftmaxSegments::new(&SegmentConfig { capture_sizes: None, ..config });
        prop_assert_eq!(eager.threshold, fills);
    }
}

/// The second of two equal steps writes where the first did.
#[test]
fn a_step_allocates_nothing() -> Result<()> {
    let batch =
        common(&[(1, 90), (3, 40), (9, 300), (20, 0), (5, 500)], vec![false, false, true, true, true], PAGE);
    let cp = ContextParallel::default();
    let state = Mamba2Config {
        chunk_size: 64,
        block_size: PAGE,
        cache_mode: MambaCacheMode::All,
        num_speculative_tokens: 2,
    };
    let (mut i, mut l, mut m) = (FlashInferStep::default(), MlaStep::default(), Mamba2Step::default());
    let mut places = vec![];
    for _ in 0..2 {
        i.fill(&batch, &infer(DecodeKernel::Xqa, PrefillKernel::Planned, 3))?;
        l.fill(&batch, &mla(cp, 320))?;
        m.fill(&batch, &state)?;
        m.states(&batch, seq_lens(&batch), &state)?;
        let chunk = &l.context.chunks[1];
        places.push([
            i.pages.indices.as_ptr(),
            i.prefill_start_loc.as_ptr(),
            i.mask.as_ptr().cast(),
            std::ptr::from_ref(chunk).cast(),
            l.context.starts(chunk).as_ptr(),
            l.context.local_cu_lens(chunk).as_ptr(),
            m.chunks.cu_chunk_seqlen.as_ptr(),
            m.conv.request.as_ptr(),
            m.decode_states.as_ptr(),
            m.prefill_states.as_ptr(),
        ]);
    }
    assert_eq!(places[0], places[1]);
    Ok(())
}
