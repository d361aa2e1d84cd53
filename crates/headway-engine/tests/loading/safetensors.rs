//! safetensors checkpoints: single files, shards, and what is refused with which words.

use super::refused;
use headway_engine::loading::safetensors::Header;
use headway_engine::loading::{Checkpoint, LoadError, SafetensorsCheckpoint};
use headway_tensor::WeightType;
use std::fs;
use std::path::{Path, PathBuf};

/// A file with this header and these data bytes, sound or not.
pub fn file(json: &str, data: &[u8]) -> Vec<u8> {
    [(json.len() as u64).to_le_bytes().as_slice(), json.as_bytes(), data].concat()
}

/// A file with one float32 tensor of two values.
pub fn one_tensor(name: &str, values: [f32; 2]) -> Vec<u8> {
    let json = format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#);
    file(&json, &values.map(f32::to_le_bytes).concat())
}

fn parse(bytes: &[u8]) -> Result<Header, LoadError> {
    Header::parse(Path::new("dir/w.safetensors"), bytes)
}

fn open_one(dir: &Path, bytes: &[u8]) -> Result<SafetensorsCheckpoint, LoadError> {
    let path = dir.join("w.safetensors");
    fs::write(&path, bytes).unwrap();
    SafetensorsCheckpoint::open_files(&[path])
}

#[test]
fn a_single_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let json = r#"{"__metadata__":{"format":"pt","dtype":"F8"},
        "b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},
        "ids":{"dtype":"I64","shape":[1],"data_offsets":[12,20]},
        "a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}}"#;
    let data = [0u8, 0x3c, 0, 0x40, 0, 0, 0, 0xc0, 0x80, 0x3f, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
    let checkpoint = open_one(dir.path(), &file(json, &data)).unwrap();
    assert_eq!(checkpoint.names(), ["a", "b", "ids"]);
    let a = checkpoint.get("a").unwrap();
    assert_eq!(
        (a.dtype(), a.shape(), a.to_f32()),
        (WeightType::F16, &[2usize, 2][..], vec![1.0, 2.0, 0.0, -2.0])
    );
    assert_eq!(checkpoint.get("b").unwrap().to_f32(), [1.0, 0.0]);
    assert_eq!(checkpoint.total_bytes(), 20);
    assert!(checkpoint.describe().ends_with("w.safetensors (safetensors; tensors: 1 BF16, 1 F16)"));
    refused(checkpoint.get("ids"), &["tensor 'ids' has type I64", "supported: BF16, F16, F32"]);
    refused(checkpoint.get("model.a"), &["no tensor 'model.a'", "nearest names in the file: 'a'"]);
}

#[test]
fn broken_headers_are_refused() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "shorter than the 8 bytes"),
        (vec![0; 7], "shorter than the 8 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "claims a header of 18446744073709551615 bytes"),
        ((1u64 << 40).to_le_bytes().to_vec(), "claims a header of 1099511627776 bytes"),
        (1000u64.to_le_bytes().to_vec(), "claims a header of 1000 bytes in a file of 8"),
        (file("[]", &[]), "header:"),
        (file("{", &[]), "header:"),
        (file(&"[".repeat(100_000), &[]), "header:"),
        (file(&entry("F32", "[2]", "[0,8]"), &[0; 7]), "ends at byte 8 of the data, but the file has 7"),
        (file(&entry("F32", "[2]", "[0,8]"), &[0; 9]), "1 bytes after the last tensor"),
        (file(&entry("F32", "[2]", "[4,12]"), &[0; 12]), "header:"),
        (file(&entry("F32", "[2]", "[8,0]"), &[0; 8]), "header:"),
        (file(&entry("F32", "[3]", "[0,8]"), &[0; 8]), "header:"),
        (file(&entry("F32", "[-2]", "[0,8]"), &[0; 8]), "header:"),
        (file(&entry("F32", "[4611686018427387905,4]", "[0,8]"), &[0; 8]), "header:"),
        (file(&entry("F32", "[4611686018427387904]", "[0,18446744073709551615]"), &[0; 8]), "header:"),
        (
            file(r#"{"a\nb":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, &[0; 8]),
            "no usable tensor name",
        ),
        (
            file(
                r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
                &[0; 4],
            ),
            "tensor 't' is listed twice",
        ),
    ];
    for (bytes, words) in cases {
        refused(parse(&bytes), &["dir/w.safetensors: damaged or incomplete safetensors file", words]);
    }
}

