//! A step end to end: builds a group whatever the number of layers, sharing, kernel blocks, capture and
//! replay on a pretend GPU, and what the registry refuses.

#[path = "support/sim.rs"]
mod sim;
mod support;

use headway_attention::*;
use headway_tensor::{DType, Dual, HostBuf, Persistent, TensorMut, TensorRef, View};
use proptest::prelude::*;
use sim::{Graph, SimAttn, SimBuilder, SimExec, SimLayer};
use std::sync::Arc;
use support::{HostExec, inputs, registry};

fn spec(block: usize, window: Option<usize>) -> KvCacheSpec {
    let attention = AttentionSpec::new(block, 1, 4, DType::F32);
    match window {
        None => KvCacheSpec::Full(attention),
        Some(sliding_window) => KvCacheSpec::SlidingWindow { attention, sliding_window },
    }
}

fn plan_of(backend: &str, specs: &[KvCacheSpec]) -> Result<KvCachePlan> {
    let backend = registry().get(backend)?;
    let layers: Vec<_> = specs
        .iter()
        .enumerate()
        .map(|(i, s)| LayerCache {
            layer: AttnLayer(i as u32),
            spec: s.clone(),
            backend: backend.clone(),
            num_heads: 1,
            latent: None,
            shares_cache_of: None,
        })
        .collect();
    plan_kv_cache(&layers, &CacheLimits::new(4, 32, 256), 1 << 16)
}

fn groups_of(plan: &KvCachePlan, micro_batches: usize) -> Result<Vec<AttentionGroup>> {
    plan.attention_groups
        .iter()
        .map(|g| AttentionGroup::from_plan(g, &HostExec, &g.backend.parse_config(None)?, micro_batches))
        .collect()
}

fn common(inputs: &Arc<StepInputs>, table: Vec<i32>, slots: Vec<i64>) -> CommonAttentionMetadata {
    let stride = table.len() / inputs.num_reqs;
    CommonAttentionMetadata::new(inputs.clone(), Dual::from_vec(table), stride, View::from_vec(slots))
        .unwrap()
}

fn metadata(step: &StepMetadata, layer: u32) -> Result<(Vec<i32>, Vec<i64>)> {
    // What the group's metadata say of table and slots, by way of a layer's entry.
    let entry = step.layer(AttnLayer(layer))?;
    let slots = entry.slot_mapping().host().unwrap_or(&[]).to_vec();
    Ok((vec![entry.num_tokens() as i32], slots))
}

#[test]
fn builds_do_not_grow_with_layers() -> Result<()> {
    for n in [2usize, 40] {
        let specs: Vec<_> = (0..n).map(|i| spec(16, (i % 2 == 1).then_some(64))).collect();
        let plan = plan_of("HOST_ATTN", &specs)?;
        let mut groups = groups_of(&plan, 1)?;
        let mut step = StepMetadata::new(plan.group_of_layer.clone());
        let i = Arc::new(inputs(&[1, 3], &[9, 3]));
        let commons: Vec<_> =
            (0..plan.kv_cache_groups.len()).map(|g| common(&i, vec![g as i32; 2], vec![0; 4])).collect();
        for _ in 0..5 {
            step.clear();
            build_step(&mut groups, &HostExec, &commons, 0, false, &mut step)?;
        }
        assert_eq!(groups.iter().map(AttentionGroup::builds).sum::<usize>(), 2 * 5, "of {n} layers");
        assert_eq!(step.layer(AttnLayer(0))?.split(), DecodeSplit { decodes: 1, decode_tokens: 1 });
    }
    Ok(())
}

