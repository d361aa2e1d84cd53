//! What can be seen only from inside: that a plan covers everything once and keeps to its room, and
//! that the kernel writes nothing outside its arrays.

use super::{
    plan::WHOLE,
    shape::GUARD,
    sight::{Seen, Sight},
    *,
};
use crate::pool::Pool;
use headway_tensor::{TensorMut, TensorRef};
use proptest::prelude::*;
use std::collections::HashSet;

fn request(first_row: usize, q_len: usize, seq_len: usize) -> Request {
    Request { first_row, q_len, seq_len, causal: true, prefix: 0 }
}

/// Each (row, key/value head, chunk that the row can see) is in exactly one item; slots of splits do
/// not meet and stay in the room.
fn covers_all_once(plan: &Plan, shape: &Shape, window: Option<usize>) {
    let mut seen = HashSet::new();
    for i in plan.items() {
        let r = &plan.requests()[i.request as usize];
        for token in i.q_begin..i.q_end {
            for head in i.head_begin..i.head_end {
                for chunk in i.chunk_begin..i.chunk_end {
                    assert!(seen.insert((r.first_row + token as usize, head, chunk)), "{i:?} overlaps");
                }
            }
        }
    }
    for r in plan.requests() {
        for token in 0..r.q_len {
            let Seen { low, high, .. } = Sight::new(r, window, &[]).of(token);
            for chunk in low / CHUNK..high.div_ceil(CHUNK) {
                for head in 0..shape.num_kv_heads as u32 {
                    assert!(
                        seen.contains(&(r.first_row + token, head, chunk as u32)),
                        "{r:?} {token} {chunk}"
                    );
                }
            }
        }
    }
    let mut end = 0;
    for (i, s) in plan.splits().iter().enumerate() {
        assert_eq!(s.first_slot, end);
        end += s.rows * (s.chunk_end - s.chunk_begin) as usize;
        let parts = plan.items().iter().filter(|x| x.split == i as u32);
        assert_eq!(parts.count(), s.parts as usize);
    }
    assert!(end <= shape.slot_rows && plan.splits().len() <= shape.max_splits());
    assert!(plan.items().iter().all(|i| i.split == WHOLE || (i.split as usize) < plan.splits().len()));
}

proptest! {
    #[test]
    fn plans_cover_every_row_once_without_growing(
        lens in prop::collection::vec((0usize..300, 0usize..5000), 1..20),
        (heads, group) in prop::sample::select(vec![(1, 1), (8, 4), (3, 3), (2, 40), (1, 128)]),
        size in prop::sample::select(vec![8, 64, 128, 256, 512]),
        threads in 1usize..65,
        window in prop::option::of(1usize..3000),
        room in prop::sample::select(vec![0usize, 100, 1000, 100_000]),
    ) {
        let mut shape = Shape::new(heads * group, heads, size, size, 8192).unwrap();
        shape.slot_rows = shape.slot_rows.min(room);
        let tokens = lens.iter().map(|(q, _)| q).sum();
        let mut plan = Plan::with_capacity(&shape, lens.len(), tokens);
        let room = plan.capacities();
        let mut row = 0;
        let requests: Vec<_> = lens.iter().map(|&(q_len, context)| {
            let r = request(row, q_len, context + q_len);
            row += q_len;
            r
        }).collect();
        plan.build(&shape, threads, window, requests.iter().copied()).unwrap();
        covers_all_once(&plan, &shape, window);
        prop_assert_eq!(plan.capacities(), room, "a step allocated");
        prop_assert!(threads > 1 || plan.num_splits() == 0);
    }
}

#[test]
fn a_long_decode_is_split_over_threads_and_a_prefill_is_not() {
    let shape = Shape::new(8, 2, 64, 64, 4096).unwrap();
    let mut plan = Plan::with_capacity(&shape, 1, 512);
    plan.build(&shape, 4, None, [request(0, 1, 4096)].into_iter()).unwrap();
    assert!(plan.num_splits() == 1 && plan.num_items() >= 8, "{plan:?}");
    plan.build(&shape, 4, None, [request(0, 512, 512)].into_iter()).unwrap();
    assert!(plan.num_splits() == 0 && plan.num_items() > 16, "{plan:?}");
    assert!(plan.build(&shape, 4, None, [request(1, 1, 1)].into_iter()).is_err());
}

