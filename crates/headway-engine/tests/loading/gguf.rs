//! GGUF files of one part: what they hold, and what is refused with which words.

use super::refused;
use headway_engine::loading::gguf::write::{GgufWriter, RawTensor};
use headway_engine::loading::gguf::{Array, Header, Value};
use headway_engine::loading::{Checkpoint, GgufFile, LoadError};
use headway_tensor::quant::{QuantFormat, quantize};
use headway_tensor::{SharedBytes, Weight, WeightType};
use proptest::prelude::*;
use std::path::Path;

const PATH: &str = "dir/model.gguf";

fn open(bytes: Vec<u8>) -> Result<GgufFile, LoadError> {
    GgufFile::from_bytes(Path::new(PATH), SharedBytes::from(bytes))
}

pub fn quantised(name: &str, format: QuantFormat, shape: &[usize]) -> Weight {
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.37).sin()).collect();
    let bytes = SharedBytes::from(quantize(format, &values).unwrap());
    Weight::new(name, WeightType::Quant(format), shape.to_vec(), bytes).unwrap()
}

/// A small model with one of everything.
fn sample() -> GgufWriter {
    let norm: Vec<f32> = (0..64).map(|i| i as f32).collect();
    GgufWriter::new("llama")
        .u32("llama.block_count", 2)
        .u32("llama.embedding_length", 64)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.rope.freq_base", 10000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.ggml.tokens", &["<s>", "", "Ġthe", "日本"])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.0, -2.5, -3.0])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1])
        .tensor(&quantised("token_embd.weight", QuantFormat::Q8_0, &[4, 64]))
        .tensor(&Weight::from_f32("output_norm.weight", vec![64], &norm).unwrap())
        .tensor(&quantised("blk.0.attn_k.weight", QuantFormat::Q4_1, &[32, 64]))
}

fn tensor(dims: &[u64], type_id: u32, offset: Option<u64>, bytes: usize) -> RawTensor {
    RawTensor { name: "odd".into(), dims: dims.to_vec(), type_id, offset, data: vec![0; bytes] }
}

#[test]
fn a_sound_file_is_read_whole() {
    let file = open(sample().finish()).unwrap();
    assert_eq!((file.version(), file.architecture().unwrap()), (3, "llama"));
    assert_eq!(file.names(), ["token_embd.weight", "output_norm.weight", "blk.0.attn_k.weight"]);
    let k = file.get("blk.0.attn_k.weight").unwrap();
    assert_eq!((k.shape(), k.dtype().name()), (&[32usize, 64][..], "Q4_1"));
    assert_eq!(k.to_f32(), quantised("", QuantFormat::Q4_1, &[32, 64]).to_f32());
    assert_eq!(file.get("output_norm.weight").unwrap().to_f32()[63], 63.0);
    assert!(file.contains("token_embd.weight") && !file.contains("token_embd"));
    assert_eq!(file.total_bytes(), 4 * 68 + 64 * 4 + 32 * 40);
    assert_eq!(file.describe(), "dir/model.gguf (GGUF version 3; tensors: 1 F32, 1 Q4_1, 1 Q8_0)");

    let meta = file.metadata();
    let tokens = meta.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["<s>", "", "Ġthe", "日本"]);
    assert_eq!((tokens.get(3), tokens.get(4)), (Some("日本"), None));
    assert_eq!(meta.f32s("tokenizer.ggml.scores").unwrap(), [0.0, -1.0, -2.5, -3.0]);
    assert_eq!(meta.i32s("tokenizer.ggml.token_type").unwrap(), [3, 1, 1, 1]);
    assert!(meta.bool("tokenizer.ggml.add_bos_token").unwrap());
    assert_eq!(meta.opt_per_layer("llama.attention.head_count", 2).unwrap(), Some(vec![4, 4]));
}

