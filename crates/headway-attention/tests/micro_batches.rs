//! Micro-batches: builders of their own, parts that lose no field, and steps that run whole.

mod support;

use headway_attention::{
    group::graph::MicroBatching,
    step::micro_batch::{MicroBatchSlice, SliceBuffers, sees_past, slice_common, slice_inputs, slices},
    *,
};
use headway_tensor::{DType, Dual, View};
use proptest::prelude::*;
use std::{ops::Range, sync::Arc};
use support::{HostExec, inputs, registry};

fn common(inputs: &Arc<StepInputs>, table: Vec<i32>, slots: Vec<i64>) -> CommonAttentionMetadata {
    let stride = table.len() / inputs.num_reqs;
    CommonAttentionMetadata::new(inputs.clone(), Dual::from_vec(table), stride, View::from_vec(slots))
        .unwrap()
}

fn part(
    whole: &CommonAttentionMetadata,
    slice: &MicroBatchSlice,
) -> Result<(Arc<StepInputs>, CommonAttentionMetadata)> {
    let mut buffers = SliceBuffers::new(&HostExec, 16).unwrap();
    let inputs = Arc::new(slice_inputs(&whole.inputs, slice, &mut buffers, &HostExec)?);
    let common = slice_common(whole, slice, inputs.clone())?;
    Ok((inputs, common))
}

#[test]
fn micro_batches_have_builders_of_their_own() -> Result<()> {
    let backend = registry().get("HOST_ATTN")?;
    let layer = LayerCache {
        layer: AttnLayer(0),
        spec: KvCacheSpec::Full(AttentionSpec::new(16, 1, 4, DType::F32)),
        backend,
        num_heads: 1,
        latent: None,
        shares_cache_of: None,
    };
    let plan = plan_kv_cache(&[layer], &CacheLimits::new(4, 32, 256), 1 << 16)?;
    let group = &plan.attention_groups[0];
    let config = group.backend.parse_config(None)?;
    let mut groups = [AttentionGroup::from_plan(group, &HostExec, &config, 2)?];
    let i = Arc::new(inputs(&[1], &[1]));
    let c = [common(&i, vec![1], vec![16])];
    let mut steps = [0, 1].map(|_| StepMetadata::new(plan.group_of_layer.clone()));
    for (m, step) in steps.iter_mut().enumerate() {
        build_step(&mut groups, &HostExec, &c, m, false, step)?;
    }
    assert!(build_step(&mut groups, &HostExec, &c, 2, false, &mut steps[0]).is_err());
    assert_eq!(groups[0].builds(), 2);
    Ok(())
}

fn ints(v: &Option<View<i32>>) -> Vec<i32> {
    v.as_ref().and_then(|v| v.host()).map(<[i32]>::to_vec).unwrap_or_default()
}

