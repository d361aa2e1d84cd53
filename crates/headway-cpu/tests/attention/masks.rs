//! Masks beyond causality and windows: spans that see each other both ways, R-SWA prefixes, and both beside
//! non-causal requests, against the float64 reference; and that a row's bits depend on its request alone.
#![expect(clippy::single_range_in_vec_init, reason = "a request with one span")]

use super::{
    act::Act,
    against_reference::{check_world, layers},
    layer::Layer,
    run::{builder, exec, step, written},
    world::{Req, World},
};
use headway_attention::{
    AttentionImpl, CommonAttentionMetadata, MetadataBuilder, Qkv, step::fast_prefill::FastPrefill,
};
use headway_cpu::Isa;
use headway_tensor::{DType, View};
use headway_testkit::Rng;
use proptest::prelude::*;
use std::{ops::Range, sync::Arc};

/// Ranges within `len` tokens that no end of the computed tokens cuts: some inside the context, some among the new.
fn spans(len: usize, new: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let mut spans = vec![];
    for part in [0..len - new, len - new..len] {
        let mut at = part.start;
        while at < part.end && rng.chance(0.8) {
            let start = at + rng.below((part.end - at).min(90));
            let end = (start + rng.between(1, 150)).min(part.end);
            spans.push(start..end);
            at = end;
        }
    }
    spans
}

fn world(l: &Layer, reqs: &[Req], seed: u64) -> World {
    let mut rng = Rng::new(seed);
    let mut w = World::new(l, reqs, 0, 2, &mut rng);
    w.spans = reqs.iter().map(|r| spans(r.len, r.new, &mut rng)).collect();
    // Prompts that end before, in and after the computed tokens; some requests have none.
    w.prefixes = reqs.iter().map(|r| if rng.chance(0.2) { 0 } else { rng.below(r.len + 20) }).collect();
    w
}

#[track_caller]
fn passes(l: &Layer, reqs: &[Req], spans: &[Vec<Range<usize>>], prefixes: &[usize]) {
    let mut w = World::new(l, reqs, 0, 1, &mut Rng::new(1));
    (w.spans, w.prefixes) = (spans.to_vec(), prefixes.to_vec());
    if let Err(e) = check_world(l, &w, &format!("{reqs:?} {spans:?} {prefixes:?}")) {
        panic!("{e}");
    }
}

#[test]
fn images_in_a_prompt() {
    for window in [None, Some(1), Some(20), Some(300)] {
        let l = Layer { window, ..Layer::plain(4, 2, 64) };
        // At the beginning, side by side, over a tile's and a chunk's end, at the end; one token; the whole prompt.
        passes(&l, &[Req::new(400, 400)], &[vec![0..10, 10..50, 60..70, 200..300, 399..400]], &[]);
        passes(&l, &[Req::new(70, 70), Req::new(33, 1)], &[vec![0..70], vec![]], &[]);
        // In a later chunk of the prompt, one of an earlier chunk behind it, one far ahead.
        passes(&l, &[Req::new(300, 120)], &[vec![20..180, 190..250]], &[]);
    }
}

#[test]
fn r_swa_with_the_prompt_near_and_far() {
    for rswa in [1, 16, 100] {
        let l = Layer { rswa: Some(rswa), ..Layer::plain(4, 2, 64) };
        // No gap yet; a gap within a tile, over tiles, over chunks; a prompt of whole tiles and chunks; no prompt.
        for prefix in [0, 1, 63, 64, 65, 250, 256, 300, 690, 700, 900] {
            passes(&l, &[Req::new(700, 1), Req::new(700, 40)], &[], &[prefix, prefix]);
        }
        passes(&l, &[Req::new(90, 90), Req::new(300, 1), Req::new(0, 0)], &[], &[60, 300, 0]);
    }
}

#[test]
fn images_in_the_prompt_of_r_swa() {
    let l = Layer { rswa: Some(30), sinks: true, ..Layer::plain(6, 2, 40) };
    passes(&l, &[Req::new(300, 300)], &[vec![10..80, 100..150]], &[150]);
}