#[test]
fn getters_name_the_key() {
    let file = open(sample().i32("neg", -4).finish()).unwrap();
    let meta = file.metadata();
    refused(meta.usize("llama.no"), &[PATH, "no key 'llama.no'"]);
    assert_eq!(meta.opt_usize("llama.no").unwrap(), None);
    refused(meta.usize("neg"), &[PATH, "'neg' must be an integer from 0 up, is -4"]);
    refused(meta.opt_text("llama.block_count"), &["'llama.block_count' must be a string, is 2"]);
    refused(meta.strings("tokenizer.ggml.scores"), &["must be an array of strings, is an array of numbers"]);
    assert_eq!(meta.f32("neg").unwrap(), -4.0);
}

#[test]
fn every_value_type_is_read() {
    let nested = [
        9u32.to_le_bytes().as_slice(),
        &1u64.to_le_bytes()[..],
        &0u32.to_le_bytes(),
        &2u64.to_le_bytes(),
        &[7, 8],
    ]
    .concat();
    let file = GgufWriter::new("x")
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[200])
        .raw("u16", 2, &[0xff, 0xff])
        .raw("i16", 3, &[0xff, 0xff])
        .raw("i32", 5, &[0xfe, 0xff, 0xff, 0xff])
        .raw("u64", 10, &u64::MAX.to_le_bytes())
        .raw("i64", 11, &i64::MIN.to_le_bytes())
        .raw("f64", 12, &0.1f64.to_le_bytes())
        .raw("nested", 9, &nested);
    let file = open(file.finish()).unwrap();
    let get = |key| file.metadata().get(key).unwrap().clone();
    assert_eq!(get("u8"), Value::Uint(200));
    assert_eq!(get("i8"), Value::Int(-56));
    assert_eq!(get("u16"), Value::Uint(65535));
    assert_eq!(get("i16"), Value::Int(-1));
    assert_eq!(get("i32"), Value::Int(-2));
    assert_eq!(get("u64"), Value::Uint(u64::MAX));
    assert_eq!(get("i64"), Value::Int(i64::MIN));
    assert_eq!(get("f64"), Value::Float(0.1));
    let Value::Array(Array::Arrays(inner)) = get("nested") else { panic!("no array of arrays") };
    let Array::Numbers(numbers) = &inner[0] else { panic!("no numbers") };
    assert_eq!(numbers.to_usize().unwrap(), [7, 8]);
}

#[test]
fn other_versions_and_files_are_refused() {
    let with_version = |version: u32| {
        let mut bytes = sample().finish();
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        open(bytes)
    };
    assert!(with_version(2).is_ok());
    refused(with_version(1), &[PATH, "GGUF version 1 is not supported", "2 and 3"]);
    refused(with_version(4), &["GGUF version 4"]);
    refused(with_version(3u32.swap_bytes()), &["a big-endian GGUF file is not supported"]);
    refused(open(b"GGML....".to_vec()), &[PATH, "does not begin with 'GGUF'"]);
}

#[test]
fn all_types_are_checked_before_anything_else() {
    for (id, name) in [(20, "IQ4_NL (number 20)"), (39, "MXFP4 (number 39)"), (200, "number 200")] {
        // The sound tensors come first, and the odd one also has an impossible place.
        let bytes = sample().raw_tensor(tensor(&[32], id, Some(1 << 40), 0)).finish();
        refused(open(bytes), &[PATH, "tensor 'odd'", name, "supported: F32, F16, BF16, Q8_0", "Q6_K"]);
    }
    let two = sample().raw_tensor(tensor(&[32], 20, None, 0));
    let two = two.raw_tensor(RawTensor { name: "odder".into(), ..tensor(&[32], 39, None, 0) });
    refused(open(two.finish()), &["(1 more tensors too)"]);
}

