//! Results within tolerance of the float64 reference, whatever lies in slots that no row sees.

use super::{
    layer::Layer,
    run::{exec, step},
    world::{Req, World},
};
use headway_cpu::Isa;
use headway_tensor::DType;
use headway_testkit::{Rng, Tolerance};
use proptest::prelude::*;

/// The reference has the cache's rounding, so only the sums and the output's own rounding differ.
fn tolerance(dtype: DType) -> Tolerance {
    match dtype {
        DType::BF16 => Tolerance { abs: 1e-3, rel: 5e-3, cosine: 0.9999 },
        DType::F16 => Tolerance { abs: 2e-4, rel: 1e-3, cosine: 0.99999 },
        _ => Tolerance { abs: 1e-5, rel: 1e-5, cosine: 0.9999999 },
    }
}

/// Runs a batch at every level, alone and with three threads; clean and poisoned caches must agree.
pub fn check(l: &Layer, reqs: &[Req], shared: usize, padding: usize, seed: u64) -> Result<(), String> {
    check_world(l, &World::new(l, reqs, shared, padding, &mut Rng::new(seed)), &format!("{reqs:?}"))
}

/// As [`check`], for a batch that is there already.
pub fn check_world(l: &Layer, w: &World, reqs: &str) -> Result<(), String> {
    let want = l.reference(w);
    let live = w.rows() * l.heads * l.size_v;
    for &isa in Isa::available() {
        for (threads, windowed) in [(1, true), (3, false)] {
            let cx = exec(isa, threads);
            let clean = step(&cx, l, w, 0, windowed);
            let poisoned = step(&cx, l, w, 0xff, windowed);
            let at = |what: String| format!("{what} ({isa}, {threads} threads, {l:?}, {reqs})");
            if clean.out.bits() != poisoned.out.bits() {
                return Err(at("poison shows".into()));
            }
            let got = clean.out.f64();
            if got[live..].iter().any(|x| *x != 0.0) {
                return Err(at("padding is not zero".into()));
            }
            if threads == 1 && clean.parts.1 > 0 {
                return Err(at("split on one thread".into()));
            }
            let mut t = tolerance(l.dtype);
            if isa == Isa::Amx && l.dtype == DType::BF16 && l.cache == DType::BF16 {
                // In tiles each weight is rounded to bfloat16, half a unit of which is 2^-9.
                t.abs = 4e-3;
            }
            t.compare(&got[..live], &want.out).map_err(|e| at(e.to_string()))?;
            let lse: Vec<f64> = clean.lse.iter().map(|x| f64::from(*x)).collect();
            let t = Tolerance { abs: 3e-5, rel: 1e-5, cosine: -1.0 };
            t.compare(&lse, &want.lse).map_err(|e| at(format!("log-sum-exp: {e}")))?;
        }
    }
    Ok(())
}

#[track_caller]
fn passes(l: &Layer, reqs: &[Req], shared: usize, padding: usize) {
    if let Err(e) = check(l, reqs, shared, padding, 1) {
        panic!("{e}");
    }
}

const NONE: [Req; 0] = [];

#[test]
fn decode_prefill_and_mixed() {
    let l = Layer::plain(4, 2, 64);
    passes(&l, &[Req::new(100, 1)], 0, 0);
    passes(&l, &[Req::new(100, 100)], 0, 0);
    let mixed = [Req::new(33, 1), Req::new(0, 0), Req::new(300, 70), Req::new(64, 64), Req::new(1, 1)];
    passes(&Layer::plain(6, 2, 40), &mixed, 0, 3);
    passes(&l, &NONE, 0, 4);
}

#[test]
fn lengths_at_block_and_chunk_ends() {
    for block_size in [16, 32, 64, 128] {
        let l = Layer { block_size, ..Layer::plain(4, 1, 16) };
        let reqs = [15, 16, 17, 128, 255, 256, 257, 512, 513].map(|len| Req::new(len, 1));
        passes(&l, &reqs, 0, 0);
        let reqs = [16, 64, 256].map(|len| Req::new(len, len));
        passes(&l, &reqs, 0, 1);
    }
}

