//! What the suite can't see of `CPU_MLA`: log-sum-exps, how often the workspace is filled and what it is said to take,
//! settings and sizes that are refused, what an 8-bit cache does at its edges.

use headway_attention::{
    AttentionBackend, AttnLayer, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheSpec, KvHandle, LayerNeed,
    MetadataBuilder, MlaArgs, MlaImpl, StepInputs,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
    process::rules::LatentDims,
};
use headway_cpu::{
    CpuExec, CpuMla, CpuOptions,
    backends::cpu_mla::{CpuMlaBuilder, CpuMlaConfig, CpuMlaLayer, Sizes},
};
use headway_tensor::{DType, Dual, HostBuf, Linear, LinearPart, Ops, TensorMut, TensorRef, View, Weight};
use headway_testkit::{reference, rng::Rng};
use std::sync::Arc;

const DIMS: LatentDims = LatentDims {
    qk_nope_head_dim: 16,
    qk_rope_head_dim: 8,
    kv_lora_rank: 32,
    v_head_dim: 24,
    index_topk: None,
};
const HEADS: usize = 3;
const WIDTH: usize = 40;

fn exec() -> CpuExec {
    CpuExec::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

fn group(dtype: DType) -> GroupInfo {
    let spec = AttentionSpec { head_size_v: 0, ..AttentionSpec::new(16, 1, WIDTH, dtype) };
    GroupInfo {
        latent: Some(DIMS),
        max_num_reqs: 8,
        max_num_tokens: 512,
        max_model_len: 1024,
        ..GroupInfo::new(KvCacheSpec::Mla(spec), HEADS)
    }
}

fn projection(cx: &CpuExec, values: &[f32]) -> Arc<dyn Linear> {
    let weight = Weight::from_f32("kv_b_proj", vec![values.len() / 32, 32], values).unwrap();
    cx.load_linear(vec![LinearPart { weight, bias: None }], None).unwrap()
}

fn args(kv_b_proj: &Arc<dyn Linear>, cache: DType, kv_scale: f32) -> MlaArgs<'_> {
    MlaArgs {
        layer: AttnLayer(0),
        num_heads: HEADS,
        kv_lora_rank: 32,
        qk_nope_head_dim: 16,
        qk_rope_head_dim: 8,
        v_head_dim: 24,
        scale: 0.2,
        kv_b_proj,
        dtype: DType::F32,
        kv_cache_dtype: cache,
        kv_scale,
    }
}

fn cache(dtype: DType, blocks: usize) -> (KvHandle, KvBuf) {
    let page = 16 * WIDTH * dtype.size();
    let handle = KvHandle {
        buf: 0,
        offset: 0,
        block_stride: page,
        page_bytes: page,
        num_blocks: blocks,
        block_size: 16,
        dtype,
        layout: KvCacheLayout::LBNHC,
        shared: false,
    };
    (handle, KvBuf::Host(HostBuf::zeroed(page * blocks).unwrap()))
}

/// A step of one request each, with blocks 1, 2, … in order.
fn step(lens: &[(i32, i32)]) -> CommonAttentionMetadata {
    let stride = lens.iter().map(|l| (l.1 as usize).div_ceil(16)).max().unwrap();
    let (mut starts, mut table, mut slots, mut next) = (vec![0], vec![], vec![], 1);
    for &(q, kv) in lens {
        starts.push(starts[starts.len() - 1] + q);
        let own: Vec<i32> = (0..stride as i32).map(|i| next + i).collect();
        next += stride as i32;
        slots.extend((kv - q..kv).map(|t| i64::from(own[t as usize / 16]) * 16 + i64::from(t) % 16));
        table.extend(own);
    }
    let lengths: Vec<i32> = lens.iter().map(|l| l.1).collect();
    let inputs = StepInputs::new(Dual::from_vec(starts), View::from_vec(lengths.clone()), lengths).unwrap();
    CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(table), stride, View::from_vec(slots)).unwrap()
}

fn builder(cx: &CpuExec, group: &GroupInfo, config: &CpuMlaConfig) -> CpuMlaBuilder {
    let plan = CpuMlaBuilder::plan(group, &CpuMla::rules(), config).unwrap();
    CpuMlaBuilder::new(cx, group, &plan, config).unwrap()
}

