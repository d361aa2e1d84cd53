//! From a path to a model: directories and files of every kind.

use super::refused;
use super::safetensors::{file, one_tensor, sharded};
use headway_engine::loading::gguf::write::GgufWriter;
use headway_engine::loading::{HfFiles, ModelFiles, ModelKind, json, open};
use headway_tensor::Weight;
use std::fs;
use std::path::Path;

fn gguf() -> Vec<u8> {
    GgufWriter::new("llama").tensor(&Weight::from_f32("w", vec![2], &[1.0, 2.0]).unwrap()).finish()
}

/// A directory with these files.
fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn hf(model: &ModelFiles) -> &HfFiles {
    match &model.kind {
        ModelKind::Safetensors(files) => files,
        ModelKind::Gguf(_) => panic!("a GGUF file"),
    }
}

#[test]
fn a_checkpoint_directory_brings_its_files() {
    let weights = one_tensor("w", [1.0, 2.0]);
    let dir = directory(&[
        ("config.json", br#"{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}"#),
        ("model.safetensors", &weights),
        ("generation_config.json", br#"{"eos_token_id": 2}"#),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", br#"{"add_bos_token": false}"#),
        ("chat_template.jinja", b"{{ bos_token }}"),
    ]);
    for path in [dir.path().to_owned(), dir.path().join("model.safetensors")] {
        let model = open(&path).unwrap();
        let files = hf(&model);
        assert_eq!(model.root, dir.path());
        assert_eq!(json::float(&files.config["time_step_limit"][1]), Some(f64::INFINITY));
        assert_eq!(files.generation_config.as_ref().unwrap()["eos_token_id"], 2);
        assert_eq!(files.tokenizer_json.as_deref(), Some(dir.path().join("tokenizer.json").as_path()));
        assert_eq!(files.tokenizer_config.as_ref().unwrap()["add_bos_token"], false);
        assert_eq!(files.chat_template.as_deref(), Some("{{ bos_token }}"));
        assert_eq!(model.checkpoint.get("w").unwrap().to_f32(), [1.0, 2.0]);
    }
}

#[test]
fn optional_files_may_be_absent() {
    let weights = one_tensor("w", [1.0, 2.0]);
    let dir = directory(&[("config.json", b"{}"), ("weights.safetensors", &weights)]);
    let model = open(dir.path()).unwrap();
    let files = hf(&model);
    assert!(
        files.generation_config.is_none() && files.tokenizer_json.is_none() && files.chat_template.is_none()
    );
    fs::write(dir.path().join("chat_template.json"), br#"{"chat_template": "x"}"#).unwrap();
    assert_eq!(hf(&open(dir.path()).unwrap()).chat_template.as_deref(), Some("x"));
}

#[test]
fn a_shard_opens_its_index() {
    let dir = directory(&[("config.json", b"{}")]);
    sharded(dir.path());
    for path in [dir.path().to_owned(), dir.path().join("model-00002-of-00002.safetensors")] {
        assert_eq!(open(&path).unwrap().checkpoint.names(), ["a", "b"]);
    }
}

#[test]
fn a_gguf_file_opens_alone_or_in_a_directory() {
    let dir = directory(&[("any.gguf", &gguf()), ("no-ending", &gguf()), ("notes.txt", b"x")]);
    for path in [dir.path().to_owned(), dir.path().join("any.gguf"), dir.path().join("no-ending")] {
        let model = open(&path).unwrap();
        assert!(matches!(&model.kind, ModelKind::Gguf(file) if file.architecture().unwrap() == "llama"));
        assert_eq!(model.checkpoint.get("w").unwrap().to_f32(), [1.0, 2.0]);
    }
    fs::write(dir.path().join("other.gguf"), gguf()).unwrap();
    refused(open(dir.path()), &["2 GGUF models (pass the path of one)"]);
}

#[test]
fn nothing_to_load_says_what_was_found() {
    let text = "no supported weight files; found";
    let expected = "expected model.safetensors";
    refused(open(directory(&[]).path()), &[text, "an empty directory", expected]);
    let pickle = directory(&[("config.json", b"{}"), ("pytorch_model.bin", b"x")]);
    refused(open(pickle.path()), &[text, "pytorch_model.bin, a format that is not read", expected]);
    let more = directory(&[("a.pth", b"x"), ("b.onnx", b"x"), ("c.txt", b"x")]);
    refused(open(more.path()), &["a.pth and 1 more in formats that are not read"]);
    refused(open(directory(&[("readme.md", b"x")]).path()), &["1 files, none with weights"]);
    let loose = directory(&[("config.json", b"{}"), ("a.safetensors", b"x"), ("b.safetensors", b"x")]);
    refused(open(loose.path()), &["2 safetensors files without an index"]);
    refused(open(Path::new("no/such/model")), &["no/such/model: cannot open it"]);
    let dir = directory(&[("model.bin", b"x")]);
    refused(open(&dir.path().join("model.bin")), &["model.bin: this kind of file is not supported", ".gguf"]);
}

#[test]
fn faulty_configurations_are_refused() {
    let weights = one_tensor("w", [1.0, 2.0]);
    let dir = directory(&[("model.safetensors", &weights)]);
    refused(open(dir.path()), &["config.json", "missing"]);
    let with = |config: &[u8]| {
        fs::write(dir.path().join("config.json"), config).unwrap();
        open(dir.path())
    };
    refused(with(b"{"), &["config.json: not valid JSON"]);
    refused(
        with(br#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#),
        &["config.json: quantised checkpoint format gptq is not supported; supported: BF16"],
    );
    assert!(with(br#"{"quantization_config": null}"#).is_ok());
    let path = dir.path().join("model.safetensors");
    fs::write(&path, file("{}", &[])).unwrap();
    refused(open(dir.path()), &["model.safetensors", "it holds no tensors"]);
    fs::write(&path, b"").unwrap();
    refused(open(&path), &["model.safetensors", "the file is empty"]);
}
