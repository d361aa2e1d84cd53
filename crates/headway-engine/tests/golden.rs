//! The engine against what Hugging Face transformers computed: every tiny model at one block size, alone
//! and batched; one of them in every way; the real models. `tools/golden-matrix.sh` runs all of them in
//! every way.

mod support;

use headway_engine::EngineOptions;
use headway_testkit::golden::{
    self,
    check::Compute,
    walk::{self, Table},
};
use support::{UnderTest, is_known, options, real_model};

fn report(table: &Table) {
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

fn walk_tiny(compute: Compute, way: &str, options: &EngineOptions, only: Option<&str>) -> Table {
    walk::all_tiny(compute, way, |golden, dir| {
        if only.is_some_and(|o| o != golden.model.name) || !is_known(&golden.model.architecture) {
            return Ok(None);
        }
        Ok(Some(Box::new(UnderTest::open(dir, options)?)))
    })
    .unwrap()
}

#[test]
fn every_tiny_model_in_float32() {
    report(&walk_tiny(Compute::Float32, "float32", &options("float32"), None));
}

#[test]
fn every_tiny_model_in_its_own_type() {
    report(&walk_tiny(Compute::Half, "auto", &options("auto"), None));
}

/// Gemma 3 has windows, two rotary bases, norms on heads and after blocks: block sizes, chunk sizes,
/// prefix caching, alone and batched.
#[test]
fn one_tiny_model_in_every_way() {
    let mut table = Table::default();
    for block_size in [16, 32] {
        for chunk in [5, 64, 512] {
            for no_prefix_caching in [false, true] {
                let options = EngineOptions {
                    block_size: Some(block_size),
                    max_num_batched_tokens: Some(chunk),
                    max_num_seqs: Some(chunk.min(16)),
                    no_prefix_caching,
                    ..options("float32")
                };
                let caching = if no_prefix_caching { "no caching" } else { "caching" };
                let way = format!("block {block_size} chunk {chunk} {caching}");
                let mut t = walk_tiny(Compute::Float32, &way, &options, Some("tiny-gemma3"));
                t.not_run.clear();
                table.extend(t);
            }
        }
    }
    report(&table);
}

#[test]
fn batch_invariant_mode_gives_the_same_answers() {
    let options = EngineOptions { batch_invariant: true, ..options("float32") };
    report(&walk_tiny(Compute::Float32, "batch-invariant", &options, Some("tiny-llama")));
}

fn walk_real(name: &str, file: &str, dtype: &str, compute: Compute, longest: usize) {
    let path = real_model(name, file).unwrap();
    let mut table = Table::default();
    for golden in golden::real().unwrap().iter().filter(|g| g.model.gguf == file) {
        let mut engine = UnderTest::open(&path, &options(dtype)).unwrap();
        walk::real(&mut table, golden, compute, dtype, longest, &mut engine);
    }
    report(&table);
}

const SMOLLM2: (&str, &str) = ("smollm2-135m-instruct", "smollm2-135m-instruct-q4_1.gguf");
const GEMMA3: (&str, &str) = ("gemma3-270m", "gemma-3-270m-q4_k_m.gguf");

#[test]
fn smollm2_in_float32() {
    walk_real(SMOLLM2.0, SMOLLM2.1, "float32", Compute::Float32, 100);
}

#[test]
fn smollm2_as_published() {
    walk_real(SMOLLM2.0, SMOLLM2.1, "auto", Compute::Quantised, usize::MAX);
}

#[test]
fn gemma3_in_float32() {
    walk_real(GEMMA3.0, GEMMA3.1, "float32", Compute::Float32, 100);
}

#[test]
fn gemma3_as_published() {
    walk_real(GEMMA3.0, GEMMA3.1, "auto", Compute::Quantised, usize::MAX);
}