#[test]
fn sizes_near_the_end_of_the_address_space_do_not_wrap() {
    // Eight tensors of just under 2^61 bytes: the end of the data wraps around to a small number.
    let size = (1u64 << 61) - 1;
    let entries: Vec<String> = (0..8u64)
        .map(|i| {
            let (start, end) = (i * size, (i + 1) * size);
            format!(r#""t{i}":{{"dtype":"BOOL","shape":[{size}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    refused(parse(&file(&format!("{{{}}}", entries.join(",")), &[])), &["dir/w.safetensors"]);
    let huge =
        r#"{"t":{"dtype":"BOOL","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}}"#;
    refused(parse(&file(huge, &[])), &["tensor 't' ends at byte 2305843009213693951 of the data"]);
}

#[test]
fn unknown_and_packed_types_name_the_tensor() {
    for (dtype, hint) in
        [("F8_E4M3", "float8"), ("U8", "packed integers"), ("F4", "microscaling"), ("Q9", "")]
    {
        let json = format!(
            r#"{{"ok":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},"w.q":{{"dtype":"{dtype}","shape":[4],"data_offsets":[4,8]}}}}"#
        );
        let words =
            ["dir/w.safetensors", "tensor 'w.q'", dtype, hint, "not supported; supported: BF16, F16, F32"];
        refused(parse(&file(&json, &[0; 8])), &words);
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = one_tensor("w", [1.0, 2.0]);
    for len in 0..bytes.len() {
        refused(parse(&bytes[..len]), &["dir/w.safetensors"]);
    }
    assert_eq!(parse(&bytes).unwrap().entries.len(), 1);
}

/// Two shards and their index.
pub fn sharded(dir: &Path) -> PathBuf {
    fs::write(dir.join("model-00001-of-00002.safetensors"), one_tensor("a", [1.0, 2.0])).unwrap();
    fs::write(dir.join("model-00002-of-00002.safetensors"), one_tensor("b", [3.0, 4.0])).unwrap();
    let map = r#"{"metadata":{"total_size":16},"weight_map":{
        "a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    let index = dir.join("model.safetensors.index.json");
    fs::write(&index, map).unwrap();
    index
}

#[test]
fn shards_are_one_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = SafetensorsCheckpoint::open_index(&sharded(dir.path())).unwrap();
    assert_eq!(checkpoint.names(), ["a", "b"]);
    assert_eq!(checkpoint.get("b").unwrap().to_f32(), [3.0, 4.0]);
    assert!(checkpoint.describe().contains("and 1 more files"));
}

#[test]
fn incomplete_shards_are_refused() {
    let second = "model-00002-of-00002.safetensors";
    let broken = |what: &dyn Fn(&Path), words: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let index = sharded(dir.path());
        what(dir.path());
        refused(SafetensorsCheckpoint::open_index(&index), words);
    };
    broken(&|dir| fs::remove_file(dir.join(second)).unwrap(), &["index.json", "missing", second]);
    broken(&|dir| fs::write(dir.join(second), &one_tensor("b", [0.0; 2])[..20]).unwrap(), &[second]);
    broken(&|dir| fs::write(dir.join(second), b"").unwrap(), &[second, "the file is empty"]);
    broken(
        &|dir| fs::write(dir.join(second), one_tensor("a", [0.0; 2])).unwrap(),
        &[second, "'a' is in both"],
    );
    broken(
        &|dir| fs::write(dir.join(second), one_tensor("c", [0.0; 2])).unwrap(),
        &["'b' is not in the shard"],
    );
    let index = |text: &'static str| {
        move |dir: &Path| fs::write(dir.join("model.safetensors.index.json"), text).unwrap()
    };
    broken(&index("{}"), &["index.json", "no 'weight_map'"]);
    broken(&index("{"), &["index.json", "not valid JSON"]);
    broken(&index(r#"{"weight_map":{"a":"../x.safetensors"}}"#), &["the shard of 'a' is no file name"]);
    broken(&index(r#"{"weight_map":{"a":7}}"#), &["the shard of 'a' is no file name"]);
    let swapped =
        r#"{"weight_map":{"a":"model-00002-of-00002.safetensors","b":"model-00001-of-00002.safetensors"}}"#;
    broken(&index(swapped), &["tensor 'a' is not in the shard"]);
}