#[test]
fn impossible_tensors_are_refused() {
    let max = i64::MAX as u64;
    let cases: &[(&[u64], Option<u64>, &str)] = &[
        (&[max, 2], None, "whose size overflows"),
        (&[max, 3], None, "whose product overflows"),
        (&[max / 8, 2, 2, 2], None, "whose size overflows"),
        (&[(1 << 42) + 1, 1152], None, "takes"),
        (&[0], None, "impossible dimensions [0]"),
        (&[8, 0], None, "impossible dimensions [8, 0]"),
        (&[(-5i64).cast_unsigned()], None, "impossible dimensions"),
        (&[u64::MAX, u64::MAX], None, "impossible dimensions"),
        (&[], None, "0 dimensions"),
        (&[1, 1, 1, 1, 1], None, "5 dimensions"),
        (&[8], Some(1 << 40), "but the file has"),
        (&[8], Some(u64::MAX - 31), "but the file has"),
        (&[8], Some(4), "not a multiple of 32"),
        (&[8], Some(0), "overlap"),
        (&[8, 8], None, "takes 256 bytes"),
    ];
    for (dims, offset, words) in cases {
        let bytes = sample().raw_tensor(tensor(dims, 0, *offset, 32)).finish();
        refused(open(bytes), &[PATH, words]);
    }
    let rows = sample().raw_tensor(tensor(&[33], 2, None, 64)).finish();
    refused(open(rows), &["tensor 'odd' has rows of 33 elements, not whole Q4_0 blocks of 32"]);
    let twice =
        sample().raw_tensor(RawTensor { name: "output_norm.weight".into(), ..tensor(&[8], 0, None, 32) });
    refused(open(twice.finish()), &["tensor 'output_norm.weight' is listed twice"]);
    let unprintable = sample().raw_tensor(RawTensor { name: "a\nb".into(), ..tensor(&[8], 0, None, 32) });
    refused(open(unprintable.finish()), &["no usable name: 'a\\nb'"]);
}

#[test]
fn absurd_counts_and_lengths_are_refused() {
    for (at, words) in [(8, "tensors"), (16, "metadata entries")] {
        for count in [1u64 << 62, u64::MAX, 1 << 32, 1 << 20] {
            let mut bytes = sample().finish();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            refused(open(bytes), &[PATH, &format!("claims {count} {words}")]);
        }
    }
    let mut long_key = sample().finish();
    long_key[24..32].copy_from_slice(&(1u64 << 61).to_le_bytes());
    refused(open(long_key), &["the key of metadata entry 0", "bytes, but"]);
    let array = |kind: u32, count: u64| [kind.to_le_bytes().as_slice(), &count.to_le_bytes()[..]].concat();
    for kind in [0, 6, 8, 9, 12] {
        let bytes = GgufWriter::new("x").raw("a", 9, &array(kind, u64::MAX / 2)).finish();
        refused(open(bytes), &["'a' claims 9223372036854775807 entries"]);
    }
    let deep: Vec<u8> = (0..1000).flat_map(|_| array(9, 1)).collect();
    refused(
        open(GgufWriter::new("x").raw("deep", 9, &deep).finish()),
        &["'deep' has arrays nested deeper than 4"],
    );
    refused(
        open(GgufWriter::new("x").raw("a", 13, &[0; 8]).finish()),
        &["'a' has the unknown value type 13"],
    );
    refused(
        open(GgufWriter::new("x").raw("a", 9, &array(99, 0)).finish()),
        &["elements of the unknown type 99"],
    );
    refused(open(GgufWriter::new("x").raw("a", 7, &[2]).finish()), &["the value of 'a' is no boolean"]);
    refused(open(GgufWriter::new("x").text("a", "1").text("a", "2").finish()), &["key 'a' appears twice"]);
    let not_text = GgufWriter::new("x").raw("a", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).finish();
    refused(open(not_text), &["the value of 'a' is not UTF-8"]);
}

#[test]
fn alignment_is_followed() {
    let mut wide = sample().u32("general.alignment", 256);
    wide.alignment = 256;
    let file = open(wide.finish()).unwrap();
    assert!(file.tensors().all(|tensor| tensor.range.start % 256 == 0));
    assert_eq!(file.get("output_norm.weight").unwrap().to_f32()[5], 5.0);
    for bad in [0, 3, 1 << 31] {
        let bytes = sample().u32("general.alignment", bad).finish();
        refused(open(bytes), &[PATH, "'general.alignment' must be a power of two"]);
    }
}

