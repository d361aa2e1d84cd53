//! Wrong sizes, options and batches: errors that say what to change.

use super::world::{Shape, Turn, World, builder, layer};
use headway_attention::{
    AttentionBackend, GroupInfo, KvCacheSpec, LayerNeed, MambaSpec, Registry,
    group::kv::spec::MambaCacheMode,
    process::{
        rules::StateSpaceMixer,
        select::{BackendRequest, select},
    },
};
use headway_cpu::{CpuExec, CpuOptions, Mamba2Attn, register};
use headway_tensor::DType;

fn group(spec: MambaSpec) -> GroupInfo {
    GroupInfo { spec: KvCacheSpec::Mamba(spec), ..Shape::small().group() }
}

#[test]
fn groups_that_the_builder_can_not_serve() {
    let cx = CpuExec::new(CpuOptions::default()).unwrap();
    let spec = Shape::small().spec();
    let says = |spec: MambaSpec, words: &[&str]| {
        let e = builder(&cx, &group(spec)).unwrap_err().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    says(MambaSpec { cache_mode: MambaCacheMode::Align, ..spec.clone() }, &["prefix caching", "off"]);
    says(MambaSpec { cache_mode: MambaCacheMode::All, ..spec.clone() }, &["prefix caching"]);
    says(MambaSpec { num_speculative_blocks: 2, ..spec.clone() }, &["--speculative-tokens"]);
    says(MambaSpec { chunk_size: None, ..spec.clone() }, &["chunk_size", "config.json"]);
    says(
        MambaSpec { dtypes: vec![DType::F32, DType::U8], ..spec.clone() },
        &["float32, bfloat16 and float16"],
    );
    says(MambaSpec { shapes: vec![vec![3, 7], vec![6, 20, 24]], ..spec.clone() }, &["[3, 7]", "conv_dim"]);
    says(
        MambaSpec { shapes: vec![vec![40, 216], vec![6, 20, 24]], ..spec.clone() },
        &["width 41", "2 to 16"],
    );
    // 6 heads in 4 groups.
    says(
        MambaSpec { shapes: vec![vec![3, 120 + 8 * 24], vec![6, 20, 24]], ..spec.clone() },
        &["4 groups", "divide"],
    );
    let half = MambaSpec { dtypes: vec![DType::BF16, DType::F32], ..spec };
    let e = builder(&cx, &GroupInfo { batch_invariant: true, ..group(half) }).unwrap_err().to_string();
    assert!(e.contains("--batch-invariant") && e.contains("float32"), "{e}");
}

#[test]
fn numbers_of_a_layer() {
    let cx = CpuExec::new(CpuOptions::default()).unwrap();
    let good = Shape::small().params(1);
    let says = |p, words: &[&str]| {
        let e = layer(&p, &cx).err().unwrap().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    let mut p = good.clone();
    p.a[2] = 1.5;
    says(p, &["1.5", "A_log"]);
    let mut p = good.clone();
    p.dt_limit = (2.0, 1.0);
    says(p, &["time_step_limit from 2 to 1"]);
    let mut p = good;
    p.d.pop();
    says(p, &["D", "[6]"]);
    says(Shape { groups: 4, ..Shape::small() }.params(1), &["groups must divide the heads"]);
}

#[test]
fn needs_that_selection_refuses() {
    let mut registry = Registry::default();
    register(&mut registry).unwrap();
    let need = LayerNeed {
        kind: Mamba2Attn::rules().kind,
        dtype: DType::F32,
        state_space: Some(StateSpaceMixer::Mamba2),
        ..LayerNeed::default()
    };
    let ask = |need: &LayerNeed| select(&registry, "layer 0", need, &BackendRequest::default());
    assert_eq!(ask(&need).unwrap().backend.rules().name, "MAMBA2_ATTN");
    let e = ask(&LayerNeed { num_speculative_tokens: 2, ..need.clone() }).err().unwrap().to_string();
    assert!(e.contains("--speculative-tokens"), "{e}");
    let e = ask(&LayerNeed { state_space: Some(StateSpaceMixer::Gdn), ..need.clone() }).err().unwrap();
    assert!(e.to_string().contains("gdn mixers not supported"), "{e}");
    let e = ask(&LayerNeed { dtype: DType::BF16, ..need }).err().unwrap().to_string();
    assert!(e.contains("dtype not supported"), "{e}");
}

#[test]
fn batches_that_contradict_themselves() {
    let mut w = World::new(Shape::small(), CpuOptions::default());
    let turn = |seed, block| Turn { seed, done: 0, new: 4, block, prefilling: true };
    let mut says = |turns: &[Turn], words: &str| {
        let e = w.run(turns, 0).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    };
    says(&[turn(1, 3), turn(2, 3)], "two requests have block 3");
    says(&[turn(1, 0)], "no block for its state");
    says(&[turn(1, 99)], "block 99; the cache has 12");
    says(&[Turn { new: 2000, ..turn(1, 1) }], "2000 new tokens; the group was built for");
    let many: Vec<Turn> = (0..20).map(|i| turn(i, i as i32 + 1)).collect();
    says(&many, "20 requests");
}