#[test]
fn groups_that_differ_in_the_block_table_share() -> Result<()> {
    // One full layer to five windows: the windows' groups share metadata.
    let specs: Vec<_> = (0..6).map(|i| spec(16, (i > 0).then_some(64))).collect();
    let plan = plan_of("HOST_ATTN", &specs)?;
    let mut groups = groups_of(&plan, 1)?;
    let i = Arc::new(inputs(&[2], &[2]));
    let commons: Vec<_> = (0..6).map(|g| common(&i, vec![g], vec![i64::from(g) * 16, -1])).collect();
    let mut step = StepMetadata::new(plan.group_of_layer.clone());
    build_step(&mut groups, &HostExec, &commons, 0, false, &mut step)?;
    assert_eq!(groups.iter().map(AttentionGroup::builds).sum::<usize>(), 2);
    assert_eq!(groups.iter().map(AttentionGroup::table_updates).sum::<usize>(), 4);
    for layer in 0..6 {
        let g = plan.attention_groups[plan.group_of_layer[layer as usize] as usize].kv_cache_group;
        assert_eq!(metadata(&step, layer)?.1, [g as i64 * 16, -1]);
    }
    Ok(())
}

#[test]
fn kernels_see_kernel_blocks() -> Result<()> {
    let plan = plan_of("SMALL_BLOCKS", &[spec(64, None)])?;
    assert_eq!(plan.attention_groups[0].info.kernel_block_size, 32);
    let mut groups = groups_of(&plan, 1)?;
    let mut step = StepMetadata::new(plan.group_of_layer.clone());
    let i = Arc::new(inputs(&[1], &[70]));
    let table = common(&i, vec![3, 8], vec![0]);
    build_step(&mut groups, &HostExec, &[table], 0, false, &mut step)?;
    let too_wide = common(&i, vec![0; 1000], vec![0]);
    let e = build_step(&mut groups, &HostExec, &[too_wide], 0, false, &mut step).unwrap_err();
    assert!(e.to_string().contains("1000 blocks"), "{e}");
    Ok(())
}

#[test]
fn the_profile_run_fills_zeros_and_touches_no_cache() -> Result<()> {
    let plan = plan_of("HOST_ATTN", &[spec(16, None)])?;
    let backend = registry().get("HOST_ATTN")?;
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: 1,
        num_kv_heads: 1,
        head_size: 4,
        head_size_v: 4,
        scale: 1.0,
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: DType::F32,
        kv_cache_dtype: DType::F32,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    let config = backend.parse_config(None)?;
    let LayerKernel::Standard(layer) = backend.layer(&LayerArgs::Standard(args), &config)? else {
        panic!("a standard backend makes standard layers")
    };
    let buf = HostBuf::zeroed(plan.total_bytes)?;
    let mut pool = KvPool::new(vec![KvBuf::Host(buf)], plan.handles.clone())?;
    let rows = [1f32; 8];
    let x = TensorRef::from_host(&rows, &[2, 1, 4])?;
    let qkv = Qkv { q: x, k: x, v: x };
    let mut out = [f32::NAN; 8];
    let entry = StepEntry::profile_run(2);
    layer.run(
        &HostExec,
        &qkv,
        &mut pool.layer(AttnLayer(0))?,
        &entry,
        TensorMut::from_host(&mut out, &[2, 1, 4])?,
    )?;
    assert_eq!(out, [0.0; 8]);
    assert!(pool.layer(AttnLayer(0))?.host_bytes()?.iter().all(|b| *b == 0));

    // With metadata: the token with a slot is written, the one without is not, block 0 keeps its bytes.
    let mut groups = groups_of(&plan, 1)?;
    let mut step = StepMetadata::new(plan.group_of_layer.clone());
    let i = Arc::new(inputs(&[2], &[2]));
    build_step(&mut groups, &HostExec, &[common(&i, vec![1], vec![17, -1])], 0, false, &mut step)?;
    layer.run(
        &HostExec,
        &qkv,
        &mut pool.layer(AttnLayer(0))?,
        step.layer(AttnLayer(0))?,
        TensorMut::from_host(&mut out, &[2, 1, 4])?,
    )?;
    assert_eq!(out, [1.0; 8]);
    let width = 2 * 4 * 4;
    let bytes = pool.layer(AttnLayer(0))?.host_bytes()?.to_vec();
    let written: Vec<usize> =
        bytes.iter().enumerate().filter(|(_, b)| **b != 0).map(|(i, _)| i / width).collect();
    assert!(!written.is_empty() && written.iter().all(|t| *t == 17), "{written:?}");

    // A layer that shares another's cache does not write it.
    let mut shared = plan.handles.clone();
    shared[0].shared = true;
    let mut pool = KvPool::new(vec![KvBuf::Host(HostBuf::zeroed(plan.total_bytes)?)], shared)?;
    let (entry, out) = (step.layer(AttnLayer(0))?, TensorMut::from_host(&mut out, &[2, 1, 4])?);
    layer.run(&HostExec, &qkv, &mut pool.layer(AttnLayer(0))?, entry, out)?;
    assert!(pool.layer(AttnLayer(0))?.host_bytes()?.iter().all(|b| *b == 0));
    Ok(())
}

