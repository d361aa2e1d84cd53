//! `explain` starts where start-up does, and fails where it fails, in the same words: the same questions to both.

use super::support::{Copy, Run, finish, generate, headway};
use headway_testkit::testdata;
use serde_json::{Value, json};
use std::path::Path;

/// A model, fields of its config (`null` removes one), options, and the words of the refusal; none: it starts.
type Case<'a> = (&'a str, &'a [(&'a str, Value)], &'a [&'a str], &'a str);

fn start(model: &Path, encoder: bool, args: &[&str]) -> Run {
    let ids = [&["--prompt-ids", "1,2"], args].concat();
    match encoder {
        true => finish(headway().arg("embed").arg("--model").arg(model).args(ids)),
        false => generate(model, &[&["--max-tokens", "1"], &ids[..]].concat()),
    }
}

/// Without the bytes that happen to be free.
fn stable(text: &str) -> String {
    let number = |w: &str| w.parse::<u64>().is_ok_and(|n| n > 1 << 30);
    text.split_whitespace().filter(|w| !number(w)).collect::<Vec<_>>().join(" ")
}

fn ask(cases: &[Case<'_>]) {
    for (model, fields, args, words) in cases {
        let copy = Copy::edited(&testdata::model_dir(model).unwrap(), "config.json", fields);
        let about = format!("{model} {fields:?} {args:?}");
        let told = finish(headway().arg("explain").arg(copy.path()).args(*args));
        let started = start(copy.path(), *model == "tiny-bert", args);
        assert_eq!(started.code == Some(0), words.is_empty(), "{about}: {}", started.err);
        if words.is_empty() {
            assert_eq!(told.code, Some(0), "{about}: {}", told.err);
            continue;
        }
        assert!(started.err.contains(words), "{about}: {}", started.err);
        assert_eq!(stable(&told.err), stable(&started.err), "{about}");
        // 3: a layer gets no backend.
        let none = told.out.contains("no valid backend");
        assert!(told.code == Some(1) || told.code == Some(3) && none, "{about}: {:?}", told.code);
    }
}

#[test]
fn options() {
    ask(&[
        ("tiny-llama", &[], &[], ""),
        ("tiny-llama", &[], &["--load-format", "dummy"], ""),
        ("tiny-llama", &[], &["--max-num-seqs", "600"], ""),
        ("tiny-llama", &[], &["--kv-cache-dtype", "fp8"], ""),
        ("tiny-llama", &[], &["--speculative-tokens", "600"], "lower the first to 511"),
        ("tiny-llama", &[], &["--kv-cache-memory", "1KiB"], "hold fewer than two blocks"),
        ("tiny-llama", &[], &["--threads", "99999999"], "from 1 to 1024"),
        ("tiny-llama", &[], &["--max-num-batched-tokens", "9999999999"], "for activations"),
        ("tiny-llama", &[], &["--max-num-seqs", "9999999999"], "for logits"),
        ("tiny-llama", &[], &["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "raise the first"),
        ("tiny-llama", &[], &["--max-model-len", "9999999"], "at most 2048 tokens"),
        ("tiny-llama", &[], &["--backend-per-kind", "full=CPU_MLA"], "CPU_MLA is a backend for MLA"),
        ("tiny-llama", &[], &["--backend-per-kind", "mla=CPU_ATTN"], "a backend for standard attention"),
        ("tiny-llama", &[], &["--block-size", "7"], "CPU_ATTN takes multiples of 16"),
        ("tiny-llama", &[], &["--kv-cache-dtype", "fp8_ds_mla"], "there are: auto"),
        ("tiny-llama", &[], &["--kv-cache-dtype", "FP8"], "there are: auto"),
        ("tiny-llama", &[], &["--device", "CPU"], "this build runs on: cpu"),
        ("tiny-mamba2", &[], &["--kv-cache-memory", "8MiB"], ""),
        ("tiny-mamba2", &[], &["--max-model-len", "1999999999"], "at most 1048576 tokens"),
        ("tiny-bert", &[], &["--micro-batches", "2"], "such steps run whole"),
    ]);
}

/// What is asked of a cache that no layer keeps is refused, never ignored.
#[test]
fn options_that_change_nothing() {
    let nothing = "has no layer that keeps keys and values; leave it out";
    ask(&[
        ("tiny-bert", &[], &["--kv-cache-dtype", "auto"], ""),
        ("tiny-bert", &[], &["--block-size", "7"], nothing),
        ("tiny-bert", &[], &["--kv-cache-dtype", "fp8"], nothing),
        ("tiny-bert", &[], &["--kv-cache-memory", "1GiB"], nothing),
        ("tiny-bert", &[], &["--kv-layout", "HND"], nothing),
        ("tiny-bert", &[], &["--speculative-tokens", "2"], "generates nothing that could be drafted"),
        ("tiny-mamba2", &[], &["--block-size", "18446744073709551615"], nothing),
        ("tiny-mamba2", &[], &["--kv-cache-dtype", "fp8"], nothing),
    ]);
}

#[test]
fn configs() {
    let words = json!("x");
    let flat = json!({"rope_theta": 10000.0});
    let wide = json!({
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    });
    ask(&[
        // The files' own type counts, whatever the config says of it.
        ("tiny-llama", &[("torch_dtype", json!("float64")), ("dtype", json!(7))], &[], ""),
        (
            "tiny-llama",
            &[("torch_dtype", json!("float64"))],
            &["--load-format", "dummy"],
            "there are: bfloat16, float16, float32",
        ),
        ("tiny-gemma4", &[("sliding_window", Value::Null)], &[], ""),
        ("tiny-gemma4", &[("eos_token_id", words)], &[], "key 'eos_token_id' is \"x\""),
        ("tiny-gemma4", &[("eos_token_id", json!([1, "a"]))], &[], "key 'eos_token_id' is [1,\"a\"]"),
        (
            "tiny-gemma4",
            &[("rope_parameters", json!({}))],
            &[],
            "rope_parameters has no object full_attention",
        ),
        ("tiny-gemma4", &[("rope_parameters", flat)], &[], "rope_parameters has no object full_attention"),
        ("tiny-gemma4", &[("rope_parameters", wide)], &[], "partial_rotary_factor is 2: 32 of 16 elements"),
        ("tiny-gemma2", &[("attn_logit_softcapping", json!(0))], &[], "attn_logit_softcapping is 0"),
        ("tiny-mamba2", &[("conv_kernel", json!(1_000_000_000))], &[], "a block holds a request's states"),
        ("tiny-deepseek-v2-yarn", &[("n_shared_experts", json!(10_000_000))], &[], "for activations"),
        (
            "tiny-deepseek-v2-yarn",
            &[("qk_rope_head_dim", json!(3)), ("qk_head_dim", Value::Null)],
            &[],
            "qk_rope_head_dim is 3",
        ),
        ("tiny-bert", &[("head_dim", json!(0))], &[], ""),
        ("tiny-bert", &[("num_attention_heads", json!(5))], &[], "num_attention_heads 5 does not divide"),
        ("tiny-bart", &[("decoder_attention_heads", json!(3))], &[], "decoder_attention_heads 3 does not"),
        ("tiny-bart", &[("eos_token_id", json!(-3))], &[], "key 'eos_token_id' is -3"),
        ("tiny-llama", &[("architectures", Value::Null)], &[], "architectures is missing"),
        ("tiny-llama", &[("quantization_config", json!({"quant_method": "awq"}))], &[], "format awq"),
    ]);
}

#[test]
fn weights_of_another_config() {
    ask(&[
        (
            "tiny-llama",
            &[("num_hidden_layers", json!(2))],
            &[],
            "belongs to a layer that the config doesn't have",
        ),
        ("tiny-llama", &[("num_hidden_layers", json!(4))], &[], "no tensor 'model.layers.3"),
        ("tiny-phi3", &[("num_attention_heads", json!(3))], &[], "qkv_proj.weight has shape [192, 96]"),
        (
            "tiny-nemotron-h",
            &[("use_bias", json!(true))],
            &[],
            "no tensor 'backbone.layers.0.mixer.in_proj.bias'",
        ),
    ]);
}

#[test]
fn static_fp8() {
    let q = |field: &str, value: Value| {
        let mut q = json!({"quant_method": "fp8", "activation_scheme": "static"});
        q[field] = value;
        ("quantization_config", q)
    };
    let list = "a list of the names of modules is needed";
    let stored = "but the tensor 'model.layers.0.self_attn.o_proj.weight' is fp8 with static scales";
    ask(&[
        ("tiny-fp8-output", &[q("ignored_layers", json!(["lm_head", "model.layers.0.mlp"]))], &[], ""),
        ("tiny-fp8-output", &[q("kv_cache_scheme", json!({"num_bits": 8, "type": "float"}))], &[], ""),
        ("tiny-fp8-output", &[q("ignored_layers", json!("lm_head"))], &[], list),
        ("tiny-fp8-output", &[q("modules_to_not_convert", json!([1]))], &[], list),
        ("tiny-fp8-output", &[q("ignored_layers", json!(["model.layers.0"]))], &[], stored),
        ("tiny-fp8-output", &[q("modules_to_not_convert", json!(["o_proj"]))], &[], stored),
        ("tiny-fp8-output", &[q("activation_scheme", json!("dynamic"))], &[], "fp8 with static scales ("),
    ]);
    let scheme = q("kv_cache_scheme", json!({"num_bits": 8, "type": "float"}));
    let copy = Copy::edited(&testdata::model_dir("tiny-fp8-output").unwrap(), "config.json", &[scheme]);
    let told = finish(headway().arg("explain").arg(copy.path()));
    for text in [&told.out, &start(copy.path(), false, &[]).err] {
        assert!(text.contains("kv_cache_scheme is not heeded"), "{text}");
    }
}

/// A foreign device has no start-up here: this machine's memory and threads don't bear on it.
#[test]
fn other_devices() {
    let llama = testdata::model_dir("tiny-llama").unwrap();
    for args in [["--threads", "99999999"], ["--max-num-batched-tokens", "9999999999"]] {
        let all = ["--engine", "vllm", "--device", "h100", args[0], args[1]];
        finish(headway().arg("explain").arg(&llama).args(all)).fine();
    }
}

#[test]
fn models_with_an_encoder() {
    let bart = testdata::model_dir("tiny-bart").unwrap();
    let field = "encoder_ids of GenerateRequest, which the Rust API alone takes";
    start(&bart, false, &[]).refused(&["BartForConditionalGeneration", field, "a decoder alone"]);
    let told = finish(headway().arg("explain").arg(&bart)).fine();
    assert!(told.out.contains(field), "{}", told.out);
    let told = finish(headway().arg("explain").arg(testdata::model_dir("tiny-bert").unwrap())).fine();
    assert!(
        told.out.contains("no layer keeps a cache") && !told.out.contains("nothing fits"),
        "{}",
        told.out
    );
}
