//! Model files that can't be: each is refused in one line that names the file and says what to do.

use super::support::{Copy, file, generate, headway, llama, run};
use serde_json::json;

const AGAIN: &str = "download or convert it again";

#[test]
fn truncated_and_damaged_weights() {
    let copy = Copy::of(&llama());
    let whole = copy.read("model.safetensors");
    for cut in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        copy.write("model.safetensors", &whole[..cut]);
        copy.generate().refused(&["model.safetensors", AGAIN]);
    }
    let mut longer = whole.clone();
    longer.push(0);
    let mut huge_header = whole.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut no_json = whole;
    no_json[8] = b'!';
    for bytes in [longer, huge_header, no_json] {
        copy.write("model.safetensors", &bytes);
        copy.generate().refused(&["model.safetensors", AGAIN]);
    }
}

#[test]
fn an_unknown_dtype_of_a_tensor() {
    let copy = Copy::of(&llama());
    let mut bytes = copy.read("model.safetensors");
    let at = bytes.windows(6).position(|w| w == b"\"BF16\"").expect("a dtype");
    bytes[at..at + 6].copy_from_slice(b"\"I3\"  ");
    copy.write("model.safetensors", &bytes);
    copy.generate().refused(&["model.safetensors", "I3"]);
}

#[test]
fn tensors_that_are_missing_or_of_another_shape() {
    let with = |fields: &[(&str, serde_json::Value)]| Copy::with("config.json", fields).generate();
    with(&[("num_hidden_layers", json!(4))]).refused(&[
        "model.safetensors",
        "no tensor 'model.layers.3.",
        "nearest names",
    ]);
    with(&[("num_hidden_layers", json!(2))]).refused(&[
        "model.safetensors",
        "model.layers.2.",
        "the config doesn't have (2 layers)",
    ]);
    with(&[("hidden_size", json!(128))])
        .refused(&["model.embed_tokens.weight has shape [512, 96]", "asks for [512, 128]"]);
    with(&[("vocab_size", json!(511))]).refused(&["embed_tokens.weight", "[511, 96]"]);
    with(&[("intermediate_size", json!(128))])
        .refused(&["down_proj.weight has shape [96, 256]", "[96, 128]"]);
    // As many rows in all, but of other heads.
    with(&[("num_attention_heads", json!(8)), ("num_key_value_heads", json!(1))])
        .refused(&["k_proj.weight has shape [128, 96]", "[64, 96]"]);
}

#[test]
fn layers_that_draft_are_left_alone_where_the_config_counts_them() {
    // The files have a third layer; the config has two, and one that predicts further tokens.
    let fields = [("num_hidden_layers", json!(2)), ("num_nextn_predict_layers", json!(1))];
    let r = Copy::with("config.json", &fields).generate();
    assert_eq!(r.code, Some(0), "{}", r.err);
    assert!(
        r.err.contains("tensors of the files are not used") && r.err.contains("model.layers.2."),
        "{}",
        r.err
    );
}

#[test]
fn directories_without_a_model() {
    let copy = Copy::of(&llama());
    copy.remove("model.safetensors");
    copy.generate().refused(&["no supported weight files", "expected model.safetensors"]);
    copy.write("pytorch_model.bin", b"PK");
    copy.generate().refused(&["pytorch_model.bin", "convert it to safetensors"]);
    let empty = tempfile::TempDir::new().unwrap();
    generate(empty.path(), &["x"]).refused(&["an empty directory", "expected model.safetensors"]);
    let copy = Copy::of(&llama());
    copy.remove("config.json");
    copy.generate().refused(&["'config.json'", "download them into the same directory"]);
}

#[test]
fn a_shard_of_an_index_that_is_not_there() {
    let copy = Copy::of(&llama());
    let weights = copy.read("model.safetensors");
    copy.remove("model.safetensors");
    copy.write("model-00001-of-00002.safetensors", &weights);
    let map = json!({"weight_map": {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }});
    copy.write("model.safetensors.index.json", map.to_string().as_bytes());
    copy.generate().refused(&["model-00002-of-00002.safetensors", "missing"]);
}

#[test]
fn gguf_headers_that_can_not_be() {
    let header = |version: u32, tensors: u64, keys: u64, rest: &[u8]| {
        let mut b = b"GGUF".to_vec();
        b.extend(version.to_le_bytes());
        b.extend(tensors.to_le_bytes());
        b.extend(keys.to_le_bytes());
        b.extend(rest);
        b
    };
    let mut long_key = (1u64 << 62).to_le_bytes().to_vec();
    long_key.extend([0; 32]);
    let mut long_array = 1u64.to_le_bytes().to_vec();
    long_array.extend(*b"a");
    long_array.extend(9u32.to_le_bytes());
    long_array.extend(4u32.to_le_bytes());
    long_array.extend((1u64 << 61).to_le_bytes());
    for (bytes, words) in [
        (vec![], [AGAIN, "empty"]),
        (b"GGUF".to_vec(), [AGAIN, "version"]),
        (b"GGML\0\0\0\0\0\0\0\0".to_vec(), [AGAIN, "does not begin with 'GGUF'"]),
        (header(1, 0, 0, &[]), ["version 1 is not supported", "2 and 3"]),
        (header(3, 1 << 62, 0, &[]), [AGAIN, "claims 4611686018427387904 tensors"]),
        (header(3, 0, 1 << 62, &[]), [AGAIN, "claims 4611686018427387904 metadata entries"]),
        (header(3, 0, 1, &long_key), [AGAIN, "4611686018427387904"]),
        (header(3, 0, 1, &long_array), [AGAIN, "2305843009213693952 entries"]),
        (header(3, 0, 0, &[]), ["general.architecture", "convert it again"]),
    ] {
        let (_dir, path) = file("x.gguf", &bytes);
        generate(&path, &["--prompt-ids", "1"]).refused(&["x.gguf", words[0], words[1]]);
    }
}