/// Three requests of 2, 3 and 1 tokens, with every optional field set, cut inside the second.
#[test]
fn every_field_survives_the_cut() -> Result<()> {
    let mut i = inputs(&[2, 3, 1], &[5, 9, 4]);
    i.causal = Causal::PerRequest(View::from_vec(vec![0, 1, 0]));
    i.positions = Some(View::from_vec(vec![3, 4, 6, 7, 8, 3]));
    i.is_prefilling = Some(vec![false, true, false]);
    i.request_index = Some(vec![7, 8, 9]);
    i.dcp_local_seq_lens = Some(View::from_vec(vec![3, 5, 2]));
    i.dcp_local_seq_lens_upper_bound = Some(vec![4, 6, 3]);
    i.mm_prefix_ranges = Some(vec![vec![1..3], vec![1..3, 7..9], vec![0..2]]);
    i.rswa_prefix_lens = Some(View::from_vec(vec![4, 6, 2]));
    i.encoder_seq_lens = Some(Dual::from_vec(vec![11, 12, 13]));
    i.logits_indices = Some(View::from_vec(vec![1, 4, 5]));
    i.extras = vec![Arc::new("of all groups")];
    let mut whole = common(&Arc::new(i), vec![1, 2, 3, 4, 5, 6], vec![10, 11, 20, 21, 22, 30]);
    whole.is_prefilling_override = Some(vec![true, false, true]);
    whole.causal_override = Some(Causal::PerRequest(View::from_vec(vec![0, 1, 1])));
    whole.hints = BuildHints { fast_build: true, common_prefix_len: 2 };
    whole.extras = vec![Arc::new(5u8)];

    let parts = slices(&[2, 3, 1], &[3], 2)?;
    let (one, c) = part(&whole, &parts[0])?;
    assert_eq!(one.query_start_loc.host(), [0, 2, 3]);
    assert_eq!((one.seq_lens.host(), &one.seq_lens_upper_bound), (Some(&[5, 7][..]), &vec![5, 7]));
    assert_eq!((one.num_reqs, one.num_actual_tokens, one.max_query_len, one.max_seq_len), (2, 3, 2, 9));
    assert_eq!([0, 1].map(|r| one.causal.of(r)), [false, true]);
    assert_eq!(ints(&one.positions), [3, 4, 6]);
    assert_eq!(one.is_prefilling, Some(vec![false, true]));
    assert_eq!(one.request_index, Some(vec![7, 8]));
    assert_eq!(ints(&one.dcp_local_seq_lens), [3, 5]);
    assert_eq!(one.dcp_local_seq_lens_upper_bound, Some(vec![4, 6]));
    assert_eq!(one.mm_prefix_ranges, Some(vec![vec![1..3], vec![1..3]]), "the next part's range waits");
    assert_eq!(ints(&one.rswa_prefix_lens), [4, 6]);
    assert_eq!(one.encoder_seq_lens.as_ref().map(|d| d.host().to_vec()), Some(vec![11, 12]));
    assert_eq!(ints(&one.logits_indices), [1, 4, 5]);
    assert_eq!(one.extra::<&str>(), Some(&"of all groups"));
    assert_eq!(c.block_table.host(), [1, 2, 3, 4]);
    assert_eq!((c.block_table_stride, c.slot_mapping.host()), (2, Some(&[10, 11, 20][..])));
    assert_eq!(c.is_prefilling(), Some(&[true, false][..]));
    assert_eq!([0, 1].map(|r| c.causal().of(r)), [false, true]);
    assert_eq!((c.hints, c.extra::<u8>()), (whole.hints, Some(&5)));

    let (two, c) = part(&whole, &parts[1])?;
    assert_eq!(two.query_start_loc.host(), [0, 2, 3]);
    assert_eq!((two.seq_lens.host(), &two.seq_lens_upper_bound), (Some(&[9, 4][..]), &vec![9, 4]));
    assert_eq!((two.num_reqs, two.num_actual_tokens), (2, 3));
    assert_eq!([0, 1].map(|r| two.causal.of(r)), [true, false]);
    assert_eq!(ints(&two.positions), [7, 8, 3]);
    assert_eq!(two.is_prefilling, Some(vec![true, false]));
    assert_eq!(two.request_index, Some(vec![8, 9]));
    assert_eq!(ints(&two.dcp_local_seq_lens), [5, 2]);
    assert_eq!(two.dcp_local_seq_lens_upper_bound, Some(vec![6, 3]));
    assert_eq!(two.mm_prefix_ranges, Some(vec![vec![1..3, 7..9], vec![0..2]]));
    assert_eq!(ints(&two.rswa_prefix_lens), [6, 2]);
    assert_eq!(two.encoder_seq_lens.as_ref().map(|d| d.host().to_vec()), Some(vec![12, 13]));
    assert_eq!(two.extra::<&str>(), Some(&"of all groups"));
    assert_eq!(c.block_table.host(), [3, 4, 5, 6]);
    assert_eq!(c.slot_mapping.host(), Some(&[21, 22, 30][..]));
    assert_eq!(c.is_prefilling(), Some(&[false, true][..]));
    assert_eq!([0, 1].map(|r| c.causal().of(r)), [true, true]);
    assert_eq!((c.hints, c.extra::<u8>()), (whole.hints, Some(&5)));
    Ok(())
}

