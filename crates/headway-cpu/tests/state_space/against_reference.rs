//! Outputs against the float64 scan.

use super::world::{BLOCKS, Shape, Turn, World, error};
use headway_cpu::Isa;
use headway_tensor::DType;
use headway_testkit::Rng;
use proptest::prelude::*;

/// A request on its way: what it has done and what it has said.
struct Request {
    seed: u64,
    prompt: usize,
    total: usize,
    block: i32,
    said: Vec<f32>,
}

/// Runs requests to their ends in random steps, decodes first; the worst error.
fn serve(world: &mut World, lengths: &[(usize, usize)], seed: u64) -> f64 {
    let mut rng = Rng::new(seed);
    let mut blocks: Vec<i32> = (1..BLOCKS as i32).collect();
    rng.shuffle(&mut blocks);
    let mut requests: Vec<Request> = lengths
        .iter()
        .zip(blocks)
        .enumerate()
        .map(|(i, (&(prompt, more), block))| Request {
            seed: seed * 100 + i as u64,
            prompt,
            total: prompt + more,
            block,
            said: vec![],
        })
        .collect();
    let inner = world.inner();
    loop {
        let mut turns: Vec<(usize, Turn)> = vec![];
        for (i, r) in requests.iter().enumerate() {
            let done = r.said.len() / inner;
            if done == r.total || (i > 0 && rng.chance(0.2)) {
                continue;
            }
            let prefilling = done < r.prompt;
            let new = if prefilling { rng.between(1, r.prompt - done) } else { 1 };
            turns.push((i, Turn { seed: r.seed, done, new, block: r.block, prefilling }));
        }
        if requests.iter().all(|r| r.said.len() == r.total * inner) {
            break;
        }
        turns.sort_by_key(|(_, t)| t.prefilling);
        let step: Vec<Turn> = turns.iter().map(|(_, t)| *t).collect();
        let padding = rng.below(3);
        let mut out = world.run(&step, padding).unwrap();
        assert!(out.pop().unwrap().iter().all(|x| *x == 0.0), "padding rows");
        for ((i, _), rows) in turns.iter().zip(out) {
            requests[*i].said.extend(rows);
        }
    }
    requests.iter().map(|r| error(&r.said, &world.reference(r.seed, r.total))).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_chunking_of_any_batch(
        lengths in prop::collection::vec((1usize..140, 0usize..5), 1..6),
        seed in 1u64..1_000_000,
        level in 0usize..3,
    ) {
        let levels = Isa::available();
        let mut world = World::on(Shape::small(), levels[level % levels.len()]);
        let worst = serve(&mut world, &lengths, seed);
        prop_assert!(worst < 5e-6, "{worst:e}");
    }
}

#[test]
fn shapes_of_published_models_and_awkward_ones() {
    let of = |heads, head_dim, groups, state, conv_kernel, chunk| Shape {
        heads,
        head_dim,
        groups,
        state,
        conv_kernel,
        chunk,
        ..Shape::small()
    };
    let shapes = [
        of(8, 64, 1, 128, 4, 256),  // Bamba, Mamba2, of fewer heads
        of(16, 64, 8, 128, 4, 128), // Nemotron-H
        of(3, 7, 1, 5, 2, 13),
        of(4, 33, 4, 17, 5, 1),
        of(5, 1, 5, 1, 16, 67),
    ];
    for shape in shapes {
        for &isa in Isa::available() {
            let worst = serve(&mut World::on(shape, isa), &[(300, 3), (1, 2), (65, 1)], 5);
            assert!(worst < 5e-6, "{shape:?} {isa}: {worst:e}");
        }
    }
}

#[test]
fn states_of_two_bytes_cost_their_precision_and_no_more() {
    for (conv, ssm, most) in [
        (DType::BF16, DType::F32, 2e-2),
        (DType::F32, DType::BF16, 4e-2),
        (DType::F16, DType::F16, 4e-3),
        (DType::BF16, DType::BF16, 4e-2),
    ] {
        let shape = Shape { conv, ssm, ..Shape::small() };
        for &isa in Isa::available() {
            let worst = serve(&mut World::on(shape, isa), &[(90, 6), (40, 3), (1, 9)], 3);
            assert!(worst < most && worst > 1e-6, "{conv} {ssm} {isa}: {worst:e}");
        }
    }
}

#[test]
fn a_long_sequence_does_not_drift() {
    let mut world = World::on(Shape::small(), Isa::of_machine());
    let worst = serve(&mut world, &[(900, 100)], 11);
    assert!(worst < 5e-6, "{worst:e}");
}