#[test]
fn decodes_give_the_log_of_their_denominators() {
    let (cx, mut rng) = (exec(), Rng::new(3));
    let mut random = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.normal() as f32 * 0.5).collect() };
    let w = random(HEADS * 40 * 32);
    let kv_b = projection(&cx, &w);
    let layer = CpuMlaLayer::new(&args(&kv_b, DType::F32, 1.0), &CpuMlaConfig::default()).unwrap();
    let (handle, mut buf) = cache(DType::F32, 80);
    // 900 tokens: several chunks of keys.
    let rows = random(900 * WIDTH);
    let write = step(&[(900, 900)]);
    let latent = TensorRef::from_host(&rows, &[900, WIDTH]).unwrap();
    layer.update_kv_cache(&cx, latent, &mut handle.on(&mut buf), &write.slot_mapping).unwrap();
    let metadata =
        builder(&cx, &group(DType::F32), &CpuMlaConfig::default()).build(&cx, &step(&[(1, 900)])).unwrap();
    let q = random(HEADS * 24);
    let (mut out, mut lse) = (vec![9.0; HEADS * 24], vec![0.0; HEADS]);
    layer
        .forward_mqa_with_lse(
            &cx,
            TensorRef::from_host(&q, &[1, HEADS, 24]).unwrap(),
            &mut handle.on(&mut buf),
            &metadata,
            TensorMut::from_host(&mut out, &[1, HEADS * 24]).unwrap(),
            Some(&mut lse),
        )
        .unwrap();
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (mut k, mut v) = (vec![], vec![]);
    for row in rows.chunks_exact(WIDTH) {
        for (i, w) in w.chunks_exact(32).enumerate() {
            let x: f64 = w.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            if i % 40 < 16 {
                k.push(x)
            } else {
                v.push(x)
            }
            if i % 40 == 15 {
                k.extend(wide(&row[32..]));
            }
        }
    }
    let params = reference::Params {
        num_heads: HEADS,
        num_kv_heads: HEADS,
        head_size: 24,
        head_size_v: 24,
        scale: f64::from(0.2f32),
        ..Default::default()
    };
    let want = reference::attend(
        &params,
        &reference::Request { q: &wide(&q), k: &k, v: &v, causal: true, ..reference::Request::default() },
    );
    let close = |a: &[f32], b: &[f64]| a.iter().zip(b).all(|(a, b)| (f64::from(*a) - b).abs() < 2e-5);
    assert!(close(&out, &want.out), "{out:?} {:?}", want.out);
    assert!(close(&lse, &want.lse), "{lse:?} {:?}", want.lse);
}

#[test]
fn the_workspace_is_filled_as_often_as_the_context_needs_and_reported_as_it_is() {
    let (cx, group) = (exec(), group(DType::F32));
    let passes = |tokens: Option<usize>| {
        let config = CpuMlaConfig { workspace_tokens: tokens };
        let metadata = builder(&cx, &group, &config).build(&cx, &step(&[(1, 40), (20, 300)])).unwrap();
        assert_eq!(CpuMlaBuilder::split(&metadata).decodes, 1);
        metadata.num_passes()
    };
    assert_eq!(passes(None), 2, "the context, then the new tokens");
    assert_eq!(passes(Some(96)), 4, "280 tokens of context in three, 20 new ones");
    assert_eq!(passes(Some(16)), 20);
    let bytes = |c: &CpuMlaConfig| CpuMlaBuilder::plan(&group, &CpuMla::rules(), c).unwrap().workspace_bytes;
    let (small, large) =
        (CpuMlaConfig { workspace_tokens: Some(16) }, CpuMlaConfig { workspace_tokens: Some(416) });
    // 400 tokens more: float32 keys and values of each head, their slice, their latents.
    let slice = (128 - 16) * HEADS * 40;
    let splits = bytes(&large) - bytes(&small) - ((400 * (HEADS * 48 + WIDTH) + slice) * 4) as u64;
    assert!(splits < 100_000, "{splits} bytes for split results");
    let sizes = Sizes::new(&group, &CpuMlaConfig::default()).unwrap();
    assert_eq!((sizes.workspace_tokens, sizes.threshold), (1024, 1));
}

#[test]
fn drafts_and_batch_invariance_raise_what_counts_as_a_decode() {
    let sizes = |g: &GroupInfo| Sizes::new(g, &CpuMlaConfig::default()).unwrap();
    let group = group(DType::F32);
    assert_eq!(sizes(&GroupInfo { num_speculative_tokens: 3, ..group.clone() }).threshold, 4);
    let invariant = GroupInfo { batch_invariant: true, ..group.clone() };
    assert_eq!((sizes(&invariant).threshold, sizes(&invariant).prefill_rows), (512, 0));
    let rules = CpuMla::rules();
    assert_eq!(
        CpuMlaBuilder::plan(&invariant, &rules, &CpuMlaConfig::default()).unwrap().reorder_batch_threshold,
        Some(512)
    );
}

