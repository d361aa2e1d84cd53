//! What must not matter: who else is in the batch, threads, what a block held before, and the way in which
//! metadata came about.

use super::world::{Shape, Turn, World, builder, common, error};
use headway_attention::MetadataBuilder;
use headway_cpu::{CpuOptions, Isa};

fn prefill(seed: u64, done: usize, new: usize, block: i32) -> Turn {
    Turn { seed, done, new, block, prefilling: true }
}

fn decode(seed: u64, done: usize, block: i32) -> Turn {
    Turn { seed, done, new: 1, block, prefilling: false }
}

#[test]
fn a_fresh_request_in_a_used_block_is_as_in_a_clean_one() {
    for &isa in Isa::available() {
        let run = |used: bool| {
            let mut w = World::on(Shape::small(), isa);
            if used {
                w.run(&[prefill(1, 0, 77, 4)], 0).unwrap();
                w.run(&[decode(1, 77, 4)], 0).unwrap();
            }
            let mut said = w.run(&[prefill(2, 0, 50, 4)], 0).unwrap().remove(0);
            said.extend(w.run(&[decode(2, 50, 4)], 0).unwrap().remove(0));
            // A prompt of one token, and one that is recomputed from its beginning as a decode would be.
            said.extend(w.run(&[prefill(3, 0, 1, 4)], 0).unwrap().remove(0));
            said.extend(w.run(&[decode(3, 0, 4)], 0).unwrap().remove(0));
            said
        };
        let (clean, used) = (run(false), run(true));
        assert!(clean.iter().all(|x| x.is_finite()));
        assert_eq!(clean, used, "{isa}");
    }
}

#[test]
fn a_preempted_request_is_recomputed_to_the_same_text() {
    let mut w = World::on(Shape::small(), Isa::of_machine());
    let mut said = w.run(&[prefill(1, 0, 40, 2)], 0).unwrap().remove(0);
    for t in 40..44 {
        said.extend(w.run(&[decode(1, t, 2)], 0).unwrap().remove(0));
    }
    // Its block goes to somebody else, and it comes back in another one: prompt and text in one prefill.
    w.run(&[prefill(9, 0, 30, 2)], 0).unwrap();
    let again = w.run(&[prefill(1, 0, 44, 7)], 0).unwrap().remove(0);
    let exact: Vec<f64> = said.iter().map(|x| f64::from(*x)).collect();
    assert!(error(&again, &exact) < 5e-6);
}

#[test]
fn rows_of_others_and_threads_change_no_bit() {
    for &isa in Isa::available() {
        let mut alone = World::new(
            Shape::small(),
            CpuOptions { isa: Some(isa), threads: Some(1), ..CpuOptions::default() },
        );
        let mut batch = World::on(Shape::small(), isa);
        let a = alone.run(&[prefill(1, 0, 70, 1)], 0).unwrap();
        let b = batch.run(&[prefill(2, 0, 100, 3), prefill(1, 0, 70, 5), prefill(3, 0, 9, 2)], 2).unwrap();
        assert_eq!(a[0], b[1], "{isa} prefill");
        let a = alone.run(&[decode(1, 70, 1)], 0).unwrap();
        let b = batch.run(&[decode(3, 9, 2), decode(1, 70, 5), prefill(4, 0, 33, 9)], 1).unwrap();
        assert_eq!(a[0], b[1], "{isa} decode");
    }
}

#[test]
fn with_batch_invariance_the_chunking_changes_no_bit() {
    for &isa in Isa::available() {
        let options = || CpuOptions { isa: Some(isa), threads: Some(2), batch_invariant: true };
        let mut whole = World::new(Shape::small(), options());
        let said = whole.run(&[prefill(1, 0, 100, 1)], 0).unwrap().remove(0);
        let mut cut = World::new(Shape::small(), options());
        let (mut pieces, mut done) = (vec![], 0);
        for new in [1, 2, 30, 33, 1, 1, 32] {
            let turns = [prefill(1, done, new, 3), prefill(8, done, new + 5, 4)];
            pieces.extend(cut.run(&turns[..1 + done % 2], 0).unwrap().remove(0));
            done += new;
        }
        assert_eq!(said, pieces, "{isa}");
        assert_eq!(
            whole.run(&[decode(1, 100, 1)], 0).unwrap()[0],
            cut.run(&[decode(1, 100, 3)], 0).unwrap()[0],
            "{isa}"
        );
    }
}

#[test]
fn a_swapped_block_table_is_what_a_build_would_give() {
    let turns = [decode(1, 20, 1), decode(2, 5, 2), prefill(3, 0, 40, 3), prefill(4, 8, 3, 4)];
    let moved: Vec<Turn> = turns.iter().map(|t| Turn { block: 11 - t.block, ..*t }).collect();
    let mut w = World::on(Shape::small(), Isa::of_machine());
    let mut second = builder(&w.cx, &w.shape.group()).unwrap();
    let first = w.builder.build(&w.cx, &common(&turns)).unwrap();
    let swapped = second.update_block_table(&w.cx, &first, &common(&moved)).unwrap();
    let mut third = builder(&w.cx, &w.shape.group()).unwrap();
    let built = third.build(&w.cx, &common(&moved)).unwrap();
    assert_eq!((swapped.plan(), swapped.states()), (built.plan(), built.states()));
    assert_ne!(first.states(), swapped.states());
    assert!(std::ptr::eq(first.workspace().as_ref(), swapped.workspace().as_ref()));
    let other = Shape { head_dim: 24, ..w.shape };
    let mut other = builder(&w.cx, &other.group()).unwrap();
    let e = other.update_block_table(&w.cx, &first, &common(&moved)).unwrap_err();
    assert!(e.to_string().contains("other states"), "{e}");
    // Memory is recycled once nobody reads it.
    drop((first, swapped));
    let before = (w.builder.reallocs(), second.reallocs());
    for _ in 0..3 {
        let first = w.builder.build(&w.cx, &common(&turns)).unwrap();
        second.update_block_table(&w.cx, &first, &common(&moved)).unwrap();
    }
    assert_eq!((w.builder.reallocs(), second.reallocs()), before);
}
