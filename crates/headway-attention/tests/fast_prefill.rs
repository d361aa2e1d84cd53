//! The batch of a group that computes only the tokens whose logits are needed.

#![expect(clippy::single_range_in_vec_init, reason = "a list of one range of a prompt is meant")]

mod support;

use headway_attention::{step::fast_prefill::FastPrefill, *};
use headway_tensor::{DType, Dual, View};
use std::sync::Arc;
use support::{HostExec, registry};

/// A prompt that ends, one that goes on, a decode, and a decode with two drafts: 4 + 3 + 1 + 3 tokens.
fn common(logits: &[i32]) -> CommonAttentionMetadata {
    let (starts, lens) = (vec![0, 4, 7, 8, 11], vec![4, 10, 9, 23]);
    let mut x = StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens).unwrap();
    x.positions = Some(View::from_vec(vec![0, 1, 2, 3, 7, 8, 9, 8, 20, 21, 22]));
    x.mm_prefix_ranges = Some(vec![Vec::from_iter([1..4]), vec![], vec![], vec![]]);
    x.rswa_prefix_lens = Some(View::from_vec(vec![4, 10, 5, 6]));
    x.logits_indices = Some(View::from_vec(logits.to_vec()));
    let slots = View::from_vec((100..111).collect());
    CommonAttentionMetadata::new(x.into(), Dual::from_vec(vec![1, 2, 3, 4]), 1, slots).unwrap()
}

#[test]
fn requests_keep_their_lengths_and_have_their_last_tokens() {
    let mut fast = FastPrefill::new(&HostExec, 4, 16).unwrap();
    // Padded to 8; twice, because buffers are recycled.
    for _ in 0..2 {
        let group = fast.batch(&HostExec, &common(&[3, 7, 8, 9, 10, 10, 10, 10]), 5).unwrap();
        let x = &group.inputs;
        assert_eq!(x.query_start_loc.host(), [0, 1, 1, 2, 5]);
        assert_eq!(x.seq_lens.host(), Some(&[4, 10, 9, 23][..]));
        assert_eq!((x.num_reqs, x.num_actual_tokens, x.max_query_len, x.max_seq_len), (4, 8, 3, 23));
        assert_eq!(x.positions.as_ref().unwrap().host(), Some(&[3, 8, 20, 21, 22, 0, 0, 0][..]));
        assert_eq!(group.slot_mapping.host(), Some(&[-1; 8][..]));
        assert_eq!(group.block_table.host(), [1, 2, 3, 4]);
        assert_eq!(x.mm_prefix_ranges.as_ref().unwrap()[0], Vec::from_iter([1..4]));
        assert_eq!(x.rswa_prefix_lens.as_ref().unwrap().host(), Some(&[4, 10, 5, 6][..]));
        assert_eq!(x.token_to_req(), [0, 2, 3, 3, 3, 0, 0, 0]);
        assert_eq!(x.num_computed_tokens(), [3, 10, 8, 20]);
        assert!(x.logits_indices.is_none());
    }
    // None wanted: a step of nothing but the middle of prompts.
    let none = fast.batch(&HostExec, &common(&[0, 0]), 0).unwrap();
    assert_eq!(none.inputs.query_start_loc.host(), [0; 5]);
    assert_eq!((none.inputs.num_actual_tokens, none.inputs.max_query_len), (2, 0));
}

#[test]
fn rows_that_cannot_be_aligned_are_refused() {
    let mut fast = FastPrefill::new(&HostExec, 4, 8).unwrap();
    let mut refused =
        |logits: &[i32], live| fast.batch(&HostExec, &common(logits), live).unwrap_err().to_string();
    assert!(refused(&[2], 1).contains("request 0 are not its last tokens, which end before 4"));
    assert!(refused(&[3, 8, 10], 3).contains("request 3"));
    assert!(refused(&[7, 3], 2).contains("ascending"));
    assert!(refused(&[3, 3], 2).contains("request 0"));
    assert!(refused(&[3, 11], 2).contains("11 is no token of the step"));
    assert!(refused(&[-1, 3], 2).contains("request 0"));
    assert!(refused(&[3], 2).contains("2 live tokens among 1"));
    assert!(refused(&[3; 9], 1).contains("set up for 8 rows of 4"));
    let mut without = common(&[3]);
    let x = std::sync::Arc::get_mut(&mut without.inputs).unwrap();
    x.logits_indices = None;
    assert!(fast.batch(&HostExec, &without, 1).unwrap_err().to_string().contains("needs logits_indices"));
}

