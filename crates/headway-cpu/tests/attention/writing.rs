//! `update_kv_cache`: where each element lands, what is skipped, and that nothing is written on error.

use super::{
    act::Act,
    layer::Layer,
    run::{Cache, exec},
};
use half::{bf16, f16};
use headway_attention::{AttentionImpl, Qkv, Result};
use headway_cpu::Isa;
use headway_tensor::{
    DType, View,
    fp8::{e4m3_to_f32, e5m2_to_f32},
};
use headway_testkit::{Rng, reference::round::through_cache};

const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];

fn read(dtype: DType, bytes: &[u8]) -> f32 {
    match dtype {
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DType::F8E4M3 => e4m3_to_f32(bytes[0]),
        DType::F8E5M2 => e5m2_to_f32(bytes[0]),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

fn write(l: &Layer, cache: &mut Cache, k: &Act, v: &Act, slots: Vec<i64>, rows: usize) -> Result<()> {
    let q = Act::of(l.dtype, std::iter::repeat_n(0.0, rows * l.heads * l.size));
    let x = Qkv {
        q: q.view(&[rows, l.heads, l.size]),
        k: k.view(&[rows, l.kv_heads, l.size]),
        v: v.view(&[rows, l.kv_heads, l.size_v]),
    };
    l.kernel().update_kv_cache(&exec(Isa::of_machine(), 2), &x, &mut cache.view(l), &View::from_vec(slots))
}

/// The key (or value) element at its documented place in the page.
fn at(l: &Layer, cache: &Cache, slot: usize, head: usize, value: bool, d: usize) -> f32 {
    let (b, t) = (slot / l.block_size, slot % l.block_size);
    let tile = head * l.block_size * (l.size + l.size_v);
    let u = if l.cache == DType::BF16 { 2 } else { 1 };
    let element = match value {
        false => tile + ((t / 16 * l.size / u + d / u) * 16 + t % 16) * u + d % u,
        true => tile + l.block_size * l.size + (t / u * l.size_v + d) * u + t % u,
    };
    read(l.cache, &cache.page(b)[element * l.cache.size()..])
}

#[test]
fn every_element_lands_in_its_place() {
    let mut rng = Rng::new(5);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for cache_dtype in DTYPES {
            let l = Layer {
                dtype,
                cache: cache_dtype,
                size_v: 24,
                block_size: 32,
                scales: (0.5, 0.25),
                ..Layer::plain(4, 2, 16)
            };
            let mut slots: Vec<i64> = (0..96).collect();
            rng.shuffle(&mut slots);
            slots.truncate(40);
            slots[7] = -1;
            let mut act = |n: usize| Act::of(dtype, (0..n).map(|_| rng.normal() as f32 * 300.0));
            let (k, v) = (act(41 * 2 * 16), act(41 * 2 * 24));
            let mut cache = Cache::new(&l, 3, 0xaa);
            write(&l, &mut cache, &k, &v, slots.clone(), 41).unwrap();
            let (k, v) = (k.f64(), v.f64());
            for (token, slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
                for head in 0..2 {
                    for d in 0..24 {
                        let want = through_cache(cache_dtype, 0.25, v[(token * 2 + head) * 24 + d] as f32);
                        let got = at(&l, &cache, *slot as usize, head, true, d);
                        let scale = if cache_dtype.size() == 1 { 0.25 } else { 1.0 };
                        assert_eq!(f64::from(got * scale), want, "{dtype} {cache_dtype}");
                    }
                    for d in 0..16 {
                        let want = through_cache(cache_dtype, 0.5, k[(token * 2 + head) * 16 + d] as f32);
                        let got = at(&l, &cache, *slot as usize, head, false, d);
                        let scale = if cache_dtype.size() == 1 { 0.5 } else { 1.0 };
                        assert_eq!(f64::from(got * scale), want, "{dtype} {cache_dtype}");
                    }
                }
            }
            let page = l.spec().unpadded_page_size_bytes();
            let written = 39 * page / 32;
            let untouched = (0..3).flat_map(|b| cache.page(b)).filter(|x| **x == 0xaa).count();
            assert!(untouched >= 3 * page - written, "other slots were written");
            assert!(cache.gaps_intact(0xaa));
        }
    }
}

#[test]
fn a_slot_outside_the_cache_writes_nothing() {
    let l = Layer::plain(2, 1, 8);
    for bad in [48, -2, i64::MAX, i64::MIN] {
        let mut cache = Cache::new(&l, 3, 0);
        let one = || Act::of(DType::F32, std::iter::repeat_n(1.0, 3 * 8));
        let e = write(&l, &mut cache, &one(), &one(), vec![0, 1, bad], 3).unwrap_err();
        assert!(e.to_string().contains(&bad.to_string()), "{e}");
        assert!(cache.bytes().iter().all(|b| *b == 0));
    }
}

#[test]
fn the_last_of_two_tokens_stays_and_nan_is_kept() {
    let l = Layer { cache: DType::F8E4M3, ..Layer::plain(1, 1, 8) };
    let mut cache = Cache::new(&l, 1, 0);
    let x = Act::of(DType::F32, (0..16).map(|i| if i == 9 { f32::NAN } else { i as f32 * 100.0 }));
    write(&l, &mut cache, &x, &x, vec![4, 4], 2).unwrap();
    assert_eq!(at(&l, &cache, 4, 0, false, 0), 448.0);
    assert!(at(&l, &cache, 4, 0, true, 1).is_nan());
}

#[test]
fn a_layer_that_shares_a_cache_must_not_write() {
    let l = Layer::plain(1, 1, 8);
    let mut cache = Cache::new(&l, 1, 0);
    let x = Act::of(DType::F32, std::iter::repeat_n(1.0, 8));
    let view = x.view(&[1, 1, 8]);
    let mut kv = cache.view(&l);
    kv.shared = true;
    let slots = View::from_vec(vec![0]);
    let qkv = Qkv { q: view, k: view, v: view };
    assert!(l.kernel().update_kv_cache(&exec(Isa::Portable, 1), &qkv, &mut kv, &slots).is_err());
    assert!(cache.bytes().iter().all(|b| *b == 0));
}