#[test]
fn hyperparameters_are_bounded() {
    let model = |layers: u32, heads: u32, kv_heads: u32| {
        GgufWriter::new("llama")
            .u32("llama.block_count", layers)
            .u32("llama.embedding_length", 64)
            .u32("llama.attention.head_count", heads)
            .u32("llama.attention.head_count_kv", kv_heads)
    };
    assert!(open(model(1, 4, 4).finish()).is_ok());
    assert!(open(model(512, 4, 1).finish()).is_ok());
    for layers in [0, 513, 1 << 31] {
        refused(open(model(layers, 4, 2).finish()), &[PATH, "'llama.block_count' must be 1 to 512"]);
    }
    refused(open(model(2, 0, 0).finish()), &["'llama.attention.head_count' must be 1 to 4096, is 0"]);
    refused(open(model(2, u32::MAX, 1).finish()), &["'llama.attention.head_count' must be 1"]);
    for kv in [0, 3, 8, u32::MAX] {
        refused(open(model(2, 4, kv).finish()), &["'llama.attention.head_count_kv' must divide the 4"]);
    }
    refused(
        open(model(2, 3, 1).finish()),
        &["'llama.attention.head_count' must divide the embedding length 64"],
    );
    assert!(open(model(2, 3, 1).u32("llama.attention.key_length", 16).finish()).is_ok());
    refused(open(model(2, 4, 2).u32("llama.vocab_size", 0).finish()), &["'llama.vocab_size' must be 1 to"]);
    refused(
        open(model(2, 4, 2).text("llama.context_length", "x").finish()),
        &["'llama.context_length' must be"],
    );
    let lengths = model(2, 4, 2).i32s("llama.feed_forward_length", &[5]);
    refused(open(lengths.finish()), &["'llama.feed_forward_length' must have 2 entries, has 1"]);
    refused(open(GgufWriter::default().finish()), &[PATH, "no key 'general.architecture'"]);
    let hybrid = GgufWriter::new("h").u32("h.block_count", 2).i32s("h.attention.head_count", &[0, 4]);
    assert!(open(hybrid.clone().i32s("h.attention.head_count_kv", &[0, 2]).finish()).is_ok());
    refused(open(hybrid.i32s("h.attention.head_count_kv", &[0, 3]).finish()), &["must divide the 4"]);
}

#[test]
fn a_missing_tensor_names_its_neighbours() {
    let file = open(sample().finish()).unwrap();
    refused(
        file.get("blk.1.attn_k.weight"),
        &[PATH, "no tensor 'blk.1.attn_k.weight'", "'blk.0.attn_k.weight'"],
    );
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = sample().finish();
    for len in 0..bytes.len() {
        refused(Header::parse(Path::new(PATH), &bytes[..len]), &[PATH]);
    }
    assert!(Header::parse(Path::new(PATH), &bytes).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_written_is_read(
        texts in prop::collection::vec("\\PC{0,12}", 0..20),
        floats in prop::collection::vec(-1e6f32..1e6, 0..20),
        ints in prop::collection::vec(any::<i32>(), 0..20),
        shapes in prop::collection::vec((1usize..4, 1usize..4, 1usize..4), 0..6),
        format in prop::sample::select(vec![QuantFormat::Q8_0, QuantFormat::Q4_0, QuantFormat::Q5_1]),
    ) {
        let refs: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut writer = GgufWriter::new("any").strings("s", &refs).f32s("f", &floats).i32s("i", &ints);
        let weights: Vec<Weight> = shapes
            .iter()
            .enumerate()
            .map(|(i, &(a, b, c))| quantised(&format!("w{i}"), format, &[a, b, c * 32]))
            .collect();
        for weight in &weights {
            writer = writer.tensor(weight);
        }
        let file = open(writer.finish()).unwrap();
        let meta = file.metadata();
        prop_assert_eq!(meta.strings("s").unwrap().to_vec(), texts);
        prop_assert_eq!(meta.f32s("f").unwrap(), floats);
        prop_assert_eq!(meta.i32s("i").unwrap(), ints);
        prop_assert_eq!(file.names().len(), weights.len());
        for weight in &weights {
            let read = file.get(weight.name()).unwrap();
            prop_assert_eq!(read.shape(), weight.shape());
            prop_assert_eq!(read.bytes().as_slice(), weight.bytes().as_slice());
        }
    }
}