fn sim_group(cx: &SimExec) -> Result<(AttentionGroup, Box<dyn DynAttention>)> {
    let mut r = Registry::default();
    r.register::<SimAttn>()?;
    let (backend, config) = (r.get("SIM_ATTN")?.clone(), r.get("SIM_ATTN")?.parse_config(None)?);
    let info = GroupInfo {
        max_num_reqs: 4,
        max_model_len: 1024,
        layers: vec![AttnLayer(0)],
        ..GroupInfo::new(spec(16, None), 1)
    };
    let args = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: 1,
        num_kv_heads: 1,
        head_size: 4,
        head_size_v: 4,
        scale: 1.0,
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: DType::BF16,
        kv_cache_dtype: DType::BF16,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    let LayerKernel::Standard(layer) = backend.layer(&LayerArgs::Standard(args), &config)? else {
        panic!("a standard backend makes standard layers")
    };
    Ok((AttentionGroup::new(&*backend, cx, 0, info, &config, 1, None)?, layer))
}

#[test]
fn a_graph_replays_only_what_it_froze() -> Result<()> {
    let cx = SimExec::default();
    let (group, layer) = sim_group(&cx)?;
    let mut groups = vec![group];
    let (mut table, mut slots) = (Persistent::new(&cx, 64)?, Persistent::new(&cx, 64)?);
    let (mut starts, mut lens) = (Persistent::new(&cx, 5)?, Persistent::new(&cx, 4)?);
    let mut step_of = |len: i32| -> Result<CommonAttentionMetadata> {
        let q = starts.write_dual(&cx, 2, |o| o.copy_from_slice(&[0, 1]));
        let inputs = StepInputs::new(q, lens.write(&cx, 1, |o| o[0] = len), vec![len])?;
        let t = table.write_dual(&cx, 2, |o| o.copy_from_slice(&[len, 1]));
        CommonAttentionMetadata::new(Arc::new(inputs), t, 2, slots.write(&cx, 1, |o| o[0] = 0))
    };
    let mut step = StepMetadata::new(vec![0u16].into());
    build_step(&mut groups, &cx, &[step_of(5)?], 0, true, &mut step)?;
    cx.capturing.set(true);
    let zeros = [0f32; 4];
    let x = TensorRef::from_host(&zeros, &[1, 1, 4])?;
    let mut kv = KvBuf::Host(HostBuf::zeroed(64)?);
    let mut out = [0f32; 4];
    let handle = KvHandle {
        buf: 0,
        offset: 0,
        block_stride: 0,
        page_bytes: 0,
        num_blocks: 0,
        block_size: 16,
        dtype: DType::BF16,
        layout: KvCacheLayout::default(),
        shared: false,
    };
    let out = TensorMut::from_host(&mut out, &[1, 1, 4])?;
    layer.run(&cx, &Qkv { q: x, k: x, v: x }, &mut handle.on(&mut kv), step.layer(AttnLayer(0))?, out)?;
    cx.capturing.set(false);
    let graph = Graph {
        frozen: step.entries().iter().map(StepEntry::frozen).collect(),
        addresses: cx.recorded.take(),
        keep: step.clone(),
    };
    let mut replay = |len, ok| -> Result<()> {
        build_step(&mut groups, &cx, &[step_of(len)?], 0, false, &mut step)?;
        assert_eq!(graph.replays(&step), ok, "length {len}");
        Ok(())
    };
    replay(6, true)?;
    replay(63, true)?;
    replay(640, false)?; // another split factor than the one that was captured
    replay(7, true)?;
    assert_eq!(graph.addresses.len(), 2);

    // A batch that the builder doesn't capture is refused, not captured as something else.
    let q = Dual::from_vec(vec![0, 3]);
    let long = StepInputs::new(q, View::from_vec(vec![3]), vec![3])?;
    let long =
        CommonAttentionMetadata::new(Arc::new(long), Dual::from_vec(vec![0]), 1, View::from_vec(vec![0; 3]))?;
    assert!(build_step(&mut groups, &cx, &[long], 0, true, &mut step).is_err());

    // The graph keeps what it recorded alive; without it nothing stays.
    drop((groups, step, table, slots, starts, lens));
    assert!(cx.live.load(std::sync::atomic::Ordering::Relaxed) > 0);
    drop(graph.keep);
    assert_eq!(cx.live.load(std::sync::atomic::Ordering::Relaxed), 0);
    Ok(())
}

