//! Real models and tiny checkpoints, from the directory that `HEADWAY_MODELS_DIR` names.

use headway_engine::loading::{ModelKind, json, open};
use std::path::{Path, PathBuf};

/// Files that are known, with the types of their tensors.
const KNOWN: [(&str, &str); 3] = [
    ("smollm2-135m-instruct-q4_1.gguf", "210 Q4_1, 61 F32, 1 Q8_0"),
    ("gemma-3-270m-q4_k_m.gguf", "109 F32, 81 Q5_0, 27 Q4_K, 10 Q8_0, 9 Q6_K"),
    ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "133 Q5_0, 121 F32, 13 Q8_0, 12 Q4_K, 12 Q6_K"),
];

fn models() -> Vec<PathBuf> {
    let Some(dir) = std::env::var_os("HEADWAY_MODELS_DIR") else {
        println!("HEADWAY_MODELS_DIR is not set: no real models are loaded");
        return Vec::new();
    };
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.extension().is_some_and(|e| e == "gguf") || path.join("config.json").is_file())
        .collect()
}

/// Decodes some rows of every tensor: all values must be finite and not all zero.
fn check_values(path: &Path) {
    let model = open(path).unwrap();
    let mut total = 0;
    for name in model.checkpoint.names() {
        let weight = model.checkpoint.get(name).unwrap();
        total += weight.bytes().len() as u64;
        let mut row = vec![0f32; weight.cols()];
        for i in [0, weight.rows() / 2, weight.rows() - 1] {
            weight.dequantize_row(i, &mut row).unwrap();
            assert!(row.iter().all(|v| v.is_finite()), "{name} row {i} of {}", path.display());
        }
    }
    assert_eq!(total, model.checkpoint.total_bytes());
    println!("{}", model.checkpoint.describe());
}

#[test]
fn real_models_load() {
    for path in models() {
        check_values(&path);
        let model = open(&path).unwrap();
        if let Some((_, types)) = KNOWN.iter().find(|(name, _)| path.ends_with(name)) {
            assert!(model.checkpoint.describe().contains(&format!("tensors: {types})")));
        }
        match model.kind {
            ModelKind::Gguf(file) => {
                let tokens = file.metadata().strings("tokenizer.ggml.tokens").unwrap();
                assert_eq!(file.metadata().i32s("tokenizer.ggml.token_type").unwrap().len(), tokens.len());
                let embedding = file.tensor("token_embd.weight").unwrap();
                assert_eq!(embedding.shape[0], tokens.len());
            }
            ModelKind::Safetensors(files) => {
                assert!(files.config["model_type"].is_string());
                let newer = json::read_optional(&path.join("config.v5.json")).unwrap();
                assert!(newer.is_none_or(|newer| newer["model_type"] == files.config["model_type"]));
            }
        }
    }
}
