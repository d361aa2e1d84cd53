//! Encoders: the goldens alone and batched, pooling, text in, and what is refused.

mod support;

use headway_engine::{
    EngineOptions, LlmEngine,
    engine::{EmbedOptions, Embedder},
    models::plan::Pooling,
    options::LoadFormat,
};
use headway_testkit::{
    golden::{self, EncoderCase},
    testdata,
};
use serde_json::{Value, json};
use std::path::Path;

/// Without a cache, memory for one would be refused.
fn options(dtype: &str) -> EngineOptions {
    EngineOptions { kv_cache_memory: None, ..support::options(dtype) }
}

fn open(dir: &Path, options: &EngineOptions, pooling: Option<Pooling>, normalize: bool) -> Embedder {
    Embedder::open(dir, options, EmbedOptions { pooling, normalize }, &mut |_, _| ()).unwrap()
}

fn error(dir: &Path, options: &EngineOptions) -> String {
    Embedder::open(dir, options, EmbedOptions::default(), &mut |_, _| ()).err().unwrap().to_string()
}

/// What a case expects of a pooling.
type Expected = fn(&EncoderCase) -> &[f64];

fn far(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_goldens_alone_and_batched_in_every_pooling() {
    let goldens = golden::encoders().unwrap();
    assert!(goldens.len() >= 2);
    for g in &goldens {
        let dir = testdata::model_dir(&g.model.name).unwrap();
        let ids: Vec<_> = g.cases.iter().map(|c| c.prompt_ids.clone()).collect();
        let poolings: [(Pooling, Expected); 3] =
            [(Pooling::Mean, |c| &c.mean), (Pooling::First, |c| &c.first), (Pooling::Last, |c| &c.last)];
        for (pooling, expected) in poolings {
            for (dtype, tokens, limit) in [
                ("float32", None, 1e-4),
                ("float32", Some(140), 1e-4),
                ("auto", None, 4.0 * g.bf16_compute_max_abs),
            ] {
                let options = EngineOptions { max_num_batched_tokens: tokens, ..options(dtype) };
                let mut embedder = open(&dir, &options, Some(pooling), false);
                let batched = embedder.embed(&ids).unwrap();
                let mut worst = 0f64;
                for ((case, together), ids) in g.cases.iter().zip(&batched).zip(&ids) {
                    let alone = &embedder.embed(std::slice::from_ref(ids)).unwrap()[0];
                    assert_eq!(alone, together, "{} {}: bit for bit", g.model.name, case.name);
                    worst = worst.max(far(together, expected(case)));
                }
                println!("{} {pooling:?} {dtype} steps of {tokens:?}: {worst:.1e}", g.model.name);
                assert!(worst < limit, "{} {pooling:?} {dtype}: {worst}", g.model.name);
            }
        }
    }
}

#[test]
fn an_encoder_keeps_no_cache_and_builds_once_a_step() {
    let dir = testdata::model_dir("tiny-bert").unwrap();
    let mut embedder = open(&dir, &options("float32"), None, true);
    let report = serde_json::to_value(embedder.report()).unwrap();
    let group = &report["groups"][0];
    assert_eq!(group["kind"], "encoder only");
    assert_eq!(group["backend"], "CPU_ATTN");
    assert_eq!(group["layers"], json!([0, 1, 2]));
    assert_eq!(report["groups"].as_array().unwrap().len(), 1);
    assert_eq!(report["memory"]["kv_bytes_per_token"], 0);
    assert_eq!(report["memory"]["kv_cache_bytes"], 0);
    let vectors = embedder.embed(&vec![vec![3, 4, 5]; 100]).unwrap();
    let steps = embedder.runner().times().steps;
    // 64 requests a step.
    assert_eq!((vectors.len(), steps), (100, 2));
    assert_eq!(embedder.runner().groups()[0].builds() as u64, steps as u64);
    for v in &vectors {
        assert!((v.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
        assert_eq!(v, &vectors[0]);
    }
    assert_eq!(embedder.runner().input_reallocs(), 0);
}

/// A copy of a model in a folder of its own, with changes to its config.
fn copied(model: &str, changes: &Value, dir: &Path) {
    let from = testdata::model_dir(model).unwrap();
    std::fs::copy(from.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    changes.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn the_models_own_files_say_how_states_are_pooled() {
    let dir = tempfile::tempdir().unwrap();
    copied("tiny-bert", &json!({}), dir.path());
    let pooling = |modes: &Value| {
        std::fs::create_dir_all(dir.path().join("1_Pooling")).unwrap();
        std::fs::write(dir.path().join("1_Pooling/config.json"), modes.to_string()).unwrap();
        Embedder::open(dir.path(), &options("auto"), EmbedOptions::default(), &mut |_, _| ())
    };
    let cls = json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false, "word_embedding_dimension": 32});
    assert_eq!(pooling(&cls).unwrap().pooling(), Pooling::First);
    assert_eq!(pooling(&json!({"pooling_mode_lasttoken": true})).unwrap().pooling(), Pooling::Last);
    let e = pooling(&json!({"pooling_mode_max_tokens": true})).err().unwrap().to_string();
    assert!(e.contains("1_Pooling/config.json") && e.contains("supported: one of mean_tokens"), "{e}");
}

#[test]
fn text_goes_through_word_pieces_with_the_models_own_marks() {
    let dir = tempfile::tempdir().unwrap();
    copied("tiny-bert", &json!({}), dir.path());
    let vocab = json!({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "hello": 4, "wor": 5, "##ld": 6});
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true})
    };
    let piece = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "[PAD]"), special(1, "[UNK]"), special(2, "[CLS]"), special(3, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": [piece("[CLS]"), text.clone(), piece("[SEP]")],
            "pair": [piece("[CLS]"), text, piece("[SEP]")], "special_tokens": {
                "[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let embedder = open(dir.path(), &options("auto"), None, true);
    assert_eq!(embedder.tokenize("Hello World").unwrap(), [2, 4, 5, 6, 3]);
    assert_eq!(embedder.tokenize("hello xyz").unwrap(), [2, 4, 1, 3]);
}

#[test]
fn what_can_not_be_says_what_to_change() {
    let dir = testdata::model_dir("tiny-bert").unwrap();
    let mut embedder =
        open(&dir, &EngineOptions { max_num_batched_tokens: Some(20), ..options("auto") }, None, true);
    let mut says = |ids: Vec<u32>, words: &[&str]| {
        let e = embedder.embed(&[vec![1], ids]).err().unwrap().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    says(vec![], &["input 1 is empty"]);
    says(vec![5; 21], &["21 tokens", "--max-num-batched-tokens to 21"]);
    says(vec![5; 200], &["200 tokens", "160 (--max-model-len)", "shorten it"]);
    says(vec![128], &["token id 128", "vocabulary has 128"]);
    let e = LlmEngine::open(&dir, &options("auto"), &mut |_, _| ()).err().unwrap().to_string();
    assert!(e.contains("generating with an encoder") && e.contains("headway embed"), "{e}");
    let e = error(&testdata::model_dir("tiny-llama").unwrap(), &options("auto"));
    assert!(e.contains("LlamaForCausalLM") && e.contains("BertModel"), "{e}");
    let other = EngineOptions { attention_backend: Some("CPU_MLA".into()), ..options("auto") };
    assert!(error(&dir, &other).contains("CPU_MLA"), "{}", error(&dir, &other));
    let scratch = tempfile::tempdir().unwrap();
    let dummy = EngineOptions { load_format: LoadFormat::Dummy, ..options("auto") };
    let config = |changes: Value, words: &[&str]| {
        copied("tiny-bert", &changes, scratch.path());
        let e = error(scratch.path(), &dummy);
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    config(json!({"is_decoder": true}), &["is_decoder", "encoders alone"]);
    config(json!({"position_embedding_type": "relative_key"}), &["relative_key", "absolute"]);
    config(json!({"num_attention_heads": 5}), &["num_attention_heads", "5 does not divide hidden_size 32"]);
    config(json!({"hidden_act": "tanh"}), &["tanh", "supported"]);
    config(
        json!({"architectures": ["RobertaModel"], "pad_token_id": 400}),
        &["max_position_embeddings", "401"],
    );
}