#[test]
fn configs_that_can_not_be() {
    for (text, words) in [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\u{feff}{}", "not valid JSON"),
    ] {
        let copy = Copy::of(&llama());
        copy.write("config.json", text.as_bytes());
        copy.generate().refused(&["config.json", words]);
    }
    for (field, value, words) in [
        (
            "architectures",
            json!(["FooForCausalLM"]),
            "architecture FooForCausalLM is not supported; supported: Llama",
        ),
        ("architectures", json!([]), "must list the model's class"),
        ("hidden_size", json!(-1), "hidden_size is -1; a positive whole number"),
        ("hidden_size", json!("x"), "hidden_size is \"x\""),
        ("num_key_value_heads", json!(4), "does not divide"),
        ("head_dim", json!(1 << 30), "head_size not supported"),
        ("num_hidden_layers", json!(1 << 30), "at most 1024"),
        ("max_position_embeddings", json!(0), "max_position_embeddings is 0"),
        ("max_position_embeddings", json!((1u64 << 31) - 1), "--max-model-len 2147483647 needs"),
        ("rms_norm_eps", json!(-1), "rms_norm_eps is -1"),
        ("rope_theta", json!(0), "rope_theta is 0; a number above 0 is needed"),
        ("rope_scaling", json!(5), "rope_scaling is 5"),
        ("rope_scaling", json!({"type": "ntk", "factor": 2}), "rope scaling of type ntk is not supported"),
        (
            "rope_scaling",
            json!({"rope_type": 7, "factor": 2}),
            "rope_scaling.rope_type is 7; a string is needed",
        ),
        ("rope_scaling", json!({"type": []}), "rope_scaling.rope_type is []; a string is needed"),
        ("rope_scaling", json!({"factor": 2}), "rope_scaling.rope_type is missing, and factor is given"),
        ("rope_parameters", json!({"rope_type": true}), "rope_parameters.rope_type is true; a string"),
        ("rope_theta", json!(1e-320), "a number above 0 is needed"),
        ("rope_scaling", json!({"type": "yarn"}), "rope_scaling.factor is missing for type yarn"),
        (
            "rope_scaling",
            json!({"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}),
            "below beta_slow 2",
        ),
        ("hidden_act", json!("foo"), "activation foo is not supported"),
        ("tie_word_embeddings", json!("yes"), "true or false is needed"),
    ] {
        Copy::with("config.json", &[(field, value)]).generate().refused(&[words]);
    }
}

#[test]
fn an_end_token_that_is_none() {
    let copy = Copy::with("generation_config.json", &[("eos_token_id", json!(1u64 << 40))]);
    copy.remove("tokenizer.json");
    copy.generate().refused(&["config.json", "eos_token_id", "token id"]);
}

#[test]
fn tokenizers_that_can_not_be() {
    for text in ["", "{}", "{\"model\": 5}", "[]"] {
        let copy = Copy::of(&llama());
        copy.write("tokenizer.json", text.as_bytes());
        let folder = copy.path().display().to_string();
        copy.generate().refused(&[&folder, "tokenizer.json"]);
    }
    let copy = Copy::of(&llama());
    copy.write("tokenizer_config.json", b"[");
    copy.generate().refused(&["tokenizer_config.json", "not valid JSON"]);
}

#[test]
fn what_is_no_model_at_all() {
    let (_dir, path) = file("notes.txt", b"hello");
    generate(&path, &["x"]).refused(&["notes.txt", "this kind of file is not supported", ".gguf"]);
    run(["generate", "--model", "./nowhere.gguf", "x"]).refused(&["./nowhere.gguf", "does not exist"]);
    run(["generate", "--model", "smolm2", "x"]).refused(&["unknown model 'smolm2'", "smollm2-135m-instruct"]);
    run(["generate", "--model", "", "x"]).refused(&["unknown model ''"]);
    run(["pull", "smolm2"]).refused(&["unknown model 'smolm2'"]);
}

#[test]
fn a_model_that_no_source_has_lists_what_was_tried() {
    let home = tempfile::TempDir::new().unwrap();
    let r = super::support::finish(headway().env("HF_HOME", home.path()).args([
        "generate",
        "--model",
        "someone/something",
        "x",
    ]));
    assert_eq!((r.code, r.out.as_str()), (Some(1), ""), "{}", r.err);
    for word in ["Tried:", "HF_HUB_OFFLINE is set", "--model PATH"] {
        assert!(r.err.contains(word), "{word}: {}", r.err);
    }
}

#[test]
fn a_gguf_of_an_unknown_architecture_is_refused_by_name() {
    let text = |t: &str| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend(0u64.to_le_bytes());
    header.extend(1u64.to_le_bytes());
    header.extend(text("general.architecture"));
    header.extend(8u32.to_le_bytes());
    header.extend(text("llamx"));
    header.resize(header.len().next_multiple_of(32), 0);
    let (_dir, path) = file("m.gguf", &header);
    generate(&path, &["hello"]).refused(&["m.gguf", "architecture llamx", "not supported", "gemma3"]);
}

#[test]
#[cfg(unix)]
fn what_is_neither_file_nor_directory() {
    generate("/dev/null".as_ref(), &["hello"]).refused(&["/dev/null", "neither a file nor a directory"]);
}
