//! Caches of bfloat16 with head sizes of whole tiles and others: small enough to be run on an emulated
//! processor, where a level with tiles or dot products is tested on a machine without them.

use super::{
    against_reference::check,
    layer::Layer,
    run::{exec, step},
    world::{Req, World},
};
use headway_cpu::Isa;
use headway_tensor::DType;
use headway_testkit::Rng;

/// Plain ones, and ones with everything that changes a score.
fn layers() -> Vec<Layer> {
    let bf16 = |heads, kv_heads, size| Layer { cache: DType::BF16, ..Layer::plain(heads, kv_heads, size) };
    let everything = Layer {
        window: Some(70),
        cap: Some(20.0),
        alibi: true,
        sinks: true,
        scales: (0.5, 2.0),
        block_size: 32,
        ..bf16(4, 2, 64)
    };
    vec![
        bf16(3, 1, 32),
        Layer { size_v: 16, ..bf16(6, 2, 96) },
        Layer { size_v: 48, block_size: 64, ..bf16(20, 1, 32) },
        Layer { block_size: 32, ..bf16(1, 1, 128) },
        bf16(2, 1, 40),
        everything,
    ]
}

#[test]
fn decodes_and_prefills() {
    for l in layers() {
        for dtype in [DType::F32, DType::BF16] {
            let l = Layer { dtype, ..l.clone() };
            let reqs = [Req::new(81, 1), Req::new(35, 35), Req::new(150, 17), Req::new(1, 1)];
            check(&l, &reqs, 0, 1, 5).unwrap();
        }
    }
}

#[test]
fn a_chunk_of_a_prompt_has_the_bits_of_the_whole() {
    for &isa in Isa::available() {
        for l in layers() {
            let bits = |reqs: &[Req], index: usize, seed: u64| {
                let w = World::new(&l, reqs, 0, 0, &mut Rng::new(seed));
                let out = step(&exec(isa, 1), &l, &w, 0xff, false).out.bits();
                let width = l.heads * l.size_v;
                out[w.query_start_loc[index] as usize * width..w.query_start_loc[index + 1] as usize * width]
                    .to_vec()
            };
            let whole = Req { seed: 9, ..Req::new(90, 90) };
            let want = bits(&[whole], 0, 1);
            let width = l.heads * l.size_v;
            for (len, new) in [(90, 1), (64, 20), (33, 33), (75, 9)] {
                let part = Req { len, new, ..whole };
                let got = bits(&[Req::new(40, 3), part], 1, 2);
                assert!(got[..] == want[(len - new) * width..len * width], "{isa} {l:?} {len} {new}");
            }
        }
    }
}