#[test]
fn settings_and_sizes_that_cannot_be_are_refused_with_what_to_do() {
    let parse = |v: serde_json::Value| serde_json::from_value::<CpuMlaConfig>(v).map_err(|e| e.to_string());
    assert_eq!(parse(serde_json::json!({})).unwrap(), CpuMlaConfig::default());
    assert_eq!(parse(serde_json::json!({ "workspace_tokens": 48 })).unwrap().workspace_tokens, Some(48));
    for tokens in [0, 8, 40] {
        let e = parse(serde_json::json!({ "workspace_tokens": tokens })).unwrap_err();
        assert!(e.contains("multiple of 16"), "{e}");
    }
    assert!(parse(serde_json::json!({ "workspace": 1 })).unwrap_err().contains("workspace_tokens"));

    let cx = exec();
    let refused = |g: GroupInfo| Sizes::new(&g, &CpuMlaConfig::default()).unwrap_err().to_string();
    assert!(refused(GroupInfo { latent: None, ..group(DType::F32) }).contains("latent dimensions"));
    let wide = LatentDims { kv_lora_rank: 64, ..DIMS };
    let e = refused(GroupInfo { latent: Some(wide), ..group(DType::F32) });
    assert!(e.contains("a latent cache of 40 elements") && e.contains("kv_lora_rank"), "{e}");
    let full = KvCacheSpec::Full(AttentionSpec::new(16, 1, WIDTH, DType::F32));
    let e = refused(GroupInfo { latent: Some(DIMS), ..GroupInfo::new(full, HEADS) });
    assert!(e.contains("one latent row a token"), "{e}");

    let short = projection(&cx, &[0.0; 32 * 5]);
    let e =
        CpuMlaLayer::new(&args(&short, DType::F32, 1.0), &CpuMlaConfig::default()).err().unwrap().to_string();
    assert!(e.contains("kv_b_proj") && e.contains("[3 x (16 + 24), 32]"), "{e}");
    let need =
        |latent| LayerNeed { head_size: 40, head_size_v: 40, latent: Some(latent), ..LayerNeed::default() };
    assert_eq!(CpuMla::combination(&need(DIMS)), None);
    let odd = CpuMla::combination(&need(LatentDims { v_head_dim: 20, ..DIMS })).unwrap().to_string();
    assert!(odd.contains("multiples of 8"), "{odd}");
}

#[test]
fn a_block_table_that_is_too_short_is_refused() {
    let cx = exec();
    let mut common = step(&[(1, 33), (1, 20)]);
    common.block_table = Dual::from_vec(vec![1; 3]);
    let e = builder(&cx, &group(DType::F32), &CpuMlaConfig::default()).build(&cx, &common).unwrap_err();
    assert!(e.to_string().contains("a block table of 3 numbers for 2 requests of 3"), "{e}");
}

#[test]
fn an_8_bit_cache_saturates_and_keeps_nan() {
    let cx = exec();
    let kv_b = projection(&cx, &[0.0; HEADS * 40 * 32]);
    for (dtype, top) in [(DType::F8E4M3, 448.0f32), (DType::F8E5M2, 57344.0)] {
        let layer = CpuMlaLayer::new(&args(&kv_b, dtype, 0.5), &CpuMlaConfig::default()).unwrap();
        let (handle, mut buf) = cache(dtype, 2);
        let mut row = [0.0f32; WIDTH];
        row[..5].copy_from_slice(&[1e9, -f32::INFINITY, f32::NAN, 1.0, -0.0]);
        let slots = View::from_vec(vec![17]);
        let latent = TensorRef::from_host(&row, &[1, WIDTH]).unwrap();
        layer.update_kv_cache(&cx, latent, &mut handle.on(&mut buf), &slots).unwrap();
        let KvBuf::Host(bytes) = &buf else { unreachable!() };
        let bits = u32::from(dtype == DType::F8E5M2) + 4;
        let at = 17 * WIDTH;
        let read = |i: usize| reference::round::f8_value(bytes.as_bytes()[at + i], bits);
        assert_eq!((read(0), read(1), read(3)), (top, -top, 2.0), "stored as 1 / 0.5");
        assert!(read(2).is_nan() && read(4).to_bits() == (-0.0f32).to_bits());
        assert!(bytes.as_bytes()[..at].iter().chain(&bytes.as_bytes()[at + WIDTH..]).all(|b| *b == 0));
        let e = layer
            .update_kv_cache(&cx, latent, &mut handle.on(&mut buf), &View::from_vec(vec![32]))
            .unwrap_err()
            .to_string();
        assert!(e.contains("slot 32"), "{e}");
    }
}