#[test]
fn groups_share_the_batch_and_keep_their_tables() {
    let mut fast = FastPrefill::new(&HostExec, 4, 16).unwrap();
    let first = common(&[3, 7, 8, 9, 10]);
    let other = CommonAttentionMetadata {
        block_table: Dual::from_vec(vec![5, 6, 7, 8]),
        causal_override: Some(Causal::All(false)),
        ..first.clone()
    };
    let mut commons = [first, other];
    assert!(fast.attach(&HostExec, &mut commons).unwrap());
    let [a, b] = commons.each_ref().map(|c| c.fast_prefill.clone().unwrap());
    assert!(Arc::ptr_eq(&a.inputs, &b.inputs) && a.inputs.num_actual_tokens == 5);
    assert_eq!((a.block_table.host(), b.block_table.host()), (&[1, 2, 3, 4][..], &[5, 6, 7, 8][..]));
    assert!(a.causal_override.is_none() && b.causal_override.is_some());
    // Every token has logits: nothing to leave out.
    let mut all = [common(&(0..11).collect::<Vec<_>>())];
    assert!(!fast.attach(&HostExec, &mut all).unwrap() && all[0].fast_prefill.is_none());
    drop((commons, a, b));
    let mut none = [common(&[])];
    assert!(fast.attach(&HostExec, &mut none).unwrap());
    let none = none[0].fast_prefill.as_ref().unwrap();
    assert_eq!((none.inputs.num_actual_tokens, none.slot_mapping.len()), (0, 0));
    assert_eq!(fast.reallocs(), 0);
}

/// Three layers; the last reads the cache of the first.
fn layers() -> Vec<LayerCache> {
    let backend = registry().get("HOST_ATTN").unwrap();
    let layer = |i: u32| LayerCache {
        layer: AttnLayer(i),
        spec: KvCacheSpec::Full(AttentionSpec::new(16, 1, 4, DType::F32)),
        backend: backend.clone(),
        num_heads: 1,
        latent: None,
        shares_cache_of: (i == 2).then_some(AttnLayer(0)),
    };
    (0..3).map(layer).collect()
}

#[test]
fn layers_of_fast_prefill_are_a_group_that_gets_the_short_batch() -> Result<()> {
    let limits =
        |from| CacheLimits { fast_prefill_from: Some(AttnLayer(from)), ..CacheLimits::new(4, 32, 256) };
    let plan = plan_kv_cache(&layers(), &limits(2), 1 << 16)?;
    let groups: Vec<_> =
        plan.attention_groups.iter().map(|g| (&g.info.layers[..], g.info.fast_prefill)).collect();
    assert_eq!(groups, [(&[AttnLayer(0), AttnLayer(1)][..], false), (&[AttnLayer(2)][..], true)]);
    assert_eq!(plan.kv_cache_groups.len(), 1, "its block table is its owner's");
    let of =
        |g: &AttentionGroupPlan| AttentionGroup::from_plan(g, &HostExec, &g.backend.parse_config(None)?, 1);
    let mut groups = plan.attention_groups.iter().map(of).collect::<Result<Vec<_>>>()?;
    let mut step = StepMetadata::new(plan.group_of_layer.clone());
    let mut commons = [common(&[3, 7, 8, 9, 10])];
    FastPrefill::new(&HostExec, 4, 16)?.attach(&HostExec, &mut commons)?;
    build_step(&mut groups, &HostExec, &commons, 0, false, &mut step)?;
    let tokens =
        |step: &StepMetadata, layer| Ok::<_, AttentionError>(step.layer(AttnLayer(layer))?.num_tokens());
    assert_eq!((tokens(&step, 1)?, tokens(&step, 2)?), (11, 5));
    // Without a short batch they compute the whole step, over metadata that is there already.
    commons[0].fast_prefill = None;
    build_step(&mut groups, &HostExec, &commons, 0, false, &mut step)?;
    assert_eq!((tokens(&step, 1)?, tokens(&step, 2)?), (11, 11));
    let counts = |g: &AttentionGroup| (g.builds(), g.table_updates());
    assert_eq!((counts(&groups[0]), counts(&groups[1])), ((2, 0), (1, 1)));
    let e = plan_kv_cache(&layers(), &limits(1), 1 << 16).err().unwrap().to_string();
    assert!(e.contains("fast prefill from layer 1 on, but layer 1 has a cache of its own"), "{e}");
    Ok(())
}