/// One call over a cache of ones, with every byte of the workspace set to a pattern before.
fn attend_over_pattern(shape: &Shape, requests: &[Request], threads: usize, isa: Isa, dtype: DType) {
    const PATTERN: u8 = 0xa5;
    let pool = Pool::new(Some(threads)).unwrap();
    let workspace = Workspace::new(shape, threads).unwrap();
    {
        let mut inner = workspace.inner.lock().unwrap();
        inner.slots.as_bytes_mut().fill(PATTERN);
        for w in &mut inner.workers {
            w.get_mut().unwrap().as_bytes_mut().fill(PATTERN);
        }
    }
    let rows = requests.iter().map(|r| r.q_len).sum::<usize>();
    let mut plan = Plan::with_capacity(shape, requests.len(), rows);
    plan.build(shape, threads, None, requests.iter().copied()).unwrap();
    let stride = requests.iter().map(|r| r.seq_len.div_ceil(16)).max().unwrap_or(1);
    let table = View::from_vec(vec![0; stride * requests.len()]);
    let batch = Batch::new(Arc::new(plan), table, stride, 16).unwrap();
    let page = 16 * shape.num_kv_heads * (shape.head_size + shape.head_size_v) * dtype.size();
    let cache = CacheLayout { offset: 0, block_stride: page, num_blocks: 1, block_size: 16, dtype };
    let bytes = vec![0x38; page];
    let q = vec![0.5f32; rows * shape.num_heads * shape.head_size];
    let mut out = vec![0f32; rows * shape.num_heads * shape.head_size_v];
    let layer = LayerNumbers {
        scale: 0.1,
        window: None,
        soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    let q = TensorRef::from_host(&q, &[rows, shape.num_heads, shape.head_size]).unwrap();
    let o = TensorMut::from_host(&mut out, &[rows, shape.num_heads, shape.head_size_v]).unwrap();
    attend((&pool, isa), &batch, &workspace, &layer, q, (&cache, &bytes), o, Lse::None).unwrap();
    assert!(out.iter().all(|x| x.is_finite()));
    let intact = |b: &[u8]| b.iter().all(|x| *x == PATTERN);
    let mut inner = workspace.inner.lock().unwrap();
    let end = shape.slot_rows * shape.slot_floats() * 4;
    assert!(intact(&inner.slots.as_bytes()[end..]), "the guard after the slots");
    for w in &mut inner.workers {
        let bytes = w.get_mut().unwrap().as_bytes();
        for (name, end) in shape.scratch().ends() {
            assert!(intact(&bytes[(end - GUARD) * 4..end * 4]), "the guard after {name}: {shape:?}");
        }
    }
    assert!(inner.arrivals.iter().all(|a| a.load(std::sync::atomic::Ordering::Relaxed) == 0));
}

#[test]
fn guards_round_the_scratch_stay_intact() {
    for (heads, kv_heads, size, size_v) in [(16, 1, 64, 72), (4, 4, 8, 8), (100, 1, 24, 40), (6, 2, 136, 512)]
    {
        // Room for exactly one decode of 1100 tokens, split.
        let shape = Shape::new(heads, kv_heads, size, size_v, 1100).unwrap();
        let requests = [request(0, 1, 1100), request(1, 70, 300), request(71, 5, 5)];
        for &isa in Isa::available() {
            for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
                for threads in [1, 2, 5] {
                    attend_over_pattern(&shape, &requests[..1], threads, isa, dtype);
                    attend_over_pattern(&shape, &requests, threads, isa, dtype);
                }
            }
        }
    }
}