#[test]
fn many_heads_on_one_key() {
    // More query heads than a pass has rows, in every path: few rows, many rows, split.
    passes(&Layer::plain(100, 1, 16), &[Req::new(600, 1), Req::new(20, 3)], 0, 0);
    passes(&Layer::plain(26, 1, 512), &[Req::new(530, 2)], 0, 0);
}

#[test]
fn rows_without_a_key_are_zero() {
    // Three rows, but only one token is there: rows 0 and 1 stand before the first key.
    let l = Layer { sinks: true, ..Layer::plain(2, 1, 8) };
    for l in [l, Layer::plain(2, 1, 8)] {
        let mut w = World::new(&l, &[Req::new(3, 3)], 0, 0, &mut Rng::new(1));
        w.seq_lens = vec![1];
        let want = l.reference(&w);
        let got = step(&exec(Isa::of_machine(), 1), &l, &w, 0, false);
        assert!(got.out.f64()[..2 * 2 * 8].iter().all(|x| *x == 0.0));
        let lse: Vec<f64> = got.lse.iter().map(|x| f64::from(*x)).collect();
        let t = Tolerance { abs: 1e-5, rel: 1e-5, cosine: -1.0 };
        t.compare(&lse, &want.lse).unwrap();
        tolerance(DType::F32).compare(&got.out.f64(), &want.out).unwrap();
    }
}

#[test]
fn large_scores_stay_finite() {
    for cap in [None, Some(30.0)] {
        let l = Layer { cap, ..Layer::plain(2, 2, 64) };
        let mut w = World::new(&l, &[Req::new(300, 40)], 0, 0, &mut Rng::new(3));
        if let super::act::Act::F32(q) = &mut w.q {
            q.iter_mut().for_each(|x| *x *= 1e4);
        }
        let got = step(&exec(Isa::of_machine(), 2), &l, &w, 0, false).out.f64();
        assert!(got.iter().all(|x| x.is_finite()));
        let t = Tolerance { abs: 2e-2, rel: 1e-2, cosine: 0.9999 };
        t.compare(&got, &l.reference(&w).out).unwrap();
    }
}

pub fn layers() -> impl Strategy<Value = Layer> {
    let heads = prop::sample::select(vec![(4, 1), (4, 2), (4, 4), (12, 3), (1, 1), (7, 1), (14, 2), (9, 3)]);
    let size = || prop::sample::select(vec![8, 16, 24, 40, 64, 72, 80, 96, 128, 136, 256]);
    let dtype = prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]);
    let caches = vec![DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];
    let cache = prop::sample::select(caches);
    let block = prop::sample::select(vec![16, 16, 32, 64, 128]);
    let window = prop::option::of(prop::sample::select(vec![1, 5, 16, 17, 100, 300]));
    let cap = prop::option::of(prop::sample::select(vec![2.0, 30.0]));
    let scales = prop::sample::select(vec![(1.0, 1.0), (0.5, 2.0), (0.037, 0.021)]);
    (heads, size(), prop::option::of(size()), (dtype, cache, block), window, cap, any::<[bool; 2]>(), scales)
        .prop_map(|(heads, size, size_v, types, window, cap, [alibi, sinks], scales)| Layer {
            heads: heads.0,
            kv_heads: heads.1,
            size,
            size_v: size_v.unwrap_or(size),
            dtype: types.0,
            cache: types.1,
            block_size: types.2,
            window,
            rswa: None,
            cap,
            alibi,
            sinks,
            scales,
        })
}

fn requests() -> impl Strategy<Value = Vec<Req>> {
    let lens = (0usize..330, 1usize..60);
    let request = prop_oneof![
        Just((0, 0)),
        Just((1, 1)),
        (1usize..20).prop_map(|n| (n * 16, 1)),
        (1usize..700).prop_map(|n| (n, 1)),
        (1usize..90).prop_map(|n| (n, n)),
        lens.prop_map(|(context, new)| (context + new, new)),
    ];
    let request = (request, prop::bool::weighted(0.8), 0u64..1 << 40)
        .prop_map(|((len, new), causal, seed)| Req { len, new, causal, seed });
    prop::collection::vec(request, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_batches(
        l in layers(),
        reqs in requests(),
        shared in 0usize..3,
        padding in 0usize..4,
        seed in any::<u64>(),
    ) {
        prop_assert_eq!(check(&l, &reqs, shared, padding, seed), Ok(()));
    }
}
