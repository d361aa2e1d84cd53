//! `CPU_ATTN` against the float64 reference, at every level that this machine has.

mod world;

use headway_cpu::Isa;
use headway_tensor::DType;
use headway_testkit::{Rng, Tolerance};
use world::{Layer, Req, World, exec, step};

/// The tolerance for outputs of this type: the reference has the cache's rounding, so only the sums
/// and the output's own rounding differ.
fn tolerance(l: &Layer) -> Tolerance {
    match l.dtype {
        DType::BF16 => Tolerance { abs: 1e-3, rel: 5e-3, cosine: 0.9999 },
        DType::F16 => Tolerance { abs: 2e-4, rel: 1e-3, cosine: 0.99999 },
        _ => Tolerance { abs: 1e-5, rel: 1e-5, cosine: 0.9999999 },
    }
}

/// Runs a batch at every level with some numbers of threads; clean and poisoned caches must agree.
fn check(l: &Layer, reqs: &[Req], shared: usize, padding: usize, seed: u64) {
    let w = World::new(l, reqs, shared, padding, &mut Rng::new(seed));
    let want = l.reference(&w);
    for &isa in Isa::available() {
        for threads in [1, 3] {
            let cx = exec(isa, threads);
            let clean = step(&cx, l, &w, 0, threads == 1);
            let poisoned = step(&cx, l, &w, 0xff, threads == 1);
            assert_eq!(clean.out.bits(), poisoned.out.bits(), "poison shows ({isa}, {l:?}, {reqs:?})");
            assert!(clean.parts.0 > 0 && (threads > 1 || clean.parts.1 == 0));
            let live = w.rows() * l.heads * l.size_v;
            let got = clean.out.f64();
            assert!(got[live..].iter().all(|x| *x == 0.0), "padding is not zero");
            let t = tolerance(l);
            if let Err(e) = t.compare(&got[..live], &want.out) {
                panic!("{e} ({isa}, {threads} threads, {l:?}, {reqs:?})");
            }
            let lse: Vec<f64> = clean.lse.iter().map(|x| f64::from(*x)).collect();
            let t = Tolerance { abs: 2e-5, rel: 1e-5, cosine: -1.0 };
            if let Err(e) = t.compare(&lse, &want.lse) {
                panic!("log-sum-exp: {e} ({isa}, {l:?}, {reqs:?})");
            }
        }
    }
}

#[test]
fn one_decode() {
    check(&Layer::plain(4, 2, 64), &[Req::new(100, 1)], 0, 0, 1);
}

#[test]
fn one_prefill() {
    check(&Layer::plain(4, 2, 64), &[Req::new(100, 100)], 0, 0, 2);
}

#[test]
fn mixed_batch() {
    let reqs = [Req::new(33, 1), Req::new(0, 0), Req::new(300, 70), Req::new(64, 64), Req::new(1, 1)];
    check(&Layer::plain(6, 2, 40), &reqs, 0, 3, 3);
}