#[test]
fn more_query_heads_than_rows_of_a_pass() {
    for rswa in [None, Some(10)] {
        let l = Layer { rswa, ..Layer::plain(100, 1, 16) };
        passes(&l, &[Req::new(600, 1), Req::new(80, 30)], &[vec![], vec![55..75]], &[500, 40]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_masks(
        l in layers(),
        rswa in prop::option::of(prop::sample::select(vec![1, 7, 64, 200])),
        reqs in prop::collection::vec((0usize..330, 1usize..120, prop::bool::weighted(0.8), 0u64..1 << 40), 1..5),
        seed in any::<u64>(),
    ) {
        let l = Layer { window: if rswa.is_some() { None } else { l.window }, rswa, ..l };
        let reqs: Vec<_> = reqs
            .into_iter()
            .map(|(context, new, causal, seed)| Req { len: context + new, new, causal, seed })
            .collect();
        let w = world(&l, &reqs, seed);
        let what = format!("{reqs:?} {:?} {:?}", w.spans, w.prefixes);
        prop_assert_eq!(check_world(&l, &w, &what), Ok(()));
    }
}

/// The prompt's rows bit by bit: whole, in chunks that end where no span does not, in any company.
#[test]
fn a_row_is_the_same_in_any_company() {
    let mut splits = 0;
    for (round, &isa) in Isa::available().iter().cycle().take(10 * Isa::available().len()).enumerate() {
        let mut rng = Rng::new(round as u64);
        let (heads, kv_heads) = [(4, 2), (9, 3), (8, 1), (2, 2)][rng.below(4)];
        let rswa = [None, Some(40), Some(200)][rng.below(3)];
        let l = Layer {
            cache: [DType::F32, DType::BF16, DType::F16, DType::F8E4M3][rng.below(4)],
            block_size: [16, 32, 64][rng.below(3)],
            window: if rswa.is_none() { [None, Some(50)][rng.below(2)] } else { None },
            rswa,
            ..Layer::plain(heads, kv_heads, [16, 64][rng.below(2)])
        };
        let len = rng.between(300, 900);
        let prefix = rng.between(1, len);
        let ranges = spans(len, 0, &mut rng);
        let whole = Req { seed: round as u64, ..Req::new(len, len) };
        let mut rows = |threads: usize, reqs: &[Req], index: usize, rng: &mut Rng| {
            let mut w = world(&l, reqs, rng.next_u64());
            w.spans[index] = ranges.clone();
            w.prefixes[index] = prefix;
            let done = step(&exec(isa, threads), &l, &w, 0xff, rng.chance(0.5));
            splits += done.parts.1;
            let (bits, width) = (done.out.bits(), l.heads * l.size_v);
            let own = w.query_start_loc[index] as usize..w.query_start_loc[index + 1] as usize;
            own.map(|r| bits[r * width..(r + 1) * width].to_vec()).collect::<Vec<_>>()
        };
        let want = rows(1, &[whole], 0, &mut rng);
        let outside = |at: usize| ranges.iter().find(|r| r.start < at && at < r.end).map_or(at, |r| r.end);
        for _ in 0..8 {
            let upto = outside(rng.between(1, len));
            let new = upto - outside(upto - if rng.chance(0.5) { 1 } else { rng.between(1, upto) });
            let mut reqs = Req::company(&mut rng);
            let index = rng.below(reqs.len() + 1);
            reqs.insert(index, Req { len: upto, new, ..whole });
            let got = rows(rng.between(1, 5), &reqs, index, &mut rng);
            assert!(
                got[..] == want[upto - new..upto],
                "{isa} {l:?} {upto} {new} {prefix} {ranges:?} {reqs:?}"
            );
        }
    }
    assert!(splits > 10, "only {splits} splits were seen: the test shows little");
}

#[test]
fn what_is_skipped_costs_nothing() {
    let cx = exec(Isa::of_machine(), 4);
    let items = |l: &Layer, len: usize, prefixes: &[usize]| {
        let mut w = World::new(l, &[Req::new(len, 1)], 0, 0, &mut Rng::new(1));
        w.prefixes = prefixes.to_vec();
        builder(&cx, l, true).build(&cx, &w.common()).unwrap().plan().num_items()
    };
    // Of 4000 tokens the row sees 100 and 64: no more work than for as many.
    let l = Layer::plain(8, 2, 64);
    assert_eq!(items(&Layer { rswa: Some(64), ..l.clone() }, 4000, &[100]), items(&l, 164, &[]));
    assert!(items(&l, 4000, &[]) > 8);
}

#[test]
fn bad_ranges_and_missing_prefixes_are_refused() {
    let cx = exec(Isa::of_machine(), 1);
    let l = Layer::plain(2, 1, 16);
    let refused = |l: &Layer, spans: Vec<Vec<Range<usize>>>, prefixes: Vec<usize>| {
        let mut w = World::new(l, &[Req::new(40, 20)], 0, 0, &mut Rng::new(1));
        (w.spans, w.prefixes) = (spans, prefixes);
        builder(&cx, l, true).build(&cx, &w.common()).map(|_| ()).unwrap_err().to_string()
    };
    let span = |s: Range<usize>| vec![vec![s]];
    assert!(refused(&l, span(30..41), vec![]).contains("30..41 of request 0 ends after the 40 tokens"));
    assert!(
        refused(&l, vec![vec![25..30, 29..35]], vec![]).contains("29..35 of request 0 is empty, descending")
    );
    assert!(refused(&l, span(30..30), vec![]).contains("30..30"));
    #[expect(clippy::reversed_empty_ranges, reason = "a descending range is what is refused")]
    let descending = refused(&l, span(30..25), vec![]);
    assert!(descending.contains("30..25"));
    assert!(refused(&l, vec![vec![]; 2], vec![]).contains("2 requests for a step of 1"));
    let rswa = Layer { rswa: Some(8), ..l };
    assert!(refused(&rswa, vec![], vec![]).contains("rswa_prefix_lens"));
}

/// Of a step whose prompts end, go on, decode and draft, the rows with logits, padded: bit by bit those of the whole.
#[test]
fn fast_prefill_gives_the_rows_of_the_whole_step() {
    let cx = exec(Isa::of_machine(), 2);
    let plain = Layer::plain(4, 2, 64);
    for l in [Layer { rswa: Some(20), ..plain.clone() }, Layer { window: Some(30), ..plain.clone() }, plain] {
        let reqs = [Req::new(100, 60), Req::new(40, 1), Req::new(300, 20), Req::new(333, 3)];
        let mut w = World::new(&l, &reqs, 0, 0, &mut Rng::new(5));
        w.spans = vec![vec![80..100], vec![], vec![290..300], vec![]];
        w.prefixes = vec![100, 10, 400, 200];
        let whole = step(&cx, &l, &w, 0, true).out.bits();
        let (wanted, live) = ([59, 60, 81, 82, 83, 83, 83, 83], 5);
        let mut common: CommonAttentionMetadata = w.common();
        Arc::get_mut(&mut common.inputs).unwrap().logits_indices = Some(View::from_vec(wanted.to_vec()));
        let group = FastPrefill::new(&cx, 4, 8).unwrap().batch(&cx, &common, live).unwrap();
        let metadata = builder(&cx, &l, true).build(&cx, &group).unwrap();
        assert_eq!(metadata.plan().rows(), live);
        let (q_width, width) = (l.heads * l.size, l.heads * l.size_v);
        let all: Vec<f64> = w.q.f64();
        let q = wanted.iter().flat_map(|&r| all[r as usize * q_width..][..q_width].iter().map(|x| *x as f32));
        let (q, mut out) = (Act::of(l.dtype, q), Act::of(l.dtype, std::iter::repeat_n(f32::NAN, 8 * width)));
        let x = Qkv {
            q: q.view(&[8, l.heads, l.size]),
            k: w.k.view(&[w.slots.len(), l.kv_heads, l.size]),
            v: w.v.view(&[w.slots.len(), l.kv_heads, l.size_v]),
        };
        let mut cache = written(&cx, &l, &w, 0xff);
        let rows = out.view_mut(&[8, l.heads, l.size_v]);
        l.kernel().forward(&cx, &x, &mut cache.view(&l), &metadata, rows).unwrap();
        let got = out.bits();
        for (i, &row) in wanted[..live].iter().enumerate() {
            let want = &whole[row as usize * width..][..width];
            assert!(got[i * width..][..width] == *want, "row {row}: {l:?}");
        }
        assert!(got[live * width..].iter().all(|x| *x == 0), "padding is zero");
    }
}
