//! A row's bits depend on its request alone: not on the other requests, on how the prompt was cut into
//! chunks, on the blocks, or on the number of threads.

use super::{
    layer::Layer,
    run::{exec, step},
    world::{Req, World},
};
use headway_cpu::Isa;
use headway_tensor::DType;
use headway_testkit::Rng;

/// Bits of each row of the request at `index` of a batch.
fn rows(
    l: &Layer,
    isa: Isa,
    threads: usize,
    reqs: &[Req],
    index: usize,
    rng: &mut Rng,
) -> (Vec<Vec<u32>>, usize) {
    let w = World::new(l, reqs, 0, rng.below(3), rng);
    let done = step(&exec(isa, threads), l, &w, 0xff, rng.chance(0.5));
    let bits = done.out.bits();
    let width = l.heads * l.size_v;
    let own = w.query_start_loc[index] as usize..w.query_start_loc[index + 1] as usize;
    (own.map(|r| bits[r * width..(r + 1) * width].to_vec()).collect(), done.parts.1)
}

#[test]
fn a_row_is_the_same_in_any_company() {
    let mut splits = 0;
    for (round, &isa) in Isa::available().iter().cycle().take(12 * Isa::available().len()).enumerate() {
        let mut rng = Rng::new(round as u64);
        let (heads, kv_heads) = [(4, 2), (9, 3), (8, 1), (2, 2)][rng.below(4)];
        let l = Layer {
            cache: [DType::F32, DType::BF16, DType::F16, DType::F8E4M3][rng.below(4)],
            block_size: [16, 32, 64][rng.below(3)],
            window: [None, Some(50), Some(400)][rng.below(3)],
            sinks: rng.chance(0.3),
            ..Layer::plain(heads, kv_heads, [16, 64, 72][rng.below(3)])
        };
        let len = rng.between(300, 900);
        let whole = Req { seed: round as u64, ..Req::new(len, len) };
        let (want, _) = rows(&l, isa, 1, &[whole], 0, &mut rng);
        for _ in 0..8 {
            // The rows up to some position, in a chunk of some size, among some others.
            let upto = rng.between(1, len);
            let new = if rng.chance(0.5) { 1 } else { rng.between(1, upto) };
            let mut reqs = Req::company(&mut rng);
            let index = rng.below(reqs.len() + 1);
            reqs.insert(index, Req { len: upto, new, ..whole });
            let (got, split) = rows(&l, isa, rng.between(1, 5), &reqs, index, &mut rng);
            splits += split;
            assert!(got[..] == want[upto - new..upto], "{isa} {l:?} {upto} {new} {reqs:?}");
        }
    }
    assert!(splits > 20, "only {splits} splits were seen: the test shows little");
}
