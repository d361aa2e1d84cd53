//! GGUF models in several files.

use super::refused;
use headway_engine::loading::gguf::write::GgufWriter;
use headway_engine::loading::{Checkpoint, GgufFile, LoadError, open};
use headway_tensor::Weight;
use std::fs;
use std::path::{Path, PathBuf};

fn part_path(dir: &Path, no: usize, of: usize) -> PathBuf {
    dir.join(format!("model-{no:05}-of-{of:05}.gguf"))
}

/// Part `no` (from 0) of `of`, with one tensor whose values are `no`; only the first has the model's metadata.
fn part(no: u16, of: u16, tensors: i32, name: &str) -> GgufWriter {
    let writer = if no == 0 {
        GgufWriter::new("llama").text("general.name", "one").u32("llama.block_count", 3)
    } else {
        GgufWriter::default()
    };
    writer
        .u16("split.no", no)
        .u16("split.count", of)
        .i32("split.tensors.count", tensors)
        .tensor(&Weight::from_f32(name, vec![8], &[f32::from(no); 8]).unwrap())
}

fn three_parts(dir: &Path) {
    for no in 0..3 {
        fs::write(part_path(dir, usize::from(no) + 1, 3), part(no, 3, 3, &format!("w{no}")).finish())
            .unwrap();
    }
}

#[test]
fn any_part_opens_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    three_parts(dir.path());
    for no in 1..=3 {
        let file = GgufFile::open(&part_path(dir.path(), no, 3)).unwrap();
        assert_eq!(file.names(), ["w0", "w1", "w2"]);
        assert_eq!(file.get("w2").unwrap().to_f32(), [2.0; 8]);
        assert_eq!(file.architecture().unwrap(), "llama");
        assert!(file.describe().contains("in 3 parts"), "{}", file.describe());
    }
    assert_eq!(open(dir.path()).unwrap().checkpoint.names().len(), 3);
}

#[test]
fn a_missing_part_is_named() {
    let dir = tempfile::tempdir().unwrap();
    three_parts(dir.path());
    fs::remove_file(part_path(dir.path(), 2, 3)).unwrap();
    let result = GgufFile::open(&part_path(dir.path(), 1, 3));
    refused(
        result,
        &["model-00001-of-00003.gguf", "1 of the model's files missing", "'model-00002-of-00003.gguf'"],
    );
    refused(open(dir.path()), &["'model-00002-of-00003.gguf'"]);
}

#[test]
fn parts_out_of_order_or_of_another_model_are_refused() {
    let first = |dir: &Path| GgufFile::open(&part_path(dir, 1, 3));
    let replace = |no: usize, part: GgufWriter, words: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        three_parts(dir.path());
        fs::write(part_path(dir.path(), no, 3), part.finish()).unwrap();
        refused(first(dir.path()), words);
    };
    replace(
        2,
        part(2, 3, 3, "w1"),
        &["model-00002-of-00003.gguf", "part 3 by its content, but part 2 by its name"],
    );
    replace(3, part(2, 4, 3, "w2"), &["model-00003-of-00003.gguf", "one of 4 parts, not of 3"]);
    replace(3, part(2, 3, 9, "w2"), &["'split.tensors.count' differs"]);
    replace(3, part(2, 3, 3, "w0"), &["tensor 'w0' is in both"]);
    replace(
        2,
        part(1, 3, 3, "w1").text("general.architecture", "qwen2"),
        &["'general.architecture' differs"],
    );
    replace(2, part(1, 3, 3, "w1").text("general.name", "two"), &["'general.name' differs"]);
    replace(2, GgufWriter::default(), &["no key 'split.no'"]);
    let extra = Weight::from_f32("extra", vec![8], &[0.0; 8]).unwrap();
    replace(2, part(1, 3, 3, "w1").tensor(&extra), &["'split.tensors.count' is 3, but the parts hold 4"]);
}

#[test]
fn a_renamed_part_says_what_it_should_be_called() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["renamed.gguf", "model-00001-of-00002.gguf", "model-1-of-3.gguf"] {
        let path = dir.path().join(name);
        fs::write(&path, part(0, 3, 3, "w0").finish()).unwrap();
        let result: Result<_, LoadError> = GgufFile::open(&path);
        refused(result, &[name, "NAME-00001-of-00003.gguf"]);
    }
}