#[test]
fn another_devices_exec_is_refused() -> Result<()> {
    let mut r = Registry::default();
    r.register::<SimAttn>()?;
    let b = r.get("SIM_ATTN")?;
    let info = GroupInfo::new(spec(16, None), 1);
    let e = AttentionGroup::new(&*b, &HostExec, 0, info, &b.parse_config(None)?, 1, None).err().unwrap();
    assert!(matches!(e, AttentionError::WrongExec { .. }), "{e}");
    Ok(())
}

#[test]
fn the_registry_keeps_names_apart() -> Result<()> {
    let mut r = registry();
    assert!(matches!(r.register::<support::HostAttn>(), Err(AttentionError::Duplicate(_))));
    assert!(matches!(r.register::<support::OldContract>(), Err(AttentionError::Contract { built: 0, .. })));
    assert_eq!(r.iter().count(), 3);
    let e = r.get("HOST_ATTN")?.parse_config(Some(&serde_json::json!({"rowz": 3}))).err().unwrap();
    assert!(e.to_string().contains("rowz") && e.to_string().contains("[backend.HOST_ATTN]"), "{e}");
    Ok(())
}

/// The simulated device's own backend of a name that the host has.
enum SimHostAttn {}

impl AttentionBackend for SimHostAttn {
    const CONTRACT: u32 = 1;
    type Exec = SimExec;
    type Kind = Standard;
    type Config = ();
    type Builder = SimBuilder;
    type Impl = SimLayer;
    fn rules() -> RuleBook {
        RuleBook { name: "HOST_ATTN".into(), platform: "sim".into(), ..RuleBook::default() }
    }
}

#[test]
fn a_name_may_be_there_once_a_platform() -> Result<()> {
    let mut r = registry();
    r.register::<SimHostAttn>()?;
    assert!(matches!(r.register::<SimHostAttn>(), Err(AttentionError::Duplicate(_))));
    let on =
        |platform: &str| Ok::<_, AttentionError>(r.get_on("host_attn", platform)?.rules().platform.clone());
    assert_eq!((on("cpu")?.as_ref(), on("sim")?.as_ref(), on("npu")?.as_ref()), ("cpu", "sim", "cpu"));
    let need = LayerNeed { platform: "sim".into(), ..LayerNeed::default() };
    let request = BackendRequest { backend: Some("HOST_ATTN".into()), ..BackendRequest::default() };
    for request in [request, BackendRequest::default()] {
        assert_eq!(select(&r, "layer 0", &need, &request)?.backend.rules().platform, "sim");
    }
    let e = r.get("NO_ATTN").err().unwrap().to_string();
    assert!(e.contains("there are: NO_WINDOW, SMALL_BLOCKS, HOST_ATTN (did"), "{e}");
    Ok(())
}