/// A row must not miss keys that a later part writes.
#[test]
fn tokens_that_see_those_after_them_are_not_parted() -> Result<()> {
    let cut = slices(&[6], &[3], 2)?;
    let whole = |causal: bool, ranges: Option<Range<usize>>| {
        let mut i = inputs(&[6], &[10]);
        i.causal = Causal::All(causal);
        i.mm_prefix_ranges = ranges.map(|r| vec![vec![r]]);
        common(&Arc::new(i), vec![1], (0..6).collect())
    };
    // The cut is before position 7.
    for (causal, range, parted) in
        [(true, None, false), (false, None, true), (true, Some(5..8), true), (true, Some(4..7), false)]
    {
        let c = whole(causal, range.clone());
        assert_eq!(sees_past(&c, &cut[0]), parted, "{causal} {range:?}");
        assert!(!sees_past(&c, &cut[1]), "nothing comes after the last part");
        match part(&c, &cut[0]) {
            Ok(_) => assert!(!parted),
            Err(e) => assert!(
                parted && e.to_string().contains(if causal { "sees both ways" } else { "see those after" })
            ),
        }
    }
    let mut c = whole(true, None);
    c.causal_override = Some(Causal::All(false));
    assert!(sees_past(&c, &cut[0]), "the group's own answer wins");
    Ok(())
}

#[test]
fn steps_below_the_thresholds_run_whole() {
    let micro = MicroBatching { num_micro_batches: 2, decode_token_threshold: 3, prefill_token_threshold: 8 };
    let step = |lens: &[i32], prefilling: bool| {
        let mut i = inputs(lens, &lens.iter().map(|l| l + 4).collect::<Vec<_>>());
        i.is_prefilling = Some(vec![prefilling; lens.len()]);
        micro.cut(&i).map(|parts| parts.into_iter().map(|p| p.tokens).collect::<Vec<_>>())
    };
    assert_eq!(step(&[1, 1], false), None);
    assert_eq!(step(&[1, 1, 1], false), Some(vec![0..1, 1..3]));
    assert_eq!(step(&[1, 1, 1], true), None, "prompts of one token are prefills");
    assert_eq!(step(&[2, 1, 1], false), None, "decodes of several lengths count as prefills");
    assert_eq!(step(&[1, 7], true), Some(vec![0..4, 4..8]));
    let more = MicroBatching { num_micro_batches: 5, decode_token_threshold: 0, ..micro };
    let mut four = inputs(&[1, 1, 1, 1], &[2, 2, 2, 2]);
    four.is_prefilling = Some(vec![false; 4]);
    assert_eq!(more.cut(&four), None, "every micro-batch has a token");
    let one = MicroBatching { num_micro_batches: 1, ..more };
    assert_eq!(one.cut(&four), None);
}

proptest! {
    /// Micro-batches cover every token once, and together have every request's new tokens.
    #[test]
    fn micro_batches_lose_nothing(
        lens in proptest::collection::vec(1i32..9, 1..9),
        cut in 1usize..40,
    ) {
        let total: i32 = lens.iter().sum();
        prop_assume!(cut < total as usize);
        let seq: Vec<i32> = lens.iter().map(|l| l + 3).collect();
        let mut i = inputs(&lens, &seq);
        i.positions = Some(View::from_vec((0..total).collect()));
        i.is_prefilling = Some(lens.iter().map(|l| *l > 1).collect());
        let i = Arc::new(i);
        let whole = common(&i, (0..lens.len() as i32).collect(), (0..i64::from(total)).collect());
        let scheduled: Vec<usize> = lens.iter().map(|l| *l as usize).collect();
        let (mut positions, mut slots, mut new) = (vec![], vec![], vec![0; lens.len()]);
        for s in slices(&scheduled, &[cut], 2).unwrap() {
            let mut buffers = SliceBuffers::new(&HostExec, 16).unwrap();
            let part = Arc::new(slice_inputs(&i, &s, &mut buffers, &HostExec).unwrap());
            let c = slice_common(&whole, &s, part.clone()).unwrap();
            positions.extend_from_slice(part.positions.as_ref().unwrap().host().unwrap());
            slots.extend_from_slice(c.slot_mapping.host().unwrap());
            prop_assert_eq!(part.is_prefilling.as_ref().unwrap().len(), s.requests.len());
            for (r, n) in s.requests.clone().zip(0..) {
                new[r] += part.query_len(n);
                prop_assert_eq!(c.blocks_of(n), &[r as i32]);
                prop_assert!(part.seq_lens_upper_bound[n] >= part.query_len(n) as i32);
            }
        }
        prop_assert_eq!(positions, (0..total).collect::<Vec<_>>());
        prop_assert_eq!(slots, (0..i64::from(total)).collect::<Vec<_>>());
        prop_assert_eq!(new, scheduled);
    }
}
