//! What does not fit is an error that says so, and never a panic.

use super::{
    act::Act,
    layer::Layer,
    run::{Cache, builder, exec},
    world::{Req, World},
};
use headway_attention::{AttentionArgs, AttentionImpl, AttnLayer, MetadataBuilder, Qkv, Result};
use headway_cpu::{
    CpuExec, Isa,
    backends::cpu_attn::{CpuAttnConfig, CpuAttnLayer},
};
use headway_tensor::{DType, Dual, View};
use headway_testkit::Rng;

fn cx() -> CpuExec {
    exec(Isa::of_machine(), 2)
}

/// Runs a step of `l` with metadata built for `built`, after `change`.
fn forward(l: &Layer, built: &Layer, windowed: bool, change: impl FnOnce(&mut World)) -> Result<()> {
    let cx = cx();
    let mut w = World::new(l, &[Req::new(40, 3)], 0, 0, &mut Rng::new(1));
    let mut cache = Cache::new(l, w.num_blocks, 0);
    change(&mut w);
    let metadata = builder(&cx, built, windowed).build(&cx, &w.common())?;
    let mut out = Act::of(l.dtype, std::iter::repeat_n(0.0, 3 * l.heads * l.size_v));
    let x = Qkv {
        q: w.q.view(&[3, l.heads, l.size]),
        k: w.k.view(&[3, l.kv_heads, l.size]),
        v: w.v.view(&[3, l.kv_heads, l.size_v]),
    };
    let out = out.view_mut(&[3, l.heads, l.size_v]);
    l.kernel().forward(&cx, &x, &mut cache.view(l), &metadata, out)
}

#[track_caller]
fn refused(result: Result<()>, word: &str) {
    let e = result.expect_err("not refused").to_string();
    assert!(e.contains(word), "{e}");
}

#[test]
fn metadata_and_layer_must_fit() {
    let l = Layer::plain(4, 2, 16);
    assert!(forward(&l, &l, false, |_| ()).is_ok());
    refused(forward(&l, &Layer::plain(4, 1, 16), false, |_| ()), "other heads");
    refused(forward(&l, &Layer { block_size: 32, ..l.clone() }, false, |_| ()), "blocks of");
    let windowed = Layer { window: Some(8), ..l.clone() };
    refused(forward(&l, &windowed, true, |_| ()), "window");
    assert!(forward(&windowed, &l, true, |_| ()).is_ok());
}

#[test]
fn block_tables_must_cover_the_tokens() {
    let l = Layer::plain(4, 2, 16);
    refused(forward(&l, &l, false, |w| w.seq_lens[0] = 4000), "block table");
    refused(forward(&l, &l, false, |w| w.table[1] = -1), "block -1");
    refused(forward(&l, &l, false, |w| w.table[1] = 99), "block 99");
    // Blocks before the window are not read, so they may be gone.
    let windowed = Layer { window: Some(4), ..l };
    assert!(forward(&windowed, &windowed, true, |w| w.table[0] = -1).is_ok());
}

#[test]
fn steps_over_the_limits_are_refused() {
    let (l, cx) = (Layer::plain(1, 1, 8), cx());
    let reqs = vec![Req::new(1, 1); 65];
    let w = World::new(&l, &reqs, 0, 0, &mut Rng::new(1));
    assert!(builder(&cx, &l, false).build(&cx, &w.common()).is_err());
}

#[test]
fn plans_are_recycled_once_their_metadata_is_gone() {
    let (l, cx) = (Layer::plain(4, 2, 16), cx());
    let mut b = builder(&cx, &l, false);
    for len in [600, 33, 90] {
        let w = World::new(&l, &[Req::new(len, 1), Req::new(40, 40)], 0, 0, &mut Rng::new(1));
        let metadata = b.build(&cx, &w.common()).unwrap();
        assert_eq!((metadata.plan().rows(), b.reallocs()), (41, 0));
    }
    let w = World::new(&l, &[Req::new(9, 1)], 0, 0, &mut Rng::new(1));
    let alive = b.build(&cx, &w.common()).unwrap();
    let next = b.build(&cx, &w.common()).unwrap();
    assert_eq!((b.reallocs(), alive.plan() == next.plan()), (1, true));
}

#[test]
fn a_block_table_can_be_swapped() {
    let (l, cx) = (Layer::plain(4, 2, 16), cx());
    let (mut a, mut b) = (builder(&cx, &l, false), builder(&cx, &l, false));
    let w = World::new(&l, &[Req::new(40, 3)], 0, 0, &mut Rng::new(1));
    let first = a.build(&cx, &w.common()).unwrap();
    let mut common = w.common();
    assert!(b.update_block_table(&cx, &first, &common).is_ok());
    common.block_table = Dual::from_vec(vec![5; w.table.len() - 1]);
    assert!(b.update_block_table(&cx, &first, &common).is_err());
    let mut other = builder(&cx, &Layer::plain(2, 2, 16), false);
    assert!(other.update_block_table(&cx, &first, &w.common()).is_err());
}

#[test]
fn layers_out_of_the_rule_book_are_refused() {
    let sinks = View::from_vec(vec![0.0; 3]);
    let good = AttentionArgs {
        layer: AttnLayer(0),
        num_heads: 4,
        num_kv_heads: 2,
        head_size: 16,
        head_size_v: 16,
        scale: 0.25,
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: DType::F32,
        kv_cache_dtype: DType::F32,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    let new = |args: AttentionArgs<'_>| CpuAttnLayer::new(&args, &CpuAttnConfig::default()).map(|_| ());
    assert!(new(good.clone()).is_ok());
    refused(new(AttentionArgs { num_kv_heads: 3, ..good.clone() }), "heads");
    refused(new(AttentionArgs { head_size: 12, ..good.clone() }), "multiples of 8");
    refused(new(AttentionArgs { head_size_v: 520, ..good.clone() }), "520");
    refused(new(AttentionArgs { kv_cache_dtype: DType::I32, ..good.clone() }), "int32");
    refused(new(AttentionArgs { dtype: DType::F8E4M3, ..good.clone() }), "activations");
    refused(new(AttentionArgs { sliding_window: Some(0), ..good.clone() }), "window");
    refused(new(AttentionArgs { logit_soft_cap: Some(0.0), ..good.clone() }), "soft cap");
    refused(new(AttentionArgs { k_scale: f32::NAN, ..good.clone() }), "k_scale");
    refused(new(AttentionArgs { scale: f32::INFINITY, ..good.clone() }), "scale");
    refused(new(AttentionArgs { sinks: Some(&sinks), ..good }), "sinks");
}