#[test]
fn caches_that_do_not_fit_their_buffer_are_refused() {
    let shape = Shape::new(2, 1, 8, 8, 64).unwrap();
    let good =
        CacheLayout { offset: 0, block_stride: 1024, num_blocks: 4, block_size: 16, dtype: DType::F32 };
    assert!(good.check(&shape, 4096).is_ok());
    assert!(good.check(&shape, 4095).is_err());
    assert!(CacheLayout { block_stride: 1020, ..good }.check(&shape, 1 << 20).is_err());
    assert!(CacheLayout { block_size: 24, ..good }.check(&shape, 1 << 20).is_err());
    assert!(CacheLayout { offset: usize::MAX, ..good }.check(&shape, 1 << 20).is_err());
    assert!(CacheLayout { block_stride: usize::MAX, ..good }.check(&shape, 1 << 20).is_err());
}

#[test]
fn a_pool_with_more_threads_than_the_workspace_is_refused() {
    let shape = Shape::new(1, 1, 8, 8, 64).unwrap();
    let mut plan = Plan::default();
    plan.build(&shape, 1, None, [request(0, 1, 1)].into_iter()).unwrap();
    let batch = Batch::new(Arc::new(plan), View::from_vec(vec![0]), 1, 16).unwrap();
    let cache =
        CacheLayout { offset: 0, block_stride: 1024, num_blocks: 1, block_size: 16, dtype: DType::F32 };
    let layer = LayerNumbers {
        scale: 1.0,
        window: None,
        soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    let (q, mut out) = ([1f32; 8], [0f32; 8]);
    let mut run = |pool: &Pool, isa| {
        let q = TensorRef::from_host(&q, &[1, 1, 8])?;
        let o = TensorMut::from_host(&mut out, &[1, 1, 8])?;
        let workspace = Workspace::new(&shape, 1)?;
        attend((pool, isa), &batch, &workspace, &layer, q, (&cache, &[0; 1024]), o, Lse::None)
    };
    let (one, two) = (Pool::new(Some(1)).unwrap(), Pool::new(Some(2)).unwrap());
    assert!(run(&one, Isa::Portable).is_ok());
    assert!(run(&two, Isa::Portable).unwrap_err().to_string().contains("pool of 2"));
    let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    assert!(run(&one, foreign).is_err());
}

#[test]
fn sizes_that_would_wrap_are_refused() {
    let big = usize::MAX / 8 * 8;
    for shape in [
        Shape::new(big, 1, 64, 64, 64),
        Shape::new(big, big, 64, 64, 64),
        Shape::new(1, 1, big, 64, 64),
        Shape::new(1, 1, 64, big, 64),
        Shape::latent(big, 512, 64, 64),
        Shape::latent(1, 512, big, 64),
        Shape::latent(1, big, 512, 64),
    ] {
        assert!(shape.is_err(), "{shape:?}");
    }
    let shape = Shape::new(2, 2, 64, 64, 64).unwrap();
    for (num_blocks, block_size, block_stride, offset) in [
        (1, 16, 0, usize::MAX),
        (2, usize::MAX / 16 * 16, 0, 0),
        (usize::MAX, 16, usize::MAX, 0),
        (3, 16, 1 << 63, 1),
    ] {
        let layout = CacheLayout { offset, block_stride, num_blocks, block_size, dtype: DType::F32 };
        assert!(layout.check(&shape, 1 << 20).is_err(), "{layout:?}");
    }
}

#[test]
fn a_latent_page_takes_no_keys_and_values() {
    let shape = Shape::latent(4, 32, 8, 64).unwrap();
    let rows = [0f32; 40];
    let row = || TensorRef::from_host(&rows, &[1, 1, 40]).unwrap();
    let cache = CacheLayout { offset: 0, block_stride: 0, num_blocks: 1, block_size: 16, dtype: DType::F32 };
    let mut bytes = vec![0; 16 * 40 * 4];
    let pool = Pool::new(Some(1)).unwrap();
    let e = write_kv((&pool, Isa::Portable), &shape, (row(), 1.0), (row(), 1.0), &[0], &cache, &mut bytes);
    assert!(e.unwrap_err().to_string().contains("latent"));
}

#[test]
fn a_window_of_no_tokens_is_refused() {
    let shape = Shape::new(1, 1, 8, 8, 64).unwrap();
    let e = Plan::default().build(&shape, 1, Some(0), [request(0, 1, 1)].into_iter()).unwrap_err();
    assert!(e.contains("window of 0"), "{e}");
}