#[test]
fn a_plugin_reuses_a_builder_with_its_own_table() -> Result<()> {
    let mut r = registry();
    r.register::<support::Plugin>()?;
    let b = r.get("PLUGIN")?;
    let config = b.parse_config(Some(&serde_json::json!({"verbose": true, "host": {"rows": 7}})))?;
    let info = GroupInfo { max_num_reqs: 4, ..GroupInfo::new(spec(16, None), 1) };
    let mut groups = vec![AttentionGroup::new(&*b, &HostExec, 0, info, &config, 1, None)?];
    let mut step = StepMetadata::new(vec![0u16].into());
    let i = Arc::new(inputs(&[1], &[1]));
    build_step(&mut groups, &HostExec, &[common(&i, vec![1], vec![16])], 0, false, &mut step)?;
    assert_eq!(groups[0].builds(), 1);
    assert_eq!(b.builder_type(), r.get("HOST_ATTN")?.builder_type());
    Ok(())
}

proptest! {
    /// Slots go through the table one by one; what lies past the tokens is −1; ranks share every token
    /// out among them exactly once.
    #[test]
    fn every_token_has_one_slot(
        lens in proptest::collection::vec((1usize..40, 0usize..60), 1..6),
        block in prop_oneof![Just(1usize), Just(4), Just(16)],
        size in 1usize..5,
        interleave in prop_oneof![Just(1usize), Just(2), Just(4)],
    ) {
        use headway_attention::group::kv::block_table::{BlockRows, slot_mapping};
        prop_assume!(block % interleave == 0);
        let stride = 100usize.div_ceil(block);
        let rows = lens.len();
        let blocks: Vec<i32> = (0..rows * stride).map(|b| 1 + b as i32).collect();
        let (mut q, mut positions) = (vec![0i32], vec![]);
        for &(new, computed) in &lens {
            positions.extend((computed..computed + new).map(|p| p as i32));
            q.push(positions.len() as i32);
        }
        let requests: Vec<i32> = (0..rows as i32).collect();
        let mut owners = vec![0; positions.len()];
        let mut seen = std::collections::BTreeSet::new();
        for rank in 0..size {
            let cp = ContextParallel { size, rank, interleave };
            let mut out = vec![7i64; positions.len() + 3];
            slot_mapping(BlockRows { blocks: &blocks, stride, block_size: block }, &requests, &q, &positions, cp, &mut out)
                .unwrap();
            prop_assert_eq!(&out[positions.len()..], &[-1, -1, -1]);
            for (t, &s) in out[..positions.len()].iter().enumerate().filter(|(_, s)| **s >= 0) {
                owners[t] += 1;
                prop_assert!(seen.insert((rank, s)), "slot {} twice on rank {}", s, rank);
                prop_assert!(s >= block as i64, "the null block is written");
            }
        }
        prop_assert!(owners.iter().all(|&o| o == 1));
    }

    /// The swaps put decodes first, keep every request, and a batch in order stays.
    #[test]
    fn reordering_puts_decodes_first(
        rows in proptest::collection::vec((1usize..8, 0usize..20, 1usize..20), 0..24),
        threshold in 1usize..4,
    ) {
        use headway_attention::step::batch::reorder_batch;
        let column = |f: fn(&(usize, usize, usize)) -> usize| rows.iter().map(f).collect::<Vec<_>>();
        let (s, c, p) = (column(|r| r.0), column(|r| r.1), column(|r| r.2));
        let mut order: Vec<usize> = (0..rows.len()).collect();
        for (a, b) in reorder_batch(&s, &c, &p, threshold) {
            order.swap(a, b);
        }
        let decodes = |i: &usize| c[*i] > 0 && s[*i] <= threshold && c[*i] >= p[*i];
        let first_other = order.iter().position(|i| !decodes(i)).unwrap_or(order.len());
        prop_assert!(order[first_other..].iter().all(|i| !decodes(i)));
        let mut all = order.clone();
        all.sort_unstable();
        prop_assert_eq!(all, (0..rows.len()).collect::<Vec<_>>());
        let again = |v: &[usize]| order.iter().map(|&i| v[i]).collect::<Vec<_>>();
        prop_assert!(reorder_batch(&again(&s), &again(&c), &again(&p), threshold).is_empty());
    }
}
